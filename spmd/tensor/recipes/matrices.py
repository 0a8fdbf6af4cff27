"""Recipes for triangles and diagonals of matrices whose rows or columns are sharded. Nothing is gathered.

    tril(f32[n@dp, n@tp])           ->  f32[n@dp, n@tp]           each block is cut at the place of the global diagonal
    trace(f32[n@dp, n@tp])          ->  f32[] +sum@dp +sum@tp
    diagonal_copy(f32[n@dp, m])     ->  f32[n] +sum@dp            zeros where another rank has the entry

If a block begins at row r and column c, its entry (i, j) is entry (r + i, c + j) of the global matrix. So the global
diagonal with `offset` is the diagonal with offset + r - c of the block.

Left out: `diagonal`, which is a view and shows the gathered tensor; and ops that write in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from spmd.tensor.call import Call
from spmd.tensor.recipes.recipe import Coordinate, Recipe, owed_sums
from spmd.tensor.spec import Spec

aten = torch.ops.aten


def _is_sharded(x: Spec, *dims: int) -> bool:
    return any(x.dims[d] for d in dims)


def _block_start(x: Spec, row: int, column: int, at: Coordinate) -> tuple[int, int]:
    """The first row and column of the block of the rank at this coordinate."""
    return x.block(row, at)[0], x.block(column, at)[0]


# ---- triangles --------------------------------------------------------------------------------


def triangle(call: Call) -> Recipe | None:
    """The result has the placements of the operand, Partials included: zeros are their own sum, maximum and product."""
    x, (out,) = call["self"], call.outs
    if not _is_sharded(x, -2, -1):
        return None
    out_spec = Spec.of(x.mesh, x.shape, x.dtype, stride=out.stride, dims=x.dims, units=x.units, partial=x.partial)
    return Recipe((x,), (out_spec,), local_triangle, x, (call.op, call["diagonal"]))


def local_triangle(recipe: Recipe, at: Coordinate, x) -> tuple:
    op, diagonal = recipe.statics
    row, column = _block_start(recipe.table, recipe.table.ndim - 2, recipe.table.ndim - 1, at)
    return (op(x, diagonal + row - column),)


# ---- diagonals --------------------------------------------------------------------------------


def trace(call: Call) -> Recipe | None:
    x, (out,) = call["self"], call.outs
    if x.partial or not _is_sharded(x, 0, 1):
        return None
    out_spec = Spec.of(x.mesh, (), out.dtype, partial=owed_sums(x.dims[0] + x.dims[1]))
    return Recipe((x,), (out_spec,), local_trace, x, ())


def local_trace(recipe: Recipe, at: Coordinate, x) -> tuple:
    row, column = _block_start(recipe.table, 0, 1, at)
    return (aten.sum.default(aten.diagonal.default(x, row - column)),)


def diagonal(call: Call) -> Recipe | None:
    x, (out,) = call["self"], call.outs
    if not x.ndim or x.partial or x.dtype == torch.bool:
        return None
    pair = call["dim1"] % x.ndim, call["dim2"] % x.ndim
    if not _is_sharded(x, *pair):
        return None
    rest = [d for d in range(x.ndim) if d not in pair]
    out_spec = Spec.of(
        x.mesh, out.shape, x.dtype, stride=out.stride, dims=(*(x.dims[d] for d in rest), ()),
        units=(*(x.units[d] for d in rest), 1), partial=owed_sums(x.dims[pair[0]] + x.dims[pair[1]]),
    )  # fmt: skip
    return Recipe((x,), (out_spec,), local_diagonal, x, (call["offset"], *pair))


def local_diagonal(recipe: Recipe, at: Coordinate, x) -> tuple:
    offset, dim1, dim2 = recipe.statics
    local_offset, before, length = _diagonal_of_block(recipe.table, at, offset, dim1, dim2)
    after = recipe.outs[0].shape[-1] - length - before
    return (aten.constant_pad_nd.default(aten.diagonal.default(x, local_offset, dim1, dim2), [before, after]),)


def diagonal_scatter(call: Call) -> Recipe | None:
    """Each rank replaces the part of the diagonal that is in its block."""
    x, src = call["self"], call["src"]
    pair = call["dim1"] % x.ndim, call["dim2"] % x.ndim
    if x.partial or x.dtype != src.dtype or not _is_sharded(x, *pair):
        return None
    rest = [d for d in range(x.ndim) if d not in pair]
    src = src.moved_to((*(x.dims[d] for d in rest), ()), (*(x.units[d] for d in rest), 1))
    out_spec = x.with_tensor(x.shape, stride=call.outs[0].stride)
    return Recipe((x, src), (out_spec,), local_diagonal_scatter, x, (call["offset"], *pair))


def local_diagonal_scatter(recipe: Recipe, at: Coordinate, x, src) -> tuple:
    offset, dim1, dim2 = recipe.statics
    local_offset, before, length = _diagonal_of_block(recipe.table, at, offset, dim1, dim2)
    if not length:
        return (aten.clone.default(x),)
    part = aten.slice.Tensor(src, -1, before, before + length)
    return (aten.diagonal_scatter.default(x, part, local_offset, dim1, dim2),)


def _diagonal_of_block(x: Spec, at: Coordinate, offset: int, dim1: int, dim2: int) -> tuple[int, int, int]:
    """The part of the diagonal that is in the block of the rank at this coordinate.

    Its offset in the block, how many entries of the global diagonal are before it, and its length.
    """
    (row, rows), (column, columns) = (x.block(d, at) for d in (dim1, dim2))
    local_offset = offset + row - column
    length = max(min(rows + min(local_offset, 0), columns - max(local_offset, 0)), 0)
    return local_offset, row + max(-local_offset, 0) + min(offset, 0) if length else 0, length


RECIPES: dict[Any, Callable[[Call], Recipe | None]] = {
    aten.tril.default: triangle,
    aten.triu.default: triangle,
    aten.trace.default: trace,
    aten.diagonal_copy.default: diagonal,
    aten.diagonal_scatter.default: diagonal_scatter,
}
