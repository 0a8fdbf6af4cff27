"""Recipes for ops that look entries up along a sharded dim. The dim is not gathered.

    embedding(f32[V@tp, d], i64[t@dp])          ->  f32[t@dp, d] +sum@tp
    gather(f32[t@dp, V@tp], 1, i64[t@dp, 1])    ->  f32[t@dp, 1] +sum@tp
    nll_loss(f32[t@dp, V@tp], i64[t@dp])        ->  f32[] +sum@dp +sum@tp      and its gradient, f32[t@dp, V@tp]
    embedding_dense_backward(f32[t@dp, d], i64[t@dp])    ->  f32[V@tp, d] +sum@dp

The entry that an index points at is on one rank of tp. That rank returns the entry and the others return zeros, so the
sum over the ranks is the entry. The gradient of a table is made in shards of its rows only where somebody wants it so
(`MADE_IN_SHARDS`): no operand says it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmd.tensor.call import Call
from spmd.tensor.recipes.recipe import Coordinate, Recipe, owed_sums
from spmd.tensor.rules.networks import MEAN, NONE, SUM
from spmd.tensor.spec import Spec

aten = torch.ops.aten

# ---- specs and indices ------------------------------------------------------------------------


def _unsharded_on(spec: Spec, axes: Sequence[int]) -> Spec:
    """The spec with its dims no longer sharded by these axes."""
    return spec.moved_to(tuple(tuple(a for a in sharding if a not in axes) for sharding in spec.dims), spec.units)


def _replicated(spec: Spec) -> Spec:
    return spec.moved_to(((),) * spec.ndim)


def local_indices(indices, spec: Spec, dim: int, at: Coordinate) -> tuple:
    """The indices relative to this rank's block, and a mask of those that point outside of it.

    An index beyond the global tensor is an error.
    """
    in_range = aten.logical_and.default(aten.ge.Scalar(indices, 0), aten.lt.Scalar(indices, spec.shape[dim]))
    aten._assert_async.msg(aten.all.default(in_range), "index out of range in self")
    start, length = spec.block(dim, at)
    local = aten.sub.Tensor(indices, start)
    elsewhere = aten.logical_or.default(aten.lt.Scalar(local, 0), aten.ge.Scalar(local, length))
    return aten.clamp.default(local, 0, max(length - 1, 0)), elsewhere


def _block_length(spec: Spec, dim: int, at: Coordinate) -> int:
    return spec.length(dim, at)


# ---- embedding --------------------------------------------------------------------------------


def embedding(call: Call) -> Recipe | None:
    table, tokens = call["weight"], call["indices"]
    if not table.dims[0] or table.partial:
        return None
    tokens = _unsharded_on(tokens, [a for axes in table.dims for a in axes])
    out = Spec.of(
        table.mesh, (*tokens.shape, table.shape[1]), table.dtype, dims=(*tokens.dims, table.dims[1]),
        units=(*tokens.units, table.units[1]), partial=owed_sums(table.dims[0]),
    )  # fmt: skip
    return Recipe((table, tokens), (out,), local_embedding, table, (), indexed=(0,))


def local_embedding(recipe: Recipe, at: Coordinate, table, tokens) -> tuple:
    """The rows of the tokens whose rows are on this rank, and zeros for the other tokens."""
    rows, elsewhere = local_indices(tokens, recipe.table, 0, at)
    if not _block_length(recipe.table, 0, at):
        return (aten.new_zeros.default(table, recipe.outs[0].local_shape(at)),)
    found = aten.embedding.default(table, rows)
    return (aten.masked_fill.Scalar(found, aten.unsqueeze.default(elsewhere, -1), 0),)


def embedding_backward(call: Call, ins: Sequence[Spec], out: Spec) -> Recipe:
    """The gradient of a table in shards of its rows, from gradients and tokens that all ranks of these axes have."""
    statics = call["padding_idx"], call["scale_grad_by_freq"]
    return Recipe(tuple(ins), (out,), local_embedding_backward, out, statics, indexed=(0,), op=call.name)


def local_embedding_backward(recipe: Recipe, at: Coordinate, grad, tokens) -> tuple:
    """What the tokens add to the rows of this rank. All others are padding, behind the last row."""
    padding, by_count = recipe.statics
    start, length = recipe.table.block(0, at)
    rows = aten.sub.Tensor(tokens, start)
    elsewhere = aten.logical_or.default(aten.lt.Scalar(rows, 0), aten.ge.Scalar(rows, length))
    if padding >= 0:
        elsewhere = aten.logical_or.default(elsewhere, aten.eq.Scalar(tokens, padding))
    rows = aten.masked_fill.Scalar(rows, elsewhere, length)
    longer = aten.embedding_dense_backward.default(grad, rows, length + 1, length, by_count)
    return (aten.slice.Tensor(longer, 0, 0, length),)


# ---- gather -----------------------------------------------------------------------------------


def gather(call: Call) -> Recipe | None:
    x, index = call["self"], call["index"]
    if not x.ndim or x.ndim != index.ndim or x.partial or x.dtype == torch.bool:
        return None
    along = call["dim"] % x.ndim
    others = [d for d in range(x.ndim) if d != along]
    if not x.dims[along] or any(x.dims[d] and x.shape[d] != index.shape[d] for d in others):
        return None
    used_axes = [a for axes in x.dims for a in axes]
    free_axes = tuple(a for a in index.dims[along] if a not in used_axes)
    dims = tuple(free_axes if d == along else x.dims[d] for d in range(x.ndim))
    units = tuple((index if d == along else x).units[d] for d in range(x.ndim))
    out = Spec.of(x.mesh, index.shape, x.dtype, dims=dims, units=units, partial=owed_sums(x.dims[along]))
    return Recipe((x, index.moved_to(dims, units)), (out,), local_gather, x, (along,), indexed=(along,))


def local_gather(recipe: Recipe, at: Coordinate, x, index) -> tuple:
    (dim,) = recipe.statics
    places, elsewhere = local_indices(index, recipe.table, dim, at)
    if not _block_length(recipe.table, dim, at):
        return (aten.new_zeros.default(x, recipe.outs[0].local_shape(at)),)
    return (aten.masked_fill.Scalar(aten.gather.default(x, dim, places), elsewhere, 0),)


# ---- losses -----------------------------------------------------------------------------------


def nll_loss(call: Call) -> Recipe | None:
    """For each row, one rank has the score of the row's class. The total weight is a sum over the ranks, too."""
    x, target, weight = call["self"], call["target"], call["weight"]
    if not _has_sharded_classes(x) or call["reduction"] == MEAN:
        return None
    rows, classes = x.dims
    target = target.moved_to((rows,), x.units[:1])
    weights = () if weight is None else (weight.moved_to((classes,), x.units[1:]),)
    one = Spec.of(x.mesh, (), x.dtype)
    if call["reduction"] == SUM:
        outs = (one.with_layout((), (), owed_sums(rows + classes)),) * 2
    else:
        each = Spec.of(x.mesh, target.shape, x.dtype, dims=(rows,), units=x.units[:1], partial=owed_sums(classes))
        outs = (each, one)
    statics = call["reduction"], call["ignore_index"]
    return Recipe((x, target, *weights), outs, local_nll_loss, x, statics, indexed=(1,))


