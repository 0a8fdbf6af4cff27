"""The cheapest way through the states: A* with what no plan can go below.

From a state on, a plan that sends k times takes at least k latencies, and the time that the bytes its ranks lack take
over the fastest links. Whatever cannot beat the best plan found so far is not looked at; so where one exchange is best,
which is nearly always within a host, the search ends with the plans that send once.

Plans are compared by time, bytes, number of moves, memory, and last by the states they go through, so the answer does
not depend on the order in which states are met.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterator
from math import inf, prod

from spmd.mesh import MeshTopoInfo
from spmd.tensor.redistribute.moves import AllGather, AllReduce, AllToAll, Move, Permute, ReduceScatter
from spmd.tensor.redistribute.states import Space, State, Way

Cost = tuple[int, int, int, int]  # picoseconds, bytes received, moves, peak bytes


def cheapest(space: Space, max_bytes: float = inf) -> list[Way] | None:
    """The ways from the start of the space to its goal; None where none keeps within so much memory."""
    if space.reaches_goal(space.start):
        return []
    return _Search(space, max_bytes).run()


class _Search:
    def __init__(self, space: Space, max_bytes: float) -> None:
        self.space, self.max_bytes = space, max_bytes
        self.latency, self.ps_per_byte = fastest(space.topology, space.movable)
        ranks = prod([space.mesh_shape[a] for a in space.movable])
        # Empty blocks may be got for nothing, before a send or after it.
        self.has_empty = any(size < ranks for size in space.sizes)
        self.best = inf  # of the plans that were found, the least time
        self._owed: dict[State, int] = {}

    def run(self) -> list[Way] | None:
        start = self.space.start
        queue: list = [(self.owed(start), (0, 0, 0, 0), (), (), start)]
        done: dict[State, Cost] = {}
        while queue:
            _, cost, code, ways, state = heapq.heappop(queue)
            if self.space.reaches_goal(state):
                return list(ways)
            if state in done and done[state] <= cost:
                continue
            done[state] = cost
            for way in self.ways(state, cost[0]):
                then = cost[0] + way.ps
                least = then + self.owed(way.to)
                if least > self.best or way.peak > self.max_bytes:
                    continue
                if self.space.reaches_goal(way.to):
                    self.best = then
                after = then, cost[1] + way.sent, cost[2] + 1, max(cost[3], way.peak)
                written = way.to.dims[::-1], way.to.units, way.move.kind  # the first dims rather than the last
                heapq.heappush(queue, (least, after, (*code, written), (*ways, way), way.to))
        return None

    def ways(self, s: State, spent: int) -> Iterator[Way]:
        """The ways out of a state that may still be part of the best plan."""
        space, wire = self.space, self.ps_per_byte * self.lack(s)
        last = spent + self.latency + wire  # of a plan that sends once more
        if not s.pending and not space.made and s.dims != space.goal.dims:
            way = space.exchange(s, space.goal)
            if way is not None:
                yield way
        yield from space.slices(s)
        if self.has_empty:
            yield from (way for way in space.exchanges(s, lambda t: True) if not way.ps)
        if last > self.best:
            return
        yield from space.reductions(s)
        yield from space.gathers(s)
        yield from space.scatters(s, space.reaches_goal)
        if space.made:
            yield from space.exchanges(s, space.reaches_goal)
        if last + (0 if self.has_empty else self.latency) <= self.best:
            yield from space.scatters(s, lambda t: not space.reaches_goal(t))
            yield from space.exchanges(s, lambda t: not space.reaches_goal(t))

    def owed(self, s: State) -> int:
        """Picoseconds that no plan from here on can go below."""
        found = self._owed.get(s)
        if found is None:
            found = self._owed[s] = self._least(s)
        return found

    def _least(self, s: State) -> int:
        space = self.space
        if not s.pending and (space.reaches_goal(s) or (not space.made and space.is_sliced(s, space.goal))):
            return 0
        lack = self.lack(s)
        return int(self.latency + self.ps_per_byte * lack) if lack or s.pending else 0

    def lack(self, s: State) -> int:
        """Bytes that some rank must still get from others."""
        space = self.space
        if space.made:
            return 0
        return space.owed(s.pending) if s.pending else space.lacks(s, space.goal)


@functools.lru_cache(maxsize=256)
def fastest(topology: MeshTopoInfo, axes: tuple[int, ...]) -> tuple[int, float]:
    """The least latency of a move over some of these axes, and the least time of a byte, both in picoseconds."""
    groups = [g for k in range(1, len(axes) + 1) for g in itertools.combinations(axes, k)]
    moves: list[Move] = [
        kind(g) for g in groups for kind in (AllGather, AllReduce, AllToAll, Permute, ReduceScatter)
        if prod(topology.sizes[a] for a in g) > 1
    ]  # fmt: skip
    if not moves:
        return 0, 0.0
    latency = min(int(move.price(0, topology) * 1e6) for move in moves)
    return latency, min(_least_per_byte(move, topology) for move in moves)


FEW, MANY = 1 << 10, 1 << 50


def _least_per_byte(move: Move, topology: MeshTopoInfo) -> float:
    """Picoseconds; prices are convex or concave in the bytes, so the least slope is at one of the ends."""
    few = (move.price(FEW, topology) - move.price(0, topology)) / FEW
    many = (move.price(2 * MANY, topology) - move.price(MANY, topology)) / MANY
    return min(few, many) * 1e6 * 0.999  # less what is lost in rounding
