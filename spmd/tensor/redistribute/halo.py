"""Halos: the rows around its block that a rank needs, from the ranks that have them.

    Halo((tp,), 2, ((-1, 5), (3, 9), ..))    from  f32[1, 8, 16@tp, 64]  to  f32[1, 8, 24@tp, 64]

A convolution of 3 rows needs one row more on each side of a block. Each rank receives these rows, and nothing else. The
tensor after the move has for each block the rows of an interval, one block after the other; so some rows are in it
twice. An interval may reach beyond the tensor: there, and where it is shorter than the longest, stands a number,
`fill`. So all blocks have one length, however uneven the shards are. An interval may be longer than the blocks, and
needs rows of several neighbours then; it may also be shorter, or elsewhere.

A `Margin` is the same where no rank needs rows of another. The adjoint of both adds rows up: a `HaloSum` sends each row
of an interval back to the rank whose block it is in, which adds what it receives. So gradients of a halo return.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
import torch

from spmd.comm.chunk import blocks
from spmd.mesh import cost
from spmd.tensor.redistribute.all_ranks import sides, volumes
from spmd.tensor.redistribute.boxes import Box, cut, narrowed, overlap, relative_to, shape_of, volume
from spmd.tensor.redistribute.collective_moves import from_wire, to_wire, wire_items
from spmd.tensor.redistribute.moves import Copied, Move, MoveContext, coordinates
from spmd.tensor.redistribute.plan import Plan, Step, plan
from spmd.tensor.spec import Spec

Interval = tuple[int, int]
"""Start and stop of rows."""


def intervals_of(spec: Spec, dim: int) -> list[Interval]:
    """The rows of every block of a sharded dim, the outermost axis slowest."""
    ranks = tuple(spec.mesh.shape[a] for a in spec.dims[dim])
    return [(start, start + length) for start, length in blocks(spec.shape[dim], spec.units[dim], ranks)]


def place_of(spec: Spec, dim: int, coordinate: Sequence[int]) -> int:
    """Which of the blocks of a dim a rank has, as `intervals_of` counts them."""
    place = 0
    for a in spec.dims[dim]:
        place = place * spec.mesh.shape[a] + coordinate[a]
    return place


@dataclass(frozen=True)
class Margin(Move):
    """The blocks of a dim become the rows of these intervals, one for each block. Nothing is sent."""

    dim: int
    intervals: tuple[Interval, ...]
    fill: float = 0

    kind = "margin"
    sends = False
    keeps_tensor = False
    copies = staticmethod(lambda have, want: Copied(0, volume(want[0]), 1))

    def needed(self, spec: Spec, coordinate: Sequence[int]) -> Box:
        """The box of the tensor that the rank at the coordinate needs."""
        box = spec.box(tuple(coordinate))
        start, stop = self.intervals[place_of(spec, self.dim, coordinate)]
        start = min(max(start, 0), spec.shape[self.dim])
        stop = max(start, min(stop, spec.shape[self.dim]))
        return (*box[: self.dim], (start, stop), *box[self.dim + 1 :])

    def start(self, x, ctx):
        return x

    def finish(self, y, ctx):
        return self._joined(y, [], ctx)

    def _joined(self, x, received: list[tuple[Box, torch.Tensor]], ctx: MoveContext):
        """The rows of the interval: those of the block x, those received, and the number that is filled in."""
        mine, need = ctx.before.box(ctx.coordinate), self.needed(ctx.before, ctx.coordinate)
        own, shape = overlap(mine, need), ctx.shape_after()
        if not prod(shape):
            return x.new_zeros(shape)
        parts = [*received, (own, narrowed(x, relative_to(own, mine), shape_of(mine)))] if volume(own) else received
        parts = [part for _, part in sorted(parts, key=lambda part: part[0])]
        (first, _), (start, stop) = self.intervals[place_of(ctx.before, self.dim, ctx.coordinate)], need[self.dim]
        before = start - first if parts else 0
        behind = shape[self.dim] - before - (stop - start if parts else 0)
        return torch.cat([*self._filled(x, before, shape), *parts, *self._filled(x, behind, shape)], self.dim)

    def _filled(self, x, rows: int, shape: Sequence[int]) -> list:
        size = [*shape[: self.dim], rows, *shape[self.dim + 1 :]]
        return [x.new_full(size, self.fill)] if rows else []

    def _details(self, before, after):
        return [str(self.dim), "+".join(map(str, self._rows_from_neighbours(before)))]

    def _rows_from_neighbours(self, spec: Spec) -> tuple[int, int]:
        """The most rows that a rank needs from the blocks before its own, and from those behind it."""
        pairs = list(zip(intervals_of(spec, self.dim), self.intervals, strict=True))
        wanted = [(p, q, max(a, 0), min(b, spec.shape[self.dim])) for (p, q), (a, b) in pairs]
        before = [min(p, b) - a for p, _, a, b in wanted]
        behind = [b - max(q, a) for _, q, a, b in wanted]
        return max(0, *before), max(0, *behind)


@dataclass(frozen=True)
class Halo(Margin):
    """The blocks of a dim become the rows of these intervals: each rank receives the rows that it lacks."""

    kind = "halo"
    sends = True
    priced = staticmethod(cost.all_to_all_cost)

    def nbytes(self, before, after):
        return int(np.max(self.received(before, after)))

    def received(self, before, after):
        wanted = [(max(a, 0), min(b, before.shape[self.dim])) for a, b in self.intervals]
        pairs = zip(wanted, intervals_of(before, self.dim), strict=True)
        lacking = [max(0, b - a) - _common((a, b), block) for (a, b), block in pairs]
        return over_ranks(lacking, before, self.dim) * before.dtype.itemsize

    def peak(self, before, after):
        return before.local_nbytes + after.local_nbytes + 2 * self.nbytes(before, after)

    def _sent(self, ctx: MoveContext) -> list[Box]:
        """The box of this rank's block that goes to each rank of the group; nothing goes to itself."""
        mine = ctx.before.box(ctx.coordinate)
        group = coordinates(ctx.before.mesh, self.axes, ctx.coordinate)
        return [_unless(at == ctx.coordinate, overlap(self.needed(ctx.before, at), mine)) for at in group]

    def _received(self, ctx: MoveContext) -> list[Box]:
        """The box that comes from each rank of the group."""
        need = self.needed(ctx.before, ctx.coordinate)
        group = coordinates(ctx.before.mesh, self.axes, ctx.coordinate)
        return [_unless(at == ctx.coordinate, overlap(ctx.before.box(at), need)) for at in group]

    def _is_empty(self, ctx: MoveContext) -> bool:
        """Whether the blocks of this group have no elements, because another dim is empty here."""
        return not prod(n for d, n in enumerate(ctx.shape_before()) if d != self.dim)

    def start(self, x, ctx):
        if self._is_empty(ctx):
            return x, x
        items, sent, mine = wire_items(ctx.before.dtype), self._sent(ctx), ctx.before.box(ctx.coordinate)
        flat = cut(x, ctx.shape_before(), [relative_to(box, mine) for box in sent])
        sizes = [[items * volume(box) for box in boxes] for boxes in (self._received(ctx), sent)]
        return x, ctx.transport.all_to_all_single(to_wire(flat, ctx.before.dtype), *sizes, ctx.group(self.axes))

    def finish(self, y, ctx):
        x, y = y
        if self._is_empty(ctx):
            return x.new_zeros(ctx.shape_after())
        y = from_wire(ctx.transport.wait_tensor(y), ctx.before.dtype)
        boxes = [box for box in self._received(ctx) if volume(box)]
        pieces = y.split([volume(box) for box in boxes], 0) if boxes else ()
        return self._joined(x, [(box, pieces[i].view(shape_of(box))) for i, box in enumerate(boxes)], ctx)


