"""Decompositions of norms and softmaxes over sharded dims: sums over the ranks instead of gathering the tensor.

    batch_norm(f32[N@dp, C, H, W])     mean and variance are sums over dp of C numbers each; nothing else is sent
    softmax(f32[t, V@tp], 1)           a maximum and a sum over tp of t numbers each

The fused op sees only one block, so its dims would have to be gathered first. Here it is decomposed into sums, which
the ranks do together, and divisions by global counts. If the dims are not sharded, the fused op is kept, because it
costs less.

The placements of a tensor are known for a DTensor, and for the tensors with a spec that replace nodes when a program is
made. They are not known when a graph is captured. So the captured graph keeps the fused op.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from spmd.tensor.call import dims_of
from spmd.tensor.rules.decomposition_table import Table, decomposition_registrar

aten = torch.ops.aten

norm_decompositions: Table = {}
"""From an op to a function of the same arguments. The function returns NotImplemented where the fused op is better."""

register_decomposition = decomposition_registrar(norm_decompositions)


def is_sharded(x: torch.Tensor, dims: Sequence[int]) -> bool:
    """Whether some of these dims are sharded. False for a tensor without a spec."""
    spec = getattr(x, "_spec", None)
    return spec is not None and any(spec.dims[d] for d in dims)


def is_distributed(*tensors: torch.Tensor) -> bool:
    """Whether some of these tensors are sharded, or owe a reduction. False for tensors without a spec."""
    specs = [getattr(x, "_spec", None) for x in tensors]
    return any(spec is not None and not spec.is_replicated for spec in specs)


def upcast(x: torch.Tensor) -> torch.Tensor:
    """x in single precision at least, and contiguous. The fused kernels compute and return their results like that."""
    x = x if x.is_contiguous() else aten.clone.default(x, memory_format=torch.contiguous_format)
    return aten._to_copy.default(x, dtype=torch.float32) if x.dtype.itemsize < 4 else x


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x if x.dtype == dtype else aten._to_copy.default(x, dtype=dtype)


def sum_over(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    return aten.sum.dim_IntList(x, list(dims), True)


def centred_moments(x: torch.Tensor, dims: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The mean over these dims, x minus the mean, and the variance.

    The variance is a mean of squares of the centred x, so no digits are lost to cancellation.
    """
    n = prod(x.shape[d] for d in dims)
    mean = aten.div.Scalar(sum_over(x, dims), n)
    centred = aten.sub.Tensor(x, mean)
    return mean, centred, aten.div.Scalar(sum_over(aten.mul.Tensor(centred, centred), dims), n)


def _affine(x: torch.Tensor, weight, bias, shape: Sequence[int]) -> torch.Tensor:
    """`x * weight + bias`, with weight and bias viewed in this shape. Either may be None."""
    if weight is not None:
        x = aten.mul.Tensor(x, aten.view.default(upcast(weight), shape))
    return x if bias is None else aten.add.Tensor(x, aten.view.default(upcast(bias), shape))


def _normalised_gradient(grad, normalised, rstd, dims: Sequence[int]) -> torch.Tensor:
    """The gradient of `(x - mean) * rstd`: grad minus its parts along the mean and along x, times rstd."""
    n = prod(normalised.shape[d] for d in dims)
    removed = aten.add.Tensor(
        aten.div.Scalar(sum_over(grad, dims), n),
        aten.mul.Tensor(normalised, aten.div.Scalar(sum_over(aten.mul.Tensor(grad, normalised), dims), n)),
    )
    return aten.mul.Tensor(aten.sub.Tensor(grad, removed), rstd)


# ---- batch norm -------------------------------------------------------------------------------


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [d for d in range(x.ndim) if d != 1]


def _per_channel(x: torch.Tensor) -> list[int]:
    return [x.shape[1] if d == 1 else 1 for d in range(x.ndim)]


