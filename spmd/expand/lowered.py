"""How an op of a graph is lowered: by the rows that were chosen for it, by a recipe, or by its rule.

    embedding_dense_backward(f32[8@dp, 4, d], i64[8@dp, 4])    ->  f32[V, d@tp] +sum@dp, by its rule
                                                               ->  f32[V@tp, d] +sum@dp, where that is its place

In a graph it is known where a result goes, and so some ops can make it in shards that no operand has
(`recipes.MADE_IN_SHARDS`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from spmd.tensor.call import Call
from spmd.tensor.lower import Lowering, is_cheaper_by_rule, lower
from spmd.tensor.placement import REPLICATE, Shard
from spmd.tensor.recipes import MADE_IN_SHARDS, recipe_for
from spmd.tensor.rules.rule import Row
from spmd.tensor.spec import Spec

MADE = "made"
"""The factor of a row whose result is made in shards that no operand has."""


def made_rows(call: Call) -> tuple[Row, ...]:
    """The rows by which a call can make its result in shards that no operand has, beyond those of its rule."""
    return (Row((REPLICATE,) * len(call.tensors), (Shard(0),), MADE),) if call.op in MADE_IN_SHARDS else ()


def lowered(call: Call, rows: Sequence[Row] | None = None, place: Spec | None = None) -> Lowering:
    """By the rows that are given, if they fit. Else as `spmd.tensor.eager.dispatch`: first a recipe, then a rule.

    place: where the result goes, if that is known.
    """
    if rows is not None:
        made = _made(call, rows)
        by_rows = made or lower(call, skips_empty=call.makes_new, chosen=rows)
        if by_rows.rows == tuple(rows):
            return by_rows
    recipe = recipe_for(call)
    if recipe is not None and not is_cheaper_by_rule(call, recipe.moves_from(call.tensors), recipe.outs):
        return Lowering(recipe.plans_from(call.tensors), recipe.outs, local=recipe)
    made = place and _made(call, _rows_to(call, place))
    return made or lower(call, skips_empty=call.makes_new)


def _rows_to(call: Call, place: Spec) -> tuple[Row, ...]:
    """The cheapest rows where the result is made in the shards of its place: on axes on which all operands are
    replicated. What is owed on other axes is so much less."""
    made, idle = made_rows(call), [a for a in place.dims[0] if all(x.on(a).is_replicate() for x in call.tensors)]
    if not made or not idle:
        return ()
    (out,) = call.outs
    rows = -(-out.shape[0] // prod(call.mesh.shape[a] for a in idle))
    smaller = replace(call, outs=(replace(out, shape=(rows, *out.shape[1:])),))
    return tuple(made[0] if a in idle else row for a, row in enumerate(lower(smaller).rows))


def _made(call: Call, rows: Sequence[Row]) -> Lowering | None:
    """By rows some of which make the result in shards; None if there are none, or the others do not fit."""
    making = tuple([a for a, row in enumerate(rows) if row.factor == MADE])
    if not making or call.op not in MADE_IN_SHARDS:
        return None
    whole = Row((REPLICATE,) * len(call.tensors), (REPLICATE,))
    rest = tuple([whole if a in making else row for a, row in enumerate(rows)])
    by_rule = lower(call, chosen=rest)
    if by_rule.rows != rest:
        return None
    (out,) = by_rule.outs
    out = out.moved_to((making, *out.dims[1:]), out.units, out.partial)
    recipe = MADE_IN_SHARDS[call.op](call, [p.dst for p in by_rule.plans], out)
    return replace(by_rule, outs=(out,), local=recipe, rows=tuple(rows))
