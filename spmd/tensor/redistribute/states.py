"""States: where a plan may go, as small tuples, and what each way between two of them costs.

A state is (dims, units, pending): for each dim that matters the ordered axes that shard it, the unit they cut it by,
and the axes whose reduction is still to be done. Axes that play no part - replicated, or partial of one kind, before
and after - are left out, and so are dims that nobody shards; but ranks that replicate may share out a reduction, and
one dim that nobody shards may be gone through.

From one state to another, a move:

    slice, reduce_scatter    axes are added inside those that shard a dim; those of them that are pending are reduced
    all_gather               innermost axes of some dims are taken away
    all_reduce               pending axes are reduced
    exchange                 to any other state of the same pending axes

`Space.ways` has them for two states; `graph.py` has the same for all states at once. All numbers are integers - bytes,
and picoseconds - so that every rank finds the same plan.
"""

# ruff: noqa: B905 - a search counts its microseconds, and what it zips has one entry a dim

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

from spmd.comm.chunk import block
from spmd.mesh import MeshTopoInfo
from spmd.mesh.cost import copies_cost
from spmd.tensor.redistribute.boxes import Box
from spmd.tensor.redistribute.moves import (
    AllGather,
    AllReduce,
    AllToAll,
    Copied,
    Exchange,
    Move,
    Permute,
    ReduceScatter,
    Slice,
    in_rows,
)
from spmd.tensor.spec import Spec

NOTHING = Copied()
Dims = tuple[tuple[int, ...], ...]
MOST_ALONE = 4  # axes that move each by itself; of more, those that replicate before and after move together


class State(NamedTuple):
    """One way for the tensor to lie."""

    dims: Dims
    units: tuple[int, ...]
    pending: tuple[int, ...]


class Way(NamedTuple):
    """A move out of a state. `sent`: the bytes that the busiest rank receives; `peak`: those it needs meanwhile."""

    to: State
    move: type[Move]
    axes: tuple[int, ...]
    ps: int
    sent: int
    peak: int


Cut = tuple[tuple[int, ...], int]  # the axes that shard a dim, and the unit


class Cutting(NamedTuple):
    """How dims may be cut: each by the outer axes that it keeps in all states, and inside of these by some that move.

    `movable` are the axes that move; those that move together are one. `ranks` are all axes that matter.
    """

    sizes: tuple[int, ...]
    prefixes: tuple[tuple[int, ...], ...]
    units: tuple[tuple[int, ...], ...]
    movable: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]
    mesh_shape: tuple[int, ...]

    def cut(self, d: int, numbers: tuple[int, ...], unit: int) -> Cut:
        """Dim d with these of the axes that move, by number, and the unit of this number."""
        axes = (*self.prefixes[d], *[a for i in numbers for a in self.movable[i]])
        return axes, self.units[d][unit] if axes else 1

    def layout(self, d: int, state: State) -> tuple[tuple[int, ...], int]:
        """What `cut` takes to cut dim d as a state does."""
        axes = state.dims[d][len(self.prefixes[d]) :]
        numbers = [i for a in axes for i, each in enumerate(self.movable) if each[0] == a]
        return tuple(numbers), self.units[d].index(state.units[d]) if axes else 0


