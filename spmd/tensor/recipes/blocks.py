"""Recipes for `to_blocks` and `from_blocks` (`spmd.tensor.rules.block_ops`) along a sharded dim. Nothing is sent.

    to_blocks(f32[5@dp], 0, [2, 2, 1, 0], 0.0)     ->  f32[4@dp, 2]     each rank fills up its block
    from_blocks(f32[4@dp, 2], 0, [2, 2, 1, 0])     ->  f32[5@dp]        each rank drops what was filled up
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spmd.comm.chunk import Packed, Unit
from spmd.comm.chunk import lengths as lengths_of
from spmd.tensor.call import Call
from spmd.tensor.recipes.recipe import Coordinate, Recipe
from spmd.tensor.rules.block_ops import aten, filled_up, from_blocks, to_blocks
from spmd.tensor.spec import Spec


def _lengths(size: int, unit: Unit, axes: tuple[int, ...], mesh: Any) -> list[int]:
    return lengths_of(size, unit, tuple(mesh.shape[a] for a in axes))


def blocks_made(call: Call) -> Recipe | None:
    x, dim, lengths, (out,) = call["x"], call["dim"], call["lengths"], call.outs
    one_block = not isinstance(x.units[dim], Packed)
    if x.partial or not one_block or _lengths(x.shape[dim], x.units[dim], x.dims[dim], x.mesh) != list(lengths):
        return None
    dims, units = (*x.dims[: dim + 1], (), *x.dims[dim + 1 :]), (*x.units[:dim], 1, 1, *x.units[dim + 1 :])
    out_spec = Spec.of(x.mesh, out.shape, out.dtype, stride=out.stride, dims=dims, units=units)
    return Recipe((x,), (out_spec,), local_blocks_made, x, (dim, max(lengths), call["fill"]))


def local_blocks_made(recipe: Recipe, at: Coordinate, x) -> tuple:
    dim, longest, fill = recipe.statics
    length = recipe.table.length(dim, at)
    return (aten.unsqueeze.default(filled_up(x, recipe.table.ndim, dim, longest - length, fill), dim),)


def blocks_joined(call: Call) -> Recipe | None:
    """The blocks are those of `torch.chunk`, of one index or of a unit that divides all of them."""
    x, dim, lengths, (out,) = call["x"], call["dim"], call["lengths"], call.outs
    size, axes = out.shape[dim], x.dims[dim]
    ranks = [x.mesh.shape[a] for a in axes]
    unit = next((u for u in (1, *divisors(size)) if _lengths(size, u, axes, x.mesh) == list(lengths)), None)
    apart = x.units[dim] == 1 and len(lengths) == x.shape[dim]  # each rank has one of the blocks
    if x.partial or not ranks or not apart or x.dims[dim + 1] or unit is None:
        return None
    dims, units = (*x.dims[: dim + 1], *x.dims[dim + 2 :]), (*x.units[:dim], unit, *x.units[dim + 2 :])
    out_spec = Spec.of(x.mesh, out.shape, out.dtype, stride=out.stride, dims=dims, units=units)
    return Recipe((x,), (out_spec,), local_blocks_joined, x, (dim,))


def divisors(n: int) -> list[int]:
    """The numbers greater than 1 that divide n.

    >>> divisors(6)
    [2, 3, 6]
    """
    return [d for d in range(2, n + 1) if n % d == 0]


def local_blocks_joined(recipe: Recipe, at: Coordinate, x) -> tuple:
    (dim,) = recipe.statics
    length = recipe.outs[0].length(dim, at)
    return (aten.slice_copy.Tensor(aten.select.int(x, dim, 0), dim, 0, length),)


RECIPES: dict[Any, Callable[[Call], Recipe | None]] = {to_blocks: blocks_made, from_blocks: blocks_joined}
