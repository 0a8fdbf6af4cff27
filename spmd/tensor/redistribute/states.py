"""States: the layouts that a plan may pass through, as small tuples, and what each edge between two of them costs.

A state is (dims, units, pending): for each dim that matters the ordered axes that shard it and their unit, and the
axes whose reduction is still owed.

    f32[8@tp, 8] -> f32[8, 8@tp]        State(((0,), ()), (1, 1), ()) -> State(((), (0,)), (1, 1), ())

Left out are axes that change nothing - replicated, or partial of one kind, before and after - and dims that no axis
shards before or after. There are two exceptions: ranks that replicate may share the work of a reduction, and a plan may
pass through shards of one dim that is sharded neither before nor after.

The edges, each of them one move:

    slice, reduce_scatter    axes are added inside those that shard a dim; those that are pending are reduced
    all_gather               innermost axes of some dims are removed
    all_reduce               pending axes are reduced
    exchange                 to any other state with the same pending axes

`Space.edges` has the edges between two states; `graph.py` has those of all states at once. All numbers are integers,
bytes and picoseconds, so that every rank finds the same plan.
"""

# ruff: noqa: B905 - `strict` would slow the search; the zipped sequences have one entry for each dim

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from spmd.comm.chunk import Side, Unit, blocks, split_unit
from spmd.mesh import MeshTopoInfo
from spmd.mesh.cost import copies_are_priced
from spmd.tensor.redistribute.all_ranks import RankSides, common, interval_arrays
from spmd.tensor.redistribute.boxes import Box
from spmd.tensor.redistribute.collective_moves import AllGather, AllReduce, AllToAll, Exchange, Permute, ReduceScatter
from spmd.tensor.redistribute.moves import Copied, Move, Slice, in_rows
from spmd.tensor.spec import Spec

NO_COPIES = Copied()
Dims = tuple[tuple[int, ...], ...]
MOST_ALONE = 4  # axes that move one by one; if there are more, those that replicate before and after move together


class State(NamedTuple):
    """One layout of the tensor, with the axes whose reduction is owed."""

    dims: Dims
    units: tuple[Unit, ...]
    pending: tuple[int, ...]

    def written(self) -> tuple[Dims, tuple[tuple[int, int], ...]]:
        """What orders states of one price: shards of the first dims come first."""
        return self.dims[::-1], tuple(map(split_unit, self.units))


class Edge(NamedTuple):
    """A move from one state to the state `to`.

    ps: picoseconds. sent: bytes that the busiest rank receives. peak: bytes of memory that it needs meanwhile.
    """

    to: State
    move: type[Move]
    axes: tuple[int, ...]
    ps: int
    sent: int
    peak: int


Cut = tuple[tuple[int, ...], Unit]  # the axes that shard a dim, and the unit


class Cutting(NamedTuple):
    """How dims may be sharded: each by the outer axes that it keeps in all states, and inside these by axes that move.

    sizes, prefixes, units: of each dim its size, the axes that it keeps, and the units that occur.
    movable: the axes that move; each entry is a group of axes that move together.
    rank_axes: all axes that matter.
    """

    sizes: tuple[int, ...]
    prefixes: tuple[tuple[int, ...], ...]
    units: tuple[tuple[Unit, ...], ...]
    movable: tuple[tuple[int, ...], ...]
    rank_axes: tuple[int, ...]
    mesh_shape: tuple[int, ...]

    def cut(self, d: int, numbers: tuple[int, ...], unit: int) -> Cut:
        """How dim d is sharded in a layout: `numbers` are those of the movable axes, `unit` the number of the unit."""
        axes = (*self.prefixes[d], *[a for i in numbers for a in self.movable[i]])
        return axes, self.units[d][unit] if axes else 1

    def layout(self, d: int, state: State) -> tuple[tuple[int, ...], int]:
        """The arguments of `cut` for dim d in this state."""
        axes = state.dims[d][len(self.prefixes[d]) :]
        numbers = [i for a in axes for i, each in enumerate(self.movable) if each[0] == a]
        return tuple(numbers), self.units[d].index(state.units[d]) if axes else 0