class Space:
    """All states between two specs of one tensor, and the ways between them."""

    def __init__(self, src: Spec, dst: Spec, topology: MeshTopoInfo) -> None:
        self.mesh_shape, self.topology = src.mesh.shape, topology
        have, want = dict(src.partial), dict(dst.partial)
        self.kept = tuple(a for a, kind in src.partial if want.get(a) == kind)
        self.made = tuple(a for a in want if a not in self.kept)  # to be made Partial, at the end
        pending = tuple(a for a in have if a not in self.kept)
        self.copies_cost = copies_cost(topology)
        # A dim to scatter a sum over, by which shards may turn inside a host before they leave it, or in which they
        # come in order.
        spare = bool(pending) or topology.layout.levels > 1 or self.copies_cost
        self.which = _dims_that_matter(src, dst, spare, rows=self.copies_cost)
        self.sizes = tuple([src.shape[d] for d in self.which])
        self.start = State(tuple(src.dims[d] for d in self.which), tuple(src.units[d] for d in self.which), pending)
        self.goal = State(tuple(dst.dims[d] for d in self.which), tuple(dst.units[d] for d in self.which), ())
        self.cutting = self._cutting({*have, *want})
        self.item = prod([n for d, n in enumerate(src.shape) if d not in self.which]) * src.dtype.itemsize
        self._ns = tuple([self.mesh_shape[a] for a in self.cutting.ranks])
        self.leads = self.which[:1] == [0]  # whether the dims that matter begin with the first of all
        self._itemsize = src.dtype.itemsize
        self._wire_itemsize = AllReduce(pending).wire_itemsize(src) if pending else self._itemsize

    def _cutting(self, partial: set[int]) -> Cutting:
        start, goal = self.start, self.goal
        prefixes = tuple(map(_common, start.dims, goal.dims, start.units, goal.units))
        units = [(v,) if p else tuple(sorted({u, v})) for u, v, p in zip(start.units, goal.units, prefixes)]
        shards = {a for axes in (*start.dims, *goal.dims) for a in axes}
        live = {*shards, *start.pending, *self.made}
        fixed = {a for axes in prefixes for a in axes}
        helpers = []
        if start.pending or self.topology.layout.levels > 1:
            # Ranks that replicate may share out a reduction, or what comes from afar.
            helpers = [a for a, n in enumerate(self.mesh_shape) if n > 1 and a not in partial | shards]
        needed = [(a,) for a in sorted(live - fixed)]
        alone = len(needed) + len(helpers) <= MOST_ALONE
        movable = (*needed, *([(a,) for a in helpers] if alone else self._alike(helpers)))
        return Cutting(self.sizes, prefixes, tuple(units), movable, tuple(sorted({*live, *helpers})), self.mesh_shape)

    def _alike(self, axes: Sequence[int]) -> list[tuple[int, ...]]:
        """The axes, those together that cross the same levels of links."""
        found: dict[tuple, list[int]] = {}
        for a in axes:
            levels = tuple([tuple([rung.level for rung in ladder]) for ladder in self.topology.crossings(a)])
            found.setdefault(levels, []).append(a)
        return [tuple(each) for each in found.values()]

    # ---- ways ---------------------------------------------------------------------------------
    def ways(self, s: State, t: State) -> Iterator[Way]:
        """Every move that leads at once from s to t, another state."""
        reduced = tuple([a for a in s.pending if a not in t.pending])
        if reduced:
            if s[:2] == t[:2]:
                yield self._all_reduce(s, t, reduced)
            elif _is_inside(s, t) and set(reduced) == set(_added(s, t)).intersection(s.pending):
                yield self._reduce_scatter(s, t, reduced)
        elif s.pending == t.pending:
            if _is_inside(s, t):
                axes, both = _added(s, t), self.largest(s) + self.largest(t)
                yield Way(t, Slice, axes, self.ps(Slice, axes, 0, s, t), 0, both)
            else:
                yield self._exchange(s, t)
                if _is_inside(t, s):
                    yield self._all_gather(s, t)

    def _reduce_scatter(self, s: State, t: State, axes: tuple[int, ...]) -> Way:
        before, after, n = self.largest(s), self.largest(t), self.size(axes)
        sent = (n - 1) * self.reduced(after)
        packed = 0 if self.in_rows(axes, t.dims) else min(before, n * after)
        return Way(t, ReduceScatter, axes, self.ps(ReduceScatter, axes, sent, s, t), sent, before + packed + after)

    def _all_reduce(self, s: State, t: State, axes: tuple[int, ...]) -> Way:
        mine, n = self.largest(s), self.size(axes)
        sent = 2 * (n - 1) * self.reduced(mine) // n
        return Way(t, AllReduce, axes, self.ps(AllReduce, axes, sent, s, t), sent, 2 * mine)

    def _all_gather(self, s: State, t: State) -> Way:
        axes, mine = _added(t, s), self.largest(s)
        sent = (self.size(axes) - 1) * mine
        whole = self.largest(t) * (1 if self.in_rows(axes, s.dims) else 2)
        return Way(t, AllGather, axes, self.ps(AllGather, axes, sent, s, t), sent, mine + whole)

    def _exchange(self, s: State, t: State) -> Way:
        """Where no rank lacks anything, because what moves is empty, a slice."""
        shared = [_common(x, y, u, v) for x, y, u, v in zip(s.dims, t.dims, s.units, t.units)]
        axes = tuple(sorted([a for x, p in zip(s.dims, shared) for a in x[len(p) :]]))
        want = tuple(sorted([a for x, p in zip(t.dims, shared) for a in x[len(p) :]]))
        sent, both = self.lacks(s, t), self.largest(s) + self.largest(t)
        if not sent:
            return Way(t, Slice, axes, self.ps(Slice, axes, 0, s, t), 0, both)
        move: type[Move] = Exchange
        if axes == want:
            same = all([self._same_blocks(*each) for each in zip(self.sizes, s.units, s.dims, t.units, t.dims)])
            move = Permute if same else AllToAll
        return Way(t, move, axes, self.ps(move, axes, sent, s, t), sent, both if move is Permute else 2 * both)

    # ---- the goal -----------------------------------------------------------------------------
    def reaches_goal(self, s: State) -> bool:
        """Whether nothing has to be sent from here on but what makes axes Partial."""
        if s.pending:
            return False
        if not self.made:
            return s == self.goal
        return s[:2] == self.goal[:2] or (_is_inside(self.goal, s) and {*_added(self.goal, s)} <= {*self.made})

    # ---- sizes --------------------------------------------------------------------------------
    def largest(self, state: State) -> int:
        """Bytes of the largest block: that of the ranks that come first."""
        ns = self.mesh_shape
        lengths = [
            _first(size, unit, tuple([ns[a] for a in axes])) if axes else size
            for size, unit, axes in zip(self.sizes, state.units, state.dims)
        ]
        return prod(lengths) * self.item

    def lacks(self, a: State, b: State) -> int:
        """Bytes that the rank that lacks most must get from others to come from the blocks of a to those of b."""
        have = want = None
        for size, ua, ub, x, y in zip(self.sizes, a.units, b.units, a.dims, b.dims):
            lengths, common = _overlaps(size, ua, x, ub, y, self.cutting.ranks, self._ns)
            want = lengths if want is None else [v * w for v, w in zip(want, lengths)]
            have = common if have is None else [v * w for v, w in zip(have, common)]
        return max([w - h for w, h in zip(want, have)]) * self.item if want else 0

    def reduced(self, nbytes: int) -> int:
        """Bytes on the wire, where they are reduced, of a block of so many."""
        return nbytes // self._itemsize * self._wire_itemsize

    def size(self, axes: tuple[int, ...]) -> int:
        """How many ranks a group along the axes has."""
        return prod([self.mesh_shape[a] for a in axes])

    def in_rows(self, axes: tuple[int, ...], dims: Dims) -> bool:
        """Whether the blocks of a group along the axes are consecutive rows of the tensor."""
        return self.which[0] == 0 and in_rows(axes, dims)

    def _same_blocks(self, size: int, u: int, x: tuple[int, ...], v: int, y: tuple[int, ...]) -> bool:
        if x == y and u == v:
            return True
        ns = [tuple([self.mesh_shape[a] for a in axes]) for axes in (x, y)]
        return prod(ns[0]) == prod(ns[1]) and blocks_with_any(size, u, ns[0]) == blocks_with_any(size, v, ns[1])

    # ---- prices -------------------------------------------------------------------------------
    def ps(self, move: type[Move], axes: tuple[int, ...], sent: int, s: State, t: State) -> int:
        """Picoseconds of a move from s to t over these axes in which the busiest rank gets so many bytes."""
        copied = Copied()
        if self.copies_cost:
            copied = move.copies(self._members(s, axes), self._members(t, axes)).each(self.item)
        return int(self.us(move, axes, sent, copied) * 1e6)

    def us(self, move: type[Move], axes: tuple[int, ...], sent: int, copied: Copied = NOTHING) -> float:
        """Microseconds of a move in which so many bytes are sent, and so many copied."""
        return _us(self.topology, move, axes, sent, copied)

    def _members(self, s: State, axes: tuple[int, ...]) -> list[Box]:
        """The boxes of the first group along some axes. Of the dims that do not matter, the first has a part in the
        order of elements."""
        ranks = zip(self.cutting.ranks, self._ns)
        weights = [prod(self._ns[i + 1 :]) for i in range(len(self._ns))]
        at = itertools.product(*[range(n) if a in axes else (0,) for a, n in ranks])
        places = [sum([i * w for i, w in zip(c, weights)]) for c in at]
        every = zip(self.sizes, s.units, s.dims)
        sides = [intervals(size, unit, sharding, self.cutting.ranks, self._ns) for size, unit, sharding in every]
        first = () if self.leads else ((0, 1),)
        return [(*first, *[side[i] for side in sides]) for i in places]


