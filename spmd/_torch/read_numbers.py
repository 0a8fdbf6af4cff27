"""What Python code sees of a number or a tensor that a trace has no value of.

    f"{x.shape[0]}"       the present size, which the trace then takes for granted: a decision, as a branch is
    table[x.shape[0]]     the entry of the present size
    isinstance(n, int)    True of an int; so is `type(n) is int`, for which `TypeOf` stands for `type`
    f"{loss.item()}"      ValueRead: only the run knows it. torch would give the name of its symbol

torch's own code and spmd's find all of this as torch has it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import torch
from torch._subclasses.functional_tensor import FunctionalTensor

NUMBERS = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}
"""The types of symbols, with those of what they stand for."""


class ValueRead(RuntimeError):
    """Python code asks for a value that only the run knows."""


class ErrorOfRun(RuntimeError):
    """Python code catches an error that only the run may raise."""


class Integer(torch.SymInt):
    """A symbol for an int that a step is given, and no size."""


def plain_type(x: Any) -> type:
    """The type of what a value stands for."""
    return next((number for kind, number in NUMBERS.items() if issubclass(type(x), kind)), type(x))


@contextlib.contextmanager
def read_as_numbers() -> Iterator[None]:
    """Inside, Python code of the user finds symbols as the numbers that they stand for. One thread at a time may be
    inside; the others find all as it is."""
    thread = threading.get_ident()
    with contextlib.ExitStack() as undo:
        for kind, number in NUMBERS.items():
            for name, read in _methods(kind, number).items():
                undo.callback(_restore, kind, name, vars(kind).get(name))
                setattr(kind, name, _for_the_user(thread, read, getattr(kind, name)))
            _set_class(kind, property(functools.partial(_class_of, thread)))
            undo.callback(_set_class, kind, None)
        undo.callback(_restore, FunctionalTensor, "__repr__", vars(FunctionalTensor).get("__repr__"))
        FunctionalTensor.__repr__ = _for_the_user(thread, _refuse_tensor, FunctionalTensor.__repr__)
        yield


class TypeOf:
    """What stands for `type` in the code of users, and tells of a symbol the type of what it stands for. is_asked:
    whether code of the user asks."""

    def __init__(self, is_asked: Callable[[], bool]) -> None:
        self._is_asked = is_asked

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1:
            return type(*args, **kwargs)
        (x,) = args
        if isinstance(x, tuple(NUMBERS)) and self._is_asked():
            return plain_type(x)
        return self if type(x) is type else type(x)

    def __getattr__(self, name: str) -> Any:
        return getattr(type, name)

    def __eq__(self, other: Any) -> bool:
        return other is self or other is type

    def __hash__(self) -> int:
        return hash(type)

    def __repr__(self) -> str:
        return repr(type)

    def __getitem__(self, kind: Any) -> Any:
        return type[kind]

    def __or__(self, other: Any) -> Any:
        return type | other

    def __instancecheck__(self, x: Any) -> bool:
        return isinstance(x, type)

    def __subclasscheck__(self, kind: type) -> bool:
        return issubclass(kind, type)

    def __mro_entries__(self, bases: tuple) -> tuple:
        return (type,)


def _methods(kind: type, number: type) -> dict[str, Callable]:
    """What asks a symbol for its value."""
    return {
        "__repr__": lambda x: repr(_value(x, number)),
        "__format__": lambda x, spec: format(_value(x, number), spec),
        "__hash__": lambda x: hash(_value(x, number)),
    }


_OF_LIBRARIES: set[str] = set()
"""Files of torch and spmd whose code has asked for a class: it asks as often as it has sizes."""


def _class_of(thread: int, x: Any) -> type:
    """The class of a symbol, or of what it stands for where code of the user asks."""
    frame = sys._getframe(1)
    code = frame.f_code
    if code.co_filename in _OF_LIBRARIES and code.co_name not in _PASSED_ON:
        return type(x)
    if code.co_filename.startswith(_TORCH):
        _OF_LIBRARIES.add(code.co_filename)
    return plain_type(x) if threading.get_ident() == thread and asked_by_user(frame) else type(x)


def _set_class(kind: type, of: property | None) -> None:
    """Let `x.__class__`, which `isinstance` asks, be what a property says. Python sets no such attribute of a class
    that is there already: it would take it for the class of the class."""
    (attributes,) = gc.get_referents(vars(kind))
    if of is None:
        del attributes["__class__"]
    else:
        attributes["__class__"] = of
    kind.__doc__ = kind.__doc__  # tells Python that the class has changed


def _restore(kind: type, name: str, before: Any) -> None:
    if before is None:
        delattr(kind, name)
    else:
        setattr(kind, name, before)


def _value(x: Any, number: type) -> Any:
    """The present value, which the trace takes for granted."""
    if not x.node.has_hint():
        raise ValueRead("as text, or as a key")
    return number(x)


def _refuse_tensor(x: torch.Tensor) -> str:
    raise ValueRead("as text")


def _for_the_user(thread: int, read: Callable, plain: Callable) -> Callable:
    def run(*args: Any, **kwargs: Any) -> Any:
        asked = threading.get_ident() == thread and asked_by_user(sys._getframe(1))
        return read(*args) if asked else plain(*args, **kwargs)

    return run


def _folder(file: str) -> str:
    return os.path.dirname(os.path.abspath(file)) + os.sep


_TORCH = (_folder(torch.__file__), os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep)
_PYTHON = _folder(os.__file__)
_PACKAGES = tuple(sysconfig.get_paths()[kind] for kind in ("purelib", "platlib"))
_SYMPY, _DEBUGGERS = os.sep + "sympy" + os.sep, ("pdb.py", "bdb.py")
_PASSED_ON = {"__repr__", "__format__", "__torch_function__", "handle_torch_function", "pass_on", "_pass_on"}
"""What code of torch and of spmd of these names does, its caller does."""


def is_of_user(frame: FrameType) -> bool:
    """Whether a frame is one of code of the user, or of a package that the user calls."""
    file = frame.f_code.co_filename
    is_library = file.startswith((*_TORCH, "<")) or _SYMPY in file or file.endswith(_DEBUGGERS)
    return not is_library and (not file.startswith(_PYTHON) or file.startswith(_PACKAGES))


def asked_by_user(frame: FrameType | None) -> bool:
    """Whether code of the user asks, or of a package that the user calls: not torch, spmd, sympy or a debugger.

    Python's own library, such as `logging`, asks for its caller.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_TORCH):
            if frame.f_code.co_name not in _PASSED_ON:
                return False
        elif _SYMPY in file or file.endswith(_DEBUGGERS):
            return False
        elif not file.startswith("<") and (not file.startswith(_PYTHON) or file.startswith(_PACKAGES)):
            return True
        frame = frame.f_back
    return False
