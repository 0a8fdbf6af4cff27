"""Whether results follow from operands as they are: by one row of the op's rule on each axis, without a move.

    mm(f32[8@dp, 4], f32[4, 6])         f32[8@dp, 6] follows, by the row `Shard(0), Replicate() -> Shard(0)`
    mul(f32[8] +sum@dp, f32[8] +sum@dp) f32[8] +sum@dp does not: no row says so

`lower` chooses rows and makes the moves that they need. This asks the other way round about an op that stands in a
program: are its operands what some rows need, and its results what these rows give?
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from spmd.tensor.call import Call
from spmd.tensor.lower import _is_legal, _operand_spec, _replicated_rule, _result_spec
from spmd.tensor.lower.price import matches
from spmd.tensor.placement import Placement
from spmd.tensor.rules.book import rule_of
from spmd.tensor.rules.rule import Row, Rule, rows
from spmd.tensor.spec import Spec


def why_not(call: Call, outs: Sequence[Spec | None], skips_empty: bool = False) -> str:
    """Why the results do not follow from the operands of the call; empty if they do.

    outs: the specs of the results, None where the op returns no tensor. skips_empty: ranks with an empty block do not
    call the op, so that it need not have a row for them.
    """
    rule = rule_of(call) or _replicated_rule(call)
    options = rows(rule)
    by_axis = [
        [row for row in options if _has(call, outs, axis, row)] if n > 1 else [options[0]]
        for axis, n in enumerate(call.mesh.shape)
    ]
    for axis, found in enumerate(by_axis):
        if not found:
            return f"no row of {rule} has these placements on {call.mesh.axis_name(axis)}"
    if any(_gives(call, rule, list(choice), outs, skips_empty) for choice in itertools.product(*by_axis)):
        return ""
    return f"the blocks of the results are not those that the rows of {rule} give"


def _has(call: Call, outs: Sequence[Spec | None], axis: int, row: Row) -> bool:
    """Whether operands and results have the placements of the row on the axis; of shards, the dims."""
    if not all(matches(spec, axis, want) for spec, want in zip(call.tensors, row.ins, strict=True)):
        return False
    pairs = zip(outs, row.outs, strict=True)
    return all(spec is None or _alike(spec.on(axis), given) for spec, given in pairs)


def _alike(have: Placement, given: Placement) -> bool:
    return have.is_shard(given.dim) if given.is_shard() else have == given


def _gives(call: Call, rule: Rule, choice: list[Row], outs: Sequence[Spec | None], skips_empty: bool) -> bool:
    """Whether these rows need the operands as they are, and give these results."""
    axes = [a for a, n in enumerate(call.mesh.shape) if n > 1]
    if not skips_empty and not all(_is_legal(call, rule, choice, a, choice[a]) for a in axes):
        return False
    needed = tuple(_operand_spec(call, rule, choice, i) for i in range(len(call.tensors)))
    if not all(have.same_layout(want) for have, want in zip(call.tensors, needed, strict=True)):
        return False
    return all(
        spec is None or spec.same_layout(_result_spec(call, rule, choice, needed, j)) for j, spec in enumerate(outs)
    )

