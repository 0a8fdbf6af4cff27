"""The Python state of modules: flags, counts, lists, hooks and caches that a step may change when it runs.

    def forward(self, x):
        if not self.ready:          # many models do something once, in their first forward
            self.ready = True
        return self.layer(x)

A capture runs the step, and so changes such values. `PythonState` notes the contents of every container that the
attributes of a module reach, so that they can be put back, and the changes be made again when the program has run.
Tensors, parameters and submodules are not its business.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from spmd.expand.guards import COMPARED_BY_ID, COMPARED_BY_VALUE, GUARDED_APART, MAX_DEPTH

Container = dict | list | set
Contents = list[tuple[Container, Any]]
"""Containers, each with a copy of its contents."""


class PythonState:
    """The contents of the containers that the attributes of some modules reach, as they are now."""

    def __init__(self, modules: Iterable[nn.Module]):
        own = [vars(module) for module in modules]
        self._apart = {id(each[name]) for each in own for name in GUARDED_APART if name in each}  # tensors, submodules
        seen = set(self._apart)
        self.before: Contents = [(box, _copied(box)) for each in own for _, box in boxes(each, seen, MAX_DEPTH)]
        self._tensors = {id(x) for x in self._reached_tensors()}

    def restore(self) -> None:
        """Put all contents back."""
        put(self.before)

    def changes(self) -> Contents:
        """The containers whose contents differ now, with their present contents."""
        return [(box, _copied(box)) for box, old in self.before if _differs(box, old)]

    def has_new_tensor(self) -> bool:
        """Whether an attribute reaches a tensor that none reached before."""
        return any(id(x) not in self._tensors for x in self._reached_tensors())

    def _reached_tensors(self) -> Iterator[torch.Tensor]:
        seen = set(self._apart)
        for box, _ in self.before:
            yield from (x for x in _reached(box, seen) if isinstance(x, torch.Tensor))


def put(contents: Contents) -> None:
    """Give the containers these contents."""
    for box, new in contents:
        box.clear()
        (box.extend if isinstance(box, list) else box.update)(new)


@contextlib.contextmanager
def made(changes: Contents) -> Iterator[None]:
    """Inside, the changes are made."""
    before = [(box, _copied(box)) for box, _ in changes]
    put(changes)
    try:
        yield
    finally:
        put(before)


def boxes(value: Any, seen: set[int], depth: int, steps: tuple = ()) -> Iterator[tuple[tuple, Container]]:
    """The containers that a value reaches, itself included, each once, with the keys and places that lead there."""
    if id(value) in seen or isinstance(value, (COMPARED_BY_VALUE, COMPARED_BY_ID)) or not depth:
        return
    seen.add(id(value))
    if isinstance(value, Container):
        yield steps, value
    inside = value
    if not isinstance(value, (dict, list, set, tuple, frozenset)):
        inside = {"__dict__": vars(value)} if hasattr(value, "__dict__") else {}
    for step, x in inside.items() if isinstance(inside, dict) else enumerate(inside):
        yield from boxes(x, seen, depth - 1, (*steps, step))


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
        yield from _reached(x, seen)


def _values(box: Any) -> list[Any]:
    return list(box.values()) if isinstance(box, dict) else list(box)


def _copied(box: Container) -> Any:
    return type(box)(box) if type(box) in (dict, list, set) else dict(box) if isinstance(box, dict) else list(box)


def _differs(box: Container, old: Any) -> bool:
    """Whether other objects are in the container now, or in another order."""
    if len(box) != len(old):
        return True
    if isinstance(box, set):
        return box != set(old)
    now, then = (list(x.items()) if isinstance(x, dict) else [(None, v) for v in x] for x in (box, old))
    return any((k is not j and k != j) or v is not w for (k, v), (j, w) in zip(now, then, strict=True))
