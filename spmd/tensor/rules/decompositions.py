"""Decompositions of ops that are not safe on shards into ops that are safe.

    decompose(aten.mean.default, (x,), {})    sum(x) / x.numel(), with the global number of elements

`mean` divides by the number of elements that it sees, which on a shard is the local number. `squeeze` drops the dims
that it sees with size 1. `addmm` adds the bias on every rank, while the product may be a Partial. Each is written here
with `torch.ops.aten` for any tensors: real, fake, functional or distributed. All sizes here are global sizes.

`decompose` returns NotImplemented where the op is safe as it is. Results equal those of the op itself, also for empty
tensors and NaN. A low-precision `addmm` rounds once more.
"""

from __future__ import annotations

import functools
from math import prod

import torch

from spmd import _torch
from spmd.tensor.call import dims_of
from spmd.tensor.rules.counts import count_decompositions
from spmd.tensor.rules.decomposition_table import Table, decomposition_registrar
from spmd.tensor.rules.distances import distance_decompositions
from spmd.tensor.rules.joins import join_decompositions
from spmd.tensor.rules.linear_algebra import matrix_decompositions
from spmd.tensor.rules.lists import list_decompositions
from spmd.tensor.rules.masked import mask_decompositions
from spmd.tensor.rules.networks import MEAN, NONE, SUM
from spmd.tensor.rules.norms import is_distributed, norm_decompositions
from spmd.tensor.rules.random_ops import random_decompositions
from spmd.tensor.rules.scans import scan_decompositions
from spmd.tensor.rules.totals import vector_norm
from spmd.tensor.spec import strides_like

aten = torch.ops.aten

decompositions: Table = {}
"""From an op to a function of the same arguments. The function returns NotImplemented where the op is safe as it is."""


def decompose(op, args, kwargs):
    """The result of the decomposition of `op`; NotImplemented where there is none or none is needed.

    >>> decompose(aten.mean.default, (torch.tensor([1.0, 3.0]),), {})
    tensor(2.)
    """
    decomposition = decompositions.get(op)
    return NotImplemented if decomposition is None else decomposition(*args, **kwargs)


register_decomposition = decomposition_registrar(decompositions)


# ---- a product plus a bias --------------------------------------------------------------------


def add_bias(bias, product, beta, alpha):
    """`beta * bias + alpha * product`. If beta is 0, the bias is not read, so a NaN in it does not count.

    NotImplemented for an integer product and a float factor, because each op treats that in its own way.
    """
    _check_bias(bias, product)
    floats = product.dtype.is_floating_point or product.dtype.is_complex
    if not floats and (isinstance(alpha, float) or isinstance(beta, float)):
        return NotImplemented
    product = product if _is(alpha, 1) else aten.mul.Scalar(product, alpha)
    if _is(beta, 0):
        return product
    return aten.add.Tensor(product, bias if _is(beta, 1) else aten.mul.Scalar(bias, beta))


def _check_bias(bias, product) -> None:
    shape, to = tuple(bias.shape), tuple(product.shape)
    if len(shape) > len(to) or any(a not in (1, b) for a, b in zip(shape[::-1], to[::-1], strict=False)):
        raise RuntimeError(f"a bias of shape {list(shape)} cannot be expanded to the product's shape {list(to)}")
    if bias.dtype != product.dtype:
        raise RuntimeError(f"bias and product must have the same dtype, but are {bias.dtype} and {product.dtype}")


def _is(number, value) -> bool:
    """Whether a number is known to be this value. The value of a symbolic number is not known."""
    return isinstance(number, (int, float)) and number == value


@register_decomposition(aten.addmm.default)
def addmm(self, mat1, mat2, *, beta=1, alpha=1):
    return add_bias(self, aten.mm.default(mat1, mat2), beta, alpha)


@register_decomposition(aten.baddbmm.default)
def baddbmm(self, batch1, batch2, *, beta=1, alpha=1):
    return add_bias(self, aten.bmm.default(batch1, batch2), beta, alpha)


