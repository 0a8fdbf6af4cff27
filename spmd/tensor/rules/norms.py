"""Norms and softmaxes over dims that are shared out: sums over ranks in place of moves.

    batch_norm(f32[N@dp, C, H, W])     mean and variance are sums over dp of C numbers each; nothing else is sent
    softmax(f32[t, V@tp], 1)           a maximum and a sum over tp of t numbers each

The fused op sees one block and knows nothing of the others, so its dims would have to be made whole first. Here it is
spelled out, with sums that ranks do together and counts that are the global ones. Where the dims lie whole on each rank
the fused op stays, which costs less.

How a tensor lies is known of a DTensor, and of what stands for one when a program is written; it is not when a graph is
captured, and the fused op stays in it until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from spmd.tensor.rules.enter import Table, entering

aten = torch.ops.aten

norm_decompositions: Table = {}
"""From an op to a function of the same arguments; it returns NotImplemented where the fused op is as good."""

instead_of = entering(norm_decompositions)


def is_cut(x: torch.Tensor, dims: Sequence[int]) -> bool:
    """Whether some of these dims are sharded; not of a tensor that does not say how it lies."""
    spec = getattr(x, "_spec", None)
    return spec is not None and any(spec.dims[d] for d in dims)


def wide(x: torch.Tensor) -> torch.Tensor:
    """In single precision at least, and contiguous, as the kernels compute: so are their results."""
    x = x if x.is_contiguous() else aten.clone.default(x, memory_format=torch.contiguous_format)
    return aten._to_copy.default(x, dtype=torch.float32) if x.dtype.itemsize < 4 else x


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if x.dtype == dtype else aten._to_copy.default(x, dtype=dtype)


def sum_over(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    return aten.sum.dim_IntList(x, list(dims), True)


def about_mean(x: torch.Tensor, dims: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The mean over these dims, x without it, and the mean of its squares, which no cancellation spoils."""
    n = prod(x.shape[d] for d in dims)
    mean = aten.div.Scalar(sum_over(x, dims), n)
    centred = aten.sub.Tensor(x, mean)
    return mean, centred, aten.div.Scalar(sum_over(aten.mul.Tensor(centred, centred), dims), n)


def _affine(x: torch.Tensor, weight, bias, shape: Sequence[int]) -> torch.Tensor:
    """`x * weight + bias`, each seen in this shape, where they are given."""
    if weight is not None:
        x = aten.mul.Tensor(x, aten.view.default(wide(weight), shape))
    return x if bias is None else aten.add.Tensor(x, aten.view.default(wide(bias), shape))


def _normal_gradient(grad, hat, rstd, dims: Sequence[int]) -> torch.Tensor:
    """The gradient of `(x - mean) * rstd`: what it loses to the mean and to the length, and the rest scaled."""
    n = prod(hat.shape[d] for d in dims)
    lost = aten.add.Tensor(
        aten.div.Scalar(sum_over(grad, dims), n),
        aten.mul.Tensor(hat, aten.div.Scalar(sum_over(aten.mul.Tensor(grad, hat), dims), n)),
    )
    return aten.mul.Tensor(aten.sub.Tensor(grad, lost), rstd)


# ---- batch norm -------------------------------------------------------------------------------


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [d for d in range(x.ndim) if d != 1]


def _per_channel(x: torch.Tensor) -> list[int]:
    return [x.shape[1] if d == 1 else 1 for d in range(x.ndim)]


def batch_normed(x, weight, bias, eps: float):
    """The result, the mean and the inverse deviation of each channel, and its variance."""
    dims, channels = _all_but_channels(x), [x.shape[1]]
    mean, centred, var = about_mean(wide(x), dims)
    rstd = aten.rsqrt.default(aten.add.Scalar(var, eps))
    out = _affine(aten.mul.Tensor(centred, rstd), weight, bias, _per_channel(x))
    mean, rstd, var = (aten.view.default(t, channels) for t in (mean, rstd, var))
    return cast(out, x.dtype), mean, rstd, var


def _running(x, mean, var, running_mean, running_var, momentum: float):
    """What the running statistics become: of the variance, that of a sample."""
    n = prod(x.shape[d] for d in _all_but_channels(x))
    fresh = (mean, aten.mul.Scalar(var, n / max(n - 1, 1)))
    old = (running_mean, running_var)
    return [
        cast(aten.add.Tensor(aten.mul.Scalar(wide(o), 1 - momentum), aten.mul.Scalar(f, momentum)), o.dtype)
        for o, f in zip(old, fresh, strict=True)
    ]


