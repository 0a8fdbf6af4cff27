"""Ways to run ops that write and do more than fill in numbers: `out=`, `t_`, `resize_`, and `as_strided`.

    torch.nonzero(x, out=y)     the op without `out`, and then y takes its result, whatever its shape
    x.t_(), x.squeeze_()        x becomes what x.t() shows: the same memory, another shape
    x.resize_(6)                x becomes its first 6 elements, or is filled up with zeros
    x.as_strided((2, 2), ...)   a view of whole memory; where x has to be gathered for it, a copy

Each is asked for once by `spmd.tensor.dispatch`, and run for every call of its kind. Refused: what reaches for memory
that a view does not show, and a new shape for a tensor whose views would go on showing the old one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from spmd import _torch
from spmd._torch import pytree
from spmd.tensor import explicit
from spmd.tensor.call import base_name
from spmd.tensor.copies import block
from spmd.tensor.redistribute.plan import Plan, plan
from spmd.tensor.spec import replicated, strides_like

aten = torch.ops.aten

RESIZES = {aten.resize_.default, aten.resize_as_.default}
STRIDED = {aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default}


COMPUTED_AS_OUT = {"sum", "nansum", "prod", "cumsum", "cumprod"}
"""Ops that compute in the dtype of `out` where they are not told another; the others convert their result."""


class IntoOut:
    """An op with `out=`: the result of the op without it goes into the tensors that were given."""

    def __init__(self, op, functional):
        self.functional = functional
        self.names = [a.name for a in _torch.arguments(op) if a.is_out]
        self.follows = base_name(op) in COMPUTED_AS_OUT

    def plans(self, call) -> Sequence[Plan]:
        return ()  # the op without `out`, and the write, say for themselves

    def run(self, call) -> Any:
        kwargs = {name: x for name, x in call.kwargs.items() if name not in self.names}
        given = call.given[-len(self.names) :]
        if self.follows and kwargs.get("dtype") is None:
            kwargs["dtype"] = given[0].dtype
        values = pytree.tree_leaves(self.functional(*call.args, **kwargs))
        for target, value in zip(given, values, strict=True):
            _deliver(call, target, value)
        return given[0] if len(given) == 1 else tuple(given)


def _deliver(call, target: torch.Tensor, value) -> None:
    """Write a result into what was given as `out`, which takes its shape."""
    if not torch.can_cast(value.dtype, target.dtype):
        raise RuntimeError(f"{call.op}: result type {value.dtype} can't be cast to the desired output {target.dtype}")
    value = value.to(target.dtype)
    if target.shape == value.shape:
        target.copy_(value if isinstance(target, call.dtensor) else _whole(call.op, value))
    elif isinstance(target, call.dtensor):
        become(call.op, target, value)
    else:
        target.data = _whole(call.op, value)


def _whole(op, value) -> torch.Tensor:
    """All of a result, for a plain tensor that was given as `out`."""
    explicit.check(op, [("the result", plan(value._spec, replicated(value._spec)))])
    return value.full_tensor()


def become(op, x, value) -> None:
    """From now on x is `value`: its block, its spec, its shape. RuntimeError where views of x would not follow."""
    follows = value._memory is not None and value._memory is x._memory and value._copy is x._copy
    if x._memory is not None and not follows:
        raise RuntimeError(
            f"{op}: {x._spec} would get new memory, as {value._spec}, and its views, or what it is a view of, would "
            "go on showing the old; use the op that gives a new tensor"
        )
    x._local_tensor, x._spec = value._local_tensor, value._spec
    with _torch.no_dispatch():
        x.resize_(value.shape).as_strided_(value.shape, value.stride())


class Turned:
    """An in-place op that gives its tensor another shape, such as `t_`: it becomes what the op's new tensor shows."""

    def __init__(self, functional):
        self.functional = functional

    def plans(self, call) -> Sequence[Plan]:
        return ()

    def run(self, call) -> Any:
        x = call.operands[0]
        seen = x._memory
        value = self.functional(*call.args, **call.kwargs)
        if seen is None:  # the views made here were of nobody else's memory
            value._memory = value._copy = x._memory = x._copy = None
        become(call.op, x, value)
        return x


def resized(x, size, **options):
    """What `resize_` leaves: as many elements as fit, in the order of memory, and zeros after them."""
    if isinstance(size, torch.Tensor):
        size = size.shape
    if options.get("memory_format") not in (None, torch.contiguous_format, torch.preserve_format):
        raise NotImplementedError("resize_ to a memory format; use resize_, and then permute or contiguous")
    _check_dense(aten.resize_.default, x)
    order = sorted(range(x.ndim), key=lambda d: (-x.stride(d), d))
    flat, n = x.permute(order).reshape(-1), prod(size)
    if n > flat.numel():
        flat = torch.cat([flat, flat.new_zeros(n - flat.numel())])
    return flat[:n].view(size)


def whole_plans(call) -> list[Plan]:
    """What makes the operands whole on every rank."""
    return [plan(x._spec, replicated(x._spec)) for x in call.operands]


def strided(call) -> tuple[torch.Tensor, torch.Tensor]:
    """What an op such as `as_strided` gives on whole memory, laid out as one device has it, and that memory."""
    x, *rest = call.operands
    _check_dense(call.op, x)
    laid_out, *others = [way.run(block(t)) for way, t in zip(whole_plans(call), call.operands, strict=True)]
    if laid_out.stride() != x.stride() or laid_out.storage_offset():
        laid_out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(laid_out)
    args = [laid_out, *(others if rest else ()), *call.args[1 + len(rest) :]]
    return call.op(*args, **call.kwargs), laid_out


def _check_dense(op, x) -> None:
    """The memory of x is its elements, each once, or else nobody knows what lies between them."""
    dense = x.stride() == strides_like(x.shape, x.stride()) and 0 not in [
        s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1
    ]
    if not dense or (x._is_view() and x._base.numel() != x.numel()):
        raise NotImplementedError(
            f"{op}: {x._spec} is a view that shows a part of its memory, and the rest is on no rank by itself. Clone "
            "it before, or use view, slicing, permute or expand."
        )
