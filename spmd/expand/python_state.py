"""The Python state of modules: flags, counts, lists, hooks and caches that a step may change when it runs.

    def forward(self, x):
        if not self.ready:          # many models do something once, in their first forward
            self.ready = True
        return self.layer(x)

A capture runs the step, and so changes such values. `PythonState` notes the contents of every container that the
attributes of a module reach, so that they can be put back, and the changes be made again when the program has run.
Tensors, parameters and submodules are not its business, but for one thing: a container may hold them, too, as a
recurrent layer does and an optimiser for each parameter. While a step is captured, they are replaced there as well.
"""

from __future__ import annotations

import types
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from spmd import _torch
from spmd.expand.guards import COMPARED_BY_ID, GUARDED_APART, MAX_DEPTH
from spmd.expand.masked import check_not_kept
from spmd.expand.sources.layout import COMPARED_BY_VALUE, Container, Contents, is_set, items_of, put
from spmd.expand.told import Told

RENEWED = "__new__"
"""A step from where a list is to the list: it is another one behind each call."""


class PythonState:
    """The contents of the containers that the attributes of some modules reach, as they are now.

    around: other values that may hold parameters: what hooks have as variables, and attributes of tensors. others: what
    else may hold numbers that a step counts: attributes of optimisers, by name.
    """

    def __init__(
        self, modules: Iterable[nn.Module], around: Iterable[Any] = (),
        others: Iterable[tuple[Optimizer, Mapping[str, Any]]] = (),
    ) -> None:  # fmt: skip
        modules = list(modules)
        own = [vars(module) for module in modules]
        self._own = {id(module): id(vars(module)) for module in modules}
        self._apart = {id(each[name]) for each in own for name in GUARDED_APART if name in each}  # tensors, submodules
        seen = set(self._apart)
        self.before: Contents = []
        self._ways: dict[int, tuple[nn.Module | Optimizer, tuple]] = {}
        for module, each in zip(modules, own, strict=True):
            for steps, box in boxes(each, seen, MAX_DEPTH):
                self.before.append((box, copied(box)))
                self._ways[id(box)] = module, steps
        reached = [box for x in around for _, box in boxes(x, seen, MAX_DEPTH)]
        self._around: Contents = [(box, copied(box)) for box in reached]
        self._others: Contents = []
        for optimizer, each in others:
            for steps, box in boxes(each, seen, MAX_DEPTH):
                if steps:
                    self._others.append((box, copied(box)))
                    self._ways[id(box)] = optimizer, steps
        self._tensors = {id(x) for x in self._reached_tensors()}

    def numbers_set(self, is_number: Callable[[Any], bool]) -> Iterator[tuple[nn.Module | Optimizer, tuple]]:
        """Where dicts, lists and objects that modules and optimisers hold had a number and have another one: the module
        or the optimiser, and the keys and places that lead there. So of lists of numbers that are others now."""
        for box, old in [*self.before, *self._others]:
            module, steps = self._ways[id(box)]
            if isinstance(box, dict | list) and len(box) == len(old):
                for key, was in items_of(old) if isinstance(old, dict) else enumerate(old):
                    now = box.get(key) if isinstance(box, dict) else box[key]
                    if type(was) is list and now is not was and _are_numbers(was, now, is_number):
                        yield from ((module, (*steps, key, RENEWED, i)) for i in range(len(was)))
                    elif steps and type(was) in (int, float) and is_number(now) and repr(now) != repr(was):
                        yield module, (*steps, key)

    def check_around(self) -> None:
        """Raise RuntimeError if a container around the modules has other contents now."""
        for box, old in self._around:
            if differs(box, old):
                raise RuntimeError(
                    f"the step changes a {type(box).__name__} that a hook on a parameter, an optimiser or an attribute "
                    "of a tensor holds, which its program would not; keep it in a tensor, or do it between steps"
                )

    def restore(self) -> None:
        """Put all contents back."""
        put([*self.before, *self._around, *self._others])

    def replace(self, new: Mapping[int, torch.Tensor]) -> None:
        """Put other tensors in the place of those with these ids, wherever a container holds them or refers to them."""
        for box, _ in [*self.before, *self._around]:
            if _may_hold(box, new.keys()) and any(_replaced(x, new) is not x for x in _keys_and_values(box)):
                items = [tuple(_replaced(x, new) for x in pair) for pair in _pairs(box)]
                put([(box, dict(items) if isinstance(box, dict) else [value for _, value in items])])

    def changes(self, but: Collection[tuple[int, str]] = ()) -> Contents:
        """The containers whose contents differ now, with their present contents, for `put_changes`.

        They are right for one call alone, and so sizes and floats in them are plain numbers, also where the step has
        noted symbols. but: the attributes, by the identity of a module and by name, that are left as they are then.
        """
        left: dict[int, set[str]] = {}
        for owner, name in but:
            if owner in self._own:
                left.setdefault(self._own[owner], set()).add(name)
        inside = set(self._apart)
        for box, old in self.before:
            for each in (contents.get(name) for name in left.get(id(box), ()) for contents in (box, old)):
                deque(boxes(each, inside, MAX_DEPTH), 0)
        seen = set(inside)
        for known, _ in self.before:
            for _, box in boxes(known, seen, MAX_DEPTH):
                pairs = _pairs(box)
                items = [(without_symbols(k), without_symbols(x, k or "a number")) for k, x in pairs]
                if any(k is not j or x is not y for (k, x), (j, y) in zip(items, pairs, strict=True)):
                    put([(box, dict(items) if isinstance(box, dict) else [x for _, x in items])])
        there = [(box, old, left.get(id(box), set())) for box, old in self.before if id(box) not in inside]
        return [
            (box, _but_for(copied(box), old, names) if names else copied(box)) for box, old, names in there
            if differs(_without(box, names), _without(old, names))
        ]  # fmt: skip

    def attribute_with_new_tensor(self, module: nn.Module, but: Collection[tuple[int, str]] = ()) -> str:
        """The first attribute of a module that reaches a tensor that none reached before; empty if none does.

        but: attributes that are not looked at, as in `changes`.
        """
        own = ((k, x) for k, x in vars(module).items() if k not in GUARDED_APART and (id(module), k) not in but)
        return next((name for name, x in own if self._has_new_tensor(x)), "")

    def _has_new_tensor(self, value: Any) -> bool:
        reached = _reached(value, set(self._apart))
        return any(isinstance(x, torch.Tensor) and id(x) not in self._tensors for x in reached)

    def _reached_tensors(self) -> Iterator[torch.Tensor]:
        seen = set(self._apart)
        for box, _ in self.before:
            yield from (x for x in _reached(box, seen) if isinstance(x, torch.Tensor))