def _is_spelled_out(x, training: bool) -> bool:
    """A batch of one number a channel is refused by torch, which the fused op says."""
    return training and is_cut(x, _all_but_channels(x)) and x.numel() > x.shape[1]


@instead_of(aten.native_batch_norm.default, aten._native_batch_norm_legit.default)
def native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps):
    if not _is_spelled_out(input, training):
        return NotImplemented
    out, mean, rstd, var = batch_normed(input, weight, bias, eps)
    if running_mean is not None:
        new = _running(input, mean, var, running_mean, running_var, momentum)
        aten.copy_.default(running_mean, new[0])
        aten.copy_.default(running_var, new[1])
    return out, mean, rstd


@instead_of(aten._native_batch_norm_legit.no_stats)
def native_batch_norm_without_stats(input, weight, bias, training, momentum, eps):
    if not _is_spelled_out(input, training):
        return NotImplemented
    return batch_normed(input, weight, bias, eps)[:3]


@instead_of(aten._native_batch_norm_legit_functional.default)
def native_batch_norm_functional(input, weight, bias, running_mean, running_var, training, momentum, eps):
    if not _is_spelled_out(input, training):
        return NotImplemented
    out, mean, rstd, var = batch_normed(input, weight, bias, eps)
    return out, mean, rstd, *_running(input, mean, var, running_mean, running_var, momentum)


@instead_of(aten.native_batch_norm_backward.default)
def native_batch_norm_backward(
    grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask
):  # fmt: skip
    if not _is_spelled_out(input, train):
        return NotImplemented
    dims, shape, channels = _all_but_channels(input), _per_channel(input), [input.shape[1]]
    x, grad = wide(input), wide(grad_out)
    mean, rstd = (aten.view.default(t, shape) for t in (save_mean, save_invstd))
    hat = aten.mul.Tensor(aten.sub.Tensor(x, mean), rstd)
    scaled = grad if weight is None else aten.mul.Tensor(grad, aten.view.default(wide(weight), shape))
    of_weight = input.dtype if weight is None else weight.dtype

    def summed(t):
        return cast(aten.view.default(sum_over(t, dims), channels), of_weight)

    return (
        cast(_normal_gradient(scaled, hat, rstd, dims), input.dtype) if output_mask[0] else None,
        summed(aten.mul.Tensor(grad, hat)) if output_mask[1] else None,
        summed(grad) if output_mask[2] else None,
    )


# ---- group norm -------------------------------------------------------------------------------


