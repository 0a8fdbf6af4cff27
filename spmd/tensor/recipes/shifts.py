"""Recipes for slices of a sharded dim that cut through blocks. Each rank receives the rows that its block lacks.

    slice(i64[8, 64@sp], 1, 1, None)     the tokens behind the first: each rank gets one from its neighbour
    slice_backward(f32[63@sp], ...)      and its gradient, backward, gives one back

The result is in the blocks of `torch.chunk`, with some rows for each rank; of fewer rows than ranks, and of parts for
which the dim is packed, the rule says where they go (`spmd.tensor.rules.movement`). So it does eagerly: what is
written into a view has to be written into its base.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch

from spmd.tensor.call import Call
from spmd.tensor.recipes.recipe import Coordinate, Recipe
from spmd.tensor.recipes.windows import Windows, interval_of, part, rows_plan
from spmd.tensor.rules.index_counts import place_within
from spmd.tensor.rules.movement import ranks_of, slice_gradient, sliced
from spmd.tensor.spec import Spec

aten = torch.ops.aten


def shifted(call: Call) -> Recipe | None:
    """A slice. Its rows are windows of one row."""
    x, (out,), step = call["self"], call.outs, call["step"]
    d = call["dim"] % x.ndim
    if type(step) is not int or not _is_shared(x, d, out) or sliced(call).ins[0][d] is not None:
        return None
    first = place_within(call["start"] or 0, x.shape[d])
    return _recipe(x, d, Windows(x.shape[d], out.shape[d], 1, step, -first), out)


def shifted_back(call: Call) -> Recipe | None:
    """The gradient of a slice without steps: zeros before and behind it."""
    grad, (out,) = call["grad_output"], call.outs
    d = call["dim"] % len(out.shape)
    if call["step"] != 1 or not _is_shared(grad, d, out) or slice_gradient(call).ins[0][d] is not None:
        return None
    first = place_within(call["start"], out.shape[d])
    return _recipe(grad, d, Windows(grad.shape[d], out.shape[d], 1, 1, first), out)


def _is_shared(x: Spec, d: int, out: Any) -> bool:
    """Whether a dim is sharded, and has rows for each of its ranks before and behind the call."""
    return bool(x.dims[d]) and 0 not in (*x.shape, *out.shape) and min(x.shape[d], out.shape[d]) >= ranks_of(x, d)


def _recipe(x: Spec, d: int, rows: Windows, out: Any) -> Recipe | None:
    """None where the rows of a slice without steps could all go to another dim for as many bytes."""
    given = x.moved_to(x.dims, x.units)
    units = (*x.units[:d], 1, *x.units[d + 1 :])
    result = Spec.of(x.mesh, out.shape, out.dtype, dims=x.dims, units=units)
    halo = rows_plan(x, given, ((d, rows),), result)
    ranks, shards = ranks_of(x, d), prod(ranks_of(x, dim) for dim in range(x.ndim))
    if rows.stride == 1 and halo.bytes_per_rank >= x.nbytes * (ranks - 1) / (ranks * shards):
        return None
    return Recipe((given,), (result,), local_shift, given, (d, rows), (halo,))


def local_shift(recipe: Recipe, at: Coordinate, x) -> tuple:
    (d, rows), (out,) = recipe.statics, recipe.outs
    first, end = rows.rows(interval_of(out, d, at))
    x = part(x, d, 0, end - first)
    return (aten.slice_copy.Tensor(x, d, 0, None, rows.stride) if rows.stride > 1 else aten.clone.default(x),)


RECIPES: dict[Any, Callable[[Call], Recipe | None]] = {
    aten.slice.Tensor: shifted,
    aten.slice_backward.default: shifted_back,
}
