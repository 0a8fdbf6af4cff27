"""The table of all recipes (`spmd.tensor.recipes.recipe`), by op.

    recipe_for(call of embedding(f32[V@tp, d], i64[t]))    the recipe whose local function is `local_embedding`
    recipe_for(call of embedding(f32[V, d], i64[t]))       None: no row of the table is on another rank

A recipe replaces the lowering by a rule where the specs of the operands call for it.
"""

from __future__ import annotations

from spmd.tensor.call import Call
from spmd.tensor.recipes import blocks, convolutions, ctc, distances, matrices, pooling, scatters, vocabulary
from spmd.tensor.recipes.recipe import Recipe

RECIPES = {}
for _recipes in (vocabulary, matrices, blocks, scatters, distances, ctc, convolutions, pooling):
    RECIPES |= _recipes.RECIPES


def recipe_for(call: Call) -> Recipe | None:
    """The recipe for a call, if its op has one that fits the specs of the operands; else None."""
    make_recipe = RECIPES.get(call.op)
    return None if make_recipe is None else make_recipe(call)