def _grouped(x: torch.Tensor, group: int) -> list[int]:
    """The shape with the channels as groups of channels."""
    return [x.shape[0], group, x.shape[1] // group, *x.shape[2:]]


@instead_of(aten.native_group_norm.default)
def native_group_norm(input, weight, bias, N, C, HxW, group, eps):
    if not is_cut(input, range(input.ndim)) or not input.numel():
        return NotImplemented
    shape = _grouped(input, group)
    x = aten.reshape.default(wide(input), shape)
    mean, centred, var = about_mean(x, range(2, x.ndim))
    rstd = aten.rsqrt.default(aten.add.Scalar(var, eps))
    out = _affine(aten.mul.Tensor(centred, rstd), weight, bias, [1, *shape[1:3], *[1] * (x.ndim - 3)])
    mean, rstd = (cast(aten.view.default(t, shape[:2]), input.dtype) for t in (mean, rstd))
    return cast(aten.reshape.default(out, list(input.shape)), input.dtype), mean, rstd


@instead_of(aten.native_group_norm_backward.default)
def native_group_norm_backward(grad_out, input, mean, rstd, weight, N, C, HxW, group, output_mask):
    if not is_cut(input, range(input.ndim)) or not input.numel():
        return NotImplemented
    shape = _grouped(input, group)
    each, channels = [*shape[:2], *[1] * (len(shape) - 2)], [1, *shape[1:3], *[1] * (len(shape) - 3)]
    x, grad = (aten.reshape.default(wide(t), shape) for t in (input, grad_out))
    mean, rstd = (aten.view.default(wide(t), each) for t in (mean, rstd))
    hat = aten.mul.Tensor(aten.sub.Tensor(x, mean), rstd)
    scaled = grad if weight is None else aten.mul.Tensor(grad, aten.view.default(wide(weight), channels))
    others = [0, *range(3, len(shape))]
    of_weight = input.dtype if weight is None else weight.dtype

    def summed(t):
        return cast(aten.view.default(sum_over(t, others), [input.shape[1]]), of_weight)

    of_input = _normal_gradient(scaled, hat, rstd, range(2, len(shape))) if output_mask[0] else None
    return (
        None if of_input is None else cast(aten.reshape.default(of_input, list(input.shape)), input.dtype),
        summed(aten.mul.Tensor(grad, hat)) if output_mask[1] else None,
        summed(grad) if output_mask[2] else None,
    )


# ---- layer norm -------------------------------------------------------------------------------


@instead_of(aten.native_layer_norm.default)
def native_layer_norm(input, normalized_shape, weight, bias, eps):
    dims = range(input.ndim - len(normalized_shape), input.ndim)
    if not is_cut(input, dims) or not input.numel():
        return NotImplemented
    mean, centred, var = about_mean(wide(input), dims)
    rstd = aten.rsqrt.default(aten.add.Scalar(var, eps))
    out = _affine(aten.mul.Tensor(centred, rstd), weight, bias, list(normalized_shape))
    return cast(out, input.dtype), mean, rstd


@instead_of(aten.native_layer_norm_backward.default)
def native_layer_norm_backward(grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask):
    lead = input.ndim - len(normalized_shape)
    if not is_cut(input, range(lead, input.ndim)) or not input.numel():
        return NotImplemented
    x, grad = wide(input), wide(grad_out)
    hat = aten.mul.Tensor(aten.sub.Tensor(x, mean), rstd)
    scaled = grad if weight is None else aten.mul.Tensor(grad, wide(weight))
    of_weight = input.dtype if weight is None else weight.dtype

    def summed(t):
        return cast(aten.sum.dim_IntList(t, list(range(lead))) if lead else t, of_weight)

    of_input = _normal_gradient(scaled, hat, rstd, range(lead, input.ndim)) if output_mask[0] else None
    return (
        None if of_input is None else cast(of_input, input.dtype),
        summed(aten.mul.Tensor(grad, hat)) if output_mask[1] else None,
        summed(grad) if output_mask[2] else None,
    )


# ---- softmax ----------------------------------------------------------------------------------


def _shifted(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x less its largest along the dim, and the exponentials of that."""
    x = aten.sub.Tensor(x, aten.amax.default(x, [dim], True))
    return x, aten.exp.default(x)


def _is_whole(x: torch.Tensor, dim: int) -> bool:
    return not x.ndim or not x.numel() or not is_cut(x, [dim])


@instead_of(aten._softmax.default)
def softmax(self, dim, half_to_float):
    if _is_whole(self, dim):
        return NotImplemented
    _, each = _shifted(wide(self), dim)
    return cast(aten.div.Tensor(each, sum_over(each, [dim])), torch.float32 if half_to_float else self.dtype)


@instead_of(aten._log_softmax.default)
def log_softmax(self, dim, half_to_float):
    if _is_whole(self, dim):
        return NotImplemented
    x, each = _shifted(wide(self), dim)
    total = aten.log.default(sum_over(each, [dim]))
    return cast(aten.sub.Tensor(x, total), torch.float32 if half_to_float else self.dtype)


@instead_of(aten._softmax_backward_data.default)
def softmax_backward(grad_output, output, dim, input_dtype):
    if _is_whole(output, dim):
        return NotImplemented
    grad, out = wide(grad_output), wide(output)
    share = sum_over(aten.mul.Tensor(grad, out), [dim])
    return cast(aten.mul.Tensor(out, aten.sub.Tensor(grad, share)), input_dtype)


@instead_of(aten._log_softmax_backward_data.default)
def log_softmax_backward(grad_output, output, dim, input_dtype):
    if _is_whole(output, dim):
        return NotImplemented
    grad, out = wide(grad_output), wide(output)
    return cast(aten.sub.Tensor(grad, aten.mul.Tensor(aten.exp.default(out), sum_over(grad, [dim]))), input_dtype)


@instead_of(aten.logsumexp.default)
def logsumexp(self, dim, keepdim=False):
    dims = [d % self.ndim for d in dim] if self.ndim else []
    if not dims or not self.is_floating_point() or not self.numel() or not is_cut(self, dims):
        return NotImplemented
    x = wide(self)
    largest = aten.amax.default(x, dims, True)
    largest = aten.masked_fill.Scalar(largest, aten.isinf.default(largest), 0.0)  # less itself it is NaN
    total = aten.log.default(sum_over(aten.exp.default(aten.sub.Tensor(x, largest)), dims))
    out = cast(aten.add.Tensor(total, largest), self.dtype)
    return out if keepdim else aten.squeeze.dims(out, dims)