LEFT = object()
"""In the place of what stays as it is."""


def put_changes(changes: Contents) -> None:
    """Give the containers these contents, but for what is left as it is."""
    put([(box, {k: box.get(k) if x is LEFT else x for k, x in new.items()} if isinstance(new, dict) else new)
         for box, new in changes])  # fmt: skip


def _without(box: Any, names: Collection[str]) -> Any:
    return {k: x for k, x in box.items() if k not in names} if names else box


def _but_for(new: dict, old: dict, names: Collection[str]) -> dict:
    """The contents of a dict without these names, or with LEFT in their place if they were there."""
    return {k: LEFT if k in names else x for k, x in new.items() if k not in names or k in old}


def boxes(value: Any, seen: set[int], depth: int, steps: tuple = ()) -> Iterator[tuple[tuple, Container]]:
    """The containers that a value reaches, itself included, each once, with the keys and places that lead there."""
    if id(value) in seen or isinstance(value, (COMPARED_BY_VALUE, COMPARED_BY_ID, *_torch.SYMBOLS)) or not depth:
        return
    seen.add(id(value))
    if isinstance(value, Container):
        yield steps, value
    inside = value
    if isinstance(value, types.MethodType):
        inside = {"__self__": value.__self__, "__dict__": vars(value)}
    elif not isinstance(value, (dict, list, set, tuple, frozenset)):
        inside = {"__dict__": vars(value)} if hasattr(value, "__dict__") else {}
    for step, x in items_of(inside) if isinstance(inside, dict) else enumerate(inside):
        if type(x) not in _VALUES:
            yield from boxes(x, seen, depth - 1, (*steps, step))


