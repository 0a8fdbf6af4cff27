"""A recipe: an op on blocks that lie as they do, by what a rank makes of its own block and of where that begins.

    trace(f32[n@dp, n@tp])    ->  f32[] +sum@dp +sum@tp: each rank adds up what it has of the diagonal

A rule says which dims ranks may do alone; a recipe may know more: where in the tensor the rank's block stands. Of that
the local function is told by the rank's coordinate. It reads no sizes off the blocks, so that it can be run on blocks
and over fx proxies alike. The recipes are in `vocabulary` and `matrices`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spmd.mesh import per_rank
from spmd.tensor.redistribute.plan import Plan, plan
from spmd.tensor.spec import Spec

At = tuple[int, ...]
"""The coordinate of a rank."""


@dataclass(frozen=True)
class Recipe:
    """How operands have to lie, how results then do, and what a rank makes of its blocks.

    local: a function of the recipe, of the rank's coordinate and of the blocks, in the order of the operands. table:
    how that lies in which is looked up, or the one operand. statics: the arguments that are no tensors and that count.
    """

    ins: tuple[Spec, ...]
    outs: tuple[Spec, ...]
    local: Callable
    table: Spec
    statics: tuple

    @property
    def __name__(self) -> str:
        return self.local.__name__

    def plans_from(self, specs: Sequence[Spec]) -> tuple[Plan, ...]:
        """How operands that lie so get to where they have to."""
        return tuple(plan(spec, target) for spec, target in zip(specs, self.ins, strict=True))

    def __call__(self, at: At, blocks: Sequence) -> tuple:
        """What the rank at the coordinate makes of its blocks: one for each result."""
        return self.local(self, at, *blocks)

    # ---- eagerly ------------------------------------------------------------------------------
    def plans(self, call: Any) -> tuple[Plan, ...]:
        return self.plans_from([x._spec for x in call.operands])

    def run(self, call: Any) -> Any:
        blocks = [way.run(x._local_tensor) for way, x in zip(self.plans(call), call.operands, strict=True)]
        found = _here(self, blocks)
        wrapped = tuple(call.dtensor(x, spec) for x, spec in zip(found, self.outs, strict=True))
        return wrapped if len(wrapped) > 1 else wrapped[0]


@per_rank
def _here(recipe: Recipe, blocks: list[torch.Tensor]) -> tuple:
    return recipe(recipe.table.mesh.get_coordinate(), blocks)


def summed(axes: Sequence[int]) -> list[tuple[int, str]]:
    """What a result owes that is a sum over these axes."""
    return [(a, "sum") for a in axes]
