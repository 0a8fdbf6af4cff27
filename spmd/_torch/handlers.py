"""Which errors the code of users catches where it is now.

    try:
        return math.exp(loss.item())        its program would raise an error here, which nothing would catch
    except OverflowError:
        return math.inf
"""

from __future__ import annotations

import builtins
import dis
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

from spmd._torch.read_numbers import is_of_user

CALLS_THE_STEP = "_called"
"""The function of spmd that calls a step: what is around it is around its program, too."""


def is_caught(kinds: tuple[type[Exception], ...]) -> bool:
    """Whether code of the user, inside of the step, catches one of these errors."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != CALLS_THE_STEP:
        if is_of_user(frame) and any(_catches(frame, caught, kinds) for caught in _handlers(frame)):
            return True
        frame = frame.f_back
    return False


def _catches(frame: types.FrameType, caught: list[Any] | None, kinds: tuple[type[Exception], ...]) -> bool:
    """caught: the names in an `except`; None for one without any."""
    if caught is None:
        return True
    found = [frame.f_globals.get(name, getattr(builtins, str(name), None)) for name in caught]
    return any(not isinstance(x, type) or any(map(functools.partial(_are_related, x), kinds)) for x in found)


def _are_related(one: type, other: type) -> bool:
    return issubclass(one, other) or issubclass(other, one)


def _handlers(frame: types.FrameType) -> Iterator[list[Any] | None]:
    """What each `except` around the present instruction names, the innermost first."""
    code = list(dis.get_instructions(frame.f_code))
    tried, at = _tried(frame.f_code, code), frame.f_lasti
    while inside := [(part, handler) for part, handler in tried if at in part and handler not in part]:
        _, at = min(inside, key=lambda each: len(each[0]))
        yield from _names([i for i in code if i.offset >= at])
        tried = [(part, handler) for part, handler in tried if handler != at]


def _tried(code: types.CodeType, instructions: list[dis.Instruction]) -> list[tuple[range, int]]:
    """The parts of a function that are tried, each with the place of what handles errors: Python 3.10 has no table."""
    if hasattr(code, "co_exceptiontable"):
        return [(range(x.start, x.end), x.target) for x in dis._parse_exception_table(code)]
    return [(range(i.offset, i.argval), i.argval) for i in instructions if i.opname == "SETUP_FINALLY"]


def _names(handler: list[dis.Instruction]) -> Iterator[list[Any] | None]:
    """Of the code of a handler, by the `except` in it; nothing of that of a `with` or a `finally`."""
    names: list[Any] = []
    for place, i in enumerate(handler):
        if i.opname in ("CHECK_EXC_MATCH", "JUMP_IF_NOT_EXC_MATCH"):
            yield names
        elif i.opname == "POP_TOP" and place < 2:
            yield None  # without a name
            return
        elif i.opname in ("WITH_EXCEPT_START", "RERAISE"):
            return
        names = [*names, i.argval] if i.opname.startswith("LOAD") else names if i.opname == "BUILD_TUPLE" else []
