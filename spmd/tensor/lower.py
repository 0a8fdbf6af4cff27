"""Lowering: an op on distributed tensors becomes moves of its operands, one local call, and the results' specs.

    mm(f32[8, 16@tp], f32[16@tp, 4])  ->  no moves, aten.mm, f32[8, 4] +sum@tp

`lower` is pure: no tensor data, no communication, no rank. The eager dispatcher, the expander and the
tests all read the same `Lowering`.

The row is chosen axis by axis: for each axis the cheapest of the rule's rows, given what the other axes do,
repeated until nothing changes. Rows that leave the largest operand shared out as it is go before rows that do
not, for that is where the work is; among them a row costs

    the moves of its operands  +  what its results still owe

A Partial owes its all-reduce, and a shard that no operand had owes its gather; so a sum over a linear chain is
done once, where it is cheapest, and nothing is sharded that nobody sharded. Rows of equal bytes are told apart by
the number of moves, made and owed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from math import inf, lcm, prod
from typing import NamedTuple

from spmd.comm.chunk import blocks
from spmd.mesh import cost
from spmd.tensor.call import Call
from spmd.tensor.placement import Partial, Placement, Shard
from spmd.tensor.redistribute.plan import Plan, plan
from spmd.tensor.rules.book import rule_of
from spmd.tensor.rules.rule import Row, Rule, rows
from spmd.tensor.spec import Spec, contiguous

READS_STORAGE = {"as_strided", "as_strided_scatter", "set", "resize", "resize_as"}
"""Ops on the memory behind a tensor."""


@dataclass(frozen=True)
class Lowering:
    """What one op becomes on every rank.

    plans: how each operand gets to its target, in the order of `Call.tensors`. outs: the specs of the results, None
    where the op returns no tensor. sizes: the name of the argument to replace by the local size of the first result.
    gathered: no row but the replicated one was known, so the op runs on whole tensors on every rank. empties: the op
    refuses an empty block, and some rank has one: there its results are empty, and the op is not called. local: what a
    rank runs on its blocks, where that is not the op (`spmd.tensor.recipe`).
    """

    plans: tuple[Plan, ...]
    outs: tuple[Spec | None, ...]
    sizes: str | None = None
    gathered: bool = False
    empties: bool = False
    local: Callable | None = None

    @property
    def modelled_us(self) -> float:
        return sum(p.modelled_us for p in self.plans)

    @property
    def nbytes_gathered(self) -> int:
        """Bytes of the operands that are made whole, where the op is `gathered`."""
        return sum(p.src.nbytes for p in self.plans if p.steps)

    def __str__(self):
        ins = ", ".join(f"{p.src} -> {p.dst}" if p.steps else str(p.dst) for p in self.plans)
        return f"({ins}) -> {', '.join(map(str, self.outs))}"


def lower(call: Call, in_place: bool = False, skips_empty: bool = False) -> Lowering:
    """The cheapest right way to run a call. With `in_place` the first operand stays as it lies, where a row allows.

    With `skips_empty` a rank without a block need not call an op that refuses an empty one, see `Lowering.empties`.
    Raises NotImplementedError for an op that looks at memory and not at a tensor.
    """
    if call.name in READS_STORAGE:
        raise NotImplementedError(
            f"{call.op}: strides of a distributed tensor say nothing about the memory of its blocks; use view, "
            "reshape, transpose, unfold or slicing"
        )
    rule = rule_of(call) or _whole(call)
    skipped = frozenset(f for f in rule.nonempty if _is_free(rule, f)) if skips_empty else frozenset()
    rule = replace(rule, nonempty=rule.nonempty - skipped) if skipped else rule
    choice = _cheapest_rows(call, rule, in_place)
    ins = tuple(_operand(call, rule, choice, i) for i in range(len(call.tensors)))
    outs = tuple(_result(call, rule, choice, ins, j) for j in range(len(call.outs)))
    plans = tuple(plan(spec, target) for spec, target in zip(call.tensors, ins, strict=True))
    sharded = any(not s.is_replicated and s.ndim for s in call.tensors)
    empties = any(f in skipped and not _all_filled(call, rule, choice, f) for f in {row.factor for row in choice})
    return Lowering(plans, outs, rule.sizes, gathered=sharded and len(rows(rule)) == 1, empties=empties)


def _is_free(rule: Rule, factor: Hashable) -> bool:
    """Whether every result has a dim of the factor, so that of an empty block there are empty results."""
    return all(dims is not None and any(f and f.name == factor for f in dims) for dims in rule.outs)


def _whole(call: Call) -> Rule:
    """The rule of an op that the book does not know: it sees all of every operand."""
    return Rule(
        tuple((None,) * s.ndim for s in call.tensors),
        tuple(None if o is None else (None,) * len(o.shape) for o in call.outs),
        kind=None,
    )


# ---- choosing rows ----------------------------------------------------------------------------

Choice = list[Row]
"""One row per axis of the mesh."""


class Price(NamedTuple):
    """What a row costs on an axis, in the order that counts. `us`: the bytes of moves made and owed."""

    forbidden: bool
    undoes: bool
    us: float
    moves: int
    moved: int


FORBIDDEN = Price(True, True, inf, 0, 0)
FREE = Price(False, False, 0.0, 0, 0)


def _first_cheapest(options: Sequence[Row], price: Callable[[Row], Price]) -> Row:
    best = options[0]
    least = price(best)
    for row in options[1:]:
        if least == FREE:  # nothing is less
            break
        us = price(row)
        if us < least:
            best, least = row, us
    return best


def _cheapest_rows(call: Call, rule: Rule, in_place: bool) -> Choice:
    options = rows(rule)
    choice = [options[0]] * call.mesh.ndim
    axes = [a for a, n in enumerate(call.mesh.shape) if n > 1]
    for _ in range(3 if len(axes) > 1 else 1):
        before = list(choice)
        for axis in axes:
            choice[axis] = _first_cheapest(options, lambda row, a=axis: _price(call, rule, choice, a, row, in_place))
        if choice == before:
            break
    return choice


def _price(call: Call, rule: Rule, choice: Choice, axis: int, row: Row, in_place: bool) -> Price:
    if not _legal(call, rule, choice, axis, row):
        return FORBIDDEN
    moved = [not _fits(spec, axis, want) for spec, want in zip(call.tensors, row.ins, strict=True)]
    if in_place and not _stays(row, moved[0], call.tensors[0].on(axis)):
        return FORBIDDEN
    which = call.which or range(len(moved))
    paid = {(w, want): i for i, (w, want, m) in enumerate(zip(which, row.ins, moved, strict=True)) if m}
    moves = [_transition(call, choice, axis, i, want) for (_, want), i in paid.items()]
    inherited = any(want.is_shard() and x.on(axis).is_shard() for want, x in zip(row.ins, call.tensors, strict=True))
    owed = [_owed(call, choice, axis, j, p, inherited) for j, p in enumerate(row.outs) if call.outs[j]]
    # Rounded: sums that are equal on paper must tie, and on every machine alike.
    us = round(sum(moves) + sum(owed), 6)
    return Price(False, _undoes(call, axis, moved), us, len(moves) + sum(o > 0 for o in owed), len(moves))


def _undoes(call: Call, axis: int, moved: Sequence[bool]) -> bool:
    """Whether the row takes apart how the largest operands are shared out on the axis."""
    largest = max(spec.nbytes for spec in call.tensors)
    return any(
        m and spec.nbytes == largest and spec.on(axis).is_shard() for spec, m in zip(call.tensors, moved, strict=True)
    )


def _stays(row: Row, moved: bool, have: Placement) -> bool:
    """Whether an in-place op may run by this row: where its target lies, or on a copy that is whole, or terms."""
    want = row.ins[0]
    copied = want.is_replicate() or (want.is_partial() and have.is_replicate())
    return row.outs[0] == want and (not moved or copied)


def _fits(spec: Spec, axis: int, want: Placement) -> bool:
    """Whether an operand lies on the axis as the row wants; a shard's blocks must begin at the row's units."""
    have = spec.on(axis)
    if not (isinstance(have, Shard) and isinstance(want, Shard)):
        return have == want
    return have.dim == want.dim and spec.aligned(have.dim, want.unit)


def _legal(call: Call, rule: Rule, choice: Choice, axis: int, row: Row) -> bool:
    trial = [*choice[:axis], row, *choice[axis + 1 :]]
    tensors = [[r.ins[i] for r in trial] for i in range(len(rule.ins))]
    tensors += [[r.outs[j] for r in trial] for j in range(len(rule.outs))]
    if not all(_commute(placements) for placements in tensors):
        return False
    return row.factor not in rule.nonempty or _all_filled(call, rule, trial, row.factor)


def _commute(placements: Sequence[Placement]) -> bool:
    """A tensor carries one kind of Partial, or sums and averages together."""
    kinds = {p.reduce_op for p in placements if isinstance(p, Partial)}
    return len(kinds) < 2 or kinds == {"sum", "avg"}


def _all_filled(call: Call, rule: Rule, choice: Choice, factor: Hashable) -> bool:
    """No rank holds an empty block of the factor, as its blocks will be cut."""
    axes, base = _sharding(call, rule, choice, factor)
    ns = tuple(call.mesh.shape[a] for a in axes)
    i, d, f = next((i, d, f) for i, dims in enumerate(rule.ins) for d, f in enumerate(dims) if f and f.name == factor)
    return all(length for _, length in blocks(call.tensors[i].shape[d], f.unit * base, ns))


# ---- pricing ----------------------------------------------------------------------------------
# Only bytes are priced here. Latencies hide: collectives overlap with work and are fused with each other; what is
# left of them is the number of moves, which decides between rows of equal bytes.


def _wire(collective: Callable[..., float], nbytes: float, axis: int, mesh) -> float:
    return collective(nbytes, axis, mesh.topology) - collective(0, axis, mesh.topology)


def _transition(call: Call, choice: Choice, axis: int, i: int, want: Placement) -> float:
    """Microseconds that the bytes of moving one operand on one axis take.

    It is moved while it is smallest: before other axes gather it, after they slice it.
    """
    spec, mesh = call.tensors[i], call.mesh
    have = spec.on(axis)
    others = [a for a, row in enumerate(choice) if a != axis and (spec.on(a).is_shard() or row.ins[i].is_shard())]
    nbytes = spec.nbytes / prod(mesh.shape[a] for a in others)
    if have.is_replicate():
        return 0.0
    if have.is_partial():
        return _wire(cost.reduce_scatter_cost if want.is_shard() else cost.all_reduce_cost, nbytes, axis, mesh)
    if isinstance(want, Shard) and want.dim != have.dim:
        return _wire(cost.all_to_all_cost, nbytes / mesh.shape[axis], axis, mesh)
    return _wire(cost.all_gather_cost, nbytes, axis, mesh)


def _owed(call: Call, choice: Choice, axis: int, j: int, placement: Placement, inherited: bool) -> float:
    """Microseconds of what a result leaves to be done: a Partial its reduction, a new shard its gather."""
    if placement.is_replicate() or (placement.is_shard() and inherited):
        return 0.0
    out, mesh = call.outs[j], call.mesh
    shards = prod(mesh.shape[a] for a, row in enumerate(choice) if a != axis and row.outs[j].is_shard())
    nbytes = prod(out.shape) * out.dtype.itemsize / shards
    return _wire(cost.all_reduce_cost if placement.is_partial() else cost.all_gather_cost, nbytes, axis, mesh)


# ---- specs from the chosen rows ---------------------------------------------------------------


def _operand(call: Call, rule: Rule, choice: Choice, i: int) -> Spec:
    spec = call.tensors[i]
    dims, units = _layout(call, rule, choice, rule.ins[i])
    target = spec.with_layout(dims, units, _partial([row.ins[i] for row in choice]))
    if target is spec:
        return spec
    return Spec.of(
        spec.mesh, spec.shape, spec.dtype, stride=contiguous(spec.shape),
        dims=target.dims, units=target.units, partial=target.partial,
    )  # fmt: skip


def _result(call: Call, rule: Rule, choice: Choice, ins: Sequence[Spec], j: int) -> Spec | None:
    out = call.outs[j]
    if out is None:
        return None
    dims, units = _layout(call, rule, choice, rule.outs[j] or (None,) * len(out.shape))
    partial = _partial([row.outs[j] for row in choice])
    return Spec.of(call.mesh, out.shape, out.dtype, stride=out.stride, dims=dims, units=units, partial=partial)


def _partial(placements: Sequence[Placement]) -> list[tuple[int, str]]:
    return [(a, p.reduce_op) for a, p in enumerate(placements) if isinstance(p, Partial)]


def _layout(call: Call, rule: Rule, choice: Choice, dims) -> tuple[list[tuple[int, ...]], list[int]]:
    """Axes and unit of each dim, from the factor it belongs to."""
    shards = [_sharding(call, rule, choice, f.name) if f else ((), 1) for f in dims]
    return [axes for axes, _ in shards], [f.unit * base if f else 1 for f, (_, base) in zip(dims, shards, strict=True)]


def _sharding(call: Call, rule: Rule, choice: Choice, factor: Hashable) -> tuple[tuple[int, ...], int]:
    """The ordered axes that shard a factor and how many of its indices stay together.

    The largest operand that lies so already leads: its order and its unit are kept.
    """
    axes = {a for a, row in enumerate(choice) if row.factor == factor}
    leaders = [
        (spec.nbytes, -i, spec, d, f.unit)
        for i, (spec, dims) in enumerate(zip(call.tensors, rule.ins, strict=True))
        for d, f in enumerate(dims)
        if f and f.name == factor and axes & set(spec.dims[d])
    ]
    if not leaders:
        return tuple(sorted(axes)), 1
    _, _, spec, d, tied = max(leaders, key=lambda leader: leader[:2])
    kept = tuple(a for a in spec.dims[d] if a in axes)
    # Both units divide the blocks, so their common multiple cuts them as they are.
    base = lcm(spec.units[d], tied) // tied if spec.aligned(d, tied) else 1
    return kept + tuple(sorted(axes - set(kept))), base
