"""States: where a plan may go, as small tuples, and what each way between two of them costs.

A state is (dims, units, pending): for each dim that matters the ordered axes that shard it, the unit they cut it by,
and the axes whose reduction is still to be done. Axes that play no part - replicated, or partial of one kind, before
and after - are left out, and so are dims that nobody shards; but ranks that replicate may share out a reduction, and
one dim that nobody shards may be gone through.

Ways out of a state, each a move:

    slice, reduce_scatter    axes are added inside those that shard a dim; those of them that are pending are reduced
    all_gather               innermost axes of some dims are taken away
    all_reduce               pending axes are reduced
    exchange                 to any other state of the same pending axes

All numbers are integers - bytes, and picoseconds - so that every rank finds the same plan.
"""

# ruff: noqa: B905 - a search counts its microseconds, and what it zips has one entry a dim

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from functools import cached_property
from math import prod
from typing import NamedTuple

from spmd.comm.chunk import block
from spmd.mesh import MeshTopoInfo
from spmd.tensor.redistribute.moves import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    Move,
    Permute,
    ReduceScatter,
    Slice,
    in_rows,
)
from spmd.tensor.spec import Spec

Dims = tuple[tuple[int, ...], ...]


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


class Space:
    """All states between two specs of one tensor, and the ways between them."""

    def __init__(self, src: Spec, dst: Spec, topology: MeshTopoInfo) -> None:
        self.mesh_shape, self.topology = src.mesh.shape, topology
        have, want = dict(src.partial), dict(dst.partial)
        self.kept = tuple(a for a, kind in src.partial if want.get(a) == kind)
        self.made = tuple(a for a in want if a not in self.kept)  # to be made Partial, at the end
        pending = tuple(a for a in have if a not in self.kept)
        # A dim to scatter a sum over, or by which shards may turn inside a host before they leave it.
        self.which = _dims_that_matter(src, dst, spare=bool(pending) or topology.layout.levels > 1)
        self.sizes = [src.shape[d] for d in self.which]
        self.start = State(tuple(src.dims[d] for d in self.which), tuple(src.units[d] for d in self.which), pending)
        self.goal = State(tuple(dst.dims[d] for d in self.which), tuple(dst.units[d] for d in self.which), ())
        self._prefixes = tuple(map(_common, self.start.dims, self.goal.dims, self.start.units, self.goal.units))
        fixed = {a for axes in self._prefixes for a in axes}
        live = {a for axes in (*self.start.dims, *self.goal.dims) for a in axes} | {*pending, *self.made}
        if pending or topology.layout.levels > 1:  # who replicates may share out a reduction, or what comes from afar
            live |= {a for a, n in enumerate(self.mesh_shape) if n > 1 and a not in have and a not in want}
        self.movable = tuple(sorted(live - fixed))
        self._ranks = tuple(sorted(live))
        self._ns = tuple(self.mesh_shape[a] for a in self._ranks)
        self._item = prod([n for d, n in enumerate(src.shape) if d not in self.which]) * src.dtype.itemsize
        self._itemsize = src.dtype.itemsize
        self._wire_itemsize = AllReduce(pending).wire_itemsize(src) if pending else self._itemsize
        self._largest: dict[tuple, int] = {}
        self._every: dict[tuple[int, ...], list[State]] = {}

    # ---- sizes --------------------------------------------------------------------------------
    def largest(self, state: State) -> int:
        """Bytes of the largest block: that of the ranks that come first."""
        key = state.dims, state.units
        found = self._largest.get(key)
        if found is None:
            ns = self.mesh_shape
            lengths = [
                _first(size, unit, tuple([ns[a] for a in axes])) if axes else size
                for size, unit, axes in zip(self.sizes, state.units, state.dims)
            ]
            found = self._largest[key] = prod(lengths) * self._item
        return found

    def lacks(self, a: State, b: State) -> int:
        """Bytes that the rank that lacks most must get from others to come from the blocks of a to those of b."""
        have = want = None
        for size, ua, ub, x, y in zip(self.sizes, a.units, b.units, a.dims, b.dims):
            lengths, common = _overlaps(size, ua, x, ub, y, self._ranks, self._ns)
            want = lengths if want is None else [v * w for v, w in zip(want, lengths)]
            have = common if have is None else [v * w for v, w in zip(have, common)]
        return max([w - h for w, h in zip(want, have)]) * self._item if want else 0

    @cached_property
    def owed(self) -> Callable[[tuple[int, ...]], int]:
        """Bytes that some rank must get from others, for each set of pending axes: see `bounds.py`."""
        goal = zip(self.sizes, self.goal.units, self.goal.dims)
        sides = [_intervals(size, unit, axes, self._ranks, self._ns) for size, unit, axes in goal]
        boxes = list(zip(*sides)) if sides else [()] * prod(self._ns)
        wanted = sum([prod([stop - start for start, stop in box]) for box in boxes])
        distinct, ranks, most = prod(self.sizes), prod(self._ns), self.largest(self.goal)

        def least(pending: tuple[int, ...]) -> int:
            messages = distinct * (self._size(pending) - 1) + max(wanted - distinct, 0)
            return max(most, messages * self._item // ranks)

        return functools.cache(least)

    # ---- ways ---------------------------------------------------------------------------------
    def slices(self, s: State) -> Iterator[Way]:
        """Ways on which nothing is sent."""
        peak = self.largest(s)
        for t in self._extended(s):
            if t.pending == s.pending:
                yield Way(t, Slice, _added(s, t), 0, 0, peak + self.largest(t))

    def scatters(self, s: State, wanted: Callable[[State], bool]) -> Iterator[Way]:
        peak = self.largest(s)
        for t in self._extended(s):
            if t.pending != s.pending and wanted(t):
                axes = tuple([a for a in s.pending if a not in t.pending])
                block = self.largest(t)
                sent = (self._size(axes) - 1) * self._reduced(block)
                packed = 0 if self._in_rows(axes, t.dims) else min(peak, self._size(axes) * block)
                yield Way(t, ReduceScatter, axes, self._ps(ReduceScatter, axes, sent), sent, peak + packed + block)

    def reductions(self, s: State) -> Iterator[Way]:
        """All-reduces."""
        mine = self.largest(s)
        for axes in _subsets(s.pending):
            n = self._size(axes)
            sent = 2 * (n - 1) * self._reduced(mine) // n
            t = State(s.dims, s.units, tuple([a for a in s.pending if a not in axes]))
            yield Way(t, AllReduce, axes, self._ps(AllReduce, axes, sent), sent, 2 * mine)

    def gathers(self, s: State) -> Iterator[Way]:
        mine = self.largest(s)
        for dims in itertools.product(
            *[[axes[:k] for k in range(len(axes), len(p) - 1, -1)] for axes, p in zip(s.dims, self._prefixes)]
        ):
            axes = tuple(sorted([a for x, y in zip(s.dims, dims) for a in x[len(y) :]]))
            if axes:
                t = State(dims, tuple([u if x else 1 for u, x in zip(s.units, dims)]), s.pending)
                sent = (self._size(axes) - 1) * mine
                whole = self.largest(t) * (1 if self._in_rows(axes, s.dims) else 2)
                yield Way(t, AllGather, axes, self._ps(AllGather, axes, sent), sent, mine + whole)

    def exchanges(self, s: State, wanted: Callable[[State], bool]) -> Iterator[Way]:
        if any(len(axes) > len(p) for axes, p in zip(s.dims, self._prefixes)):
            for t in self._all(s.pending):
                if t != s and wanted(t):
                    way = self.exchange(s, t)
                    if way is not None:
                        yield way

    def exchange(self, s: State, t: State) -> Way | None:
        """The exchange from s to t; None where no rank lacks anything, or no group of ranks has it all."""
        shared = [_common(x, y, u, v) for x, y, u, v in zip(s.dims, t.dims, s.units, t.units)]
        have = [a for x, p in zip(s.dims, shared) for a in x[len(p) :]]
        if not have:
            return None
        want = [a for x, p in zip(t.dims, shared) for a in x[len(p) :]]
        axes = tuple(sorted(have))
        sent = self.lacks(s, t)
        if not sent:
            return Way(t, Slice, axes, 0, 0, self.largest(s) + self.largest(t))
        move: type[Move] = Exchange
        if axes == tuple(sorted(want)):
            same = all([self._same_blocks(*each) for each in zip(self.sizes, s.units, s.dims, t.units, t.dims)])
            move = Permute if same else AllToAll
        both = self.largest(s) + self.largest(t)
        return Way(t, move, axes, self._ps(move, axes, sent), sent, both if move is Permute else 2 * both)

    def is_sliced(self, s: State, t: State) -> bool:
        """Whether slices lead from s to t."""
        if s.pending != t.pending:
            return False
        return all(
            [y[: len(x)] == x and (not x or u == v) for x, y, u, v in zip(s.dims, t.dims, s.units, t.units)]
        )

    def reaches_goal(self, s: State) -> bool:
        """Whether nothing has to be sent from here on but what makes axes Partial."""
        if s.pending:
            return False
        if not self.made:
            return s == self.goal
        for x, y, u, v in zip(s.dims, self.goal.dims, s.units, self.goal.units):
            if x[: len(y)] != y or not set(x[len(y) :]) <= set(self.made) or (y and u != v):
                return False
        return True

    def _in_rows(self, axes: tuple[int, ...], dims: Dims) -> bool:
        return self.which[0] == 0 and in_rows(axes, dims)

    # ---- states -------------------------------------------------------------------------------
    def _extended(self, s: State) -> list[State]:
        """States with more axes inside those that shard the dims already."""
        used = {a for axes in s.dims for a in axes}
        free = [a for a in self.movable if a not in used]
        found = []
        for fates in itertools.product(range(-1, len(s.dims)), repeat=len(free)):
            groups = [[a for a, fate in zip(free, fates) if fate == d] for d in range(len(s.dims))]
            if not any(groups):
                continue
            pending = tuple([a for a in s.pending if all([a not in g for g in groups])])
            for orders in itertools.product(*[itertools.permutations(g) for g in groups]):
                dims = tuple([x + tuple(o) for x, o in zip(s.dims, orders)])
                found += [State(dims, units, pending) for units in self._units(dims, s)]
        return found

    def _all(self, pending: tuple[int, ...]) -> list[State]:
        """All states of these pending axes that leave the common outer axes as they are."""
        found = self._every.get(pending)
        if found is None:
            found = self._every[pending] = self._enumerated(pending)
        return found

    def _enumerated(self, pending: tuple[int, ...]) -> list[State]:
        free = [a for a in self.movable if a not in pending]
        none = State(self._prefixes, self.goal.units, ())
        bare = State(none.dims, tuple([u if p else 1 for u, p in zip(none.units, none.dims)]), pending)
        k = len(self.sizes)
        found = []
        for fates in itertools.product(range(-1, k), repeat=len(free)):
            groups = [[a for a, fate in zip(free, fates) if fate == d] for d in range(k)]
            for orders in itertools.product(*[itertools.permutations(g) for g in groups]):
                dims = tuple([x + tuple(o) for x, o in zip(bare.dims, orders)])
                found += [State(dims, units, pending) for units in self._units(dims, bare)]
        return found

    def _units(self, dims: Dims, s: State) -> list[tuple[int, ...]]:
        """The units that these dims may be cut by, where s is cut as it is."""
        choices = []
        for i, axes in enumerate(dims):
            if not axes:
                choices.append([1])
            elif s.dims[i]:
                choices.append([s.units[i]])
            else:
                choices.append(sorted({self.start.units[i], self.goal.units[i]}))
        return list(itertools.product(*choices))

    # ---- prices -------------------------------------------------------------------------------
    def _reduced(self, nbytes: int) -> int:
        """Bytes on the wire, where they are reduced, of a block of so many."""
        return nbytes // self._itemsize * self._wire_itemsize

    def _size(self, axes: tuple[int, ...]) -> int:
        return prod([self.mesh_shape[a] for a in axes])

    def _ps(self, move: type[Move], axes: tuple[int, ...], sent: int) -> int:
        return int(move(axes).price(sent, self.topology) * 1e6)

    def _same_blocks(self, size: int, u: int, x: tuple[int, ...], v: int, y: tuple[int, ...]) -> bool:
        if x == y and u == v:
            return True
        ns = [tuple([self.mesh_shape[a] for a in axes]) for axes in (x, y)]
        return prod(ns[0]) == prod(ns[1]) and _blocks(size, u, ns[0]) == _blocks(size, v, ns[1])


def _dims_that_matter(src: Spec, dst: Spec, spare: bool) -> list[int]:
    """Dims that are sharded before or after; where it may pay, one more to go through."""
    found = [d for d in range(src.ndim) if src.dims[d] or dst.dims[d]]
    rest = [d for d in range(src.ndim) if d not in found]
    if spare and rest:
        n = prod(src.mesh.shape)
        found.append(max(rest, key=lambda d: (src.shape[d] % n == 0, src.shape[d], -d)))
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


def _added(s: State, t: State) -> tuple[int, ...]:
    return tuple(sorted([a for x, y in zip(s.dims, t.dims) for a in y[len(x) :]]))


@functools.lru_cache(maxsize=4096)
def _subsets(axes: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [some for k in range(1, len(axes) + 1) for some in itertools.combinations(axes, k)]


@functools.lru_cache(maxsize=65536)
def _first(size: int, unit: int, ns: tuple[int, ...]) -> int:
    length = size // unit
    for n in ns:
        length = -(-length // n)
    return length * unit


@functools.lru_cache(maxsize=4096)
def _blocks(size: int, unit: int, ns: tuple[int, ...]) -> list[tuple[int, int]]:
    every = [block(size, unit, ns, at) for at in itertools.product(*map(range, ns))]
    return [(start, length) for start, length in every if length]


@functools.lru_cache(maxsize=65536)
def _intervals(
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
    want = _intervals(size, ub, y, ranks, ns)
    lengths = [stop - start for start, stop in want]
    if x == y and ua == ub:
        return lengths, lengths
    have = _intervals(size, ua, x, ranks, ns)
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
