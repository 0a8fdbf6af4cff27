"""Decompositions of scans, extremes and variances along sharded dims: each block sends a few numbers, not all of them.

    argmax(f32[t, V@tp], 1)        a maximum over tp of t numbers, and a minimum of the indices where it is
    topk(f32[t, V@tp], k, 1)       the k largest of each block, and then the k largest of these
    cumsum(f32[t, V@tp], 1)        the running sums of each block, plus the sum of all blocks before it
    cummax(f32[t, V@tp], 1)        the running maxima of each block, or that of all blocks before it
    var(f32[t, V@tp], 1)           a mean and a mean of squares over tp

The op is kept if the dims are not sharded. Blocks of different lengths are filled up to one length
(`spmd.tensor.rules.block_ops`).

Running products are computed in double precision, as torch does on CPU: so a block of single precision does not
overflow by itself, unless its numbers are all extreme. In double precision it may, as in `prod`, where one device would
not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf, prod

import torch

from spmd.comm.chunk import Packed
from spmd.comm.chunk import lengths as lengths_of
from spmd.tensor.call import dims_of
from spmd.tensor.rules.block_ops import from_blocks, to_blocks
from spmd.tensor.rules.decomposition_table import Table, decomposition_registrar
from spmd.tensor.rules.norms import cast, centred_moments, is_sharded, upcast

aten = torch.ops.aten

scan_decompositions: Table = {}
"""From an op to a function of the same arguments. The function returns NotImplemented where the op is better."""

register_decomposition = decomposition_registrar(scan_decompositions)


def block_lengths(x: torch.Tensor, dim: int) -> list[int]:
    """The lengths of the blocks of x along a dim. Empty if the dim is not sharded or x owes a reduction."""
    spec = getattr(x, "_spec", None)
    if spec is None or spec.partial or not spec.ndim or not spec.dims[dim]:
        return []
    ranks = tuple(spec.mesh.shape[a] for a in spec.dims[dim])
    return lengths_of(spec.shape[dim], spec.units[dim], ranks)


def positions(x: torch.Tensor, n: int, dim: int, ndim: int) -> torch.Tensor:
    """0, 1, .. n - 1 along a dim of a tensor of `ndim` dims, the other dims of size 1. It is on the mesh of x."""
    ones = aten.new_ones.default(x, [n], dtype=torch.int64)
    count = aten.sub.Scalar(aten.cumsum.default(ones, 0), 1)
    return aten.view.default(count, [n if d == dim else 1 for d in range(ndim)])


# ---- extremes ---------------------------------------------------------------------------------


def _extremum(x, dim: int, keepdim: bool, best: Callable):
    """The best value along a dim (`best` is amax or amin), and its first index. NaN is better than all numbers."""
    (dim,) = dims_of(dim, x.ndim) or (0,)
    if x.is_complex() or not block_lengths(x, dim):
        return NotImplemented
    if x.dtype == torch.bool:
        values, indices = _extremum(cast(x, torch.uint8), dim, keepdim, best)
        return cast(values, torch.bool), indices
    n = x.shape[dim]
    # times 1: reduced here, and not once for each reader
    values = aten.mul.Scalar(_best_of_blocks(x, dim, best, _worst(x.dtype, best)), 1)
    others = aten.ne.Tensor(x, values)
    if x.is_floating_point():
        others = aten.logical_and.default(others, aten.eq.Tensor(x, x))  # if there is a NaN, its index is wanted
    indices = aten.masked_fill.Scalar(positions(x, n, dim, x.ndim), others, n)
    indices = _best_of_blocks(indices, dim, aten.amin.default, n)
    return tuple(t if keepdim else aten.squeeze.dims(t, [dim]) for t in (values, aten.mul.Scalar(indices, 1)))


def _best_of_blocks(x: torch.Tensor, dim: int, best: Callable, worst: float) -> torch.Tensor:
    """The best value along a dim. Empty blocks, of which there is no best value, are filled up with the worst one."""
    lengths = block_lengths(x, dim)
    if all(lengths):
        return best(x, [dim], True)
    return aten.squeeze.dims(best(to_blocks(x, dim, lengths, worst), [dim, dim + 1], True), [dim])


def _worst(dtype: torch.dtype, best: Callable) -> float:
    """The number of this dtype that is no better than any other."""
    low, high = (-inf, inf) if dtype.is_floating_point else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return low if best is aten.amax.default else high


@register_decomposition(aten.max.dim)
def max_dim(self, dim, keepdim=False):
    return _extremum(self, dim, keepdim, aten.amax.default)


@register_decomposition(aten.min.dim)
def min_dim(self, dim, keepdim=False):
    return _extremum(self, dim, keepdim, aten.amin.default)


def _index_of_best(x, dim, keepdim, best):
    found = NotImplemented if dim is None else _extremum(x, dim, keepdim, best)
    return found if found is NotImplemented else found[1]


@register_decomposition(aten.argmax.default)
def argmax(self, dim=None, keepdim=False):
    return _index_of_best(self, dim, keepdim, aten.amax.default)


@register_decomposition(aten.argmin.default)
def argmin(self, dim=None, keepdim=False):
    return _index_of_best(self, dim, keepdim, aten.amin.default)


@register_decomposition(aten.aminmax.default)
def aminmax(self, *, dim=None, keepdim=False):
    dims = list(dims_of(dim, self.ndim))
    if not self.numel() or not is_sharded(self, dims):
        return NotImplemented
    return aten.amin.default(self, dims, keepdim), aten.amax.default(self, dims, keepdim)


# ---- by blocks --------------------------------------------------------------------------------


def split_into_blocks(x: torch.Tensor, dim: int, fill: float = 0) -> torch.Tensor | None:
    """x with a dim split into two: the blocks, each on its rank, and the elements of a block.

    Shorter blocks are filled up. None if no block has more than one element, or the dim is packed: then a rank's
    elements are not in one place.
    """
    lengths = block_lengths(x, dim)
    if max(lengths, default=0) < 2 or isinstance(x._spec.units[dim], Packed):
        return None
    if len(set(lengths)) > 1:
        return to_blocks(x, dim, lengths, fill)
    return aten.reshape.default(x, [*x.shape[:dim], len(lengths), lengths[0], *x.shape[dim + 1 :]])


def _merged(x: torch.Tensor, dim: int, lengths: Sequence[int] = ()) -> torch.Tensor:
    """x with the dim and the next one merged again. lengths: those of the blocks, where some were filled up."""
    if len(set(lengths)) > 1:
        return from_blocks(x, dim, lengths)
    return aten.reshape.default(x, [*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :]])


MIN_REDUCTION = 4
"""`topk` is decomposed only if there are this many times fewer candidates than elements: their indices are sent, too.
"""


@register_decomposition(aten.topk.default)
def topk(self, k, dim=-1, largest=True, sorted=True):
    (dim,) = dims_of(dim, self.ndim) or (0,)
    lengths = block_lengths(self, dim)
    if not 0 < k * len(lengths) * MIN_REDUCTION <= prod(self.shape[dim : dim + 1]) or len(set(lengths)) > 1:
        return NotImplemented
    parts = split_into_blocks(self, dim)
    if parts is None:
        return NotImplemented
    values, indices = aten.topk.default(parts, k, dim + 1, largest, sorted)
    starts = aten.mul.Scalar(positions(self, len(lengths), dim, parts.ndim), lengths[0])
    values, indices = _merged(values, dim), _merged(aten.add.Tensor(indices, starts), dim)
    values, best = aten.topk.default(values, k, dim, largest, sorted)
    return values, aten.abs.default(aten.gather.default(indices, dim, best))  # abs: reduced here, like the values


def _scan_by_blocks(x: torch.Tensor, dim: int, scan: Callable, join: Callable, nothing: float):
    """The scan of each block, joined with the total of all blocks before it. nothing: the total of no blocks."""
    (dim,) = dims_of(dim, x.ndim) or (0,)
    lengths, parts = block_lengths(x, dim), split_into_blocks(x, dim, nothing)
    if parts is None and lengths and x.ndim == 1:  # one number on each rank
        return aten.squeeze.dim(scan(aten.unsqueeze.default(x, 1), 0), 1)
    if parts is None:
        return NotImplemented
    scanned = scan(parts, dim + 1)
    n, length = parts.shape[dim : dim + 2]
    totals = scan(aten.slice.Tensor(scanned, dim + 1, length - 1, length), dim)
    totals = aten.slice.Tensor(totals, dim, 0, n - 1)
    first = aten.full_like.default(aten.slice.Tensor(totals, dim, 0, 1), nothing)
    return _merged(join(scanned, aten.cat.default([first, totals], dim)), dim, lengths)


@register_decomposition(aten.cumsum.default)
def cumsum(self, dim, *, dtype=None):
    floats = self.is_floating_point() or self.is_complex()
    dtype = dtype or (self.dtype if floats else torch.int64)
    sum_dtype = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    out = _scan_by_blocks(self, dim, lambda x, d: aten.cumsum.default(x, d, dtype=sum_dtype), aten.add.Tensor, 0)
    return out if out is NotImplemented else cast(out, dtype)


@register_decomposition(aten.cumprod.default)
def cumprod(self, dim, *, dtype=None):
    floats = self.is_floating_point() or self.is_complex()
    dtype = dtype or (self.dtype if floats else torch.int64)
    double = torch.complex128 if dtype.is_complex else torch.float64 if dtype.is_floating_point else dtype
    out = _scan_by_blocks(self, dim, lambda x, d: aten.cumprod.default(x, d, dtype=double), aten.mul.Tensor, 1)
    return out if out is NotImplemented else cast(out, dtype)


@register_decomposition(aten.logcumsumexp.default)
def logcumsumexp(self, dim):
    if not self.is_floating_point():
        return NotImplemented
    out = _scan_by_blocks(upcast(self), dim, aten.logcumsumexp.default, aten.logaddexp.default, -inf)
    return out if out is NotImplemented else cast(out, self.dtype)


def _only_last_is_shorter(lengths: Sequence[int]) -> bool:
    """Whether all blocks that are not empty, except the last of them, have one length."""
    filled = [n for n in lengths if n]
    return all(n == filled[0] for n in filled[:-1]) and filled[-1] <= filled[0]


def _running_extremum(x: torch.Tensor, dim: int, scan: Callable, is_better: Callable, best: Callable):
    """`cummax` or `cummin` and its indices. NaN is better than all numbers; of equal values the last one counts."""
    (dim,) = dims_of(dim, x.ndim) or (0,)
    if x.dtype == torch.bool or x.is_complex() or not x.ndim:
        return NotImplemented
    lengths, parts = block_lengths(x, dim), split_into_blocks(x, dim, _worst(x.dtype, best))
    if parts is None or not _only_last_is_shorter(lengths):
        return NotImplemented  # what fills up a block before the last one would count
    values, indices = scan(parts, dim + 1)
    n, length = parts.shape[dim : dim + 2]
    starts = aten.mul.Scalar(positions(x, n, dim, parts.ndim), max(lengths))
    indices = aten.add.Tensor(indices, starts)
    before = []
    for every, first in ((values, _worst(x.dtype, best)), (indices, 0)):
        last = aten.slice.Tensor(every, dim + 1, length - 1, length)
        first = aten.full_like.default(aten.slice.Tensor(last, dim, 0, 1), first)
        before.append(aten.cat.default([first, aten.slice.Tensor(last, dim, 0, n - 1)], dim))
    best_before, places = scan(before[0], dim)
    best_indices = aten.gather.default(before[1], dim, places)
    own = is_better(values, best_before)
    if x.is_floating_point():
        own = aten.logical_and.default(own, aten.eq.Tensor(best_before, best_before))
        own = aten.logical_or.default(own, aten.ne.Tensor(values, values))
    pairs = ((values, best_before), (indices, best_indices))
    return tuple(_merged(aten.where.self(own, now, then), dim, lengths) for now, then in pairs)


@register_decomposition(aten.cummax.default)
def cummax(self, dim):
    return _running_extremum(self, dim, aten.cummax.default, aten.ge.Tensor, aten.amax.default)


@register_decomposition(aten.cummin.default)
def cummin(self, dim):
    return _running_extremum(self, dim, aten.cummin.default, aten.le.Tensor, aten.amin.default)


# ---- variances --------------------------------------------------------------------------------


def _variance(x: torch.Tensor, dim, correction, keepdim: bool):
    """The variance over some dims, and the mean. NotImplemented if the dims are not sharded."""
    dims = list(dims_of(dim, x.ndim))
    if not x.is_floating_point() or not x.numel() or not is_sharded(x, dims):
        return NotImplemented
    n = prod(x.shape[d] for d in dims)
    mean, _, squares = centred_moments(upcast(x), dims)
    freedom = n - (1 if correction is None else correction)
    variance = aten.mul.Scalar(squares, n / freedom if freedom > 0 else inf)
    return tuple(t if keepdim else aten.squeeze.dims(t, dims) for t in (variance, mean))


def _variance_op(root: bool, with_mean: bool) -> Callable:
    def run(self, dim=None, *, correction=None, keepdim=False):
        found = _variance(self, dim, correction, keepdim)
        if found is NotImplemented:
            return found
        variance, mean = found
        spread = cast(aten.sqrt.default(variance) if root else variance, self.dtype)
        return (spread, cast(mean, self.dtype)) if with_mean else spread

    return run


for _name, _root, _mean in (
    ("var", False, False), ("std", True, False), ("var_mean", False, True), ("std_mean", True, True)
):  # fmt: skip
    scan_decompositions[getattr(aten, _name).correction] = _variance_op(_root, _mean)