@dataclass(frozen=True)
class MarginSum(Margin):
    """The adjoint of a `Margin`: the rows of each interval are again those of the block. Nothing is sent."""

    kind = "margin_sum"

    def start(self, x, ctx):
        return x, x

    def finish(self, y, ctx):
        return self._summed(y[0], [], ctx)

    def _within(self, box: Box, ctx: MoveContext) -> Box:
        """The box, counted from the first row of this rank's interval, and in the other dims from that of its block."""
        mine = ctx.after.box(ctx.coordinate)
        first, _ = self.intervals[place_of(ctx.after, self.dim, ctx.coordinate)]
        return relative_to(box, (*mine[: self.dim], (first, first), *mine[self.dim + 1 :]))

    def _summed(self, x, received: list[tuple[Box, torch.Tensor]], ctx: MoveContext):
        """This rank's own rows of its interval, and those received, added to a block of zeros in their order."""
        mine = ctx.after.box(ctx.coordinate)
        own = overlap(self.needed(ctx.after, ctx.coordinate), mine)
        kept = [(own, narrowed(x, self._within(own, ctx), ctx.shape_before()))] if volume(own) else []
        terms = [self._placed(part, box[self.dim], mine[self.dim], len(mine)) for box, part in (*kept, *received)]
        return functools.reduce(torch.add, terms) if terms else x.new_zeros(ctx.shape_after())

    def _placed(self, part, rows: Interval, block: Interval, ndim: int):
        """These rows among the rows of a block, with zeros around them."""
        pads = [rows[0] - block[0], block[1] - rows[1]]
        return torch.nn.functional.pad(part, [*[0, 0] * (ndim - 1 - self.dim), *pads])

    def _details(self, before, after):
        return [str(self.dim), "+".join(map(str, self._rows_from_neighbours(after)))]


