"""Ops that are spelled in a way that is not safe on a shard, in terms of ops that are.

`mean` divides by the number of elements it sees: on a shard that is the local number. `squeeze` drops the dims whose
size it sees to be 1. `addmm` adds the bias on every rank to a product of which each rank has a part. Each is
written here with `torch.ops.aten` on whatever tensors come: real, fake, functional or distributed. Sizes read here are
global ones.

    decompose(op, args, kwargs)    the result, or NotImplemented where the op is safe as it is

Results equal the op's own, empty tensors and NaN included; a low-precision `addmm` rounds once more.
"""

from __future__ import annotations

import functools
from math import prod

import torch

from spmd import _torch
from spmd.comm.chunk import blocks
from spmd.tensor.call import dims_of
from spmd.tensor.rules.draws import random_decompositions
from spmd.tensor.rules.enter import Table, entering
from spmd.tensor.rules.lists import list_decompositions
from spmd.tensor.rules.networks import MEAN, NONE, SUM
from spmd.tensor.rules.norms import norm_decompositions
from spmd.tensor.rules.scans import scan_decompositions
from spmd.tensor.rules.totals import vector_norm
from spmd.tensor.spec import strides_like

aten = torch.ops.aten

decompositions: Table = {}
"""From an op to a function of the same arguments; it returns NotImplemented where the op is safe as it is."""


def decompose(op, args, kwargs):
    """The result of `op` by its decomposition; NotImplemented where there is none or none is needed.

    >>> decompose(aten.mean.default, (torch.tensor([1.0, 3.0]),), {})
    tensor(2.)
    """
    found = decompositions.get(op)
    return NotImplemented if found is None else found(*args, **kwargs)


instead_of = entering(decompositions)


# ---- a product plus a bias --------------------------------------------------------------------


def biased(bias, product, beta, alpha):
    """`beta * bias + alpha * product`; a beta of 0 means that the bias is not read, NaN or not.

    What an integer times a float is to be, each op says for itself.
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
    """Whether a number is known to be this; a symbolic one is not."""
    return isinstance(number, (int, float)) and number == value


@instead_of(aten.addmm.default)
def addmm(self, mat1, mat2, *, beta=1, alpha=1):
    return biased(self, aten.mm.default(mat1, mat2), beta, alpha)


@instead_of(aten.baddbmm.default)
def baddbmm(self, batch1, batch2, *, beta=1, alpha=1):
    return biased(self, aten.bmm.default(batch1, batch2), beta, alpha)


@instead_of(aten.addmv.default)
def addmv(self, mat, vec, *, beta=1, alpha=1):
    return biased(self, aten.mv.default(mat, vec), beta, alpha)


@instead_of(aten.addbmm.default)
def addbmm(self, batch1, batch2, *, beta=1, alpha=1):
    return biased(self, aten.sum.dim_IntList(aten.bmm.default(batch1, batch2), [0]), beta, alpha)


@instead_of(aten.addr.default)
def addr(self, vec1, vec2, *, beta=1, alpha=1):
    return biased(self, aten.ger.default(vec1, vec2), beta, alpha)


# ---- convolutions -----------------------------------------------------------------------------


@instead_of(aten.convolution_backward.default)
def convolution_backward(grad_output, input, weight, bias_sizes, *options):
    """Of an empty batch the kernel gives a bias the global size that `bias_sizes` says: there it is a sum by itself."""
    *options, wanted = options
    if not wanted[2] or not _has_empty_block(input, 0):
        return NotImplemented
    found = aten.convolution_backward.default(grad_output, input, weight, None, *options, [*wanted[:2], False])
    return found[0], found[1], aten.sum.dim_IntList(grad_output, [d for d in range(grad_output.ndim) if d != 1])


def _has_empty_block(x, dim: int) -> bool:
    """Whether some rank has nothing along the dim; not of a tensor that does not say how it lies."""
    spec = getattr(x, "_spec", None)
    if spec is None or not spec.dims[dim]:
        return False
    ranks = tuple(spec.mesh.shape[a] for a in spec.dims[dim])
    return not all(length for _, length in blocks(spec.shape[dim], spec.units[dim], ranks))


# ---- means ------------------------------------------------------------------------------------


@instead_of(aten.mean.default)
def mean(self, *, dtype=None):
    return mean_dim(self, None, dtype=dtype)


@instead_of(aten.mean.dim)
def mean_dim(self, dim, keepdim=False, *, dtype=None):
    """A sum over a count that is the same on every rank. Half precision is summed in float, as torch does."""
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


instead_of(aten.linalg_vector_norm.default)(vector_norm)


# ---- losses -----------------------------------------------------------------------------------


@instead_of(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll(self, target, weight, reduction, ignore_index):
    """A mean is the summed loss over the summed weight; both are sums over the ranks."""
    if reduction != MEAN:
        return NotImplemented
    op = aten.nll_loss_forward if target.ndim < 2 else aten.nll_loss2d_forward
    loss, total_weight = op.default(self, target, weight, SUM, ignore_index)
    return aten.div.Tensor(loss, total_weight), total_weight


def _reduced(loss, reduction):
    """Of a loss per element: itself, its mean or its sum."""
    return {NONE: lambda x: x, MEAN: mean, SUM: aten.sum.default}[reduction](loss)


def _position(op, name: str) -> int:
    return next(i for i, a in enumerate(_torch.arguments(op)) if a.name == name)


def _arguments(op, args, kwargs) -> list:
    """All arguments by position, defaults filled in."""
    given = dict(zip((a.name for a in _torch.arguments(op)), args, strict=False)) | kwargs
    return [given.get(a.name, a.default_value) for a in _torch.arguments(op)]


def pointwise_loss(op, *args, **kwargs):
    """The loss per element, then its sum or mean."""
    given, at = _arguments(op, args, kwargs), _position(op, "reduction")
    reduction, given[at] = given[at], NONE
    return NotImplemented if reduction == NONE else _reduced(op(*given), reduction)


def pointwise_loss_backward(op, *args, **kwargs):
    """The gradient of a mean is that of a sum, over the global count."""
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


@instead_of(aten.binary_cross_entropy_with_logits.default)
def binary_cross_entropy_with_logits(self, target, weight=None, pos_weight=None, reduction=MEAN):
    """`(1 - t) x - w log sigmoid(x)`, with w = 1 + (pos_weight - 1) t: as torch computes it, in the target's dtype."""
    if not target.dtype.is_floating_point:
        raise RuntimeError(f"result type {self.dtype} can't be cast to the desired output type {target.dtype}")
    log = aten.log_sigmoid_forward.default(self)[0]
    if pos_weight is not None:
        weighted = aten.mul.Tensor(aten.sub.Scalar(pos_weight, 1), target)
        log = aten.mul.Tensor(log, aten.add.Scalar(weighted, 1))
    each = aten.sub.Tensor(aten.mul.Tensor(aten.rsub.Scalar(target, 1), self), log)
    each = each if weight is None else aten.mul.Tensor(each, weight)
    return _reduced(each if each.dtype == target.dtype else aten._to_copy.default(each, dtype=target.dtype), reduction)