class Space:
    """All states between two specs of one tensor, and the edges between them.

    live_dims: the dims that matter. stays_partial, becomes_partial: axes that are Partial before and after, and only
    after. element_bytes: bytes of all elements with one index in the live dims. starts_with_dim_0: whether the live
    dims begin with dim 0.
    """

    def __init__(self, src: Spec, dst: Spec, topology: MeshTopoInfo) -> None:
        self.mesh_shape, self.topology = src.mesh.shape, topology
        have, want = dict(src.partial), dict(dst.partial)
        self.stays_partial = tuple(a for a, kind in src.partial if want.get(a) == kind)
        self.becomes_partial = tuple(a for a in want if a not in self.stays_partial)  # at the end of the plan
        pending = tuple(a for a in have if a not in self.stays_partial)
        self.copies_are_priced = copies_are_priced(topology)
        # One more dim helps: a sum is scattered over it, shards are reordered inside a host before they leave it, or
        # blocks arrive in order in it.
        spare = bool(pending) or topology.layout.levels > 1 or self.copies_are_priced
        self.live_dims = _dims_that_matter(src, dst, spare, rows=self.copies_are_priced)
        self.sizes = tuple([src.shape[d] for d in self.live_dims])
        self.start, self.goal = self._state(src, pending), self._state(dst, ())
        self.cutting = self._cutting({*have, *want})
        self.element_bytes = prod([n for d, n in enumerate(src.shape) if d not in self.live_dims]) * src.dtype.itemsize
        self._ns = tuple([self.mesh_shape[a] for a in self.cutting.rank_axes])
        self.starts_with_dim_0 = self.live_dims[:1] == [0]  # whether the dims that matter begin with the first of all
        self._itemsize = src.dtype.itemsize
        self._wire_itemsize = AllReduce(pending).wire_itemsize(src) if pending else self._itemsize

    def _state(self, spec: Spec, pending: tuple[int, ...]) -> State:
        dims, units = [tuple(of[d] for d in self.live_dims) for of in (spec.dims, spec.units)]
        return State(dims, units, pending)

    def _cutting(self, partial: set[int]) -> Cutting:
        start, goal = self.start, self.goal
        prefixes = tuple(map(_common_prefix, start.dims, goal.dims, start.units, goal.units))
        every = zip(start.units, goal.units, prefixes)
        units = [(v,) if p else tuple(sorted({u, v}, key=split_unit)) for u, v, p in every]
        shards = {a for axes in (*start.dims, *goal.dims) for a in axes}
        live = {*shards, *start.pending, *self.becomes_partial}
        fixed = {a for axes in prefixes for a in axes}
        helpers = []
        if start.pending or self.topology.layout.levels > 1:
            # Ranks that replicate may share a reduction, or what arrives from another host.
            helpers = [a for a, n in enumerate(self.mesh_shape) if n > 1 and a not in partial | shards]
        needed = [(a,) for a in sorted(live - fixed)]
        alone = len(needed) + len(helpers) <= MOST_ALONE
        movable = (*needed, *([(a,) for a in helpers] if alone else self._grouped_by_levels(helpers)))
        return Cutting(self.sizes, prefixes, tuple(units), movable, tuple(sorted({*live, *helpers})), self.mesh_shape)

    def _grouped_by_levels(self, axes: Sequence[int]) -> list[tuple[int, ...]]:
        """The axes in groups; axes that cross the same levels of links are in one group."""
        found: dict[tuple, list[int]] = {}
        for a in axes:
            levels = tuple([tuple([rung.level for rung in ladder]) for ladder in self.topology.crossings(a)])
            found.setdefault(levels, []).append(a)
        return [tuple(each) for each in found.values()]

    # ---- edges ---------------------------------------------------------------------------------
    def edges(self, s: State, t: State) -> Iterator[Edge]:
        """Every single move from s to t, another state."""
        reduced = tuple([a for a in s.pending if a not in t.pending])
        if reduced:
            if s[:2] == t[:2]:
                yield self._all_reduce(s, t, reduced)
            elif _is_inside(s, t) and set(reduced) == set(_added(s, t)).intersection(s.pending):
                yield self._reduce_scatter(s, t, reduced)
        elif s.pending == t.pending:
            if _is_inside(s, t):
                axes, both = _added(s, t), self.largest(s) + self.largest(t)
                yield Edge(t, Slice, axes, self.ps(Slice, axes, 0, s, t), 0, both)
            else:
                yield self._exchange(s, t)
                if _is_inside(t, s):
                    yield self._all_gather(s, t)

    def _reduce_scatter(self, s: State, t: State, axes: tuple[int, ...]) -> Edge:
        before, after, n = self.largest(s), self.largest(t), self.size(axes)
        sent = (n - 1) * self.wire_bytes(after)
        packed = 0 if self.in_rows(axes, t) else min(before, n * after)
        return Edge(t, ReduceScatter, axes, self.ps(ReduceScatter, axes, sent, s, t), sent, before + packed + after)

    def _all_reduce(self, s: State, t: State, axes: tuple[int, ...]) -> Edge:
        mine, n = self.largest(s), self.size(axes)
        sent = 2 * (n - 1) * self.wire_bytes(mine) // n
        return Edge(t, AllReduce, axes, self.ps(AllReduce, axes, sent, s, t), sent, 2 * mine)

    def _all_gather(self, s: State, t: State) -> Edge:
        axes, mine = _added(t, s), self.largest(s)
        sent = (self.size(axes) - 1) * mine
        whole = self.largest(t) * (1 if self.in_rows(axes, s) else 2)
        return Edge(t, AllGather, axes, self.ps(AllGather, axes, sent, s, t), sent, mine + whole)

    def _exchange(self, s: State, t: State) -> Edge:
        """An exchange; a slice, if no rank lacks anything because all that would move is empty."""
        shared = [_common_prefix(x, y, u, v) for x, y, u, v in zip(s.dims, t.dims, s.units, t.units)]
        axes = tuple(sorted([a for x, p in zip(s.dims, shared) for a in x[len(p) :]]))
        want = tuple(sorted([a for x, p in zip(t.dims, shared) for a in x[len(p) :]]))
        sent, both = self.lacks(s, t), self.largest(s) + self.largest(t)
        if not sent:
            return Edge(t, Slice, axes, self.ps(Slice, axes, 0, s, t), 0, both)
        move: type[Move] = Exchange
        if axes == want:
            same = all([self._same_blocks(*each) for each in zip(self.sizes, s.units, s.dims, t.units, t.dims)])
            move = Permute if same else AllToAll
        return Edge(t, move, axes, self.ps(move, axes, sent, s, t), sent, both if move is Permute else 2 * both)

    # ---- the goal -----------------------------------------------------------------------------
    def reaches_goal(self, s: State) -> bool:
        """Whether only moves to Partial are left, which send nothing."""
        if s.pending:
            return False
        if not self.becomes_partial:
            return s == self.goal
        if s[:2] == self.goal[:2]:
            return True
        return _is_inside(self.goal, s) and {*_added(self.goal, s)} <= {*self.becomes_partial}

    # ---- sizes --------------------------------------------------------------------------------
    def largest(self, state: State) -> int:
        """Bytes of the largest block, which is that of the first rank."""
        ns = self.mesh_shape
        lengths = [
            _first_length(size, unit, tuple([ns[a] for a in axes])) if axes else size
            for size, unit, axes in zip(self.sizes, state.units, state.dims)
        ]
        return prod(lengths) * self.element_bytes

    def lacks(self, a: State, b: State) -> int:
        """Bytes that the busiest rank has to receive to come from its block in a to its block in b."""
        have, want = 1, 1
        for size, ua, ub, x, y in zip(self.sizes, a.units, b.units, a.dims, b.dims):
            lengths, common = _overlaps(size, ua, x, ub, y, self.cutting.rank_axes, self._ns)
            want, have = want * lengths, have * common
        return int(np.max(want - have)) * self.element_bytes

    def wire_bytes(self, nbytes: int) -> int:
        """Bytes on the wire of a block of so many bytes, when it is reduced."""
        return nbytes // self._itemsize * self._wire_itemsize

    def size(self, axes: tuple[int, ...]) -> int:
        """How many ranks a group along the axes has."""
        return prod([self.mesh_shape[a] for a in axes])

    def in_rows(self, axes: tuple[int, ...], state: State) -> bool:
        """Whether the blocks of a group along the axes are consecutive rows of the tensor."""
        return self.live_dims[0] == 0 and in_rows(axes, state.dims, state.units)

    def _same_blocks(self, size: int, u: Unit, x: tuple[int, ...], v: Unit, y: tuple[int, ...]) -> bool:
        if x == y and u == v:
            return True
        ns = [tuple([self.mesh_shape[a] for a in axes]) for axes in (x, y)]
        return prod(ns[0]) == prod(ns[1]) and nonempty_blocks(size, u, ns[0]) == nonempty_blocks(size, v, ns[1])

    # ---- prices -------------------------------------------------------------------------------
    def ps(self, move: type[Move], axes: tuple[int, ...], sent: int, s: State, t: State) -> int:
        """Picoseconds of a move from s to t over these axes, if the busiest rank receives so many bytes."""
        copied = Copied()
        if self.copies_are_priced:
            copied = move.copies(self._members(s, axes), self._members(t, axes)).in_bytes(self.element_bytes)
        return int(self.us(move, axes, sent, copied) * 1e6)

    def us(self, move: type[Move], axes: tuple[int, ...], sent: int, copied: Copied = NO_COPIES) -> float:
        """Microseconds of a move that sends and copies so many bytes."""
        return _us(self.topology, move, axes, sent, copied)

    def _members(self, s: State, axes: tuple[int, ...]) -> list[Box]:
        """The boxes of the first group along some axes.

        The dims that do not matter are left out. If dim 0 is one of them, one dim stands for it, because it decides
        whether elements are in order.
        """
        ranks = zip(self.cutting.rank_axes, self._ns)
        at = [*itertools.product(*[range(n) if a in axes else (0,) for a, n in ranks])]
        every = zip(self.sizes, s.units, s.dims)
        sides = [_intervals(size, unit, sharding, self.cutting.rank_axes, self._ns) for size, unit, sharding in every]
        first = () if self.starts_with_dim_0 else ((0, 1),)
        return [(*first, *[side.of_rank(c) for side in sides]) for c in at]


