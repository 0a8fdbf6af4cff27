"""Whether a move does what its specs say, whoever made the step.

    AllReduce over dp  from  f32[8] +sum@dp  to  f32[8]         legal
    AllReduce over tp  from  f32[8] +sum@dp  to  f32[8]         "nothing is owed on tp"
    Slice over dp      from  f32[8@tp]       to  f32[8@dp]      "ranks lack elements that they should have"

The planner makes legal steps. A pass that rewrites a program may not: `fault` is asked about each step of a program
(`spmd.expand.verify`). It reads both specs and nothing of the planner.
"""

from __future__ import annotations

import functools
from math import prod

import numpy as np

from spmd.comm.chunk import smallest_unit
from spmd.tensor.redistribute.all_ranks import overlaps, sides, volumes
from spmd.tensor.redistribute.collective_moves import AllGather, AllReduce, Exchange, ReduceInOrder, ReduceScatter
from spmd.tensor.redistribute.halo import Margin, MarginSum
from spmd.tensor.redistribute.moves import Move, Scale, Slice, ToPartial, View
from spmd.tensor.redistribute.plan import Step
from spmd.tensor.spec import Spec


def fault(step: Step) -> str:
    """Why the move does not lead from the one spec to the other; empty if it does.

    >>> from spmd.mesh import DeviceMesh
    >>> from spmd.tensor.spec import parse_spec
    >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    >>> owed, whole = parse_spec("f32[8] +sum@dp", mesh), parse_spec("f32[8]", mesh)
    >>> fault(Step(AllReduce((0,)), owed, whole)), fault(Step(AllReduce((1,)), owed, whole))
    ('', 'nothing is owed on tp')
    """
    return _fault(step.move, step.before, step.after)


@functools.lru_cache(maxsize=4096)
def _fault(move: Move, before: Spec, after: Spec) -> str:
    if before.mesh != after.mesh or before.dtype != after.dtype:
        return "the mesh or the dtype changes"
    if not isinstance(move, (View, Margin)) and before.shape != after.shape:
        return "the shape changes"
    return _FAULTS[_family(move)](move, before, after)


def _family(move: Move) -> type[Move]:
    return next(kind for kind in (*_FAULTS, Move) if isinstance(move, kind))


# ---- what is owed -----------------------------------------------------------------------------


def _owed(move: Move, before: Spec, after: Spec) -> str:
    """Whether exactly the axes of the move are no longer owed."""
    have, want = dict(before.partial), dict(after.partial)
    name = before.mesh.axis_name
    for axis in move.axes:
        if axis not in have:
            return f"nothing is owed on {name(axis)}"
    rest = {a: kind for a, kind in have.items() if a not in move.axes}
    return "" if rest == want else f"{_kinds(before, rest)} is left, not {_kinds(before, want)}"


def _kinds(spec: Spec, partial: dict[int, str]) -> str:
    return " ".join(f"+{kind}@{spec.mesh.axis_name(a)}" for a, kind in partial.items()) or "nothing"


def _same_owed(before: Spec, after: Spec) -> str:
    have, want = dict(before.partial), dict(after.partial)
    return "" if have == want else f"{_kinds(before, have)} is owed before, {_kinds(before, want)} after"


# ---- which elements ---------------------------------------------------------------------------


def _same_blocks(before: Spec, after: Spec) -> str:
    return "" if (before.dims, before.units) == (after.dims, after.units) else "the blocks change"


def _inside(before: Spec, after: Spec) -> str:
    """Whether each rank has all elements of its block after the move before it."""
    want = sides(after)
    if np.all(overlaps(sides(before), want) == volumes(want)):
        return ""
    return "ranks lack elements that they should have"


def _within_groups(move: Move, before: Spec, after: Spec) -> str:
    """Whether what a rank lacks is on the ranks of its group: of the axes that shard before, the others stay."""
    for d, x in enumerate(before.dims):
        moved = {*x[_cut_alike(before, after, d) :]} - {*move.axes}
        if moved:
            return f"{before.mesh.axis_name(min(moved))} shards dim {d} otherwise, and the move is not over it"
    return ""