def _are_numbers(was: list, now: Any, is_number: Callable[[Any], bool]) -> bool:
    """Whether a list of numbers has another list of as many in its place."""
    plain = type(now) is list and 0 < len(was) == len(now) and all(type(x) in (int, float) for x in was)
    return plain and all(map(is_number, now))


def all_boxes(value: Any) -> list[Container]:
    """The containers that a value reaches, itself included, each once."""
    return [box for _, box in boxes(value, set(), MAX_DEPTH)]


_VALUES = frozenset(COMPARED_BY_VALUE)


def _reached(value: Any, seen: set[int]) -> Iterator[Any]:
    """The values that a value reaches through containers and plain objects, itself included, each once."""
    if id(value) in seen or isinstance(value, COMPARED_BY_VALUE):
        return
    seen.add(id(value))
    yield value
    if isinstance(value, COMPARED_BY_ID):
        return
    inside = value if isinstance(value, (dict, list, set, frozenset, tuple)) else getattr(value, "__dict__", ())
    for x in _values(inside):
        if type(x) not in _VALUES:
            yield from _reached(x, seen)


def _values(box: Any) -> list[Any]:
    return list(box.values()) if isinstance(box, dict) else list(box)


def variables_of(function: Any) -> list[Any]:
    """What a function has from around it: the variables of its closure, and the object that it is bound to."""
    if isinstance(function, types.MethodType):
        return [function.__self__, *variables_of(function.__func__)]
    cells = getattr(function, "__closure__", None) or ()
    return [cell.cell_contents for cell in cells if is_set(cell)]


def _pairs(box: Container) -> list[tuple[Any, Any]]:
    return list(items_of(box)) if isinstance(box, dict) else [(None, x) for x in box]


def _keys_and_values(box: Container) -> list[Any]:
    return [x for pair in _pairs(box) for x in pair]


def _may_hold(box: Container, ids: Set[int]) -> bool:
    """Whether a container holds objects with these ids, or weak references, which may be to some of them."""
    inside = [*box, *box.values()] if isinstance(box, dict) else [*box]
    is_held = not ids.isdisjoint(map(id, inside))
    return is_held or any([issubclass(kind, weakref.ref) for kind in set(map(type, inside))])


def _replaced(x: Any, new: Mapping[int, torch.Tensor]) -> Any:
    if isinstance(x, weakref.ref):
        return weakref.ref(new[id(x())]) if id(x()) in new else x
    return new.get(id(x), x)


class KeptOfRun(RuntimeError):
    """The step keeps what only the run knows. name: of the attribute, or the key."""

    def __init__(self, name: Any, kind: str) -> None:
        super().__init__(
            f"the step keeps {name} in a module, a {kind} that is known only when the program runs; keep a tensor with "
            "register_buffer, or let the step return it"
        )
        self.name, self.kind = name, kind


def without_symbols(x: Any, name: Any = "a number") -> Any:
    """The present numbers in the place of symbols, which the trace takes for granted. Containers inside, but for
    tuples, are not looked into. name: of the attribute or the key."""
    if _torch.is_symbol(x):
        try:
            return _torch.settled(x)
        except LookupError as error:
            raise KeptOfRun(name, "flag" if isinstance(x, torch.SymBool) else "number") from error
    if type(x) is Told:
        raise RuntimeError(
            f"the step keeps in a module what {x._what} says, which its program would do at the first call alone; keep "
            "it between steps"
        )
    check_not_kept(x)
    if not isinstance(x, tuple):
        return x
    inside = [without_symbols(each, name) for each in x]
    if all(new is old for new, old in zip(inside, x, strict=True)):
        return x
    return x._make(inside) if hasattr(x, "_make") else type(x)(inside)


def copied(box: Container) -> Any:
    """The contents of a container, for `put`."""
    if isinstance(box, dict):
        return dict(items_of(box)) if box else {}  # as most are
    return set(box) if type(box) is set else list(box)


def differs(box: Container, old: Any) -> bool:
    """Whether other objects are in the container now, or in another order."""
    if len(box) != len(old):
        return True
    if isinstance(box, set):
        return box != set(old)
    pairs = zip(_pairs(box), _pairs(old), strict=True)
    return any((k is not j and k != j) or v is not w for (k, v), (j, w) in pairs)