@functools.lru_cache(maxsize=65536)
def _us(topology: MeshTopoInfo, move: type[Move], axes: tuple[int, ...], sent: int, copied: Copied) -> float:
    return move(axes).us(sent, copied, topology)


def _dims_that_matter(src: Spec, dst: Spec, spare: bool, rows: bool) -> list[int]:
    """Dims that are sharded before or after. With `spare` one dim more; with `rows` that is preferably dim 0."""
    found = [d for d in range(src.ndim) if src.dims[d] or dst.dims[d]]
    rest = [d for d in range(src.ndim) if d not in found]
    if spare and rest:
        n = prod(src.mesh.shape)
        found.append(max(rest, key=lambda d: (src.shape[d] % n == 0, rows and d == 0, src.shape[d], -d)))
    return sorted(found)


def _common_prefix(x: tuple[int, ...], y: tuple[int, ...], u: Unit, v: Unit) -> tuple[int, ...]:
    """The outer axes that shard a dim in both layouts, (x, u) and (y, v)."""
    if u != v:
        return ()
    if x == y:
        return x
    k = 0
    while k < len(x) and k < len(y) and x[k] == y[k]:
        k += 1
    return x[:k]


def _is_inside(s: State, t: State) -> bool:
    """Whether the blocks of t are those of s, or parts of them."""
    return all([y[: len(x)] == x and (not x or u == v) for x, y, u, v in zip(s.dims, t.dims, s.units, t.units)])


