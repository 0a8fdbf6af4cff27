"""How Python lays out values: which are compared by value, what is in slots, what a class of C keeps unseen.

    slots_of(Point)             ("x", "y")
    hides(functools.partial)    "a functools.partial, which keeps what Python cannot see"
"""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any

import torch

from spmd.mesh import DeviceMesh

COMPARED_BY_VALUE = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.memory_format,
    DeviceMesh,
)  # fmt: skip
Container = dict | list | set | deque
Contents = list[tuple[Container, Any]]
"""Containers, each with a copy of its contents."""


def items_of(box: dict) -> Iterable[tuple[Any, Any]]:
    """The items that a dict has itself, in order, whatever a class of its own gives for them."""
    return (OrderedDict if isinstance(box, OrderedDict) else dict).items(box)


def put(contents: Contents) -> None:
    """Give the containers these contents."""
    for box, new in contents:
        if isinstance(box, dict):
            kind = OrderedDict if isinstance(box, OrderedDict) else dict  # a class of the user may do more
            kind.clear(box)
            for key, value in new.items():
                kind.__setitem__(box, key, value)
        else:
            box.clear()
            (box.extend if isinstance(box, list | deque) else box.update)(new)


def is_set(cell: types.CellType) -> bool:
    """Whether a variable of a closure has a value yet."""
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


@functools.lru_cache(maxsize=4096)
def slots_of(kind: type) -> tuple[str, ...]:
    """The attributes that objects of a class keep in slots, by the names under which they are found."""
    found = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        own = [slots] if isinstance(slots, str) else slots
        found += [_mangled(base, name) for name in own if name not in ("__dict__", "__weakref__")]
    return tuple(found)


KNOWN_SIZES = {dict, list, tuple, set, frozenset, deque, OrderedDict, defaultdict, int, float, str, bytes, object}
"""Classes of C of which Python code sees everything."""


@functools.lru_cache(maxsize=4096)
def hides(kind: type) -> str:
    """Why objects of a class cannot be looked at: they are larger than what Python code sees of them."""
    known = max((base.__basicsize__ for base in kind.__mro__ if base in KNOWN_SIZES), default=object.__basicsize__)
    words = len(slots_of(kind)) + bool(kind.__dictoffset__) + bool(kind.__weakrefoffset__)
    if kind.__basicsize__ <= known + words * tuple.__itemsize__ and kind is not object:
        return ""
    return "" if kind is object else f"a {kind.__module__}.{kind.__qualname__}, which keeps what Python cannot see"


def _mangled(base: type, name: str) -> str:
    is_private = name.startswith("__") and not name.endswith("__")
    return f"_{base.__name__.lstrip('_')}{name}" if is_private else name
