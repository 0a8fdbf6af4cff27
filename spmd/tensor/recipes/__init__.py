"""The table of all recipes (`spmd.tensor.recipes.recipe`), by op.

    recipe_for(call of embedding(f32[V@tp, d], i64[t]))    the recipe whose local function is `local_embedding`
    recipe_for(call of embedding(f32[V, d], i64[t]))       None: no row of the table is on another rank

A recipe replaces the lowering by a rule where the specs of the operands call for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from spmd._torch import pytree
from spmd.comm.chunk import Packed
from spmd.tensor.call import Call
from spmd.tensor.recipes import (
    attention,
    blocks,
    convolutions,
    ctc,
    ctc_lengths,
    distances,
    matrices,
    pooling,
    scatters,
    shifts,
    vocabulary,
)  # fmt: skip
from spmd.tensor.recipes.recipe import Recipe
from spmd.tensor.spec import Spec

MADE_IN_SHARDS = vocabulary.MADE_IN_SHARDS
RECIPES = {}
for _recipes in (
    vocabulary, matrices, blocks, scatters, distances, ctc, ctc_lengths, convolutions, pooling, shifts, attention,
):  # fmt: skip
    RECIPES |= _recipes.RECIPES


def recipe_for(call: Call) -> Recipe | None:
    """The recipe for a call, if its op has one that fits the specs of the operands; else None.

    A rank looks for one place where its block begins, so packed dims become shards of one interval first.
    """
    make_recipe = RECIPES.get(call.op)
    recipe = make_recipe and _recipe_for(call, make_recipe)
    return recipe and replace(recipe, op=call.name)


def _recipe_for(call: Call, make_recipe: Callable[[Call], Recipe | None]) -> Recipe | None:
    if not any(x.is_packed for x in call.tensors):
        return make_recipe(call)
    unpacked = _with_specs(call, _in_one_block)
    recipe = make_recipe(unpacked)
    if recipe is None or recipe.indexed is None:
        return recipe
    tables = {x for x, other in zip(call.tensors, unpacked.tensors, strict=True) if other is recipe.table}
    return make_recipe(_with_specs(call, lambda x: _in_one_block(x, recipe.indexed) if x in tables else x))


def _with_specs(call: Call, spec_of: Callable[[Spec], Spec]) -> Call:
    """The call with operands of other layouts."""
    args, kwargs = pytree.tree_map_only(Spec, spec_of, (call.args, call.kwargs))
    return replace(call, args=args, kwargs=kwargs)


def _in_one_block(spec: Spec, dims: Sequence[int] | None = None) -> Spec:
    """The spec with some dims, or all, sharded by the same axes and not packed."""
    units = [1 if isinstance(u, Packed) and (dims is None or d in dims) else u for d, u in enumerate(spec.units)]
    return spec.moved_to(spec.dims, units, spec.partial)
