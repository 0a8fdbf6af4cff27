"""Functions of `math` of numbers that a trace keeps as symbols.

    math.cos(self.steps / 9)    the same of the symbol: each call has a number of its own
    math.exp(loss.item())       the same of what the run finds in a tensor

`math` asks for a float, which would freeze a symbol, and which one without a value, as what is read of a tensor, does
not give. Where one device raises, as for the logarithm of a negative number, the step or its program does.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from spmd._torch.computed import FUNCTIONS
from spmd._torch.number_methods import of_numbers

NAMES = [name.removeprefix("math.") for name in FUNCTIONS if name.startswith("math.")]
"""The functions of `math` that are symbols of symbols, by name."""


@contextlib.contextmanager
def symbolic_math() -> Iterator[None]:
    """Inside, functions of `math` of symbols are symbols, too.

    One thread at a time may be inside; the others find them as they are.
    """
    thread = threading.get_ident()
    real = {name: getattr(math, name) for name in NAMES}
    for name, function in real.items():
        setattr(math, name, _of_symbols(thread, function, f"math.{name}"))
    try:
        yield
    finally:
        for name, function in real.items():
            setattr(math, name, function)


def _of_symbols(thread: int, plain: Callable, op: str) -> Callable:
    @functools.wraps(plain)
    def run(*args: Any) -> Any:
        if threading.get_ident() != thread:
            return plain(*args)
        numbers = [x.item() if isinstance(x, torch.Tensor) else x for x in args]
        return of_numbers(op, plain, *map(_as_float, numbers))

    return run


def _as_float(x: Any) -> Any:
    return torch.sym_float(x) if isinstance(x, (torch.SymInt, torch.SymBool)) else x
