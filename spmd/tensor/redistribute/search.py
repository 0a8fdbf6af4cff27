"""The cheapest way through the states: first how long it takes from every state to the goal, then which way that is.

The time from a state is that of the best move out of it, and the time from where that leads: each is made better by the
others until none changes (Bellman and Ford), with all states at once in arrays. Prices may be any numbers: nothing is
left out for want of promise, so there is no bound that a topology could break.

What then counts are the moves after which the time that is left is as much less as they take. Plans made of these are
compared by bytes, number of moves, memory, and last by the states they go through, so the answer does not depend on the
order in which states are met.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from math import inf

import numpy as np

from spmd.mesh.cost import copy_cost
from spmd.tensor.redistribute.copying import Cells, Few, copies_of
from spmd.tensor.redistribute.graph import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    EXCHANGE,
    REDUCE_SCATTER,
    SLICE,
    Row,
    Scatters,
    state_of,
    view_of,
)
from spmd.tensor.redistribute.moves import (
    AllGather,
    AllReduce,
    AllToAll,
    Exchange,
    Move,
    Permute,
    ReduceScatter,
    Slice,
)
from spmd.tensor.redistribute.states import Space, State, Way

NEVER = 1 << 60  # picoseconds
KINDS = Slice, Exchange, AllToAll, Permute, AllGather, ReduceScatter, AllReduce  # as graph.py numbers them


def cheapest(space: Space, max_bytes: float = inf) -> list[Way] | None:
    """The ways from the start of the space to its goal; None where none keeps within so much memory."""
    if space.reaches_goal(space.start):
        return []
    return Search(space, max_bytes).run()


class Search:
    """The cheapest plan of a space, and how long it takes from every state."""

    def __init__(self, space: Space, max_bytes: float) -> None:
        self.space, self.max_bytes = space, max_bytes
        self.graph, self.cell, self.start, goal = view_of(space)
        self._named: dict[int, tuple[int, ...]] = {}
        self.goals = self._goals(goal)
        self.copies = copies_of(self.graph, space) if space.copies_cost else None
        self.moving = self._moving()
        # The time that is left, by the axes that are pending, as bits, and by the state.
        self.left = np.full((1 << len(space.cutting.movable), len(self.graph.used)), NEVER)
        self.scattering: dict[int, np.ndarray] = {}
        for pending in subsets(self._bits(space.start.pending)):
            self._settle(pending)

    # ---- how long it takes --------------------------------------------------------------------
    def _settle(self, pending: int) -> None:
        """The time that is left where these axes are pending; where fewer are it is known."""
        here = np.nonzero(self.graph.used & pending == 0)[0]
        moving = self.moving[here[:, None], here] if pending else self.moving
        left = self._reducing(pending)[here] if pending else np.where(self.goals, 0, NEVER)
        fresh = np.nonzero(left < NEVER)[0]
        while fresh.size:
            better = (moving[:, fresh] + left[fresh]).min(1)
            fresh = np.nonzero(better < left)[0]
            left = np.minimum(left, better)
        self.left[pending, here] = left

    def _moving(self) -> np.ndarray:
        """From each state to each other, while nothing is reduced."""
        graph = self.graph
        copies = self.copies
        found = self._prices(graph.moves, graph.which, copies and copies.moves)
        gathers = self._prices(graph.gathers, graph.which_gather, copies and copies.gathers)
        if self.max_bytes < inf:
            self._forbid(found, gathers)
        back = graph.inner, graph.outer
        found[back] = np.minimum(found[back], gathers)
        return found

    def _reducing(self, pending: int) -> np.ndarray:
        """From each state where these axes are pending, if some of them are reduced at once."""
        found = np.full(len(self.graph.used), NEVER)
        for axes in subsets(pending)[1:]:
            found = np.minimum(found, self._all_reduces(axes) + self.left[pending ^ axes])
        scatters = self.graph.scatters(pending)
        if len(scatters.outer):
            times = self._prices(scatters.moves, scatters.which, self.copies and self._scattered(pending, scatters))
            if self.max_bytes < inf:
                self._forbid_scatters(times, scatters, pending)
            self.scattering[pending] = times = times + self.left[pending ^ scatters.reduced, scatters.inner]
            outer = scatters.outer[scatters.first]
            found[outer] = np.minimum(found[outer], np.minimum.reduceat(times, scatters.first))
        return found

    def _all_reduces(self, axes: int) -> np.ndarray:
        sizes, which = self.graph.blocks
        found = self._prices([(size, ALL_REDUCE, axes) for size in sizes], which, None)
        return np.where(2 * self.cell * self.graph.largest > self.max_bytes, NEVER, found)

    def _prices(self, rows: list[Row], which: np.ndarray, copied: Cells | None) -> np.ndarray:
        """Picoseconds of moves, which are these rows and copy so much."""
        us = np.array([self._us(*row) for row in rows], float)
        if copied is None:
            return (us * 1e6).astype(int)[which]
        packed, joined = self._copy_us(copied.packed), self._copy_us(copied.joined)
        return ((us[which] + packed + copied.times * joined) * 1e6).astype(int)

    def _copy_us(self, cells: Few) -> np.ndarray:
        us = [copy_cost(n * self.cell, self.space.topology) if n else 0.0 for n in cells.numbers]
        return np.array(us, float)[cells.which]

    def _scattered(self, pending: int, scatters: Scatters) -> Cells:
        ranks = [self.space.size(self._axes(bits)) for bits in scatters.reduced.tolist()]
        return self.copies.scatters(pending, scatters, ranks)

    def _us(self, size: int, kind: int, bits: int) -> float:
        space, axes, nbytes = self.space, self._axes(bits), size * self.cell
        n = space.size(axes)
        if kind == ALL_GATHER:
            nbytes = (n - 1) * nbytes
        elif kind == REDUCE_SCATTER:
            nbytes = (n - 1) * space.reduced(nbytes)
        elif kind == ALL_REDUCE:
            nbytes = 2 * (n - 1) * space.reduced(nbytes) // n
        elif not nbytes:
            kind = SLICE  # as what is empty need not be sent
        return space.us(KINDS[kind], axes, nbytes)

    # ---- within some memory -------------------------------------------------------------------
    def _forbid(self, moving: np.ndarray, gathers: np.ndarray) -> None:
        """Price what takes too much memory so that it is never taken."""
        graph, nbytes = self.graph, self.graph.largest * self.cell
        twice = np.array([kind in (EXCHANGE, ALL_TO_ALL) for _, kind, _ in graph.moves])[graph.which]
        moving[(nbytes[:, None] + nbytes) * (1 + twice) > self.max_bytes] = NEVER
        for i, (s, t) in enumerate(zip(graph.inner.tolist(), graph.outer.tolist(), strict=True)):
            if self._way(s, t, 0, 0, AllGather).peak > self.max_bytes:
                gathers[i] = NEVER

    def _forbid_scatters(self, times: np.ndarray, scatters: Scatters, pending: int) -> None:
        for i, (s, t, axes) in enumerate(zip(*[x.tolist() for x in scatters[:3]], strict=True)):
            if self._way(s, t, pending, pending ^ axes, ReduceScatter).peak > self.max_bytes:
                times[i] = NEVER

    def _way(self, s: int, t: int, before: int, after: int, kind: type[Move]) -> Way:
        ways = self.space.ways(self._state(s, before), self._state(t, after))
        return next(way for way in ways if way.move is kind)

    # ---- which way ----------------------------------------------------------------------------
    def run(self) -> list[Way] | None:
        """The first of the plans that take the least time."""
        pending = self._bits(self.space.start.pending)
        if self.left[pending, self.start] >= NEVER:
            return None
        queue: list = [((0, 0, 0), (), self.start, pending, ())]
        done, first = set(), (inf,)
        while True:
            (sent, moves, peak), code, at, pending, ways = heapq.heappop(queue)
            if not pending and self.goals[at]:
                return list(ways)
            if (at, pending) in done or (sent, moves + 1) > first[:2]:
                continue
            done.add((at, pending))
            for way, to, then in self._best(at, pending):
                written = way.to.dims[::-1], way.to.units, way.move.kind  # the first dims rather than the last
                cost = sent + way.sent, moves + 1, max(peak, way.peak)
                if not then and self.goals[to]:
                    first = min(first, cost)
                heapq.heappush(queue, (cost, (*code, written), to, then, (*ways, way)))

    def _best(self, at: int, pending: int) -> Iterator[tuple[Way, int, int]]:
        """The moves after which so much less time is left as they take, and where they lead: the state, what pends."""
        left, state = self.left[pending, at], self._state(at, pending)
        for to, then in self._near(at, pending):
            for way in self.space.ways(state, self._state(to, then)):
                if way.ps + self.left[then, to] == left and way.peak <= self.max_bytes:
                    yield way, to, then

    def _near(self, at: int, pending: int) -> Iterator[tuple[int, int]]:
        left = self.left[pending, at]
        moved = np.nonzero(self.moving[at] + self.left[pending] == left)[0].tolist()
        yield from ((to, pending) for to in moved if to != at)
        yield from ((at, pending ^ axes) for axes in subsets(pending)[1:] if self.left[pending ^ axes, at] <= left)
        if pending in self.scattering:
            scatters = self.graph.scatters(pending)
            for i in np.nonzero((scatters.outer == at) & (self.scattering[pending] == left))[0].tolist():
                yield int(scatters.inner[i]), pending ^ int(scatters.reduced[i])

    # ---- names --------------------------------------------------------------------------------
    def _goals(self, goal: int) -> np.ndarray:
        """The states from which nothing has to be sent but what makes axes Partial."""
        made = self._bits(self.space.made)
        return (self.graph.left[goal] == 0) & (self.graph.left[:, goal] & ~made == 0)

    def _state(self, number: int, pending: int) -> State:
        return state_of(self.space, self.graph, number, self._axes(pending))

    def _axes(self, bits: int) -> tuple[int, ...]:
        """The axes of the mesh that these bits stand for."""
        found = self._named.get(bits)
        if found is None:
            movable = self.space.cutting.movable
            each = [a for i, axes in enumerate(movable) if bits >> i & 1 for a in axes]
            found = self._named[bits] = tuple(sorted(each))
        return found

    def _bits(self, axes: tuple[int, ...]) -> int:
        return sum([1 << i for i, each in enumerate(self.space.cutting.movable) if each[0] in axes])


def subsets(bits: int) -> list[int]:
    """All subsets of a set of bits, each after its own subsets."""
    return [some for some in range(bits + 1) if some & ~bits == 0]