@functools.lru_cache(maxsize=65536)
def _us(topology: MeshTopoInfo, move: type[Move], axes: tuple[int, ...], sent: int, copied: Copied) -> float:
    return move(axes).us(sent, copied, topology)


def _dims_that_matter(src: Spec, dst: Spec, spare: bool, rows: bool) -> list[int]:
    """Dims that are sharded before or after; where it may pay, one more to go through: with rows, rather the first."""
    found = [d for d in range(src.ndim) if src.dims[d] or dst.dims[d]]
    rest = [d for d in range(src.ndim) if d not in found]
    if spare and rest:
        n = prod(src.mesh.shape)
        found.append(max(rest, key=lambda d: (src.shape[d] % n == 0, rows and d == 0, src.shape[d], -d)))
    return sorted(found)


def _common(x: tuple[int, ...], y: tuple[int, ...], u: int, v: int) -> tuple[int, ...]:
    """The outer axes that cut a dim alike."""
    if u != v:
        return ()
    if x == y:
        return x
    k = 0
    while k < len(x) and k < len(y) and x[k] == y[k]:
        k += 1
    return x[:k]


def _is_inside(s: State, t: State) -> bool:
    """Whether the blocks of t are those of s, or cut out of them."""
    return all([y[: len(x)] == x and (not x or u == v) for x, y, u, v in zip(s.dims, t.dims, s.units, t.units)])