def batch_normed(x, weight, bias, eps: float):
    """The result, and for each channel the mean, the inverse standard deviation and the variance."""
    dims, channels = _all_but_channels(x), [x.shape[1]]
    mean, centred, var = centred_moments(upcast(x), dims)
    rstd = aten.rsqrt.default(aten.add.Scalar(var, eps))
    out = _affine(aten.mul.Tensor(centred, rstd), weight, bias, _per_channel(x))
    mean, rstd, var = (aten.view.default(t, channels) for t in (mean, rstd, var))
    return cast(out, x.dtype), mean, rstd, var


def _running_stats(x, mean, var, running_mean, running_var, momentum: float):
    """The new running mean and variance. The running variance is that of a sample: divided by n - 1."""
    n = prod(x.shape[d] for d in _all_but_channels(x))
    of_batch = (mean, aten.mul.Scalar(var, n / max(n - 1, 1)))
    old = (running_mean, running_var)
    return [
        cast(aten.add.Tensor(aten.mul.Scalar(upcast(o), 1 - momentum), aten.mul.Scalar(b, momentum)), o.dtype)
        for o, b in zip(old, of_batch, strict=True)
    ]


def _is_decomposed(x, training: bool) -> bool:
    """Whether batch norm is decomposed. If a channel has only one number, the fused op stays and raises torch's error.
    """
    return training and is_sharded(x, _all_but_channels(x)) and x.numel() > x.shape[1]


@register_decomposition(aten.native_batch_norm.default, aten._native_batch_norm_legit.default)
def native_batch_norm(input, weight, bias, running_mean, running_var, training, momentum, eps):
    if not _is_decomposed(input, training):
        return NotImplemented
    out, mean, rstd, var = batch_normed(input, weight, bias, eps)
    if running_mean is not None:
        new = _running_stats(input, mean, var, running_mean, running_var, momentum)
        aten.copy_.default(running_mean, new[0])
        aten.copy_.default(running_var, new[1])
    return out, mean, rstd


@register_decomposition(aten._native_batch_norm_legit.no_stats)
def native_batch_norm_without_stats(input, weight, bias, training, momentum, eps):
    if not _is_decomposed(input, training):
        return NotImplemented
    return batch_normed(input, weight, bias, eps)[:3]


@register_decomposition(aten._native_batch_norm_legit_functional.default)
def native_batch_norm_functional(input, weight, bias, running_mean, running_var, training, momentum, eps):
    if not _is_decomposed(input, training):
        return NotImplemented
    out, mean, rstd, var = batch_normed(input, weight, bias, eps)
    return out, mean, rstd, *_running_stats(input, mean, var, running_mean, running_var, momentum)


@register_decomposition(aten.native_batch_norm_backward.default)
def native_batch_norm_backward(
    grad_out, input, weight, running_mean, running_var, save_mean, save_invstd, train, eps, output_mask
):  # fmt: skip
    if not _is_decomposed(input, train):
        return NotImplemented
    dims, shape, channels = _all_but_channels(input), _per_channel(input), [input.shape[1]]
    x, grad = upcast(input), upcast(grad_out)
    mean, rstd = (aten.view.default(t, shape) for t in (save_mean, save_invstd))
    normalised = aten.mul.Tensor(aten.sub.Tensor(x, mean), rstd)
    scaled = grad if weight is None else aten.mul.Tensor(grad, aten.view.default(upcast(weight), shape))
    weight_dtype = input.dtype if weight is None else weight.dtype

    def summed(t):
        return cast(aten.view.default(sum_over(t, dims), channels), weight_dtype)

    return (
        cast(_normalised_gradient(scaled, normalised, rstd, dims), input.dtype) if output_mask[0] else None,
        summed(aten.mul.Tensor(grad, normalised)) if output_mask[1] else None,
        summed(grad) if output_mask[2] else None,
    )


# ---- group norm -------------------------------------------------------------------------------


