"""Tensors in plain attributes of modules, optimisers and objects: a step reads them as arguments, and sets them.

    self.mask = torch.ones(8, 8).tril()         in __init__, and no buffer: an input of the program
    module.weight = module.weight_orig * mask   in a hook, as torch.nn.utils.prune does: a result
    self.mean = 0.9 * self.mean + y.mean(0)     both, and both lie alike

Such an attribute may be a tensor, or a list, dict, tuple or object of tensors and plain values. It has the path of the
module and its own name, as a buffer has. What a step sets and does not read first is no input: it may be whatever it is
before the call, and plays a role by its shape alone. What is neither read nor set stays as it is.

    self.b = self.a                             gives both the tensor that is there: nothing is computed or copied
    self.a = self.b = x + 1                     one new tensor
    self.mean.mul_(0.9)                         written into the tensor itself, which is placed as a buffer is
    self.last = self.mean[-1]                   a view of it behind the call, too (`views`)
    self.k = self.l                             gives both the list that is there (`containers`)

Left out, and errors: what holds parameters or modules beside tensors, and what a step sets to something without them,
or to a parameter or buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn

from spmd import _torch
from spmd._torch import pytree
from spmd.expand.assigned import functions_of
from spmd.expand.containers import Containers, Copies
from spmd.expand.guards import guard_key
from spmd.expand.objects import NAMED, PLAIN, Counted, node, opened, twins, with_containers, with_counted
from spmd.expand.outside import line_naming
from spmd.expand.sources.layout import COMPARED_BY_VALUE
from spmd.expand.state import State, named_leaves
from spmd.expand.variables import Place

NEVER = (*COMPARED_BY_VALUE, *NAMED, nn.Module)
"""What holds no tensors."""


class Attribute(NamedTuple):
    """An attribute that holds tensors. owner: a module, an optimiser or an object of the user."""

    path: str
    owner: Any
    name: str

    @property
    def value(self) -> Any:
        return vars(self.owner)[self.name]

    @property
    def place(self) -> tuple[int, str]:
        return id(self.owner), self.name


@dataclass(frozen=True)
class Attributes:
    """The attributes that hold tensors, by path. trees: what they hold, opened. containers: those in each, in order.
    tensors: each tensor once, under its first path. shared: the paths of those that several attributes hold. constant:
    the containers in attributes without tensors."""

    by_path: dict[str, Attribute]
    trees: dict[str, Any]
    containers: Containers
    tensors: dict[str, torch.Tensor]
    shared: frozenset[str]
    constant: Containers

    @classmethod
    def of(cls, state: State) -> Attributes:
        """Those of the modules, optimisers and objects of a state, as they are now."""
        own = {id(x) for x in (*state.parameters().values(), *state.buffers().values())}
        known: dict[int, tuple[Any, list[Any]]] = {}
        counted = _counted(state)
        apart = {id(x) for x in state.objects.values()}  # their attributes are looked at by themselves
        found: dict[str, Attribute] = {}
        trees: dict[str, Any] = {}
        containers: dict[str, list[Any]] = {}
        constant: dict[str, list[Any]] = {}
        for path, owner in _each_once(state.owners()):
            for name, value in state.attributes_of(owner).items():
                if isinstance(value, NEVER) or (apart and not apart.isdisjoint(map(id, pytree.tree_leaves(value)))):
                    continue
                if id(value) not in known:
                    known[id(value)] = _with_tensors(value, own, counted)
                each = Attribute(f"{path}.{name}", owner, name)
                tree, inside = known[id(value)]
                if tree is not None:
                    found[each.path], trees[each.path], containers[each.path] = each, tree, inside
                elif inside:
                    constant[each.path] = inside
        first: dict[int, str] = {}
        tensors: dict[str, torch.Tensor] = {}
        shared: set[str] = set()
        for path in found:
            for leaf_path, x in _tensors_of(path, trees[path]):
                if id(x) in first:
                    shared.add(first[id(x)])
                else:
                    first[id(x)], tensors[leaf_path] = leaf_path, x
        return cls(found, trees, containers, tensors, frozenset(shared), constant)

    @property
    def places(self) -> frozenset[tuple[int, str]]:
        """Their owners, by identity, and the names of the attributes."""
        return frozenset(each.place for each in self.by_path.values())

    def guards(self) -> dict[int, dict[str, Hashable]]:
        """By owner and name, what a program depends on besides the tensors: which they are, and the rest."""
        first = {id(x): path for path, x in self.tensors.items()}
        found: dict[int, dict[str, Hashable]] = {}
        for path, each in self.by_path.items():
            found.setdefault(id(each.owner), {})[each.name] = guard_of(self.trees[path], lambda x: first[id(x)])
        return found

    def put(self, new: Mapping[str, torch.Tensor], state: State, copies: Copies) -> Attributes:
        """Put other tensors in the place of those of these paths, in copies of what holds them, and count in these.
        Returns the new attributes."""
        by_id = {id(x): new[path] for path, x in self.tensors.items()}
        made = [
            (each, each.value, copies.of(tree, self.containers[path], lambda x: by_id.get(id(x), x)), tree)
            for (path, each), tree in zip(self.by_path.items(), self.trees.values(), strict=True)
        ]
        for each, _, copy, _ in made:
            vars(each.owner)[each.name] = copy
        count_in(state, [(value, copy, tree) for _, value, copy, tree in made])
        counted = _counted(state)
        both = {path: with_containers(each.value) for path, each in self.by_path.items()}
        trees = {path: with_counted(self.by_path[path].value, tree, counted) for path, (tree, _) in both.items()}
        containers = {path: inside for path, (_, inside) in both.items()}
        tensors = {path: new[path] for path in self.tensors}
        return Attributes(self.by_path, trees, containers, tensors, self.shared, self.constant)


def _counted(state: State) -> dict[tuple[int, Any], str]:
    """The paths of the numbers that a step counts, by where they are."""
    return {place.key: path for path, place in state.counters.items()}


def count_in(state: State, copies: Iterable[tuple[Any, Any, Any]]) -> None:
    """Let the counters of a state that are in some values be those in copies of them, with the numbers that they have.
    copies: values, the copies, and the trees that these have been made of."""
    boxes = {key: box for value, copy, tree in copies if state.counters for key, box in twins(value, copy, tree)}
    for path, place in list(state.counters.items()):
        if (box := boxes.get(place.key[0])) is not None:
            state.counters = {**state.counters, path: Place(box, place.name, place.module or place.of)}
            state.counters[path].set(place.value)


def leaves_of(path: str, tree: Any) -> list[tuple[str, Any]]:
    """What is in an attribute, by path."""
    return [(f"{path}.{inner}".rstrip("."), x) for inner, x in named_leaves(tree)]


def _tensors_of(path: str, tree: Any) -> Iterator[tuple[str, torch.Tensor]]:
    return ((inner, x) for inner, x in leaves_of(path, tree) if isinstance(x, torch.Tensor))


def guard_of(tree: Any, of_tensor: Callable[[torch.Tensor], Hashable] = lambda x: None) -> Hashable:
    """The guard of an attribute: its structure, its plain values, and what stands for its tensors."""
    leaves, structure = pytree.tree_flatten(tree)
    inside = (of_tensor(x) if isinstance(x, torch.Tensor) else guard_key(_torch.number_now(x)) for x in leaves)
    return "tensors", str(structure), tuple(inside)


def _each_once(owners: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found: dict[int, tuple[str, Any]] = {}
    for path, owner in owners.items():
        found.setdefault(id(owner), (path, owner))
    return list(found.values())


def _with_tensors(value: Any, own: set[int], counted: Mapping[tuple[int, Any], str]) -> tuple[Any, list[Any]]:
    """What an attribute holds, opened, if that is tensors and plain values, or None for anything else; and the
    containers there, of which there may be some, too, where it is plain values alone.

    own: the parameters and buffers, by identity, which have places of their own. counted: the paths of numbers that the
    step counts, by where they are, in whose places is `Counted`.
    """
    tree, containers = with_containers(value)
    tree = with_counted(value, tree, counted) if counted and tree is not value else tree
    leaves = pytree.tree_leaves(tree)
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    plain = all(isinstance(x, (*PLAIN, *NAMED)) or _torch.is_symbol(x) for x in leaves)
    if not plain or any(id(x) in own or isinstance(x, nn.Parameter) for x in tensors):
        return None, []
    return tree if tensors else None, containers


# ---- what a step sets -------------------------------------------------------------------------


@dataclass(frozen=True)
class SetByStep:
    """What a step has set. trees: the attributes that hold other tensors or containers now, opened, by path.
    containers: those in each. changed: those where more than these is new. places: where tensors were before or are
    now."""

    trees: dict[str, Any]
    containers: Containers
    changed: tuple[str, ...]
    places: frozenset[tuple[int, str]]

    @classmethod
    def between(cls, before: Attributes, after: Attributes, state: State) -> SetByStep:
        """What differs between the attributes of a state before a step and after it. Raises RuntimeError for what
        cannot be a result."""
        for path in sorted(before.by_path.keys() - after.by_path.keys()):
            raise RuntimeError(_taken_out(before.by_path[path], state))
        trees, changed = {}, []
        for path, tree in after.trees.items():
            old = before.trees.get(path)
            _check_counted(path, old, tree)
            if path not in before.by_path or guard_of(tree) != guard_of(old):
                changed.append(path)
            elif _same_tensors(old, tree) and all(map(is_, after.containers[path], before.containers[path])):
                continue
            trees[path] = tree
        alone = {path for path in changed if path not in before.by_path and isinstance(trees[path], torch.Tensor)}
        containers = {path: after.containers[path] for path in trees}
        return cls(trees, containers, tuple(x for x in changed if x not in alone), before.places | after.places)

    def stand_ins(self) -> dict[str, Any]:
        """The same trees with tensors without values of their own. One container is one node of theirs."""
        copies = Copies(node)
        return {path: copies.of(tree, self.containers[path], _stand_in) for path, tree in self.trees.items()}


def _taken_out(of: Attribute, state: State) -> str:
    """What is wrong with an attribute that holds nothing but tensors and plain values no more."""
    line = line_naming(functions_of(of.owner), {of.name})
    names = {id(x): path for path, x in (*state.parameters().items(), *state.buffers().items())}
    held = pytree.tree_leaves(opened(vars(of.owner).get(of.name)))
    if name := next((names[id(x)] for x in held if id(x) in names), ""):
        return f"the step sets {of.path} to {name}, which has a place of its own; set it to a clone() of that{line}"
    return (
        f"the step takes the tensors out of {of.path}; let it set others in their place, such as zeros, or do it "
        f"between steps{line}"
    )


def _stand_in(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return _torch.number_now(x)
    shape = [_torch.number_now(n) for n in x.shape]
    with _torch.no_modes():
        return torch.zeros((), dtype=x.dtype, device=x.device).expand(shape)


def _check_counted(path: str, old: Any, new: Any) -> None:
    """Refuse numbers that are counted, and that the step moves to other places in what holds them."""
    before, after = ({at: x for at, x in leaves_of(path, tree) if isinstance(x, Counted)} for tree in (old, new))
    for at in (at for at, x in after.items() if before.get(at) != x):
        raise RuntimeError(f"the step moves the number at {after[at].path} to {at}; keep what it counts in one place")


def _same_tensors(old: Any, new: Any) -> bool:
    pairs = zip(pytree.tree_leaves(old), pytree.tree_leaves(new), strict=True)
    return all(x is y for x, y in pairs if isinstance(x, torch.Tensor))


class Others:
    """The attributes of optimisers and objects before a step is traced, to be put back where it has set tensors there.

    What it has set to other things stays: somebody else sees to it, and says that a program does not do that.
    """

    def __init__(self, state: State) -> None:
        held = *state.optimizers.values(), *state.objects.values(), *state.libraries.values()
        self._before = {id(x): (vars(x), dict(vars(x))) for x in held}

    def put_all_back(self) -> None:
        for own, before in self._before.values():
            own.clear()
            own.update(before)

    def put_back(self, places: Iterable[tuple[int, str]]) -> None:
        """places: the owners, by identity, and the names of what holds tensors now, or did before."""
        for owner, name in places:
            own, before = self._before.get(owner, ({}, {}))
            if name in before:
                own[name] = before[name]
            else:
                own.pop(name, None)


def check_read(attributes: Attributes, paths: Iterable[str]) -> None:
    """Refuse to read these tensors where they want gradients, which a program would not give them."""
    for path in paths:
        if attributes.tensors[path].requires_grad:
            raise RuntimeError(
                f"the step reads {path}, which requires a gradient and is no parameter of a module or of an optimiser, "
                "so that its program would give it none; make it an nn.Parameter, or keep it detached"
            )


def is_attribute(name: str) -> bool:
    """Whether something that a step changes is an attribute of a module, by its path, and no argument, by its name."""
    return "." in name


def _with_owners(state: State, new: Mapping[str, Any]) -> list[tuple[dict[str, Any], str, Any]]:
    """For each of these paths the attributes of its owner, its own name there, and what it is to be."""
    owners = state.owners() if new else {}
    parts = [(*path.rpartition("."), tree) for path, tree in new.items()]
    return [(vars(owners[of]), name, tree) for of, _, name, tree in parts]


def set_attributes(state: State, new: Mapping[str, Any]) -> None:
    """Give the modules attributes by path."""
    for own, name, value in _with_owners(state, new):
        own[name] = value
