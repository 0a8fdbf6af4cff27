"""Scans, extremes and spreads along dims that are shared out: a few numbers a block in place of moves.

    argmax(f32[t, V@tp], 1)        a maximum over tp of t numbers, and a minimum of the places where it is found
    topk(f32[t, V@tp], k, 1)       the k largest of each block, and of these the k largest
    cumsum(f32[t, V@tp], 1)        each block by itself, and on it the sums of the blocks before
    var(f32[t, V@tp], 1)           a mean and a mean of squares over tp

Where the dims lie whole on each rank the op stays as it is, and where a decomposition would not do: where a rank has
nothing, and where blocks are not alike, so that the dim cannot be seen as blocks.

Left out: products, whose blocks may overflow where one device, going through all, would not.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf, prod

import torch

from spmd.comm.chunk import blocks
from spmd.tensor.call import dims_of
from spmd.tensor.rules.enter import Table, entering
from spmd.tensor.rules.norms import about_mean, cast, is_cut, wide

aten = torch.ops.aten

scan_decompositions: Table = {}
"""From an op to a function of the same arguments; it returns NotImplemented where the op is as good."""

instead_of = entering(scan_decompositions)


def lengths(x: torch.Tensor, dim: int) -> list[int]:
    """How long the blocks of x along a dim are, where it is sharded and nothing is to be reduced; else none."""
    spec = getattr(x, "_spec", None)
    if spec is None or spec.partial or not spec.ndim or not spec.dims[dim]:
        return []
    ns = tuple(spec.mesh.shape[a] for a in spec.dims[dim])
    return [length for _, length in blocks(spec.shape[dim], spec.units[dim], ns)]


def counted(x: torch.Tensor, n: int, dim: int, ndim: int) -> torch.Tensor:
    """0, 1, .. n - 1 along this dim of so many; a new tensor beside x."""
    ones = aten.new_ones.default(x, [n], dtype=torch.int64)
    count = aten.sub.Scalar(aten.cumsum.default(ones, 0), 1)
    return aten.view.default(count, [n if d == dim else 1 for d in range(ndim)])


# ---- extremes ---------------------------------------------------------------------------------


def _extreme(x, dim: int, keepdim: bool, best: Callable):
    """The best of a dim, and the first place where it stands; a NaN is better than all."""
    dim = dim % x.ndim if x.ndim else 0
    if x.dtype == torch.bool or not all(lengths(x, dim) or [0]):
        return NotImplemented
    n = x.shape[dim]
    values = aten.mul.Scalar(best(x, [dim], True), 1)  # reduced here, and not once for each of its readers
    others = aten.ne.Tensor(x, values)
    if x.is_floating_point():
        others = aten.logical_and.default(others, aten.eq.Tensor(x, x))  # where there is a NaN, that is sought
    places = aten.amin.default(aten.masked_fill.Scalar(counted(x, n, dim, x.ndim), others, n), [dim], True)
    return tuple(t if keepdim else aten.squeeze.dims(t, [dim]) for t in (values, aten.mul.Scalar(places, 1)))


@instead_of(aten.max.dim)
def max_dim(self, dim, keepdim=False):
    return _extreme(self, dim, keepdim, aten.amax.default)


@instead_of(aten.min.dim)
def min_dim(self, dim, keepdim=False):
    return _extreme(self, dim, keepdim, aten.amin.default)


def _place(x, dim, keepdim, best):
    found = NotImplemented if dim is None else _extreme(x, dim, keepdim, best)
    return found if found is NotImplemented else found[1]


@instead_of(aten.argmax.default)
def argmax(self, dim=None, keepdim=False):
    return _place(self, dim, keepdim, aten.amax.default)


@instead_of(aten.argmin.default)
def argmin(self, dim=None, keepdim=False):
    return _place(self, dim, keepdim, aten.amin.default)


@instead_of(aten.aminmax.default)
def aminmax(self, *, dim=None, keepdim=False):
    dims = list(dims_of(dim, self.ndim))
    if not self.numel() or not is_cut(self, dims):
        return NotImplemented
    return aten.amin.default(self, dims, keepdim), aten.amax.default(self, dims, keepdim)


# ---- by blocks --------------------------------------------------------------------------------


def in_blocks(x: torch.Tensor, dim: int) -> torch.Tensor | None:
    """x with the blocks of a dim in a dim of their own before it, each on its rank.

    None where they are not alike, or of one element each.
    """
    found = lengths(x, dim)
    if len(set(found)) != 1 or found[0] < 2:
        return None
    return aten.reshape.default(x, [*x.shape[:dim], len(found), found[0], *x.shape[dim + 1 :]])


def _joined(x: torch.Tensor, dim: int) -> torch.Tensor:
    """The dim and the next as one again."""
    return aten.reshape.default(x, [*x.shape[:dim], x.shape[dim] * x.shape[dim + 1], *x.shape[dim + 2 :]])


WORTH = 4
"""How many times fewer candidates than elements there are to be, for all their indices to be moved too."""


@instead_of(aten.topk.default)
def topk(self, k, dim=-1, largest=True, sorted=True):
    dim = dim % self.ndim if self.ndim else 0
    found = lengths(self, dim)
    if not 0 < k * len(found) * WORTH <= prod(self.shape[dim : dim + 1]) or len(set(found)) > 1:
        return NotImplemented
    parts = in_blocks(self, dim)
    values, places = aten.topk.default(parts, k, dim + 1, largest, sorted)
    first = aten.mul.Scalar(counted(self, len(found), dim, parts.ndim), found[0])
    values, places = _joined(values, dim), _joined(aten.add.Tensor(places, first), dim)
    values, best = aten.topk.default(values, k, dim, largest, sorted)
    return values, aten.abs.default(aten.gather.default(places, dim, best))  # abs: reduced, as the values are


def _scanned(x: torch.Tensor, dim: int, scan: Callable, join: Callable, nothing: float):
    """The scan of each block, joined with what the blocks before it come to."""
    dim = dim % x.ndim if x.ndim else 0
    parts = in_blocks(x, dim)
    if parts is None:
        return NotImplemented
    own = scan(parts, dim + 1)
    n, length = parts.shape[dim : dim + 2]
    before = scan(aten.select.int(own, dim + 1, length - 1), dim)
    before = aten.slice.Tensor(before, dim, 0, n - 1)
    start = aten.full_like.default(aten.slice.Tensor(before, dim, 0, 1), nothing)
    before = aten.unsqueeze.default(aten.cat.default([start, before], dim), dim + 1)
    return _joined(join(own, before), dim)


@instead_of(aten.cumsum.default)
def cumsum(self, dim, *, dtype=None):
    floats = self.is_floating_point() or self.is_complex()
    dtype = dtype or (self.dtype if floats else torch.int64)
    inside = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    out = _scanned(self, dim, lambda x, d: aten.cumsum.default(x, d, dtype=inside), aten.add.Tensor, 0)
    return out if out is NotImplemented else cast(out, dtype)


@instead_of(aten.logcumsumexp.default)
def logcumsumexp(self, dim):
    if not self.is_floating_point():
        return NotImplemented
    out = _scanned(wide(self), dim, aten.logcumsumexp.default, aten.logaddexp.default, -inf)
    return out if out is NotImplemented else cast(out, self.dtype)


# ---- spreads ----------------------------------------------------------------------------------


def _spread(x: torch.Tensor, dim, correction, keepdim: bool):
    """The variance over some dims, and the mean; NotImplemented where they lie whole."""
    dims = list(dims_of(dim, x.ndim))
    if not x.is_floating_point() or not x.numel() or not is_cut(x, dims):
        return NotImplemented
    n = prod(x.shape[d] for d in dims)
    mean, _, squares = about_mean(wide(x), dims)
    free = n - (1 if correction is None else correction)
    spread = aten.mul.Scalar(squares, n / free if free > 0 else inf)
    return tuple(t if keepdim else aten.squeeze.dims(t, dims) for t in (spread, mean))


def _spread_op(root: bool, with_mean: bool) -> Callable:
    def run(self, dim=None, *, correction=None, keepdim=False):
        found = _spread(self, dim, correction, keepdim)
        if found is NotImplemented:
            return found
        spread, mean = found
        spread = cast(aten.sqrt.default(spread) if root else spread, self.dtype)
        return (spread, cast(mean, self.dtype)) if with_mean else spread

    return run


for _name, _root, _mean in (
    ("var", False, False), ("std", True, False), ("var_mean", False, True), ("std_mean", True, True)
):  # fmt: skip
    scan_decompositions[getattr(aten, _name).correction] = _spread_op(_root, _mean)
