"""Recipes: triangles and diagonals of matrices whose rows or columns are shared out, in place.

    tril(f32[n@dp, n@tp])           ->  f32[n@dp, n@tp]           each block with the diagonal where it crosses it
    trace(f32[n@dp, n@tp])          ->  f32[] +sum@dp +sum@tp
    diagonal_copy(f32[n@dp, m])     ->  f32[n] +sum@dp             zeros where the diagonal is another rank's

Entry (i, j) of a block that begins at row r and column c is entry (r + i, c + j): the diagonal that is `offset` to the
right of the main one is offset + r - c to the right of the block's own.

Left out: `diagonal`, which is a view, and shows what is gathered; and what writes in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from spmd.tensor.call import Call
from spmd.tensor.recipe import At, Recipe, summed
from spmd.tensor.spec import Spec

aten = torch.ops.aten


def _is_cut(x: Spec, *dims: int) -> bool:
    return any(x.dims[d] for d in dims)


def _begins(x: Spec, row: int, column: int, at: At) -> tuple[int, int]:
    return x.block(row, at)[0], x.block(column, at)[0]


# ---- triangles --------------------------------------------------------------------------------


def triangle(call: Call) -> Recipe | None:
    """As the tensor lies, Partials too: zeros are their own sum, maximum and product."""
    x, (out,) = call["self"], call.outs
    if not _is_cut(x, -2, -1):
        return None
    given = Spec.of(x.mesh, x.shape, x.dtype, stride=out.stride, dims=x.dims, units=x.units, partial=x.partial)
    return Recipe((x,), (given,), own_triangle, x, (call.op, call["diagonal"]))


def own_triangle(this: Recipe, at: At, x) -> tuple:
    op, diagonal = this.statics
    row, column = _begins(this.table, this.table.ndim - 2, this.table.ndim - 1, at)
    return (op(x, diagonal + row - column),)


# ---- diagonals --------------------------------------------------------------------------------


def trace(call: Call) -> Recipe | None:
    x, (out,) = call["self"], call.outs
    if x.partial or not _is_cut(x, 0, 1):
        return None
    given = Spec.of(x.mesh, (), out.dtype, partial=summed(x.dims[0] + x.dims[1]))
    return Recipe((x,), (given,), own_trace, x, ())


def own_trace(this: Recipe, at: At, x) -> tuple:
    row, column = _begins(this.table, 0, 1, at)
    return (aten.sum.default(aten.diagonal.default(x, row - column)),)


def diagonal(call: Call) -> Recipe | None:
    x, (out,) = call["self"], call.outs
    if not x.ndim or x.partial or x.dtype == torch.bool:
        return None
    of = call["dim1"] % x.ndim, call["dim2"] % x.ndim
    if not _is_cut(x, *of):
        return None
    rest = [d for d in range(x.ndim) if d not in of]
    given = Spec.of(
        x.mesh, out.shape, x.dtype, stride=out.stride, dims=(*(x.dims[d] for d in rest), ()),
        units=(*(x.units[d] for d in rest), 1), partial=summed(x.dims[of[0]] + x.dims[of[1]]),
    )  # fmt: skip
    return Recipe((x,), (given,), own_diagonal, x, (call["offset"], *of))


def own_diagonal(this: Recipe, at: At, x) -> tuple:
    offset, dim1, dim2 = this.statics
    (row, rows), (column, columns) = (this.table.block(d, at) for d in (dim1, dim2))
    own = offset + row - column
    length = max(min(rows + min(own, 0), columns - max(own, 0)), 0)
    before = row + max(-own, 0) + min(offset, 0) if length else 0
    after = this.outs[0].shape[-1] - length - before
    return (aten.constant_pad_nd.default(aten.diagonal.default(x, own, dim1, dim2), [before, after]),)


RECIPES: dict[Any, Callable[[Call], Recipe | None]] = {
    aten.tril.default: triangle,
    aten.triu.default: triangle,
    aten.trace.default: trace,
    aten.diagonal_copy.default: diagonal,
}