@register_decomposition(aten.addmv.default)
def addmv(self, mat, vec, *, beta=1, alpha=1):
    return add_bias(self, aten.mv.default(mat, vec), beta, alpha)


@register_decomposition(aten.addbmm.default)
def addbmm(self, batch1, batch2, *, beta=1, alpha=1):
    return add_bias(self, aten.sum.dim_IntList(aten.bmm.default(batch1, batch2), [0]), beta, alpha)


@register_decomposition(aten.addr.default)
def addr(self, vec1, vec2, *, beta=1, alpha=1):
    return add_bias(self, aten.ger.default(vec1, vec2), beta, alpha)


# ---- means ------------------------------------------------------------------------------------


@register_decomposition(aten.mean.default)
def mean(self, *, dtype=None):
    return mean_dim(self, None, dtype=dtype)


@register_decomposition(aten.mean.dim)
def mean_dim(self, dim, keepdim=False, *, dtype=None):
    """A sum divided by the global count. Half precision is summed in float32, as torch does."""
    dtype = dtype or self.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        which = "Input" if dtype == self.dtype else "Optional"
        raise RuntimeError(
            "mean(): could not infer output dtype. "
            f"{which} dtype must be either a floating point or complex dtype. Got: {dtype}"
        )
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    count = prod(self.shape[d] for d in dims_of(dim, self.ndim))
    out = aten.div.Scalar(aten.sum.dim_IntList(self, dim, keepdim, dtype=wide), count)
    return out if wide == dtype else aten._to_copy.default(out, dtype=dtype)


register_decomposition(aten.linalg_vector_norm.default)(vector_norm)


# ---- losses -----------------------------------------------------------------------------------


