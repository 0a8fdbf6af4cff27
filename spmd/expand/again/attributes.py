"""Tensors in plain attributes of modules and objects, which a step or a user may replace from call to call. So are the
buffers that a step sets to other tensors.

    module.weight = module.weight_orig * mask       set by each call, as torch.nn.utils.prune does
    self.mean = 0.9 * self.mean + y.mean(0)         read by each call, too
    model.mask = another                            set by the user between calls

They are read anew at each call. What is there has to be alike: tensors of the same specs in containers of the same
structure, the same ones of them one tensor and one container, and no other values. What the step sets is written as the
long way does it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from spmd._torch import pytree
from spmd.expand.again.given import is_plain, likeness
from spmd.expand.containers import There, is_constant
from spmd.expand.counters import KINDS
from spmd.expand.guards import guard_key
from spmd.expand.module_attributes import Attributes
from spmd.expand.objects import Counted, with_containers
from spmd.expand.reads import Reads
from spmd.tensor.spec import spec_of_value


class Place:
    """Where an attribute is, or a buffer: a dict and a name in it. tree: what was there, opened."""

    def __init__(self, path: str, own: dict, name: str, tree: Any) -> None:
        self.path, self.own, self.name = path, own, name
        leaves, self._structure = pytree.tree_flatten(tree)
        self._is_tensor = isinstance(tree, torch.Tensor)
        self._alike = list(map(_alike, leaves))
        self._tensors = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        counts = any(isinstance(x, Counted) for x in leaves)
        self._counting = list(_boxes(self.own.get(self.name))) if counts else []  # numbers are looked for in these

    def tensors(self, containers: list[Any]) -> list[torch.Tensor] | None:
        """Those that are there now; None where that is not alike. Containers are added to those that are given."""
        value = self.own.get(self.name)
        if self._is_tensor:
            return [value] if self._alike[0](value) else None
        if self._counting and not all(x is y for x, y in itertools.zip_longest(_boxes(value), self._counting)):
            return None
        tree, inside = with_containers(value)
        leaves, structure = pytree.tree_flatten(tree)
        if structure != self._structure or not all([same(x) for same, x in zip(self._alike, leaves, strict=True)]):
            return None
        containers += inside
        return [leaves[i] for i in self._tensors]


def _alike(x: Any) -> Callable[[Any], bool]:
    """Whether a program is right for another value in the place of this one."""
    if isinstance(x, torch.Tensor):
        same = _like(x)
        return lambda y: same(y) and not isinstance(y, nn.Parameter)
    if isinstance(x, Counted):  # it is looked at by itself
        return lambda y: type(y) in KINDS
    key = guard_key(x)
    return lambda y: type(y) is type(x) and guard_key(y) == key


def _like(x: torch.Tensor) -> Callable[[Any], bool]:
    """The same of a tensor. Of a distributed one somebody may have a view."""
    kind, spec = type(x), spec_of_value(x)
    if spec is None:
        return likeness(x) or _never
    if not is_plain(x):
        return _never
    return lambda y: type(y) is kind and y._spec is spec and y._copy is None and is_plain(y)


def _never(x: Any) -> bool:
    return False


class Held:
    """The attributes that are read anew at each call. paths: those of their tensors, each once, in order."""

    def __init__(
        self, places: list[Place], found: list[str], others: Iterable[torch.Tensor], read: Collection[str],
        writes: bool, changed: Collection[str], containers: Boxes,
    ) -> None:  # fmt: skip
        """found: the paths of the tensors in these places. read: of these, what programs read or write. writes: whether
        the step writes into what it is given. changed: the places that the step sets, by path."""
        self._places, self._others, self._writes = places, list(others), writes
        self._set = [place for place in places if place.path in changed]
        self.containers = containers
        self._ids = frozenset(map(id, self._others))
        self.paths = list(dict.fromkeys(found))
        self._read = [i for i, path in enumerate(self.paths) if path in read]
        self._which = [self.paths.index(path) for path in found] if len(self.paths) < len(found) else None

    @classmethod
    def of(
        cls, attributes: Attributes, changed: Collection[str], others: Iterable[torch.Tensor], read: Collection[str],
        writes: bool, buffers: Mapping[str, Sequence[tuple[dict, str]]], given: Sequence[Any],
        there: Mapping[There, Any],
    ) -> Held | None:  # fmt: skip
        """Those that are tensors themselves, those that the step sets, and those that share tensors or containers with
        these. None where it sets what it did not have. changed: what it sets, by path. others: tensors of the state,
        which no attribute may be. buffers: those that the step sets, with where they are. given: the containers in the
        arguments. there: those that are to be found for what the step gives, which may be in attributes, too."""
        first = {id(x): path for path, x in attributes.tensors.items()}
        inside = {
            path: [first[id(x)] for x in pytree.tree_leaves(tree) if isinstance(x, torch.Tensor)]
            for path, tree in attributes.trees.items()
        }
        boxes = {path: [id(x) for x in each if not is_constant(x)] for path, each in attributes.containers.items()}
        of_others = {id(x) for x in (*given, *there.values())}
        alone = {path for path, x in attributes.trees.items() if isinstance(x, torch.Tensor)}
        alone |= {path for path, several in boxes.items() if not of_others.isdisjoint(several)}
        taken = _sharing({path: [*inside[path], *boxes[path]] for path in inside}, alone | set(changed))
        named = ((attributes.by_path[path], path) for path in taken)
        places = [Place(path, vars(of.owner), of.name, attributes.trees[path]) for of, path in named]
        found = [each for path in taken for each in inside[path]]
        fixed = [attributes.tensors[path] for path in attributes.tensors.keys() - found]
        if not set(changed) <= attributes.by_path.keys() | buffers.keys():
            return None
        for path, several in buffers.items():
            places += [Place(path, own, name, own[name]) for own, name in several]
            found += [path] * len(several)
        held = [x for path in taken for x in attributes.containers[path]]
        untaken = [x for path in boxes.keys() - set(taken) for x in boxes[path]]
        return cls(places, found, [*others, *fixed], read, writes, changed, Boxes([*held, *given], untaken, there))

    def leave_out_of(self, reads: Reads) -> None:
        """Let what is in them change, of what was noted."""
        reads.leave_out([(place.own, place.name) for place in self._places])
        reads.forget([box for place in self._places for box in _boxes(place.own.get(place.name))])

    def read(self, arguments: list[torch.Tensor], given: list[Any]) -> tuple[list[torch.Tensor], list[Any]] | None:
        """All tensors that are there now, by `paths`, and all containers; None where that is not alike. arguments:
        those that are tensors. given: the containers in them."""
        found: list[torch.Tensor] = []
        containers: list[Any] = []
        for place in self._places:
            if (inside := place.tensors(containers)) is None:
                return None
            found += inside
        containers += given
        if self._which is not None:
            several, found = found, [found[self._which.index(i)] for i in range(len(self.paths))]
            if not all([x is found[i] for x, i in zip(several, self._which, strict=True)]):
                return None
        ids = set(map(id, found))
        if len(ids) < len(found) or not ids.isdisjoint(self._ids) or not self.containers.are_alike(containers):
            return None
        given = set(map(id, arguments))
        if self._writes and (len(given) < len(arguments) or not given.isdisjoint(ids | self._ids)):
            return None
        shared = _memories([*(found[i] for i in self._read), *arguments])
        if shared and not set(shared).isdisjoint(_memories(self._others)):
            return None
        return None if self._writes and len(set(shared)) < len(shared) else (found, containers)

    def set(self, changed: Mapping[str, Any]) -> None:
        """Set those that the step sets."""
        for place in self._set:
            place.own[place.name] = changed[place.path]


class Boxes:
    """Which containers are one in the attributes that are read anew, and in the arguments.

    containers: those of a call, in order. others: the identities of those in other attributes, which stay what they
    are. there: the containers that are to be found for what the step gives."""

    def __init__(self, containers: Sequence[Any], others: Iterable[int], there: Mapping[There, Any]) -> None:
        self._counted = [i for i, x in enumerate(containers) if not is_constant(x)]
        self._which = _first_of(list(map(id, containers)), self._counted)
        self._others = frozenset(others)
        numbers = {id(x): i for i, x in reversed(list(enumerate(containers)))}
        self._numbers = {place: numbers[id(x)] for place, x in there.items() if id(x) in numbers}
        self._fixed = {place: x for place, x in there.items() if id(x) not in numbers}

    def are_alike(self, containers: Sequence[Any]) -> bool:
        """Whether the same ones of the containers of another call are one."""
        if not self._counted:
            return True
        ids = list(map(id, containers))
        return _first_of(ids, self._counted) == self._which and self._others.isdisjoint(ids)

    def at(self, containers: Sequence[Any]) -> dict[There, Any]:
        """Those that are to be found, of the containers of another call."""
        return {place: containers[i] for place, i in self._numbers.items()} | self._fixed


def _first_of(ids: list[int], counted: Iterable[int]) -> list[int]:
    first: dict[int, int] = {}
    return [first.setdefault(ids[i], i) for i in counted]


def _sharing(inside: Mapping[str, list[Hashable]], begin: Collection[str]) -> list[str]:
    """The attributes to begin with, and all that share what is in these. inside: what is in each."""
    taken, known = {path for path in begin if path in inside}, set[Hashable]()
    while more := {path for path in taken if not known.issuperset(inside[path])}:
        known.update(x for path in more for x in inside[path])
        taken |= {path for path, several in inside.items() if not known.isdisjoint(several)}
    return [path for path in inside if path in taken]


def _memories(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Which memories tensors share with views."""
    return [id(memory) for x in tensors if (memory := getattr(x, "_memory", None)) is not None]


def _boxes(x: Any) -> Iterator[Any]:
    """The dicts and lists in a value that is tensors, plain values and containers and objects of them."""
    if isinstance(x, (torch.Tensor, type)):
        return
    if isinstance(x, (dict, list)):
        yield x
    if hasattr(x, "__dict__"):
        yield from _boxes(vars(x))
    if isinstance(x, (dict, list, tuple)):
        for each in x.values() if isinstance(x, dict) else x:
            yield from _boxes(each)