@dataclass(frozen=True)
class HaloSum(MarginSum):
    """The adjoint of a `Halo`: each rank receives the rows of its block from the intervals of others, and adds them."""

    kind = "halo_sum"
    sends = True
    priced = staticmethod(cost.all_to_all_cost)

    def nbytes(self, before, after):
        return Halo.nbytes(self, before, after)

    def received(self, before, after):
        wanted = [(max(a, 0), min(b, after.shape[self.dim])) for a, b in self.intervals]
        have = intervals_of(after, self.dim)
        rows = [sum([_common(block, w) for i, w in enumerate(wanted) if i != j]) for j, block in enumerate(have)]
        return over_ranks(rows, after, self.dim) * after.dtype.itemsize

    peak = Halo.peak

    def _others(self, ctx: MoveContext) -> tuple[tuple[int, ...], ...]:
        return coordinates(ctx.after.mesh, self.axes, ctx.coordinate)

    def _received(self, ctx: MoveContext) -> list[Box]:
        """The box of this rank's block that comes from each rank of the group."""
        mine = ctx.after.box(ctx.coordinate)
        return [_unless(at == ctx.coordinate, overlap(self.needed(ctx.after, at), mine)) for at in self._others(ctx)]

    def start(self, x, ctx):
        if not prod(n for d, n in enumerate(ctx.shape_after()) if d != self.dim):
            return x, x
        have, items = self.needed(ctx.after, ctx.coordinate), wire_items(ctx.after.dtype)
        boxes = [_unless(at == ctx.coordinate, overlap(ctx.after.box(at), have)) for at in self._others(ctx)]
        flat = cut(x, ctx.shape_before(), [self._within(box, ctx) for box in boxes])
        sizes = [[items * volume(box) for box in each] for each in (self._received(ctx), boxes)]
        return x, ctx.transport.all_to_all_single(to_wire(flat, ctx.after.dtype), *sizes, ctx.group(self.axes))

    def finish(self, y, ctx):
        x, y = y
        if not prod(n for d, n in enumerate(ctx.shape_after()) if d != self.dim):
            return x.new_zeros(ctx.shape_after())
        y = from_wire(ctx.transport.wait_tensor(y), ctx.after.dtype)
        boxes = [box for box in self._received(ctx) if volume(box)]
        pieces = y.split([volume(box) for box in boxes], 0) if boxes else ()
        return self._summed(x, [(box, pieces[i].view(shape_of(box))) for i, box in enumerate(boxes)], ctx)


def _common(a: Interval, b: Interval) -> int:
    """How many rows are in both intervals."""
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))