@register_decomposition(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll(self, target, weight, reduction, ignore_index):
    """A mean is the summed loss divided by the total weight. Both are sums over the ranks."""
    if reduction != MEAN:
        return NotImplemented
    op = aten.nll_loss_forward if target.ndim < 2 else aten.nll_loss2d_forward
    loss, total_weight = op.default(self, target, weight, SUM, ignore_index)
    return aten.div.Tensor(loss, total_weight), total_weight


def _reduced(loss, reduction):
    """The loss per element, its mean or its sum, as `reduction` says."""
    return {NONE: lambda x: x, MEAN: mean, SUM: aten.sum.default}[reduction](loss)


def _position(op, name: str) -> int:
    return next(i for i, a in enumerate(_torch.arguments(op)) if a.name == name)


def _arguments(op, args, kwargs) -> list:
    """All arguments by position, with the defaults of those that are not given."""
    given = dict(zip((a.name for a in _torch.arguments(op)), args, strict=False)) | kwargs
    return [given.get(a.name, a.default_value) for a in _torch.arguments(op)]


def pointwise_loss(op, *args, **kwargs):
    """The loss per element, then its sum or mean."""
    given, at = _arguments(op, args, kwargs), _position(op, "reduction")
    reduction, given[at] = given[at], NONE
    return NotImplemented if reduction == NONE else _reduced(op(*given), reduction)


def pointwise_loss_backward(op, *args, **kwargs):
    """The gradient of a mean is the gradient of a sum, divided by the global count."""
    given, at = _arguments(op, args, kwargs), _position(op, "reduction")
    if given[at] != MEAN:
        return NotImplemented
    grad, x = given[:2]
    given[0], given[at] = aten.div.Scalar(grad, prod(x.shape)), SUM
    return op(*given)


for _name in ("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss"):
    _forward, _backward = getattr(aten, _name).default, getattr(aten, f"{_name}_backward").default
    decompositions[_forward] = functools.partial(pointwise_loss, _forward)
    decompositions[_backward] = functools.partial(pointwise_loss_backward, _backward)


@register_decomposition(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(self, target, weight=None, pos_weight=None, reduction=MEAN):
    """`(1 - t) x - w log sigmoid(x)`, with w = 1 + (pos_weight - 1) t, as torch computes it, in the target's dtype."""
    if not target.dtype.is_floating_point:
        raise RuntimeError(f"result type {self.dtype} can't be cast to the desired output type {target.dtype}")
    log = aten.log_sigmoid_forward.default(self)[0]
    if pos_weight is not None:
        weighted = aten.mul.Tensor(aten.sub.Scalar(pos_weight, 1), target)
        log = aten.mul.Tensor(log, aten.add.Scalar(weighted, 1))
    each = aten.sub.Tensor(aten.mul.Tensor(aten.rsub.Scalar(target, 1), self), log)
    each = each if weight is None else aten.mul.Tensor(each, weight)
    return _reduced(each if each.dtype == target.dtype else aten._to_copy.default(each, dtype=target.dtype), reduction)


def row_loss(op, *args, **kwargs):
    """A loss of rows: for each row, then their sum or mean. Some of these losses have a second result."""
    given, at = _arguments(op, args, kwargs), _position(op, "reduction")
    tensors = [x for x in given if isinstance(x, torch.Tensor)]
    reduction, given[at] = given[at], NONE
    if reduction == NONE or given[0].ndim != 2 or not is_distributed(*tensors):
        return NotImplemented
    out = op(*given)
    return _reduced(out, reduction) if isinstance(out, torch.Tensor) else (_reduced(out[0], reduction), *out[1:])


def row_loss_backward(op, *args, **kwargs):
    """The gradient of a mean is the gradient of a sum, divided by the global number of rows."""
    given, at = _arguments(op, args, kwargs), _position(op, "reduction")
    tensors = [x for x in given if isinstance(x, torch.Tensor)]
    if given[at] != MEAN or given[1].ndim != 2 or not given[1].shape[0] or not is_distributed(*tensors):
        return NotImplemented
    given[0], given[at] = aten.div.Scalar(given[0], given[1].shape[0]), SUM
    return op(*given)


for _op in (aten.multi_margin_loss.default, aten.multilabel_margin_loss_forward.default):
    decompositions[_op] = functools.partial(row_loss, _op)
for _op in (aten.multi_margin_loss_backward.default, aten.multilabel_margin_loss_backward.default):
    decompositions[_op] = functools.partial(row_loss_backward, _op)


# ---- other names of ops -----------------------------------------------------------------------


@register_decomposition(aten.batch_norm_backward.default)
def batch_norm_backward(grad_out, input, weight, running_mean, running_var, save_mean, save_var, update, eps, mask, _):
    """As `native_batch_norm_backward`; the last argument is memory that only other devices use."""
    if not is_distributed(input, grad_out):
        return NotImplemented
    given = grad_out, input, weight, running_mean, running_var, save_mean, save_var, update, eps, mask
    out = decompose(aten.native_batch_norm_backward.default, given, {})
    return aten.native_batch_norm_backward.default(*given) if out is NotImplemented else out


@register_decomposition(aten._embedding_bag_backward.default)
def embedding_bag_backward(
    grad, indices, offsets, offset2bag, bag_size, maximum_indices, num_weights, scale_grad_by_freq, mode, sparse,
    per_sample_weights, padding_idx=-1,
):  # fmt: skip
    """The gradient of the table. If the forward did not say which bag each index is in, the offsets say it."""
    if sparse or not is_distributed(grad, indices, offsets, offset2bag):
        return NotImplemented
    n = indices.shape[0]
    if n and not offset2bag.numel():
        ends = aten.new_zeros.default(offsets, [n + 1])
        ends = aten.index_add.default(ends, 0, offsets, aten.ones_like.default(offsets))
        offset2bag = aten.sub.Scalar(aten.slice.Tensor(aten.cumsum.default(ends, 0), 0, 0, n), 1)
    return aten._embedding_bag_dense_backward.default(
        grad, indices, offset2bag, bag_size, maximum_indices, num_weights, scale_grad_by_freq, mode,
        per_sample_weights, padding_idx,
    )  # fmt: skip


def _in_place(op):
    """An op in place, as its result on new memory and a copy."""

    def run(self, *args, **kwargs):
        if not is_distributed(self, *[x for x in args if isinstance(x, torch.Tensor)]):
            return NotImplemented
        out = decompose(op, (self, *args), kwargs)
        return NotImplemented if out is NotImplemented else aten.copy_.default(self, out)

    return run


IN_PLACE = ("addmm", "addbmm", "addmv", "addr", "baddbmm", "masked_scatter", "index_put", "put")
"""Decomposed ops whose variants in place are decomposed in the same way."""

for _name in IN_PLACE:
    decompositions[getattr(aten, f"{_name}_").default] = _in_place(getattr(aten, _name).default)


# ---- factories --------------------------------------------------------------------------------


@register_decomposition(aten.new_empty_strided.default)
def new_empty_strided(self, size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    """`new_empty` with the dims in the order of their strides, then permuted back. A block has its own strides.

    If the size is that of `self`, then `self` is permuted, too, so that the result gets the placements of `self`.
    """
    if strides_like(size, stride) != tuple(stride):
        return NotImplemented  # the strides leave gaps, or elements share memory
    order = sorted(range(len(size)), key=lambda d: (-stride[d], d))
    options = {"dtype": dtype, "layout": layout, "device": device, "pin_memory": pin_memory}
    if order == sorted(order):
        return aten.new_empty.default(self, size, **options)
    like = aten.permute.default(self, order) if tuple(size) == tuple(self.shape) else self
    permuted = aten.new_empty.default(like, [size[d] for d in order], **options)
    return aten.permute.default(permuted, [order.index(d) for d in range(len(size))])


# ---- memory -----------------------------------------------------------------------------------


@register_decomposition(aten._has_same_storage_numel.default)
def has_same_storage_numel(self, other):
    """torch asks this of a tensor and its tangent. For distributed ones, the memory of the blocks does not matter."""
    sizes = [torch.Tensor.untyped_storage(t).nbytes() // t.itemsize for t in (self, other)]
    return sizes[0] == sizes[1]


# ---- split ----


@register_decomposition(aten.split.Tensor, aten.unsafe_split.Tensor)
def split(self, split_size, dim=0):
    """With the sizes of all parts: on a rank without elements the one size would be 0, and there would be one part."""
    spec = getattr(self, "_spec", None)
    if spec is None or not spec.ndim or not spec.dims[dim]:
        return NotImplemented
    if type(split_size) is not int or split_size < 1:
        return NotImplemented
    size = self.shape[dim]
    sizes = [min(split_size, size - start) for start in range(0, size, split_size)]
    return list(aten.split_with_sizes.default(self, sizes, dim))


# ---- squeeze ----------------------------------------------------------------------------------


@register_decomposition(aten.squeeze.default)
def squeeze(self):
    return aten.squeeze.dims(self, [d for d, size in enumerate(self.shape) if size == 1])


@register_decomposition(aten.squeeze_copy.default)
def squeeze_copy(self):
    return aten.squeeze_copy.dims(self, [d for d, size in enumerate(self.shape) if size == 1])


@register_decomposition(aten.squeeze_copy.dim)
def squeeze_copy_dim(self, dim):
    ones = [dim] if self.ndim and self.shape[dim] == 1 else []
    return aten.squeeze_copy.dims(self, ones)


@register_decomposition(aten.squeeze.dim)
def squeeze_dim(self, dim):
    return squeeze_dims(self, [dim], decomposed=True)


@register_decomposition(aten.squeeze.dims)
def squeeze_dims(self, dim, decomposed=False):
    """Name only the dims of global size 1, so that no other dim of local size 1 is dropped."""
    if len({d % max(self.ndim, 1) for d in dim}) < len(dim):
        return NotImplemented  # a dim is named twice: the op raises the error
    ones = [d for d in dim if self.ndim and self.shape[d] == 1]
    return NotImplemented if len(ones) == len(dim) and not decomposed else aten.squeeze.dims(self, ones)


for _table in (
    list_decompositions(), norm_decompositions, scan_decompositions, random_decompositions, mask_decompositions,
    count_decompositions, matrix_decompositions, distance_decompositions, join_decompositions,
):  # fmt: skip
    decompositions |= _table
