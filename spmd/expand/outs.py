"""Ops with `out=` in a trace, as the op without it and a write.

    torch.sum(x, out=flags)      computed in the dtype of flags, as torch does: any, and not a count

A tensor that is given as `out` and has another size gets new memory. What it shares memory with keeps the old, and
functionalisation does not know that. So only an empty tensor may grow.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from spmd import _torch
from spmd._torch import pytree
from spmd.expand.user_code import at_user_line, current_frames
from spmd.tensor.call import COMPUTED_AS_OUT, base_name


def write_out(op: _torch.OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The results of an op with `out=`, written into the tensors that are given. NotImplemented for other ops."""
    names, without_out = _outs(op)
    if without_out is None or not all(isinstance(kwargs.get(name), torch.Tensor) for name in names):
        return NotImplemented
    given, rest = [kwargs[name] for name in names], {name: x for name, x in kwargs.items() if name not in names}
    if base_name(op) in COMPUTED_AS_OUT and rest.get("dtype") is None:
        rest["dtype"] = given[0].dtype
    values = pytree.tree_leaves(without_out(*args, **rest))
    if any(x.shape != value.shape for x, value in zip(given, values, strict=True)):
        _check_empty(op, given, values)
        return op(*args, **rest, **dict(zip(names, given, strict=True)))
    for x, value in zip(given, values, strict=True):
        if not torch.can_cast(value.dtype, x.dtype):
            raise RuntimeError(f"{op}: result type {value.dtype} can't be cast to the desired output type {x.dtype}")
        x.copy_(value)
    return given[0] if len(given) == 1 else tuple(given)


@functools.lru_cache(maxsize=4096)
def _outs(op: _torch.OpOverload) -> tuple[tuple[str, ...], _torch.OpOverload | None]:
    names = tuple(a.name for a in _torch.arguments(op) if a.is_out)
    return names, _torch.without_out(op) if names else None


def _check_empty(op: _torch.OpOverload, given: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    for x, value in zip(given, values, strict=True):
        if x.shape != value.shape and x.numel():
            raise NotImplementedError(
                f"{op}: out, {list(x.shape)}, would get new memory, for {list(value.shape)}, and what shares its "
                f"memory would go on showing the old; take the result of the op{at_user_line(current_frames())}"
            )