def _cut_alike(before: Spec, after: Spec, d: int) -> int:
    """How many of the outermost axes of a dim cut it into the same blocks before and after: f32[4@tp] and
    f32[4@tp,cp/2] are alike in tp, on 2 x 2 ranks, though the units of whole dims differ."""
    n = 0
    while before.dims[d][: n + 1] == after.dims[d][: n + 1] and n < len(before.dims[d]):
        n += 1
    sizes = tuple([before.mesh.shape[a] for a in before.dims[d][:n]])
    while n and before.units[d] != after.units[d]:
        of = [smallest_unit(before.shape[d], spec.units[d], sizes[:n]) for spec in (before, after)]
        if of[0] == of[1]:
            break
        n -= 1
    return n


# ---- by move ----------------------------------------------------------------------------------


def _slice(move: Move, before: Spec, after: Spec) -> str:
    return _same_owed(before, after) or _inside(before, after)


def _view(move: Move, before: Spec, after: Spec) -> str:
    if prod(before.shape) != prod(after.shape) or np.any(volumes(sides(before)) != volumes(sides(after))):
        return "the number of elements changes"
    return _same_owed(before, after)


def _to_partial(move: ToPartial, before: Spec, after: Spec) -> str:
    want = {**dict(before.partial), **dict.fromkeys(move.axes, move.reduce_op)}
    if any(a in move.axes for a, _ in before.partial) or dict(after.partial) != want:
        return f"{_kinds(before, dict(after.partial))} is owed, not {_kinds(before, want)}"
    bare = [tuple(a for a in axes if a not in move.axes) for axes in before.dims]
    return "" if tuple(bare) == after.dims else "the blocks change"


def _scale(move: Move, before: Spec, after: Spec) -> str:
    turned = {a: "avg" if kind == "sum" else "sum" for a, kind in before.partial if a in move.axes}
    known = {*turned} == {*move.axes} and all(kind in ("sum", "avg") for a, kind in before.partial if a in move.axes)
    if not known or {**dict(before.partial), **turned} != dict(after.partial):
        return f"{_kinds(before, dict(before.partial))} does not become {_kinds(before, dict(after.partial))}"
    return _same_blocks(before, after)


def _all_gather(move: Move, before: Spec, after: Spec) -> str:
    if left := {*move.axes} & {a for axes in after.dims for a in axes}:
        return f"{before.mesh.axis_name(min(left))} still shards"
    return _same_owed(before, after) or _inside(after, before) or _within_groups(move, before, after)


def _exchange(move: Move, before: Spec, after: Spec) -> str:
    return _same_owed(before, after) or _within_groups(move, before, after)


def _all_reduce(move: Move, before: Spec, after: Spec) -> str:
    return _owed(move, before, after) or _same_blocks(before, after)


def _reduce_scatter(move: Move, before: Spec, after: Spec) -> str:
    scattered = {a for axes in after.dims for a in axes} >= {*move.axes}
    message = "" if scattered else "an axis of the move shards nothing after it"
    return _owed(move, before, after) or message or _inside(before, after)


def _reduce_in_order(move: Move, before: Spec, after: Spec) -> str:
    """A number has no dim to scatter: each rank receives all of its terms."""
    return _reduce_scatter(move, before, after) if before.ndim else _all_reduce(move, before, after)


def _margin(move: Margin, before: Spec, after: Spec) -> str:
    if isinstance(move, MarginSum):  # the other way
        before, after = after, before
    dim, (blocks, longest) = move.dim, (len(move.intervals), max(stop - start for start, stop in move.intervals))
    if before.dims != after.dims or {*move.axes} != {*before.dims[dim]} or before.partial or after.partial:
        return f"the shards are not those of dim {dim}, or something is owed"
    if prod(before.mesh.shape[a] for a in move.axes) != blocks:
        return f"it has {blocks} intervals, one for each block"
    want = (*before.shape[:dim], blocks * longest, *before.shape[dim + 1 :])
    units = (*before.units[:dim], 1, *before.units[dim + 1 :])
    return "" if (after.shape, after.units) == (want, units) else f"it gives blocks of {longest} rows"


_FAULTS = {
    Slice: _slice, View: _view, ToPartial: _to_partial, Scale: _scale, AllGather: _all_gather, Exchange: _exchange,
    Margin: _margin, AllReduce: _all_reduce, ReduceScatter: _reduce_scatter, ReduceInOrder: _reduce_in_order,
    Move: lambda move, before, after: "",
}  # fmt: skip
