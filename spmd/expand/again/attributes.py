"""Tensors in plain attributes of modules and objects, which a step or a user may replace from call to call.

    module.weight = module.weight_orig * mask       set by each call, as torch.nn.utils.prune does
    self.mean = 0.9 * self.mean + y.mean(0)         read by each call, too
    model.mask = another                            set by the user between calls

They are read anew at each call. What is there has to be alike: tensors of the same specs in containers of the same
structure, each tensor once, and no other values. What the step sets is written as the long way does it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from spmd._torch import pytree
from spmd.expand.again.given import likeness
from spmd.expand.counters import KINDS
from spmd.expand.guards import guard_key
from spmd.expand.module_attributes import Attribute, Attributes, leaves_of
from spmd.expand.objects import Counted, opened, write_back
from spmd.expand.reads import Reads
from spmd.tensor.spec import spec_of_value


class Place:
    """Where an attribute is. tree: what was there, opened. set_to: where the leaves of what the step sets it to are
    among those of what it gives; None if it does not set it."""

    def __init__(self, of: Attribute, tree: Any, set_to: Any = None) -> None:
        self.own, self.name, self._set_to = vars(of.owner), of.name, set_to
        leaves, self._structure = pytree.tree_flatten(tree)
        self._is_tensor = isinstance(tree, torch.Tensor)
        self._alike = list(map(_alike, leaves))
        self._tensors = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        counts = any(isinstance(x, Counted) for x in leaves)
        self._counting = list(_boxes(self.own.get(self.name))) if counts else []  # numbers are looked for in these

    def tensors(self) -> list[torch.Tensor] | None:
        """Those that are there now; None where that is not alike."""
        value = self.own.get(self.name)
        if self._is_tensor:
            return [value] if self._alike[0](value) else None
        if self._counting and not all(x is y for x, y in itertools.zip_longest(_boxes(value), self._counting)):
            return None
        leaves, structure = pytree.tree_flatten(opened(value))
        if structure != self._structure or not all([same(x) for same, x in zip(self._alike, leaves, strict=True)]):
            return None
        return [leaves[i] for i in self._tensors]

    def set(self, leaves: list[Any]) -> None:
        """Set it, if the step does, as the long way does it."""
        if type(self._set_to) is int:
            self.own[self.name] = leaves[self._set_to]
        elif self._set_to is not None:
            tree = pytree.tree_map(leaves.__getitem__, self._set_to)
            self.own[self.name] = write_back(self.own.get(self.name), tree)


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
    return lambda y: type(y) is kind and y._spec is spec and y._copy is None and not y.requires_grad


def _never(x: Any) -> bool:
    return False


class Held:
    """The attributes that are read anew at each call. paths: those of their tensors, in order."""

    def __init__(self, places: list[Place], paths: list[str], others: Iterable[torch.Tensor]) -> None:
        self._places, self.paths, self._others = places, paths, list(others)
        self._ids = frozenset(map(id, self._others))

    @classmethod
    def of(cls, attributes: Attributes, changed: Mapping[str, Any], others: Iterable[torch.Tensor]) -> Held | None:
        """Those that are tensors themselves, and those that the step sets. None where it sets what it did not have, or
        what several attributes share. changed: the places of the leaves of what it sets, by path. others: tensors of
        the state, which no attribute may be."""
        alone = attributes.tensors.keys() - attributes.shared
        places, paths = [], []
        for path, each in attributes.by_path.items():
            tree = attributes.trees[path]
            inner = [inner for inner, x in leaves_of(path, tree) if isinstance(x, torch.Tensor)]
            if path in changed or isinstance(tree, torch.Tensor):
                if alone.issuperset(inner):
                    places.append(Place(each, tree, changed.get(path)))
                    paths += inner
                elif path in changed:
                    return None
        fixed = [attributes.tensors[path] for path in attributes.tensors.keys() - paths]
        return cls(places, paths, [*others, *fixed]) if changed.keys() <= attributes.by_path.keys() else None

    def leave_out_of(self, reads: Reads) -> None:
        """Let what is in them change, of what was noted."""
        reads.leave_out([(place.own, place.name) for place in self._places])
        reads.forget([box for place in self._places for box in _boxes(place.own.get(place.name))])

    def tensors(self) -> list[torch.Tensor] | None:
        """All that are there now, by `paths`; None where that is not alike."""
        found: list[torch.Tensor] = []
        for place in self._places:
            if (inside := place.tensors()) is None:
                return None
            found += inside
        ids = set(map(id, found))
        if len(ids) < len(found) or not ids.isdisjoint(self._ids):
            return None
        shared = _memories(found)
        return None if shared and not shared.isdisjoint(_memories(self._others)) else found

    def set(self, leaves: list[Any]) -> None:
        """Set those that the step sets. leaves: of all that it gives."""
        for place in self._places:
            place.set(leaves)


def _memories(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Which memories tensors share with views."""
    return {id(memory) for x in tensors if (memory := getattr(x, "_memory", None)) is not None}


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
