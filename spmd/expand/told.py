"""What the process tells a step while it is captured: a value that may be shown, and that no program may depend on.

    begin = time.perf_counter()
    loss = model(x).sum()
    print(f"{time.perf_counter() - begin:.3f} s")      shows how long the capture took, once
    loss = loss * (time.perf_counter() - begin)          an error: the program would have the time of the capture
"""

from __future__ import annotations

import dis
import operator
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from spmd.expand.user_code import at_user_line, current_frames

FORMATS = ("BINARY_OP", "BINARY_MODULO")
"""What Python does where it asks for a number and is not called for it: "%.2f" % seconds."""


class Told:
    """A value that the process told, and what is computed of it. It is shown as the value; to decide by it, or to give
    it to torch, is an error that names the user's line."""

    __slots__ = ("_value", "_what")

    def __init__(self, value: Any, what: str) -> None:
        self._value, self._what = value, what

    def __repr__(self) -> str:
        return repr(self._value)

    def __str__(self) -> str:
        return str(self._value)

    def __format__(self, spec: str) -> str:
        return format(self._value, spec)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # what protocols ask for, such as those of copies
            raise AttributeError(name)
        return _told(getattr(self._value, name), self._what)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _told(self._value(*args, **kwargs), self._what)

    def __float__(self) -> float:
        return float(self._value) if _formats(sys._getframe(1)) else self._refuse()

    def __int__(self) -> int:
        return int(self._value) if _formats(sys._getframe(1)) else self._refuse()

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise FrozenValue(self._what)

    __bool__ = __index__ = __complex__ = __hash__ = __iter__ = __len__ = _refuse
    __array_ufunc__ = __array__ = _refuse
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __contains__ = _refuse

    @classmethod
    def __torch_function__(cls, function: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        given = [*args, *(kwargs or {}).values()]
        raise FrozenValue(next((x._what for x in given if type(x) is cls), "the process"))


class FrozenValue(RuntimeError):
    """A step computes with, or decides by, what the process tells it."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"the step computes with what {what} says, or decides by it, and its program would do so for ever with "
            "what it said at the first call; pass the value as an argument, or decide outside the step"
            f"{at_user_line(current_frames())}"
        )


def find_told(data: Any) -> Told | None:
    """The first told value in nested lists of numbers."""
    if isinstance(data, (list, tuple)):
        return next((found for x in data if (found := find_told(x)) is not None), None)
    return data if type(data) is Told else None


def _told(value: Any, what: str) -> Any:
    """A part of a told value; text is what may be shown, and is itself."""
    return value if isinstance(value, str) or value is None or value is NotImplemented else Told(value, what)


def _formats(frame: FrameType) -> bool:
    """Whether the code that runs in a frame writes a value into a text."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] in FORMATS


def _value_of(x: Any) -> Any:
    return x._value if type(x) is Told else x


def _computed(compute: Callable) -> Callable:
    """An operator of told values and others; tensors say themselves what they are multiplied with."""

    def run(*operands: Any) -> Any:
        told = next(x for x in operands if type(x) is Told)
        if any(hasattr(x, "__torch_function__") and type(x) is not Told for x in operands):
            raise FrozenValue(told._what)
        return _told(compute(*map(_value_of, operands)), told._what)

    return run


def _reflected(compute: Callable) -> Callable:
    return lambda x, other: compute(other, x)


for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
    _run = _computed(getattr(operator, f"__{_name}__"))
    setattr(Told, f"__{_name}__", _run)
    setattr(Told, f"__r{_name}__", _reflected(_run))
for _name, _function in (("divmod", divmod), ("neg", operator.neg), ("abs", abs), ("round", round)):
    setattr(Told, f"__{_name}__", _computed(_function))