def _grouped(x: torch.Tensor, group: int) -> list[int]:
    """The shape with the channel dim split into groups and channels of a group."""
    return [x.shape[0], group, x.shape[1] // group, *x.shape[2:]]


@register_decomposition(aten.native_group_norm.default)
def native_group_norm(input, weight, bias, N, C, HxW, group, eps):
    if not is_distributed(input) or not input.numel():
        return NotImplemented
    shape = _grouped(input, group)
    x = aten.reshape.default(upcast(input), shape)
    mean, centred, var = centred_moments(x, range(2, x.ndim))
    rstd = aten.rsqrt.default(aten.add.Scalar(var, eps))
    out = _affine(aten.mul.Tensor(centred, rstd), weight, bias, [1, *shape[1:3], *[1] * (x.ndim - 3)])
    mean, rstd = (cast(aten.view.default(t, shape[:2]), input.dtype) for t in (mean, rstd))
    return cast(aten.reshape.default(out, list(input.shape)), input.dtype), mean, rstd


@register_decomposition(aten.native_group_norm_backward.default)
def native_group_norm_backward(grad_out, input, mean, rstd, weight, N, C, HxW, group, output_mask):
    if not is_distributed(input) or not input.numel():
        return NotImplemented
    shape = _grouped(input, group)
    each, channels = [*shape[:2], *[1] * (len(shape) - 2)], [1, *shape[1:3], *[1] * (len(shape) - 3)]
    x, grad = (aten.reshape.default(upcast(t), shape) for t in (input, grad_out))
    mean, rstd = (aten.view.default(upcast(t), each) for t in (mean, rstd))
    normalised = aten.mul.Tensor(aten.sub.Tensor(x, mean), rstd)
    scaled = grad if weight is None else aten.mul.Tensor(grad, aten.view.default(upcast(weight), channels))
    others = [0, *range(3, len(shape))]
    weight_dtype = input.dtype if weight is None else weight.dtype

    def summed(t):
        return cast(aten.view.default(sum_over(t, others), [input.shape[1]]), weight_dtype)

    input_grad = _normalised_gradient(scaled, normalised, rstd, range(2, len(shape))) if output_mask[0] else None
    return (
        None if input_grad is None else cast(aten.reshape.default(input_grad, list(input.shape)), input.dtype),
        summed(aten.mul.Tensor(grad, normalised)) if output_mask[1] else None,
        summed(grad) if output_mask[2] else None,
    )


# ---- layer norm -------------------------------------------------------------------------------


@register_decomposition(aten.native_layer_norm.default)
def native_layer_norm(input, normalized_shape, weight, bias, eps):
    dims = range(input.ndim - len(normalized_shape), input.ndim)
    fits = dims.start >= 0 and list(input.shape[dims.start :]) == list(normalized_shape)
    if not fits or not is_sharded(input, dims) or not input.numel():  # what does not fit is torch's error
        return NotImplemented
    mean, centred, var = centred_moments(upcast(input), dims)
    rstd = aten.rsqrt.default(aten.add.Scalar(var, eps))
    out = _affine(aten.mul.Tensor(centred, rstd), weight, bias, list(normalized_shape))
    return cast(out, input.dtype), mean, rstd


@register_decomposition(aten.native_layer_norm_backward.default)
def native_layer_norm_backward(grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask):
    lead = input.ndim - len(normalized_shape)
    if not is_sharded(input, range(lead, input.ndim)) or not input.numel():
        return NotImplemented
    x, grad = upcast(input), upcast(grad_out)
    normalised = aten.mul.Tensor(aten.sub.Tensor(x, mean), rstd)
    scaled = grad if weight is None else aten.mul.Tensor(grad, upcast(weight))
    weight_dtype = input.dtype if weight is None else weight.dtype

    def summed(t):
        return cast(aten.sum.dim_IntList(t, list(range(lead))) if lead else t, weight_dtype)

    input_grad = _normalised_gradient(scaled, normalised, rstd, range(lead, input.ndim)) if output_mask[0] else None
    return (
        None if input_grad is None else cast(input_grad, input.dtype),
        summed(aten.mul.Tensor(grad, normalised)) if output_mask[1] else None,
        summed(grad) if output_mask[2] else None,
    )


def rms_norm_backward(grad_out, input, normalized_shape, rstd, weight, output_mask):
    """The kernel of `_fused_rms_norm_backward`, which torch has for GPUs alone, for plain tensors."""
    if input.device.type not in ("cpu", "meta"):
        return aten._fused_rms_norm_backward.default(grad_out, input, normalized_shape, rstd, weight, output_mask)
    lead = input.ndim - len(normalized_shape)
    normalised, grad = input * rstd, grad_out.to(rstd.dtype)
    scaled = grad if weight is None else grad * weight
    along = (scaled * normalised).sum(list(range(lead, input.ndim)), True) / prod(normalized_shape)
    of_weight = grad * normalised
    return (
        ((scaled - normalised * along) * rstd).to(input.dtype) if output_mask[0] else None,
        (of_weight.sum(list(range(lead))) if lead else of_weight).to(weight.dtype) if output_mask[1] else None,
    )


# ---- softmax ----------------------------------------------------------------------------------


def _shifted_exp(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x minus its maximum along the dim, and the exponentials of that."""
    x = aten.sub.Tensor(x, aten.amax.default(x, [dim], True))
    return x, aten.exp.default(x)


def _has_whole_dim(x: torch.Tensor, dim: int) -> bool:
    return not x.ndim or not is_sharded(x, [dim]) or not x.numel()


@register_decomposition(aten._softmax.default)
def softmax(self, dim, half_to_float):
    if _has_whole_dim(self, dim):
        return NotImplemented
    _, exps = _shifted_exp(upcast(self), dim)
    return cast(aten.div.Tensor(exps, sum_over(exps, [dim])), torch.float32 if half_to_float else self.dtype)


@register_decomposition(aten._log_softmax.default)
def log_softmax(self, dim, half_to_float):
    if _has_whole_dim(self, dim):
        return NotImplemented
    x, exps = _shifted_exp(upcast(self), dim)
    total = aten.log.default(sum_over(exps, [dim]))
    return cast(aten.sub.Tensor(x, total), torch.float32 if half_to_float else self.dtype)


@register_decomposition(aten._softmax_backward_data.default)
def softmax_backward(grad_output, output, dim, input_dtype):
    if _has_whole_dim(output, dim):
        return NotImplemented
    grad, out = upcast(grad_output), upcast(output)
    share = sum_over(aten.mul.Tensor(grad, out), [dim])
    return cast(aten.mul.Tensor(out, aten.sub.Tensor(grad, share)), input_dtype)


@register_decomposition(aten._log_softmax_backward_data.default)
def log_softmax_backward(grad_output, output, dim, input_dtype):
    if _has_whole_dim(output, dim):
        return NotImplemented
    grad, out = upcast(grad_output), upcast(output)
    return cast(aten.sub.Tensor(grad, aten.mul.Tensor(aten.exp.default(out), sum_over(grad, [dim]))), input_dtype)


@register_decomposition(aten.logsumexp.default)
def logsumexp(self, dim, keepdim=False):
    dims = list(dims_of(dim, self.ndim)) if dim else []
    if not dims or not self.is_floating_point() or not self.numel() or not is_sharded(self, dims):
        return NotImplemented
    x = upcast(self)
    largest = aten.amax.default(x, dims, True)
    largest = aten.masked_fill.Scalar(largest, aten.isinf.default(largest), 0.0)  # inf - inf would be NaN
    total = aten.log.default(sum_over(aten.exp.default(aten.sub.Tensor(x, largest)), dims))
    out = cast(aten.add.Tensor(total, largest), self.dtype)
    return out if keepdim else aten.squeeze.dims(out, dims)
