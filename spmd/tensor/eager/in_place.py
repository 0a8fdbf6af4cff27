"""Handlers of ops that write more than values: `out=`, `t_`, `resize_`. And the local call of `as_strided`.

    torch.nonzero(x, out=y)     the op without `out`; then y takes the result, whatever its shape
    x.t_(), x.squeeze_()        x becomes the tensor x.t(): the same memory, another shape
    x.resize_(6)                x becomes its first 6 elements; missing elements are zeros
    x.as_strided((2, 2), ...)   a view of the memory of the global tensor; a copy where x has to be gathered for it

`spmd.tensor.eager.dispatch` picks the handler once, and runs it for every call of its kind. Two things are refused: to
read memory beyond the elements of a view, and to give a tensor a new shape while its views would keep the old one.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from spmd import _torch
from spmd._torch import pytree
from spmd.tensor.call import COMPUTED_AS_OUT, base_name
from spmd.tensor.eager.view_copies import block
from spmd.tensor.modes import explicit
from spmd.tensor.redistribute.plan import Plan, plan
from spmd.tensor.spec import replicated, strides_like

aten = torch.ops.aten

RESIZES = {aten.resize_.default, aten.resize_as_.default}
STRIDED = {aten.as_strided.default, aten.as_strided_copy.default, aten.as_strided_scatter.default}


# ---- out= -------------------------------------------------------------------------------------

class OutHandler:
    """For an op with `out=`: run the op without it, and write the results into the tensors that were given."""

    def __init__(self, op, without_out):
        self.without_out = without_out
        self.names = [a.name for a in _torch.arguments(op) if a.is_out]
        self.computes_as_out = base_name(op) in COMPUTED_AS_OUT

    def plans(self, call) -> Sequence[Plan]:
        return ()  # the op without `out` and the write are calls of their own, with plans of their own

    def run(self, call) -> Any:
        kwargs = {name: x for name, x in call.kwargs.items() if name not in self.names}
        given = call.given[-len(self.names) :]
        if self.computes_as_out and kwargs.get("dtype") is None:
            kwargs["dtype"] = given[0].dtype
        values = pytree.tree_leaves(self.without_out(*call.args, **kwargs))
        for target, value in zip(given, values, strict=True):
            _write_out(call, target, value)
        return given[0] if len(given) == 1 else tuple(given)


def _write_out(call, target: torch.Tensor, value) -> None:
    """Write a result into the tensor that was given as `out`, which takes the shape of the result."""
    if not torch.can_cast(value.dtype, target.dtype):
        raise RuntimeError(f"{call.op}: result type {value.dtype} can't be cast to the desired output {target.dtype}")
    value = value.to(target.dtype)
    if target.shape == value.shape:
        target.copy_(value if isinstance(target, call.dtensor) else _full_result(call.op, value))
    elif isinstance(target, call.dtensor):
        become(call.op, target, value)
    else:
        target.data = _full_result(call.op, value)


def _full_result(op, value) -> torch.Tensor:
    """A result as a full tensor, for a plain tensor that was given as `out`."""
    explicit.check(op, [("the result", plan(value._spec, replicated(value._spec)))])
    return value.full_tensor()


# ---- another shape ----------------------------------------------------------------------------


class ShapeChangeHandler:
    """For an in-place op that changes the shape of its tensor, such as `t_`: the tensor becomes the result of `t`."""

    def __init__(self, functional):
        self.functional = functional

    def plans(self, call) -> Sequence[Plan]:
        return ()

    def run(self, call) -> Any:
        x = call.operands[0]
        memory_before = x._memory
        value = self.functional(*call.args, **call.kwargs)
        if memory_before is None:  # x had no views before; those made here are not the user's
            value._memory = value._copy = x._memory = x._copy = None
        become(call.op, x, value)
        return x


def become(op, x, value) -> None:
    """Give x the block, the spec and the shape of `value`. RuntimeError where views of x would keep the old ones."""
    same_memory = value._memory is not None and value._memory is x._memory and value._copy is x._copy
    if x._memory is not None and not same_memory:
        raise RuntimeError(
            f"{op}: {x._spec} would get new memory, as {value._spec}, and its views, or what it is a view of, would "
            "go on showing the old; use the op that gives a new tensor"
        )
    x._local_tensor, x._spec, x._offset = value._local_tensor, value._spec, value._offset
    with _torch.no_dispatch():
        x.resize_(value.shape).as_strided_(value.shape, value.stride())


def resized(x, size, **options):
    """The result of `resize_`: the first elements of x, in the order of memory, and zeros after them."""
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


# ---- memory of the global tensor --------------------------------------------------------------


def replicating_plans(call) -> list[Plan]:
    """The plans that replicate the operands."""
    return [plan(x._spec, replicated(x._spec)) for x in call.operands]


def strided(call) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of an op such as `as_strided` on the global tensor, and the memory that it is computed on.

    That memory has the strides and the offset of one device.
    """
    x, *rest = call.operands
    _check_dense(call.op, x)
    memory, *others = [p.run(block(t)) for p, t in zip(replicating_plans(call), call.operands, strict=True)]
    if memory.stride() != x.stride() or memory.storage_offset():
        memory = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(memory)
    args = [memory, *(others if rest else ()), *call.args[1 + len(rest) :]]
    return call.op(*args, **call.kwargs), memory


def _check_dense(op, x) -> None:
    """Check that the memory of x is its elements, each once. No rank knows the elements between them."""
    dense = x.stride() == strides_like(x.shape, x.stride()) and 0 not in [
        s for s, n in zip(x.stride(), x.shape, strict=True) if n > 1
    ]
    if not dense or (x._is_view() and x._base.numel() != x.numel()):
        raise NotImplementedError(
            f"{op}: {x._spec} is a view that shows a part of its memory, and the rest is on no rank by itself. Clone "
            "it before, or use view, slicing, permute or expand."
        )