def _added(s: State, t: State) -> tuple[int, ...]:
    """The axes that t has, inside the axes of s."""
    return tuple(sorted([a for x, y in zip(s.dims, t.dims) for a in y[len(x) :]]))


@functools.lru_cache(maxsize=65536)
def _first_length(size: int, unit: Unit, ns: tuple[int, ...]) -> int:
    packed, inner = split_unit(unit)
    length = size // packed // inner
    for n in ns:
        length = -(-length // n)
    return packed * length * inner


@functools.lru_cache(maxsize=4096)
def nonempty_blocks(size: int, unit: Unit, ns: tuple[int, ...]) -> tuple[Side, ...]:
    """Where each block that is not empty starts and stops."""
    packed, inner = split_unit(unit)
    period = size // packed
    filled = [(start, start + length) for start, length in blocks(period, inner, ns) if length]
    if packed == 1:
        return tuple(filled)
    return tuple([tuple([edge + i * period for i in range(packed) for edge in each]) for each in filled])


@functools.lru_cache(maxsize=4096)
def _intervals(
    size: int, unit: Unit, axes: tuple[int, ...], rank_axes: tuple[int, ...], ns: tuple[int, ...]
) -> RankSides:
    """Start and stop of every rank's block along one dim: arrays over `rank_axes`, which have sizes `ns`.

    Along axes that do not shard the dim the arrays have one entry.
    """
    return interval_arrays(size, unit, [rank_axes.index(a) for a in axes], ns)


@functools.lru_cache(maxsize=4096)
def _overlaps(
    size: int, ua: Unit, x: tuple[int, ...], ub: Unit, y: tuple[int, ...], rank_axes: tuple[int, ...],
    ns: tuple[int, ...],
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """For every rank: the length of its block if y shards the dim, and how much of that it has if x shards the dim."""
    want = _intervals(size, ub, y, rank_axes, ns)
    lengths = want.lengths()
    return lengths, lengths if x == y and ua == ub else common(_intervals(size, ua, x, rank_axes, ns), want)


def spec_of_state(space: Space, state: State, src: Spec, dst: Spec) -> Spec:
    """The spec of a state between src and dst."""
    dims: list[tuple[int, ...]] = [()] * src.ndim
    units: list[Unit] = [1] * src.ndim
    for d, axes, unit in zip(space.live_dims, state.dims, state.units):
        dims[d], units[d] = axes, unit
    kinds = dict(src.partial)
    partial = [(a, kinds[a]) for a in (*space.stays_partial, *state.pending)]
    return dst.with_layout(dims, units, partial)
