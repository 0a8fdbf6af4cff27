"""All recipes (`spmd.tensor.recipe`), by op."""

from __future__ import annotations

from spmd.tensor import matrices, vocabulary
from spmd.tensor.call import Call
from spmd.tensor.recipe import Recipe

RECIPES = vocabulary.RECIPES | matrices.RECIPES


def recipe_for(call: Call) -> Recipe | None:
    """The recipe of a call whose operands lie so that it takes one; None where it takes none."""
    found = RECIPES.get(call.op)
    return None if found is None else found(call)