# ---- factories --------------------------------------------------------------------------------


@instead_of(aten.new_empty_strided.default)
def new_empty_strided(self, size, stride, *, dtype=None, layout=None, device=None, pin_memory=None):
    """`new_empty` with the dims in the order of their strides, and turned back: a block has other strides.

    Of the shape of `self` it is turned as well, so that the result lies on the ranks as it does.
    """
    if strides_like(size, stride) != tuple(stride):
        return NotImplemented  # with holes, or elements that share memory
    order = sorted(range(len(size)), key=lambda d: (-stride[d], d))
    options = {"dtype": dtype, "layout": layout, "device": device, "pin_memory": pin_memory}
    if order == sorted(order):
        return aten.new_empty.default(self, size, **options)
    like = aten.permute.default(self, order) if tuple(size) == tuple(self.shape) else self
    turned = aten.new_empty.default(like, [size[d] for d in order], **options)
    return aten.permute.default(turned, [order.index(d) for d in range(len(size))])


# ---- memory -----------------------------------------------------------------------------------


@instead_of(aten._has_same_storage_numel.default)
def has_same_storage_numel(self, other):
    """Asked of a view and its tangent; of distributed ones it is not the memory of the blocks that counts."""
    sizes = [t.untyped_storage().nbytes() // t.itemsize for t in (self, other)]
    return sizes[0] == sizes[1]


# ---- squeeze ----------------------------------------------------------------------------------


@instead_of(aten.squeeze.default)
def squeeze(self):
    return aten.squeeze.dims(self, [d for d, size in enumerate(self.shape) if size == 1])


@instead_of(aten.squeeze.dim)
def squeeze_dim(self, dim):
    return squeeze_dims(self, [dim], decomposed=True)


@instead_of(aten.squeeze.dims)
def squeeze_dims(self, dim, decomposed=False):
    """Only the dims that are 1 are named, so that no dim of local size 1 is dropped."""
    if len({d % max(self.ndim, 1) for d in dim}) < len(dim):
        return NotImplemented  # an error, that the op raises
    ones = [d for d in dim if self.ndim and self.shape[d] == 1]
    return NotImplemented if len(ones) == len(dim) and not decomposed else aten.squeeze.dims(self, ones)


decompositions |= list_decompositions() | norm_decompositions | scan_decompositions | random_decompositions
