"""`len` of a tensor in the code of a step: its first size, which a trace keeps as a symbol.

    loss = (y - t).square().sum() / len(x)

Python asks `__len__` for a number, so that the program would be for this size alone. While a step is traced, the user's
functions find another `len` among their globals, where they have none of their own.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from spmd import _torch


@contextlib.contextmanager
def lengths_are_symbols(functions: Iterable[types.FunctionType]) -> Iterator[None]:
    """Inside, `len` of a traced tensor is a symbol in the code of these functions."""
    several = {id(fn.__globals__): fn.__globals__ for fn in functions if "len" in fn.__code__.co_names}
    own = [names for names in several.values() if "len" not in names]
    for names in own:
        names["len"] = _length
    try:
        yield
    finally:
        for names in own:
            del names["len"]


def _length(x: Any, /) -> Any:
    if type(x) is _torch.FunctionalTensor and x.ndim and isinstance(size := x.shape[0], torch.SymInt):
        return _torch.Integer(size.node)
    return len(x)
