"""Recipes: ops that look up along a dim which is shared out, without gathering it.

    embedding(f32[V@tp, d], i64[t@dp])          ->  f32[t@dp, d] +sum@tp
    gather(f32[t@dp, V@tp], 1, i64[t@dp, 1])    ->  f32[t@dp, 1] +sum@tp
    nll_loss(f32[t@dp, V@tp], i64[t@dp])        ->  f32[] +sum@dp +sum@tp      and its gradient, f32[t@dp, V@tp]

What an index points at is on one rank of tp; that rank gives it and the others give zeros, so their sum is it.

Left out: gradients of tables, which are a Partial of the whole table.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmd.tensor.call import Call
from spmd.tensor.recipe import At, Recipe, summed
from spmd.tensor.rules.networks import MEAN, NONE, SUM
from spmd.tensor.spec import Spec

aten = torch.ops.aten

# ---- where things lie -------------------------------------------------------------------------


def _without(spec: Spec, axes: Sequence[int], dims: Sequence[tuple[int, ...]] | None = None) -> Spec:
    """The tensor moved off these axes, its dims sharded as they are or as is said."""
    dims = spec.dims if dims is None else dims
    return spec.moved_to(tuple(tuple(a for a in of if a not in axes) for of in dims), spec.units)


def _whole(spec: Spec) -> Spec:
    return spec.moved_to(((),) * spec.ndim)


def _own(indices, spec: Spec, dim: int, at: At) -> tuple:
    """Where in this rank's block the indices point, and which of them point elsewhere; an error beyond the tensor."""
    known = aten.logical_and.default(aten.ge.Scalar(indices, 0), aten.lt.Scalar(indices, spec.shape[dim]))
    aten._assert_async.msg(aten.all.default(known), "index out of range in self")
    start, length = spec.block(dim, at)
    own = aten.sub.Tensor(indices, start)
    elsewhere = aten.logical_or.default(aten.lt.Scalar(own, 0), aten.ge.Scalar(own, length))
    return aten.clamp.default(own, 0, max(length - 1, 0)), elsewhere


def _length(spec: Spec, dim: int, at: At) -> int:
    return spec.block(dim, at)[1]


# ---- embedding --------------------------------------------------------------------------------


def embedding(call: Call) -> Recipe | None:
    table, tokens = call["weight"], call["indices"]
    if not table.dims[0] or table.partial:
        return None
    moved = _without(tokens, [a for axes in table.dims for a in axes])
    out = Spec.of(
        table.mesh, (*tokens.shape, table.shape[1]), table.dtype, dims=(*moved.dims, table.dims[1]),
        units=(*moved.units, table.units[1]), partial=summed(table.dims[0]),
    )  # fmt: skip
    return Recipe((table, moved), (out,), own_rows, table, ())


def own_rows(this: Recipe, at: At, table, tokens) -> tuple:
    """This rank's rows of the tokens that it has, and zeros for the others."""
    own, elsewhere = _own(tokens, this.table, 0, at)
    if not _length(this.table, 0, at):
        return (aten.new_zeros.default(table, this.outs[0].local_shape(at)),)
    found = aten.embedding.default(table, own)
    return (aten.masked_fill.Scalar(found, aten.unsqueeze.default(elsewhere, -1), 0),)


# ---- gather -----------------------------------------------------------------------------------


def gather(call: Call) -> Recipe | None:
    x, index = call["self"], call["index"]
    if not x.ndim or x.ndim != index.ndim or x.partial or x.dtype == torch.bool:
        return None
    along = call["dim"] % x.ndim
    others = [d for d in range(x.ndim) if d != along]
    if not x.dims[along] or any(x.dims[d] and x.shape[d] != index.shape[d] for d in others):
        return None
    taken = [a for axes in x.dims for a in axes]
    free = tuple(a for a in index.dims[along] if a not in taken)
    dims = tuple(free if d == along else x.dims[d] for d in range(x.ndim))
    units = tuple((index if d == along else x).units[d] for d in range(x.ndim))
    moved = index.moved_to(dims, units)
    out = Spec.of(x.mesh, index.shape, x.dtype, dims=dims, units=units, partial=summed(x.dims[along]))
    return Recipe((x, moved), (out,), own_entries, x, (along,))