def nll_loss_backward(call: Call) -> Recipe | None:
    x, target, weight = call["self"], call["target"], call["weight"]
    if not _has_sharded_classes(x):
        return None
    grad, rows = call["grad_output"], x.dims[0]
    grad = grad.moved_to((rows,), x.units[:1]) if grad.ndim else _replicated(grad)
    weights = () if weight is None else (weight.moved_to((x.dims[1],), x.units[1:]),)
    ins = (grad, x, target.moved_to((rows,), x.units[:1]), *weights, _replicated(call["total_weight"]))
    out = x.with_tensor(x.shape)
    statics = call["reduction"], call["ignore_index"]
    return Recipe(ins, (out,), local_nll_loss_backward, x, statics, indexed=(1,))


def _has_sharded_classes(x: Spec) -> bool:
    return x.ndim == 2 and bool(x.dims[1]) and not x.partial


def _local_classes(target, x, weight, spec: Spec, ignore_index: int, at: Coordinate) -> tuple:
    """For each row: its class in this block, the weight of the class, and whether the row contributes nothing here.

    A row contributes nothing where another rank has its class, and where its target is ignored.
    """
    ignored = aten.eq.Scalar(target, ignore_index)
    classes, elsewhere = local_indices(aten.masked_fill.Scalar(target, ignored, 0), spec, 1, at)
    masked = aten.logical_or.default(elsewhere, ignored)
    if weight is None or not _block_length(spec, 1, at):
        weights = aten.new_ones.default(x, [_block_length(spec, 0, at)])
    else:
        weights = aten.index_select.default(weight, 0, classes)
    return classes, aten.masked_fill.Scalar(weights, masked, 0), masked


def local_nll_loss(recipe: Recipe, at: Coordinate, x, target, weight=None) -> tuple:
    reduction, ignore_index = recipe.statics
    classes, weights, masked = _local_classes(target, x, weight, recipe.table, ignore_index, at)
    scores = aten.zeros_like.default(weights)
    if _block_length(recipe.table, 1, at):
        scores = aten.squeeze.dim(aten.gather.default(x, 1, aten.unsqueeze.default(classes, 1)), 1)
    losses = aten.neg.default(aten.mul.Tensor(scores, weights))
    losses = aten.masked_fill.Scalar(losses, masked, 0)  # a masked score of -inf must not become a NaN
    if reduction == NONE:
        return losses, aten.new_zeros.default(x, [])
    return aten.sum.default(losses), aten.sum.default(weights)


def local_nll_loss_backward(recipe: Recipe, at: Coordinate, grad, x, target, *rest) -> tuple:
    *weight, total = rest
    reduction, ignore_index = recipe.statics
    classes, weights, masked = _local_classes(target, x, *weight or (None,), recipe.table, ignore_index, at)
    row_grads = aten.div.Tensor(grad, total) if reduction == MEAN else grad
    row_grads = aten.masked_fill.Scalar(aten.neg.default(aten.mul.Tensor(weights, row_grads)), masked, 0)
    zeros = aten.zeros_like.default(x, memory_format=torch.contiguous_format)
    if not _block_length(recipe.table, 1, at):
        return (zeros,)
    index, values = aten.unsqueeze.default(classes, 1), aten.unsqueeze.default(row_grads, 1)
    return (aten.scatter_add.default(zeros, 1, index, values),)


RECIPES: dict[Any, Callable[[Call], Recipe | None]] = {
    aten.embedding.default: embedding,
    aten.gather.default: gather,
    aten.nll_loss_forward.default: nll_loss,
    aten.nll_loss_backward.default: nll_loss_backward,
}

MADE_IN_SHARDS: dict[Any, Callable[[Call, Sequence[Spec], Spec], Recipe]] = {
    aten.embedding_dense_backward.default: embedding_backward,
}
"""Ops that can make a result in shards of its first dim, which no operand has: their recipes by the specs of operands
and result. On the axes of these shards the operands are replicated."""
