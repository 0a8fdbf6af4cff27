"""Recipes for the distances between all pairs of rows. The pairs are shared; every rank has all rows.

    _pdist_forward(f32[n@dp, d])     ->  f32[n (n - 1) / 2 @dp]      each rank has a block of the pairs
    _pdist_backward(...)             ->  f32[n, d] +sum@dp           and adds what its pairs contribute

The pairs of a block are those of some neighbouring rows with all rows. So a rank computes the distances from these rows
to all, and picks its pairs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from spmd.tensor.call import Call
from spmd.tensor.recipes.recipe import Coordinate, Recipe, owed_sums
from spmd.tensor.spec import Spec

aten = torch.ops.aten
EXACT = 2
"""The way of `_cdist_forward` that subtracts, as pdist does, and does not multiply matrices."""


def _pairs(x: Spec, out_shape: tuple[int, ...]) -> tuple[Spec, Spec] | None:
    """The rows, replicated, and the pairs, sharded by the axes that shard the rows; None if they are not sharded."""
    axes = tuple(a for sharding in x.dims for a in sharding)
    if not axes or not x.shape[1] or x.shape[0] < 2:
        return None
    return x.moved_to(((), ())), Spec.of(x.mesh, out_shape, x.dtype, dims=(axes,))


def pdist(call: Call) -> Recipe | None:
    found = _pairs(call["self"], call.outs[0].shape)
    return found and Recipe(found[:1], found[1:], local_pdist, found[1], (call["p"], call["self"].shape[0]))


def pdist_backward(call: Call) -> Recipe | None:
    x, distances = call["self"], call["pdist"]
    found = _pairs(x, distances.shape)
    if found is None:
        return None
    rows, pairs = found
    (axes,) = pairs.dims
    grad, distances = (t.moved_to(pairs.dims, pairs.units) for t in (call["grad"], distances))
    out = Spec.of(x.mesh, x.shape, x.dtype, partial=owed_sums(axes))
    return Recipe((grad, rows, distances), (out,), local_pdist_backward, pairs, (call["p"], x.shape[0]))


def _rows_of_pairs(recipe: Recipe, at: Coordinate) -> tuple[int, int, int, int]:
    """The rows that this rank's pairs begin with: the first, and how many. How many pairs they have before and behind.

    Pair (i, j), i < j, stands behind all pairs that begin with a lower row than i.
    """
    _, n = recipe.statics
    start, length = recipe.table.block(0, at)
    begin = [i * (2 * n - i - 1) // 2 for i in range(n + 1)]  # of the pairs of each row
    first = max(i for i in range(n) if begin[i] <= start)
    end = min(i for i in range(n + 1) if begin[i] >= start + length)
    return first, end - first, start - begin[first], begin[end] - start - length


def _all_distances(recipe: Recipe, x, first: int, rows: int) -> tuple:
    """The first rows of the pairs, and a mask of the pairs among the distances from these rows to all."""
    _, n = recipe.statics
    own = aten.slice.Tensor(x, 0, first, first + rows)
    ones = aten.new_ones.default(x, [rows, n], dtype=torch.bool)
    return own, aten.triu.default(ones, first + 1)


def local_pdist(recipe: Recipe, at: Coordinate, x) -> tuple:
    _, length = recipe.table.block(0, at)
    if not length:
        return (aten.new_zeros.default(x, [0]),)
    first, rows, before, _ = _rows_of_pairs(recipe, at)
    own, mask = _all_distances(recipe, x, first, rows)
    found = aten.masked_select.default(aten._cdist_forward.default(own, x, recipe.statics[0], EXACT), mask)
    return (aten.slice_copy.Tensor(found, 0, before, before + length),)


def local_pdist_backward(recipe: Recipe, at: Coordinate, grad, x, distances) -> tuple:
    p, n = recipe.statics
    _, length = recipe.table.block(0, at)
    if not length:
        return (aten.zeros_like.default(x),)
    first, rows, before, behind = _rows_of_pairs(recipe, at)
    own, mask = _all_distances(recipe, x, first, rows)
    zeros = aten.new_zeros.default(x, [rows, n])
    of_pairs = [aten.constant_pad_nd.default(t, [before, behind]) for t in (grad, distances)]
    grad, distances = (aten.masked_scatter.default(zeros, mask, t) for t in of_pairs)
    of_own = aten._cdist_backward.default(grad, own, x, p, distances)
    turned = [aten.clone.default(aten.t.default(t), memory_format=torch.contiguous_format) for t in (grad, distances)]
    of_all = aten._cdist_backward.default(turned[0], x, own, p, turned[1])
    return (aten.add.Tensor(of_all, aten.constant_pad_nd.default(of_own, [0, 0, first, n - first - rows])),)


RECIPES: dict[Any, Callable[[Call], Recipe | None]] = {
    aten._pdist_forward.default: pdist,
    aten._pdist_backward.default: pdist_backward,
}
