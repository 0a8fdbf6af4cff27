"""Calls of torch that a trace takes apart, or makes of symbols.

    torch.as_tensor(lr / (1 + decay * step))      one number, as ASGD keeps it: an op of the program
    torch._fused_adamw_(ps, ..., lr=lr)           the arithmetic of the step, for each parameter
    torch.lstm(x, ...)                            its products and gates

Of a symbol torch would ask for the value, and freeze it. For recurrent layers torch may have one kernel of the machine,
with memory of its own that no other op can read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from spmd import _torch
from spmd.expand.told import FrozenValue, find_told
from spmd.expand.traced_ops import Normalise

aten = torch.ops.aten


class TracedCalls(TorchFunctionMode):
    """Inside, `torch.tensor`, `torch.as_tensor` and fused updates take symbols, and recurrent layers are made of many
    ops."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.lstm:
            with _without_kernels_of_the_machine():
                return function(*args, **kwargs)
        if function in (torch.tensor, torch.as_tensor) and args:
            if (told := find_told(args[0])) is not None:
                raise FrozenValue(told._what)
            if _has_symbol(args[0]):
                return _tensor(args[0], **_options(**kwargs))
        if function in _torch.FUSED_STEPS and _has_symbol([*kwargs.values()]):
            return Normalise.table[_torch.FUSED_STEPS[function]](*args, **kwargs)
        return function(*args, **kwargs)


@contextlib.contextmanager
def _without_kernels_of_the_machine() -> Iterator[None]:
    before, *_ = torch.backends.mkldnn.set_flags(False)
    try:
        yield
    finally:
        torch.backends.mkldnn.set_flags(before)


def _has_symbol(data: Any) -> bool:
    return any(map(_has_symbol, data)) if isinstance(data, (list, tuple)) else _torch.is_symbol(data)


def _options(dtype: Any = None, device: Any = None, requires_grad: bool = False, **_: Any) -> dict[str, Any]:
    if requires_grad:
        raise NotImplementedError("torch.tensor(..., requires_grad=True) of a number that the step computes")
    return {"dtype": dtype, "device": device}


def _tensor(data: Any, dtype: torch.dtype | None, device: Any) -> torch.Tensor:
    if isinstance(data, (list, tuple)):
        return torch.stack([_tensor(x, dtype, device) for x in data])
    if dtype is None:
        dtype = torch.get_default_dtype() if isinstance(data, (float, torch.SymFloat)) else torch.int64
    return aten.scalar_tensor.default(data, dtype=dtype, device=device)