def _added(s: State, t: State) -> tuple[int, ...]:
    """The axes that t has inside those of s."""
    return tuple(sorted([a for x, y in zip(s.dims, t.dims) for a in y[len(x) :]]))


@functools.lru_cache(maxsize=65536)
def _first(size: int, unit: int, ns: tuple[int, ...]) -> int:
    length = size // unit
    for n in ns:
        length = -(-length // n)
    return length * unit


@functools.lru_cache(maxsize=4096)
def blocks_with_any(size: int, unit: int, ns: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Start and length of all blocks that are not empty."""
    every = [block(size, unit, ns, at) for at in itertools.product(*map(range, ns))]
    return tuple([(start, length) for start, length in every if length])


@functools.lru_cache(maxsize=65536)
def intervals(
    size: int, unit: int, axes: tuple[int, ...], ranks: tuple[int, ...], ns: tuple[int, ...]
) -> list[tuple[int, int]]:
    """Start and stop of every rank's block; `ranks` are the axes that are counted through, of sizes `ns`."""
    at = [ranks.index(a) for a in axes]
    cut = tuple(ns[i] for i in at)
    found = {}
    for c in itertools.product(*map(range, cut)):
        start, length = block(size, unit, cut, c)
        found[c] = start, start + length
    return [found[tuple([c[i] for i in at])] for c in itertools.product(*map(range, ns))]


@functools.lru_cache(maxsize=65536)
def _overlaps(
    size: int, ua: int, x: tuple[int, ...], ub: int, y: tuple[int, ...], ranks: tuple[int, ...], ns: tuple[int, ...]
) -> tuple[list[int], list[int]]:
    """For every rank the length of its block when y shards the dim, and how much of it it has when x does."""
    want = intervals(size, ub, y, ranks, ns)
    lengths = [stop - start for start, stop in want]
    if x == y and ua == ub:
        return lengths, lengths
    have = intervals(size, ua, x, ranks, ns)
    common = [
        (q if q < s else s) - (p if p > r else r) for (p, q), (r, s) in zip(have, want)
    ]
    return lengths, [n if n > 0 else 0 for n in common]


def spec_of_state(space: Space, state: State, src: Spec, dst: Spec) -> Spec:
    """The spec of a state on the way from src to dst."""
    dims, units = [()] * src.ndim, [1] * src.ndim
    for d, axes, unit in zip(space.which, state.dims, state.units):
        dims[d], units[d] = axes, unit
    kinds = dict(src.partial)
    partial = [(a, kinds[a]) for a in (*space.kept, *state.pending)]
    return dst.with_layout(dims, units, partial)
