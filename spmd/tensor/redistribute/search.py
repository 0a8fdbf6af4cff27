"""The cheapest plan through the states: first the remaining time from every state to the goal, then the plan itself.

The remaining time of a state is the least, over all moves out of it, of the move's time plus the remaining time of the
state after it. Each state is improved by the others until nothing changes (Bellman and Ford), all states at once in
arrays. Prices may be any numbers: no move is left out because it looks expensive, so no topology can break a bound.

A move is part of a cheapest plan if it shortens the remaining time by its own time. Plans of such moves are compared
by bytes, number of moves, memory, and last by the states they pass through. So the answer does not depend on the order
in which states are visited.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from math import inf

import numpy as np

from spmd.mesh.cost import copy_cost
from spmd.tensor.redistribute.collective_moves import AllGather, AllReduce, AllToAll, Exchange, Permute, ReduceScatter
from spmd.tensor.redistribute.copy_cost import CopiedCells, UniqueValues, copies_of
from spmd.tensor.redistribute.graph import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    EXCHANGE,
    REDUCE_SCATTER,
    SLICE,
    MoveRow,
    Scatters,
    graph_of,
    state_of,
)
from spmd.tensor.redistribute.moves import Move, Slice
from spmd.tensor.redistribute.states import Edge, Space, State

NEVER = 1 << 60  # picoseconds
KINDS = Slice, Exchange, AllToAll, Permute, AllGather, ReduceScatter, AllReduce  # as graph.py numbers them


def cheapest(space: Space, max_bytes: float = inf) -> list[Edge] | None:
    """The edges of the cheapest plan of the space; None if no plan keeps within so much memory."""
    if space.reaches_goal(space.start):
        return []
    return Search(space, max_bytes).run()


class Search:
    """The cheapest plan of a space, and the remaining time from every state.

    remaining: picoseconds, by the pending axes (as bits) and by the state.
    """

    def __init__(self, space: Space, max_bytes: float) -> None:
        self.space, self.max_bytes = space, max_bytes
        self.graph, self.cell_bytes, self.start, goal = graph_of(space)
        self._named: dict[int, tuple[int, ...]] = {}
        self.goals = self._goals(goal)
        self.copies = copies_of(self.graph, space) if space.copies_are_priced else None
        self.moving = self._moving()
        self.remaining = np.full((1 << len(space.cutting.movable), len(self.graph.used)), NEVER)
        self.scattering: dict[int, np.ndarray] = {}
        for pending in subsets(self._bits(space.start.pending)):
            self._relax(pending)

    # ---- remaining times ----------------------------------------------------------------------
    def _relax(self, pending: int) -> None:
        """Find the remaining times with these pending axes; those with fewer pending axes are known already."""
        here = np.nonzero(self.graph.used & pending == 0)[0]
        moving = self.moving[here[:, None], here] if pending else self.moving
        remaining = self._reducing(pending)[here] if pending else np.where(self.goals, 0, NEVER)
        fresh = np.nonzero(remaining < NEVER)[0]
        while fresh.size:
            better = (moving[:, fresh] + remaining[fresh]).min(1)
            fresh = np.nonzero(better < remaining)[0]
            remaining = np.minimum(remaining, better)
        self.remaining[pending, here] = remaining

    def _moving(self) -> np.ndarray:
        """Picoseconds from each state to each other, without a reduction."""
        graph = self.graph
        copies = self.copies
        found = self._prices(graph.moves, graph.move_index, copies and copies.moves)
        gathers = self._prices(graph.gathers, graph.gather_index, copies and copies.gathers)
        if self.max_bytes < inf:
            self._forbid(found, gathers)
        back = graph.inner, graph.outer
        found[back] = np.minimum(found[back], gathers)
        return found

    def _reducing(self, pending: int) -> np.ndarray:
        """The remaining times with these pending axes, if the next move reduces some of them."""
        found = np.full(len(self.graph.used), NEVER)
        for axes in subsets(pending)[1:]:
            found = np.minimum(found, self._all_reduces(axes) + self.remaining[pending ^ axes])
        scatters = self.graph.scatters(pending)
        if len(scatters.outer):
            copied = self.copies and self._scattered(pending, scatters)
            times = self._prices(scatters.moves, scatters.move_index, copied)
            if self.max_bytes < inf:
                self._forbid_scatters(times, scatters, pending)
            self.scattering[pending] = times = times + self.remaining[pending ^ scatters.reduced, scatters.inner]
            outer = scatters.outer[scatters.first]
            found[outer] = np.minimum(found[outer], np.minimum.reduceat(times, scatters.first))
        return found

    def _all_reduces(self, axes: int) -> np.ndarray:
        sizes, index = self.graph.blocks
        found = self._prices([(size, ALL_REDUCE, axes) for size in sizes], index, None)
        return np.where(2 * self.cell_bytes * self.graph.largest > self.max_bytes, NEVER, found)

    def _prices(self, rows: list[MoveRow], index: np.ndarray, copied: CopiedCells | None) -> np.ndarray:
        """Picoseconds of moves: `index` gives the row of each, `copied` its copies."""
        us = np.array([self._us(*row) for row in rows], float)
        if copied is None:
            return (us * 1e6).astype(int)[index]
        packed, joined = self._copy_us(copied.packed), self._copy_us(copied.joined)
        return ((us[index] + packed + copied.times * joined) * 1e6).astype(int)

    def _copy_us(self, cells: UniqueValues) -> np.ndarray:
        us = [copy_cost(n * self.cell_bytes, self.space.topology) if n else 0.0 for n in cells.values]
        return np.array(us, float)[cells.inverse]

    def _scattered(self, pending: int, scatters: Scatters) -> CopiedCells:
        ranks = [self.space.size(self._axes(bits)) for bits in scatters.reduced.tolist()]
        return self.copies.scatters(pending, scatters, ranks)

    def _us(self, size: int, kind: int, bits: int) -> float:
        space, axes, nbytes = self.space, self._axes(bits), size * self.cell_bytes
        n = space.size(axes)
        if kind == ALL_GATHER:
            nbytes = (n - 1) * nbytes
        elif kind == REDUCE_SCATTER:
            nbytes = (n - 1) * space.wire_bytes(nbytes)
        elif kind == ALL_REDUCE:
            nbytes = 2 * (n - 1) * space.wire_bytes(nbytes) // n
        elif not nbytes:
            kind = SLICE  # an empty block need not be sent
        return space.us(KINDS[kind], axes, nbytes)

    # ---- a limit on memory --------------------------------------------------------------------
    def _forbid(self, moving: np.ndarray, gathers: np.ndarray) -> None:
        """Set the time of moves that need too much memory so high that they are never made."""
        graph, nbytes = self.graph, self.graph.largest * self.cell_bytes
        twice = np.array([kind in (EXCHANGE, ALL_TO_ALL) for _, kind, _ in graph.moves])[graph.move_index]
        moving[(nbytes[:, None] + nbytes) * (1 + twice) > self.max_bytes] = NEVER
        for i, (s, t) in enumerate(zip(graph.inner.tolist(), graph.outer.tolist(), strict=True)):
            if self._edge(s, t, 0, 0, AllGather).peak > self.max_bytes:
                gathers[i] = NEVER

    def _forbid_scatters(self, times: np.ndarray, scatters: Scatters, pending: int) -> None:
        for i, (s, t, axes) in enumerate(zip(*[x.tolist() for x in scatters[:3]], strict=True)):
            if self._edge(s, t, pending, pending ^ axes, ReduceScatter).peak > self.max_bytes:
                times[i] = NEVER

    def _edge(self, s: int, t: int, before: int, after: int, kind: type[Move]) -> Edge:
        edges = self.space.edges(self._state(s, before), self._state(t, after))
        return next(edge for edge in edges if edge.move is kind)

    # ---- the plan ------------------------------------------------------------------------------
    def run(self) -> list[Edge] | None:
        """The first, as plans are compared, of the plans that take the least time."""
        pending = self._bits(self.space.start.pending)
        if self.remaining[pending, self.start] >= NEVER:
            return None
        queue: list = [((0, 0, 0), (), self.start, pending, ())]
        done, first = set(), (inf,)
        while True:
            (sent, moves, peak), code, at, pending, edges = heapq.heappop(queue)
            if not pending and self.goals[at]:
                return list(edges)
            if (at, pending) in done or (sent, moves + 1) > first[:2]:
                continue
            done.add((at, pending))
            for edge, to, then in self._best(at, pending):
                written = *edge.to.written(), edge.move.kind  # rather the first dims than the last
                cost = sent + edge.sent, moves + 1, max(peak, edge.peak)
                if not then and self.goals[to]:
                    first = min(first, cost)
                heapq.heappush(queue, (cost, (*code, written), to, then, (*edges, edge)))

    def _best(self, at: int, pending: int) -> Iterator[tuple[Edge, int, int]]:
        """The moves that are part of a cheapest plan, with the state after each and the axes that are then pending."""
        remaining, state = self.remaining[pending, at], self._state(at, pending)
        for to, then in self._candidates(at, pending):
            for edge in self.space.edges(state, self._state(to, then)):
                if edge.ps + self.remaining[then, to] == remaining and edge.peak <= self.max_bytes:
                    yield edge, to, then

    def _candidates(self, at: int, pending: int) -> Iterator[tuple[int, int]]:
        """The states, with their pending axes, to which a move of a cheapest plan may lead."""
        remaining = self.remaining[pending, at]
        moved = np.nonzero(self.moving[at] + self.remaining[pending] == remaining)[0].tolist()
        yield from ((to, pending) for to in moved if to != at)
        reduced = [pending ^ axes for axes in subsets(pending)[1:]]
        yield from ((at, rest) for rest in reduced if self.remaining[rest, at] <= remaining)
        if pending in self.scattering:
            scatters = self.graph.scatters(pending)
            for i in np.nonzero((scatters.outer == at) & (self.scattering[pending] == remaining))[0].tolist():
                yield int(scatters.inner[i]), pending ^ int(scatters.reduced[i])

    # ---- states and axes by number ------------------------------------------------------------
    def _goals(self, goal: int) -> np.ndarray:
        """The states from which only moves to Partial are left, which send nothing."""
        made = self._bits(self.space.becomes_partial)
        return (self.graph.removed[goal] == 0) & (self.graph.removed[:, goal] & ~made == 0)

    def _state(self, number: int, pending: int) -> State:
        return state_of(self.space, self.graph, number, self._axes(pending))

    def _axes(self, bits: int) -> tuple[int, ...]:
        """The axes of the mesh for these bits."""
        found = self._named.get(bits)
        if found is None:
            movable = self.space.cutting.movable
            each = [a for i, axes in enumerate(movable) if bits >> i & 1 for a in axes]
            found = self._named[bits] = tuple(sorted(each))
        return found

    def _bits(self, axes: tuple[int, ...]) -> int:
        return sum([1 << i for i, each in enumerate(self.space.cutting.movable) if each[0] in axes])


def subsets(bits: int) -> list[int]:
    """All subsets of a set of bits; each comes after its own subsets."""
    return [some for some in range(bits + 1) if some & ~bits == 0]
