"""A recipe runs an op on the blocks of sharded operands, where a rank only has to know where its block begins.

    trace(f32[n@dp, n@tp])    ->  f32[] +sum@dp +sum@tp: each rank adds up the diagonal entries of its own block

A rule says along which dims the ranks can work alone. A recipe can use more: the place of a rank's block in the global
tensor. The local function gets the coordinate of the rank and finds that place from it. It reads no sizes from the
blocks, so it runs on blocks and on fx proxies alike. The recipes are in `vocabulary` and `matrices`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spmd.mesh import per_rank
from spmd.tensor.redistribute.halo import HaloPlan
from spmd.tensor.redistribute.plan import Plan, plan
from spmd.tensor.spec import Spec

Coordinate = tuple[int, ...]
"""The coordinate of a rank on the mesh."""


@dataclass(frozen=True)
class Recipe:
    """The specs that the operands must have, the specs of the results, and the function of a rank's blocks.

    local: a function of the recipe, the coordinate of the rank and the blocks, in the order of the operands. table:
    the spec of the operand that is indexed, or of the only operand. statics: the arguments that are not tensors and
    that the local function needs. halos: the plans of the operands that get rows around their blocks as well
    (`redistribute.halo`), None for the others; empty if there are none. indexed: the dims of the table along which a
    rank has to know where its block is; None if that is so of all dims of all operands. sums: as halos, for results
    whose blocks have rows that belong to other ranks, which add them up. op: the name of the op whose work it does.
    """

    ins: tuple[Spec, ...]
    outs: tuple[Spec | None, ...]
    local: Callable
    table: Spec
    statics: tuple
    halos: tuple[HaloPlan | None, ...] = ()
    indexed: tuple[int, ...] | None = None
    sums: tuple[HaloPlan | None, ...] = ()
    op: str = ""

    @property
    def __name__(self) -> str:
        return self.local.__name__

    def plans_from(self, specs: Sequence[Spec]) -> tuple[Plan, ...]:
        """The plans that take operands from these specs to the specs that the recipe needs."""
        halos = self.halos or (None,) * len(self.ins)
        every = zip(specs, self.ins, halos, strict=True)
        return tuple(plan(spec, target) if halo is None else halo.starting_at(spec) for spec, target, halo in every)

    @property
    def given(self) -> tuple[Spec, ...]:
        """The specs of the blocks that the local function gets: the operands, with halos around some of them."""
        return tuple(p.dst for p in self.plans_from(self.ins))

    @property
    def made(self) -> tuple[Spec | None, ...]:
        """The specs of what the local function gives: the results, before some of them are added up."""
        sums = self.sums or (None,) * len(self.outs)
        return tuple(spec if p is None else p.src for spec, p in zip(self.outs, sums, strict=True))

    def moves_from(self, specs: Sequence[Spec]) -> tuple[Plan, ...]:
        """All that is moved: the operands, and the results that are added up."""
        return (*self.plans_from(specs), *filter(None, self.sums))

    def __call__(self, at: Coordinate, blocks: Sequence) -> tuple:
        """Run the local function for the rank at this coordinate: one block for each result."""
        return self.local(self, at, *blocks)

    # ---- eagerly ------------------------------------------------------------------------------
    def plans(self, call: Any) -> tuple[Plan, ...]:
        return self.plans_from([x._spec for x in call.operands])

    def run(self, call: Any) -> Any:
        blocks = [p.run(x) for p, x in zip(self.plans(call), call.blocks(), strict=True)]
        results = _run_local(self, blocks)
        if self.sums:
            results = [x if p is None else p.run(x) for x, p in zip(results, self.sums, strict=True)]
        pairs = zip(results, self.outs, strict=True)
        wrapped = tuple(None if spec is None else call.dtensor(x, spec) for x, spec in pairs)
        return wrapped if len(wrapped) > 1 else wrapped[0]


@per_rank
def _run_local(recipe: Recipe, blocks: list[torch.Tensor]) -> tuple:
    return recipe(recipe.table.mesh.get_coordinate(), blocks)


def owed_sums(axes: Sequence[int]) -> list[tuple[int, str]]:
    """The reductions that a result owes when it is a sum over these axes."""
    return [(a, "sum") for a in axes]
