"""What Python does with numbers where torch does something of its own with those of a trace.

    k // 2, k ** -2, divmod(k, 2)    as floats have it: torch has the floor of a quotient, and no negative powers
    flag + 1                         a truth value is an int
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx.experimental.sym_node import to_node, wrap_node

from spmd._torch.number_nodes import NotComputed, NumberNode, applied

SYMBOLS = torch.SymInt, torch.SymFloat, torch.SymBool
_NUMBERS = (*SYMBOLS, int, float)


def of_numbers(op: str, plain: Callable, *numbers: Any) -> Any:
    """What a function (`computed.FUNCTIONS`) gives for numbers. plain: does it where none is of a trace."""
    node = next((x.node for x in numbers if isinstance(x, SYMBOLS) and isinstance(x.node, NumberNode)), None)
    if node is None or not all(isinstance(x, _NUMBERS) for x in numbers):
        return plain(*numbers)
    try:
        return wrap_node(applied(op, *(to_node(node, x) for x in numbers)))
    except NotComputed as error:
        return error.value


@contextlib.contextmanager
def python_methods() -> Iterator[None]:
    """Inside, numbers of a trace have the methods of Python's. One thread at a time may be inside; the others find all
    as it is."""
    thread = threading.get_ident()
    with contextlib.ExitStack() as undo:
        for kind, methods in _METHODS.items():
            for name, method in methods.items():
                before = vars(kind).get(name)
                undo.callback(setattr, kind, name, before) if before else undo.callback(delattr, kind, name)
                setattr(kind, name, _here(thread, method, before))
        yield


def _here(thread: int, method: Callable, before: Callable | None) -> Callable:
    def run(x: Any, *args: Any) -> Any:
        if threading.get_ident() != thread or not isinstance(x.node, NumberNode):
            return before(x, *args) if before else NotImplemented
        return method(before, x, *args)

    return run


def _of_ints(method: str, reflected: bool) -> Callable:
    """Arithmetic and comparisons of sizes, which a trace has by the thousand: without torch's questions about types."""
    def run(before: Any, x: torch.SymInt, y: Any) -> Any:
        if type(y) is int:
            other = x.node.wrap_int(y)
        elif type(y) is torch.SymInt and isinstance(y.node, NumberNode):
            other = y.node
        else:
            return before(x, as_int(y))
        return wrap_node(getattr(other, method)(x.node) if reflected else getattr(x.node, method)(other))

    return run


def _of_floats(op: str, is_reflected: bool) -> Callable:
    def run(before: Any, x: Any, y: Any) -> Any:
        if not isinstance(y, _NUMBERS):
            return NotImplemented
        pair = torch.sym_float(x), torch.sym_float(y)
        return of_numbers(op, getattr(operator, op), *(reversed(pair) if is_reflected else pair))

    return run


def _of_pair(before: Any, x: Any, y: Any) -> Any:
    return (x // y, x % y) if isinstance(y, _NUMBERS) else NotImplemented


def _of_reflected_pair(before: Any, x: Any, y: Any) -> Any:
    return (y // x, y % x) if isinstance(y, _NUMBERS) else NotImplemented


def as_int(x: Any) -> Any:
    """A truth value as 0 or 1."""
    return of_numbers("pos", operator.pos, x) if isinstance(x, torch.SymBool) else x


def _of_truths(op: str, is_reflected: bool) -> Callable:
    def run(before: Any, x: Any, y: Any) -> Any:
        if not isinstance(y, _NUMBERS):
            return NotImplemented
        pair = as_int(x), as_int(y)
        return getattr(operator, op)(*(reversed(pair) if is_reflected else pair))

    return run


def _with_truths(before: Any, x: Any, y: Any, *more: Any) -> Any:
    return before(x, as_int(y), *more)


_OPERATIONS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
_BOTH = [(op, f"__{r}{op}__", bool(r)) for op in _OPERATIONS for r in ("", "r")]
_METHODS: dict[type, dict[str, Callable]] = {
    torch.SymInt: {name: _with_truths for _, name, _ in _BOTH},
    torch.SymFloat: {name: _with_truths for _, name, _ in _BOTH},
    torch.SymBool: {name: _of_truths(op, reflected) for op, name, reflected in _BOTH},
}
_METHODS[torch.SymInt] |= {
    name: _of_ints(op, reflected) for op, name, reflected in _BOTH if op in ("add", "sub", "mul")
}
_METHODS[torch.SymInt] |= {f"__{op}__": _of_ints(op, False) for op in ("eq", "ne", "lt", "le", "gt", "ge")}
_METHODS[torch.SymFloat] |= {
    name: _of_floats(op, reflected) for op, name, reflected in _BOTH if op in ("pow", "floordiv")
}
_METHODS[torch.SymBool] |= {f"__{op}__": _of_truths(op, False) for op in ("lt", "le", "gt", "ge")}
_METHODS[torch.SymBool] |= {
    "__pos__": lambda _, x: as_int(x), "__neg__": lambda _, x: -as_int(x), "__abs__": lambda _, x: as_int(x),
    "__float__": lambda _, x: float(bool(x)), "__index__": lambda _, x: int(bool(x)),
    "__invert__": lambda _, x: ~int(bool(x)),
}  # fmt: skip
for _kind in (torch.SymInt, torch.SymFloat, torch.SymBool):
    _METHODS[_kind] |= {"__divmod__": _of_pair, "__rdivmod__": _of_reflected_pair}
