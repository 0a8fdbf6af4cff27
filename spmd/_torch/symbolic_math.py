"""Functions of `math` of numbers that a trace keeps as symbols.

    math.cos(self.steps / 9)    the same of the symbol: each call has a number of its own
    math.exp(loss.item())       exp of a tensor of one number, and what the run finds in it

`math` asks for a float, which would freeze a symbol, and which one without a value, as what is read of a tensor, does
not give. For such numbers a program gives what tensors give where one device raises, as for the logarithm of a negative
number: NaN, or infinity.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch


def _log(x: torch.Tensor, base: torch.Tensor | None = None) -> torch.Tensor:
    return torch.log(x) if base is None else torch.log(x) / torch.log(base)


_OF_ONE_NAME = (
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "atan2", "cos", "cosh", "erf", "erfc", "exp", "exp2", "expm1",
    "hypot", "lgamma", "log10", "log1p", "log2", "pow", "sin", "sinh", "sqrt", "tan", "tanh",
)  # fmt: skip
FUNCTIONS = {name: getattr(torch, name) for name in _OF_ONE_NAME if hasattr(math, name)}  # exp2 is of Python 3.11
FUNCTIONS |= {"fabs": torch.abs, "log": _log}
"""By the names that they have in `math`, the same of tensors."""


OF_SYMBOLS: dict[str, Callable] = {
    name: getattr(torch, f"_sym_{name}")
    for name in ("acos", "asin", "atan", "cos", "cosh", "log2", "sin", "sinh", "sqrt", "tan", "tanh")
}
"""By the names that they have in `math`, those that torch has for symbols."""


def _exp_of_symbol(x: torch.SymFloat) -> Any:
    """A power of e, which torch has: it may differ from Python's in the last bit."""
    return math.e**x


def _log_of_symbol(x: torch.SymFloat) -> Any:
    return torch._sym_log2(x) * math.log(2)


_MADE = {**OF_SYMBOLS, "exp": _exp_of_symbol, "log": _log_of_symbol}


@contextlib.contextmanager
def symbolic_math() -> Iterator[None]:
    """Inside, functions of `math` of symbols are symbols, too.

    One thread at a time may be inside; the others find them as they are.
    """
    thread = threading.get_ident()
    real = {name: getattr(math, name) for name in FUNCTIONS}
    for name, function in FUNCTIONS.items():
        setattr(math, name, _of_symbols(thread, real[name], function, _MADE.get(name)))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(math, name, function)


def _of_symbols(thread: int, plain: Callable, of_tensors: Callable, of_symbol: Callable | None) -> Callable:
    @functools.wraps(plain)
    def run(*args: Any) -> Any:
        if threading.get_ident() != thread:
            return plain(*args)
        numbers = [x.item() if isinstance(x, torch.Tensor) else x for x in args]
        if any(map(_is_unknown, numbers)):
            return of_tensors(*map(_as_tensor, numbers)).item()
        if of_symbol is not None and len(numbers) == 1 and isinstance(numbers[0], torch.SymInt | torch.SymFloat):
            return of_symbol(torch.sym_float(numbers[0]))
        return plain(*numbers)

    return run


def _is_unknown(x: Any) -> bool:
    return isinstance(x, torch.SymInt | torch.SymFloat) and not x.node.has_hint()


def _as_tensor(x: Any) -> torch.Tensor:
    return torch.scalar_tensor(x, dtype=torch.float64)  # as Python computes
