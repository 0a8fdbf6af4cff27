"""`rms_norm` of DTensors as one op with one gradient, as it is on GPUs, also where torch makes it of several ops.

    rms_norm's gradient, grad +sum@tp       one all-reduce of grad; those of input and weight need no other

Of several ops each gradient would have terms of its own to reduce. Where a normalised dim is sharded torch's way is
the better one: it sends a number a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spmd import _torch
from spmd.tensor.rules.norms import is_sharded

aten = torch.ops.aten

_fused = _torch.kept_whole(aten._fused_rms_norm.default)


def rms_norm(
    input: torch.Tensor, normalized_shape: Sequence[int], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """The norm over the last dims, times the weight."""
    lead = input.ndim - len(normalized_shape)
    others = input.device.type != "cpu" or not input.is_floating_point() or _torch.is_seen_by_more(input)
    if others or lead < 0 or is_sharded(input, range(lead, input.ndim)) or not input.numel():
        return _of_several_ops(input, normalized_shape, weight, eps)
    if weight is not None and (weight.dtype != input.dtype or tuple(weight.shape) != tuple(normalized_shape)):
        return _of_several_ops(input, normalized_shape, weight, eps)
    return _RmsNorm.apply(input, tuple(normalized_shape), weight, eps)


def _of_several_ops(input: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, eps: float | None) -> Any:
    with _torch.without_first():
        return aten.rms_norm.default(input, shape, weight, eps)


class _RmsNorm(torch.autograd.Function):
    """The gradient is one op, too. A gradient of the gradient is that of the several ops."""

    @staticmethod
    def forward(ctx, input, shape, weight, eps):
        out, rstd = _fused(input, shape, weight, eps)
        ctx.save_for_backward(input, weight, rstd)
        ctx.shape, ctx.eps = shape, eps
        return out

    @staticmethod
    def backward(ctx, grad):
        input, weight, rstd = ctx.saved_tensors
        wanted = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
        if torch.is_grad_enabled():
            out = _of_several_ops(input, ctx.shape, weight, ctx.eps)
            asked = [x for x, is_wanted in zip((input, weight), wanted, strict=True) if is_wanted]
            found = iter(torch.autograd.grad(out, asked, grad, create_graph=True))
            return next(found) if wanted[0] else None, None, next(found) if wanted[1] else None, None
        found = aten._fused_rms_norm_backward.default(grad, input, ctx.shape, rstd, weight, wanted)
        return found[0], None, found[1], None
