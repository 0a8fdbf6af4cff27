"""Lowering: an op on distributed tensors becomes moves of its operands, one local call, and the results' specs.

    mm(f32[8, 16@tp], f32[16@tp, 4])  ->  no moves, aten.mm, f32[8, 4] +sum@tp

`lower` is pure: it reads no tensor data, no rank, and sends nothing. The eager dispatcher, the expander and the
tests all read the same `Lowering`.

A row is chosen for each axis in turn: the cheapest of the rule's rows (`price.py`), given the rows of the other axes.
This is repeated until nothing changes. Rows of equal time are compared by the number of moves, made and owed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from math import inf

from spmd.comm.chunk import Unit, lengths, unit_over, unit_times
from spmd.tensor.call import Call
from spmd.tensor.lower.price import FORBIDDEN, FREE, Price, leaves_all_to_one, matches, price
from spmd.tensor.placement import Partial, Placement
from spmd.tensor.redistribute.plan import Plan, plan
from spmd.tensor.rules.book import rule_of
from spmd.tensor.rules.index_counts import Counts
from spmd.tensor.rules.rule import CountArguments, Row, Rule, rows
from spmd.tensor.spec import Spec, commute, contiguous

READS_STORAGE = {"as_strided", "as_strided_scatter", "set", "resize", "resize_as"}
"""Ops on the memory behind a tensor: a distributed tensor has no such memory."""


@dataclass(frozen=True)
class Lowering:
    """The work of every rank for one op.

    plans: how each operand gets to its target, in the order of `Call.tensors`.
    outs: the specs of the results, None where the op returns no tensor.
    sizes: the name of the argument to replace by the local size of a result. sized: the position of that result.
    counts: the arguments to replace by what they are in a rank's block.
    gathered: the op runs on replicated tensors on every rank, because its rule has no other row, or because no other
        is cheaper; or one rank has all of a tensor that was shared by the ranks of an axis. So the ranks do the work of
        one; an operand that is gathered where they share the work, as a weight of data parallelism, does not count.
    skips_empty: the op refuses an empty block, and some rank has one. On that rank the results are empty, and the op
        is not called.
    local: the function that a rank calls on its blocks, if that is not the op (`spmd.tensor.recipes.recipe`).
    rows: the row on each axis, where a rule gave the specs.
    """

    plans: tuple[Plan, ...]
    outs: tuple[Spec | None, ...]
    sizes: str | None = None
    gathered: bool = False
    skips_empty: bool = False
    local: Callable | None = None
    sized: int = 0
    counts: Counts | None = None
    rows: tuple[Row, ...] = ()

    @property
    def modelled_us(self) -> float:
        return sum(p.modelled_us for p in self.plans)

    @property
    def nbytes_gathered(self) -> int:
        """Bytes of the operands, whole, that every rank of some axis gets whole and had shared."""
        return sum(p.src.nbytes for p in self.plans if _sharding_axes(p.src) - _sharding_axes(p.dst))

    def __str__(self):
        ins = ", ".join(f"{p.src} -> {p.dst}" if p.steps else str(p.dst) for p in self.plans)
        return f"({ins}) -> {', '.join(map(str, self.outs))}"


def _sharding_axes(spec: Spec) -> set[int]:
    return {axis for axes in spec.dims for axis in axes}


def lower(
    call: Call, in_place: bool = False, skips_empty: bool = False, chosen: Sequence[Row] | None = None,
    rule: Rule | None = None,
) -> Lowering:  # fmt: skip
    """The cheapest right way to run a call.

    in_place: the first operand keeps its layout, where a row allows that.
    skips_empty: an op that refuses an empty block need not be called on a rank that has one (`Lowering.skips_empty`).
    chosen: a row for each axis, to run by these rows and no others; where they are not right for the call, it is
    lowered as without them. rule: that of the call, if it was asked for already.
    Raises NotImplementedError for an op on the memory behind a tensor.
    """
    if call.name in READS_STORAGE:
        raise NotImplementedError(
            f"{call.op}: strides of a distributed tensor say nothing about the memory of its blocks; use view, "
            "reshape, transpose, unfold or slicing"
        )
    rule = rule or rule_of(call) or _replicated_rule(call)
    skipped = frozenset(filter(rule.is_free, rule.nonempty)) if skips_empty else frozenset()
    rule = replace(rule, nonempty=rule.nonempty - skipped) if skipped else rule
    fits = chosen is not None and _are_right(call, rule, list(chosen))
    options = rows(rule)
    choice = list(chosen) if fits else _cheapest_rows(call, rule, options, in_place)
    ins = tuple(_operand_spec(call, rule, choice, i) for i in range(len(call.tensors)))
    outs = tuple(_result_spec(call, rule, choice, ins, j) for j in range(len(call.outs)))
    plans = tuple(plan(spec, target) for spec, target in zip(call.tensors, ins, strict=True))
    gathered = len(options) == 1 and any(not s.is_replicated and s.ndim for s in call.tensors)
    gathered |= not in_place and any(leaves_all_to_one(call, axis, row) for axis, row in enumerate(choice))
    skips_empty = any(f in skipped and not _all_filled(call, rule, choice, f) for f in {row.factor for row in choice})
    counts = rule.counts and _counts(rule.counts, ins[0], outs[0])
    return Lowering(
        plans, outs, rule.sizes, gathered, skips_empty, sized=rule.sized, counts=counts, rows=tuple(choice)
    )


def _counts(arguments: CountArguments, operand: Spec, result: Spec) -> Counts | None:
    """None where the dim is whole on all ranks, which then count as one device does."""
    spec = result if arguments.of_result else operand
    return Counts(arguments.names, spec, arguments.dim) if spec.dims[arguments.dim] else None


def is_cheaper_by_rule(call: Call, plans: Sequence[Plan], outs: Sequence[Spec]) -> bool:
    """Whether the rule of a call sends less than these plans and what these results owe.

    So it is for an embedding whose table and indices are sharded by one axis, if the table is smaller than the result:
    the table is gathered, where the indices would be, and then the result reduced. Plans that send nothing are kept.
    """
    if not any(step.sends for p in plans for step in p.steps) or rule_of(call) is None:
        return False
    by_rule = lower(call)
    return _nbytes_sent(by_rule.plans, by_rule.outs) < _nbytes_sent(plans, outs)


def _nbytes_sent(plans: Sequence[Plan], outs: Sequence[Spec | None]) -> int:
    """Bytes that a rank receives by the plans, and by the reductions that the results owe."""
    owed = [plan(spec, spec.with_layout(spec.dims, spec.units)) for spec in outs if spec is not None and spec.partial]
    return sum(p.bytes_per_rank for p in (*plans, *owed))


def _replicated_rule(call: Call) -> Rule:
    """The rule of an op that the book does not know: all dims of its operands are whole."""
    return Rule(
        tuple((None,) * s.ndim for s in call.tensors),
        tuple(None if o is None else (None,) * len(o.shape) for o in call.outs),
        kind=None,
    )


# ---- choosing rows ----------------------------------------------------------------------------

Choice = list[Row]
"""One row per axis of the mesh."""


def _first_cheapest(options: Sequence[Row], price_of: Callable[[Row, float], Price]) -> Row:
    """price_of: of a row, and microseconds above which it need not be told exactly."""
    best = options[0]
    least = price_of(best, inf)
    for row in options[1:]:
        if least == FREE:  # no price is lower
            break
        found = price_of(row, least.us)
        if found < least:
            best, least = row, found
    return best


def _cheapest_rows(call: Call, rule: Rule, options: Sequence[Row], in_place: bool) -> Choice:
    as_given = _rows_as_given(call, rule, options, in_place)
    if as_given is not None:
        return as_given
    choice = [options[0]] * call.mesh.ndim
    axes = [a for a, n in enumerate(call.mesh.shape) if n > 1]
    chosen_for: dict[int, Choice] = {}  # for an axis, the rows of the others, and its own
    for _ in range(3 if len(axes) > 1 else 1):
        before = list(choice)
        for axis in axes:
            if chosen_for.get(axis) == choice:
                continue
            choice[axis] = _first_cheapest(
                options, lambda row, most, a=axis: _price(call, rule, choice, a, row, in_place, most)
            )
            chosen_for[axis] = list(choice)
        if choice == before:
            break
    return choice


def _rows_as_given(call: Call, rule: Rule, options: Sequence[Row], in_place: bool) -> Choice | None:
    """The rows that take the operands as they are, if they cost nothing: so it is in most calls, and found at once."""
    choice = [options[0]] * call.mesh.ndim
    axes = [a for a, n in enumerate(call.mesh.shape) if n > 1]
    for axis in axes:
        given = tuple([x.on(axis) for x in call.tensors])
        row = next((row for row in options if row.ins == given), None)
        if row is None:
            return None
        choice[axis] = row
    free = all([_price(call, rule, choice, axis, choice[axis], in_place) == FREE for axis in axes])
    return choice if free else None


def _price(
    call: Call, rule: Rule, choice: Choice, axis: int, row: Row, in_place: bool, most: float = inf
) -> Price:  # fmt: skip
    """The price of a row on an axis, given the rows of the other axes. Rows that may not be chosen are forbidden."""
    if not _is_legal(call, rule, choice, axis, row):
        return FORBIDDEN
    if in_place and not _keeps_target(row, not matches(call.tensors[0], axis, row.ins[0]), call.tensors[0].on(axis)):
        return FORBIDDEN
    return price(call, choice, axis, row, most)


def rows_as_given(call: Call) -> tuple[Row, ...] | None:
    """The rows by which a call takes its operands as they are, whatever comes of it; None where it cannot.

    >>> import torch
    >>> from spmd.mesh import DeviceMesh
    >>> from spmd.tensor.call import TensorMeta
    >>> from spmd.tensor.spec import parse_spec
    >>> terms = parse_spec("bf16[8, 4] +sum@dp", DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",)))
    >>> cast = Call(torch.ops.aten._to_copy.default, (terms,), {}, (TensorMeta((8, 4), (4, 1), torch.float32),))
    >>> [row.outs for row in rows_as_given(cast)]
    [(Partial(),)]
    """
    rule = rule_of(call)
    given = [tuple([x.on(axis) for x in call.tensors]) for axis in range(call.mesh.ndim)]
    found = [next((row for row in (rows(rule) if rule else ()) if row.ins == ins), None) for ins in given]
    return None if None in found or not _are_right(call, rule, found) else tuple(found)


def _keeps_target(row: Row, moved: bool, have: Placement) -> bool:
    """Whether an in-place op may run by this row.

    The result has to have the placement of the target. The target is not moved, or a replicated copy or terms of it
    are made.
    """
    want = row.ins[0]
    copied = want.is_replicate() or (want.is_partial() and have.is_replicate())
    return row.outs[0] == want and (not moved or copied)


def _are_right(call: Call, rule: Rule, choice: Choice) -> bool:
    """Whether the call may run by these rows."""
    options = rows(rule)
    return all(row in options and _is_legal(call, rule, choice, axis, row) for axis, row in enumerate(choice))


def _is_legal(call: Call, rule: Rule, choice: Choice, axis: int, row: Row) -> bool:
    """Whether the row may be chosen on the axis, given the rows of the other axes."""
    trial = [*choice[:axis], row, *choice[axis + 1 :]]
    if sum([each.has_partial for each in trial]) > 1:  # a tensor has one kind of Partial, or sums and averages together
        tensors = [[r.ins[i] for r in trial] for i in range(len(rule.ins))]
        tensors += [[r.outs[j] for r in trial] for j in range(len(rule.outs))]
        if not all(commute(p.reduce_op for p in each if isinstance(p, Partial)) for each in tensors):
            return False
    return row.factor not in rule.nonempty or _all_filled(call, rule, trial, row.factor)


def _all_filled(call: Call, rule: Rule, choice: Choice, factor: Hashable) -> bool:
    """Whether no rank gets an empty block of the factor."""
    axes, base = _sharding(call, rule, choice, factor)
    ns = tuple(call.mesh.shape[a] for a in axes)
    i, d, f = next((i, d, f) for i, dims in enumerate(rule.ins) for d, f in enumerate(dims) if f and f.name == factor)
    return all(lengths(call.tensors[i].shape[d], unit_times(base, f.units), ns))


# ---- specs from the chosen rows ---------------------------------------------------------------


def _operand_spec(call: Call, rule: Rule, choice: Choice, i: int) -> Spec:
    """The spec that operand i has to have. If the operand has to move, its blocks become contiguous."""
    spec = call.tensors[i]
    dims, units = _layout(call, rule, choice, rule.ins[i])
    target = spec.with_layout(dims, units, _partial([row.ins[i] for row in choice]))
    if target is spec:
        return spec
    return Spec.of(
        spec.mesh, spec.shape, spec.dtype, stride=contiguous(spec.shape),
        dims=target.dims, units=target.units, partial=target.partial,
    )  # fmt: skip


def _result_spec(call: Call, rule: Rule, choice: Choice, ins: Sequence[Spec], j: int) -> Spec | None:
    """The spec of result j."""
    out = call.outs[j]
    if out is None:
        return None
    dims, units = _layout(call, rule, choice, rule.outs[j] or (None,) * len(out.shape))
    partial = _partial([row.outs[j] for row in choice])
    return Spec.of(call.mesh, out.shape, out.dtype, stride=out.stride, dims=dims, units=units, partial=partial)


def _partial(placements: Sequence[Placement]) -> list[tuple[int, str]]:
    return [(a, p.reduce_op) for a, p in enumerate(placements) if isinstance(p, Partial)]


def _layout(call: Call, rule: Rule, choice: Choice, dims) -> tuple[list[tuple[int, ...]], list[Unit]]:
    """The axes and the unit of each dim: those of its factor."""
    shards = [_sharding(call, rule, choice, f.name) if f else ((), 1) for f in dims]
    units = [unit_times(base, f.units) if f else 1 for f, (_, base) in zip(dims, shards, strict=True)]
    return [axes for axes, _ in shards], units


def _sharding(call: Call, rule: Rule, choice: Choice, factor: Hashable) -> tuple[tuple[int, ...], Unit]:
    """The ordered axes that shard a factor, and which of its indices stay together.

    The operand that is already sharded by most of these axes leads, of several the largest: its order and its unit are
    kept.
    """
    axes = {a for a, row in enumerate(choice) if row.factor == factor}
    leaders = [
        (len(axes & set(spec.dims[d])), spec.nbytes, -i, spec, d, f.units)
        for i, (spec, dims) in enumerate(zip(call.tensors, rule.ins, strict=True))
        for d, f in enumerate(dims)
        if f and f.name == factor and axes & set(spec.dims[d])
    ]
    if not leaders:
        return tuple(sorted(axes)), 1
    *_, spec, d, tied = max(leaders, key=lambda leader: leader[:3])
    kept = tuple(a for a in spec.dims[d] if a in axes)
    base = unit_over(spec.units[d], tied) if spec.aligned(d, tied) else 1
    return kept + tuple(sorted(axes - set(kept))), base