def over_ranks(rows: Sequence[int], spec: Spec, dim: int) -> np.ndarray:
    """The elements of so many rows for each block of a dim, as an array that broadcasts to the shape of the mesh."""
    axes, ns = spec.dims[dim], spec.mesh.shape
    counts = np.array(rows).reshape([ns[a] for a in axes]).transpose(np.argsort(axes))
    others = [side for d, side in enumerate(sides(spec)) if d != dim]
    return counts.reshape([n if a in axes else 1 for a, n in enumerate(ns)]) * volumes(others)


def _unless(nothing: bool, box: Box) -> Box:
    """The box, or one of no elements."""
    return tuple((start, start) for start, _ in box) if nothing else box


# ---- plans ------------------------------------------------------------------------------------


def halo(before: Spec, dim: int, intervals: Sequence[Interval], fill: float = 0) -> tuple[Step, ...]:
    """The step after which the block of each rank has the rows of its interval; no step if it has them already.

    before: its dim is sharded, and it owes no reduction.
    """
    have, size = intervals_of(before, dim), before.shape[dim]
    longest = max(stop - start for start, stop in intervals)
    if have == list(intervals) and all(stop - start == longest for start, stop in have):
        return ()
    within = zip(have, intervals, strict=True)
    sends = any(max(a, 0) < min(b, size) and not (p <= max(a, 0) and min(b, size) <= q) for (p, q), (a, b) in within)
    shape = (*before.shape[:dim], longest * len(intervals), *before.shape[dim + 1 :])
    units = (*before.units[:dim], 1, *before.units[dim + 1 :])
    after = Spec.of(before.mesh, shape, before.dtype, dims=before.dims, units=units)
    axes = tuple(sorted(before.dims[dim]))
    return (Step((Halo if sends else Margin)(axes, dim, tuple(intervals), fill), before, after),)


def adjoint(step: Step) -> Step:
    """The step that adds gradients of the rows of intervals to those of the blocks."""
    move = step.move
    return Step((HaloSum if move.sends else MarginSum)(move.axes, move.dim, move.intervals), step.after, step.before)


@dataclass(frozen=True)
class HaloPlan(Plan):
    """The moves of a tensor to another layout, and then the halos around its blocks."""

    moved: Plan

    @property
    def effective(self) -> HaloPlan:
        moved = self.moved.effective
        return HaloPlan(self.src, self.dst, (*moved.steps, *self.halos), moved)

    @property
    def halos(self) -> tuple[Step, ...]:
        """The last steps: halos and margins."""
        return self.steps[len(self.moved.steps) :]

    def starting_at(self, src: Spec) -> HaloPlan:
        """The same for a tensor that has another layout at first."""
        if src is self.src:
            return self
        moved = plan(src, self.moved.dst)
        return HaloPlan(src, self.dst, (*moved.steps, *self.halos), moved)

    @cached_property
    def lower_bound_bytes(self) -> int:
        return self.moved.lower_bound_bytes

    @property
    def instead(self) -> Spec:
        """The layout without the shards that need halos: from there, nothing is sent."""
        halos = {step.move.dim for step in self.halos}
        spec = self.moved.dst
        return spec.with_layout(tuple(() if d in halos else axes for d, axes in enumerate(spec.dims)), spec.units)


def plan_with_halos(src: Spec, dst: Spec, wanted: dict[int, Sequence[Interval]], fill: float = 0) -> HaloPlan:
    """The moves from src to dst, and then for these dims the rows of these intervals."""
    moved = plan(src, dst)
    steps, spec = moved.steps, dst
    for dim, intervals in wanted.items():
        more = halo(spec, dim, intervals, fill)
        steps, spec = (*steps, *more), more[-1].after if more else spec
    return HaloPlan(src, spec, steps, moved)


def sum_of_halos(dst: Spec, wanted: dict[int, Sequence[Interval]]) -> HaloPlan:
    """The plan that adds up to dst what the ranks have of these intervals; the adjoint of `plan_with_halos`."""
    there = plan_with_halos(dst, dst, wanted)
    return HaloPlan(there.dst, dst, tuple(adjoint(step) for step in reversed(there.halos)), plan(there.dst, there.dst))
