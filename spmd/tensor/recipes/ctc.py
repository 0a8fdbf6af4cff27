"""Recipes for the CTC loss over a sharded batch: a rank takes the lengths of its own sequences.

    _ctc_loss(f32[T, N@dp, C], i64[N@dp, S], [..N lengths..], [..N lengths..])  ->  f32[N@dp], f32[N@dp, T, 2 S + 1]

The lengths are lists of numbers for the global batch. Where the scores are sharded in time or by class, they are moved
to the batch. The targets may be one long list of all sequences, one behind the other; then every rank has all of it.
Lengths in tensors are read first by DTensors (`rules/counts.py`); for programs see `ctc_lengths`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from spmd.comm.chunk import Unit
from spmd.tensor.call import Call
from spmd.tensor.recipes.recipe import Coordinate, Recipe
from spmd.tensor.spec import Spec

aten = torch.ops.aten


def over_batch(x: Spec) -> tuple[tuple[int, ...], Unit]:
    """The axes that shard the batch of the scores, and its unit. The axes that shard another dim are added."""
    more = x.dims[0] + x.dims[2]
    return x.dims[1] + more, 1 if more else x.units[1]


def batched(x: Spec, axes: tuple[int, ...], unit: Unit, dim: int = 0) -> Spec:
    """The spec with the batch, at this dim, sharded by these axes."""
    return x.moved_to(
        tuple(axes if d == dim else () for d in range(x.ndim)), tuple(unit if d == dim else 1 for d in range(x.ndim))
    )


def _operands(call: Call, axes: tuple[int, ...], unit: Unit) -> tuple[Spec, Spec]:
    """The scores and the targets."""
    targets = call["targets"]
    of_targets = batched(targets, axes, unit) if targets.ndim > 1 else targets.moved_to(((),))
    return batched(call["log_probs"], axes, unit, 1), of_targets


def _statics(call: Call) -> tuple:
    return tuple(call["input_lengths"]), tuple(call["target_lengths"]), call["blank"], call["zero_infinity"]


def ctc_loss(call: Call) -> Recipe | None:
    x = call["log_probs"]
    if x.ndim != 3 or x.is_replicated:
        return None
    axes, unit = over_batch(x)
    ins = _operands(call, axes, unit)
    outs = tuple(
        batched(Spec.of(x.mesh, o.shape, o.dtype, stride=o.stride), axes, unit) for o in call.outs
    )
    return Recipe(ins, outs, local_ctc_loss, ins[0], _statics(call))


def ctc_loss_backward(call: Call) -> Recipe | None:
    x = call["log_probs"]
    if x.ndim != 3 or x.is_replicated:
        return None
    axes, unit = over_batch(x)
    scores, targets = _operands(call, axes, unit)
    grad, loss, alpha = (batched(call[name], axes, unit) for name in ("grad", "neg_log_likelihood", "log_alpha"))
    ins = grad, scores, targets, loss, alpha
    return Recipe(ins, (scores.with_tensor(x.shape),), local_ctc_loss_backward, scores, _statics(call))


def _own_part(recipe: Recipe, at: Coordinate, targets) -> tuple:
    """The targets and the lengths of the sequences of this rank, and how wide their table of paths is."""
    input_lengths, target_lengths, *_ = recipe.statics
    start, n = recipe.table.block(1, at)
    own = [list(x[start : start + n]) for x in (input_lengths, target_lengths)]
    if len(recipe.ins[_TARGETS[recipe.local]].shape) == 1:
        first = sum(target_lengths[:start])
        targets = aten.slice.Tensor(targets, 0, first, first + sum(own[1]))
    return targets, *own, 2 * max(own[1], default=0) + 1


def local_ctc_loss(recipe: Recipe, at: Coordinate, x, targets) -> tuple:
    *_, blank, zero_infinity = recipe.statics
    targets, input_lengths, target_lengths, width = _own_part(recipe, at, targets)
    if not input_lengths:
        return tuple(aten.new_zeros.default(x, spec.local_shape(at)) for spec in recipe.outs)
    loss, alpha = aten._ctc_loss.default(x, targets, input_lengths, target_lengths, blank, zero_infinity)
    return loss, aten.constant_pad_nd.default(alpha, [0, recipe.outs[1].shape[-1] - width])


def local_ctc_loss_backward(recipe: Recipe, at: Coordinate, grad, x, targets, loss, alpha) -> tuple:
    *_, blank, zero_infinity = recipe.statics
    targets, input_lengths, target_lengths, width = _own_part(recipe, at, targets)
    if not input_lengths:
        return (aten.zeros_like.default(x),)
    alpha = aten.slice_copy.Tensor(alpha, 2, 0, width)
    given = targets, input_lengths, target_lengths, loss, alpha, blank, zero_infinity
    return (aten._ctc_loss_backward.default(grad, x, *given),)


_TARGETS = {local_ctc_loss: 1, local_ctc_loss_backward: 2}
"""The position of the targets among the operands."""

RECIPES: dict[Any, Callable[[Call], Recipe | None]] = {
    aten._ctc_loss.default: ctc_loss,
    aten._ctc_loss_backward.default: ctc_loss_backward,
}
