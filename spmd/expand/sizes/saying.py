"""Why a call needs another capture, in one line: which guard differs, both values, and where the user's code reads it.

    flag was 1 and is 2, read at train.py:31, in step
    model.layers.0: dropped was False and is True, read at model.py:12, in Block.forward
"""

from __future__ import annotations

import inspect
import re
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

from spmd.expand.bytecode import instructions
from spmd.expand.guards import ModuleGuard
from spmd.expand.state import Slot

Guards = Mapping[Any, Hashable]
"""By name, everything that a capture depends on, but for sizes and for branches on numbers."""


def difference(before: Guards, now: Guards, fn: Callable) -> str:
    """The first guard that differs, but for gradients. Empty for tensors of the state: a step makes an optimiser's.

    fn: the step, whose code reads the arguments.
    """
    for name in {**before, **now}:
        if (old := before.get(name)) != (new := now.get(name)) and not (isinstance(name, Slot) and name.kind == "grad"):
            old, new = (_there(name, guards) for guards in (before, now))
            return "" if isinstance(name, Slot) else _sentence(name, old, new, fn)
    return ""


class _Said(NamedTuple):
    """In the place of a guard: what is said of it. `value` is read as that of a guard that keeps an object."""

    value: str


_A_SYMBOL = "a number that may change"
"""What is said of a number that a program takes as it is: it has no guard, or that of its type."""


def _there(name: str, guards: Guards) -> Hashable:
    """The guard of this name, or what is said where there is none."""
    if name in guards:
        return guards[name]
    return _Said(_A_SYMBOL if ".param_groups." in str(name) else "not there")


def _sentence(name: str, old: Hashable, new: Hashable, fn: Callable) -> str:
    if is_of_module(old) and is_of_module(new) and old[0] is new[0]:
        ours, theirs = dict(old[1]), dict(new[1])
        attribute = next(k for k in {**ours, **theirs} if ours.get(k) != theirs.get(k))
        where = _first(_read_at(code, attribute) for code in _codes_of(old[0]))
        part, old, new = _part_that_differs(attribute, ours.get(attribute), theirs.get(attribute))
        return f"{name}: {part} was {_text(old)} and is {_text(new)}{where}"
    code = getattr(inspect.unwrap(fn), "__code__", None)
    where = _first(_read_at(code, re.split(r"\W", name, maxsplit=1)[0]) for code in [code] if code is not None)
    part, old, new = _part_that_differs(name, old, new)
    return f"{part} was {_text(old)} and is {_text(new)}{where}"


def _part_that_differs(name: str, old: Hashable, new: Hashable) -> tuple[str, Hashable, Hashable]:
    """The first item or attribute that is another one, inside of a container or an object, and what it was and is."""
    before, now = _parts(old), _parts(new)
    if before is None or now is None or old[0] is not new[0]:
        return name, old, new
    gone = _Said("not there")
    for part in {**before, **now}:
        if before.get(part, gone) != now.get(part, gone):
            return _part_that_differs(f"{name}{part}", before.get(part, gone), now.get(part, gone))
    return name, old, new


def _parts(key: Hashable) -> dict[str, Hashable] | None:
    """The guards of what is in a container, or of the attributes of an object; None for other guards."""
    if not (isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], type) and isinstance(key[1], tuple)):
        return None
    kind, inside = key
    if issubclass(kind, dict):
        return {f"[{_shown(k)}]": v for k, v in inside}
    if issubclass(kind, (list, tuple, deque)):
        return {f"[{i}]": v for i, v in enumerate(inside)}
    is_object = all(isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], str) for each in inside)
    return {f".{k}": v for k, v in inside} if is_object else None


def is_of_module(key: Hashable) -> bool:
    """Whether this is the guard of all attributes of a module, or of another object that counts as a whole."""
    return type(key) is ModuleGuard


def _text(key: Hashable) -> str:
    """The value of which this is the guard."""
    if isinstance(key, _Said) or key in (int, float):
        return key.value if isinstance(key, _Said) else _A_SYMBOL
    text = _shown(key)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _shown(key: Hashable) -> str:
    if not (isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], type)):
        return repr(getattr(key, "value", key))
    kind, value = key
    if kind is dict and isinstance(value, tuple):
        return f"{{{', '.join(f'{_shown(k)}: {_shown(v)}' for k, v in value)}}}"
    if kind in (list, tuple, set, frozenset) and isinstance(value, (tuple, frozenset)):
        return f"[{', '.join(map(_shown, value))}]"
    return value if kind is float else repr(value)


# ---- where it is read -------------------------------------------------------------------------


def _codes_of(kind: type) -> Iterator[types.CodeType]:
    """The code of the methods of a class, the nearest first."""
    for each in kind.__mro__:
        for method in vars(each).values():
            if isinstance(method, types.FunctionType) and method.__name__ != "__init__":
                yield method.__code__


def _read_at(code: types.CodeType, name: str) -> str:
    """The first line of a function that reads a variable or an attribute of this name; empty if there is none."""
    for i in instructions(code):
        if i.value == name and i.name.startswith("LOAD"):
            return f", read at {code.co_filename}:{i.line}, in {code.co_name}"
    return ""


def _first(found: Iterator[str]) -> str:
    return next(filter(None, found), "")
