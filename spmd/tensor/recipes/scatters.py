"""Recipes for ops that write along a sharded dim, where an index says. The tensor that is written into stays sharded.

    scatter_reduce(f32[V@tp, d], 0, i64[t, d], f32[t, d], "prod")     ->  f32[V@tp, d]

Each rank gets the index and the source, and writes what belongs into its block. What belongs elsewhere is written into
one place more, which is dropped.

Left out: sums of sources that are larger than the tensor. There each rank adds what it has of the source, and the
terms are reduced (`spmd.tensor.rules.indexing`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmd.tensor.call import Call
from spmd.tensor.recipes.recipe import Coordinate, Recipe
from spmd.tensor.recipes.vocabulary import local_indices
from spmd.tensor.rules.block_ops import filled_up
from spmd.tensor.spec import Spec, contiguous

aten = torch.ops.aten


def scatter(call: Call) -> Recipe | None:
    x, index, src = call["self"], call["index"], call["src"]
    given = (index,) if src is None else (index, src)
    if not x.ndim or x.partial or any(t.ndim != x.ndim for t in given):
        return None
    along = call["dim"] % x.ndim
    table = _sharded_along(x, along, [d for d in range(x.ndim) if any(t.shape[d] != x.shape[d] for t in given)])
    if not table.dims[along]:
        return None
    adds = call.name == "scatter_add" or call["reduce"] in ("sum", "add")
    if adds and sum(t.nbytes for t in given) > x.nbytes:
        return None
    options = {name: call[name] for name in ("reduce", "include_self") if call[name] is not None}
    dims = tuple(() if d == along else axes for d, axes in enumerate(table.dims))
    units = tuple(1 if d == along else unit for d, unit in enumerate(table.units))
    ins = (table, *(t.moved_to(dims, units) for t in given))
    out_spec = table.with_tensor(x.shape, stride=contiguous(x.shape))
    statics = call.op, along, call["value"], tuple(options.items())
    return Recipe(ins, (out_spec,), local_scatter, table, statics, indexed=(along,) if table is x else None)


def _sharded_along(x: Spec, along: int, shorter: Sequence[int]) -> Spec:
    """The spec of x without shards of the other dims in which index or source are shorter: their shards go to `along`.

    A rank could not tell there which of the places of its block are written.
    """
    moved = tuple(a for d in shorter if d != along for a in x.dims[d])
    if not moved:
        return x
    dims = [(*axes, *moved) if d == along else () if d in shorter else axes for d, axes in enumerate(x.dims)]
    return x.moved_to(dims, [1 if d == along or d in shorter else unit for d, unit in enumerate(x.units)])


def local_scatter(recipe: Recipe, at: Coordinate, x, index, *src) -> tuple:
    op, along, value, options = recipe.statics
    _, length = recipe.table.block(along, at)
    places, elsewhere = local_indices(index, recipe.table, along, at)
    places = aten.masked_fill.Scalar(places, elsewhere, length)
    longer = filled_up(x, recipe.table.ndim, along, 1, 0)
    options = dict(options)
    if op is aten.scatter_reduce.two:
        src = (*src, options.pop("reduce"))
    out = op(longer, along, places, *(src or (value,)), **options)
    return (aten.slice_copy.Tensor(out, along, 0, length),)


RECIPES: dict[Any, Callable[[Call], Recipe | None]] = dict.fromkeys(
    (
        aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce, aten.scatter_add.default,
        aten.scatter_reduce.two,
    ),
    scatter,
)  # fmt: skip