def own_entries(this: Recipe, at: At, x, index) -> tuple:
    (dim,) = this.statics
    own, elsewhere = _own(index, this.table, dim, at)
    if not _length(this.table, dim, at):
        return (aten.new_zeros.default(x, this.outs[0].local_shape(at)),)
    return (aten.masked_fill.Scalar(aten.gather.default(x, dim, own), elsewhere, 0),)


# ---- losses -----------------------------------------------------------------------------------


def nll(call: Call) -> Recipe | None:
    """Of each row the rank with its class has the score; the summed weights are sums of the ranks' as well."""
    x, target, weight = call["self"], call["target"], call["weight"]
    if not _has_shared_classes(x) or call["reduction"] == MEAN:
        return None
    rows, classes = x.dims
    target = target.moved_to((rows,), x.units[:1])
    given = () if weight is None else (weight.moved_to((classes,), x.units[1:]),)
    one = Spec.of(x.mesh, (), x.dtype)
    if call["reduction"] == SUM:
        outs = (one.with_layout((), (), summed(rows + classes)),) * 2
    else:
        each = Spec.of(x.mesh, target.shape, x.dtype, dims=(rows,), units=x.units[:1], partial=summed(classes))
        outs = (each, one)
    return Recipe((x, target, *given), outs, own_losses, x, (call["reduction"], call["ignore_index"]))


def nll_backward(call: Call) -> Recipe | None:
    x, target, weight = call["self"], call["target"], call["weight"]
    if not _has_shared_classes(x):
        return None
    grad, rows = call["grad_output"], x.dims[0]
    grad = grad.moved_to((rows,), x.units[:1]) if grad.ndim else _whole(grad)
    given = () if weight is None else (weight.moved_to((x.dims[1],), x.units[1:]),)
    ins = (grad, x, target.moved_to((rows,), x.units[:1]), *given, _whole(call["total_weight"]))
    out = x.with_tensor(x.shape)
    return Recipe(ins, (out,), own_loss_gradients, x, (call["reduction"], call["ignore_index"]))


def _has_shared_classes(x: Spec) -> bool:
    return x.ndim == 2 and bool(x.dims[1]) and not x.partial


def _hit(target, x, weight, spec: Spec, ignored: int, at: At) -> tuple:
    """For each row its class in this block, the weight of that, and whether it counts nothing here.

    So it is where another rank has the class, or none.
    """
    skipped = aten.eq.Scalar(target, ignored)
    own, elsewhere = _own(aten.masked_fill.Scalar(target, skipped, 0), spec, 1, at)
    without = aten.logical_or.default(elsewhere, skipped)
    if weight is None or not _length(spec, 1, at):
        each = aten.new_ones.default(x, [_length(spec, 0, at)])
    else:
        each = aten.index_select.default(weight, 0, own)
    return own, aten.masked_fill.Scalar(each, without, 0), without


def own_losses(this: Recipe, at: At, x, target, weight=None) -> tuple:
    reduction, ignored = this.statics
    own, each, without = _hit(target, x, weight, this.table, ignored, at)
    scores = aten.zeros_like.default(each)
    if _length(this.table, 1, at):
        scores = aten.squeeze.dim(aten.gather.default(x, 1, aten.unsqueeze.default(own, 1)), 1)
    losses = aten.neg.default(aten.mul.Tensor(scores, each))
    losses = aten.masked_fill.Scalar(losses, without, 0)  # a score of -inf that does not count is no NaN
    if reduction == NONE:
        return losses, aten.new_zeros.default(x, [])
    return aten.sum.default(losses), aten.sum.default(each)


def own_loss_gradients(this: Recipe, at: At, grad, x, target, *rest) -> tuple:
    *weight, total = rest
    reduction, ignored = this.statics
    own, each, without = _hit(target, x, *weight or (None,), this.table, ignored, at)
    of_each = aten.div.Tensor(grad, total) if reduction == MEAN else grad
    each = aten.masked_fill.Scalar(aten.neg.default(aten.mul.Tensor(each, of_each)), without, 0)
    zeros = aten.zeros_like.default(x, memory_format=torch.contiguous_format)
    if not _length(this.table, 1, at):
        return (zeros,)
    return (aten.scatter_add.default(zeros, 1, aten.unsqueeze.default(own, 1), aten.unsqueeze.default(each, 1)),)


RECIPES: dict[Any, Callable[[Call], Recipe | None]] = {
    aten.embedding.default: embedding,
    aten.gather.default: gather,
    aten.nll_loss_forward.default: nll,
    aten.nll_loss_backward.default: nll_backward,
}
