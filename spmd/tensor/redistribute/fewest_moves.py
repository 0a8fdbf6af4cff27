"""Of plans that a calibration cannot tell apart, the one with the fewest moves.

    [8.4 us in 2 moves, 8.5 us in 1 move], residual 3 %     the plan of one move is made

A measured curve is off by its residual (`mesh/machine.py`), so a plan that is cheaper by less may not be cheaper. Each
plan is compared with the cheapest of all plans, and never with another one. So there is no chain of plans of which each
is as good as the one before. Among the near enough plans of fewest moves, the cheapest is taken.
"""

from __future__ import annotations

from itertools import pairwise
from math import inf

import numpy as np

from spmd.mesh.cost import residual
from spmd.tensor.redistribute.collective_moves import AllGather, AllReduce, AllToAll, Exchange, Permute, ReduceScatter
from spmd.tensor.redistribute.search import NEVER, Search, cheapest, subsets
from spmd.tensor.redistribute.states import Edge, Space

MEASURED_AS = {
    AllGather: "all_gather", AllReduce: "all_reduce", AllToAll: "all_to_all", Exchange: "all_to_all",
    Permute: "permute", ReduceScatter: "reduce_scatter",
}  # fmt: skip


def simplest(space: Space, max_bytes: float = inf) -> list[Edge] | None:
    """The edges from the start of the space to its goal: of the plans that may be the cheapest, one of fewest moves."""
    edges = cheapest(space, max_bytes)
    uncertainty = sum([_uncertainty_ps(space, edge) for edge in edges or ()])
    if not uncertainty or len(edges) == 1:
        return edges
    limit = sum([edge.ps for edge in edges]) + uncertainty
    return _FewestMoves(space, max_bytes).cheapest_within(limit, len(edges)) or edges


def _uncertainty_ps(space: Space, edge: Edge) -> int:
    """Picoseconds by which a move may take more or less time than its price says."""
    kind = MEASURED_AS.get(edge.move)
    return int(edge.ps * residual(kind, edge.axes, space.topology)) if kind else 0


class _FewestMoves(Search):
    """A search for the remaining time with at most 0 moves, with at most 1, 2, and so on."""

    def cheapest_within(self, limit: int, fewer_than: int) -> list[Edge] | None:
        """The cheapest of the plans of fewest moves that take no longer than `limit`.

        None if these have `fewer_than` moves or more.
        """
        pending = self._bits(self.space.start.pending)
        remaining = [np.full_like(self.remaining, NEVER)]
        remaining[0][0, self.goals] = 0
        while remaining[-1][pending, self.start] > limit:
            if len(remaining) == fewer_than:
                return None
            remaining.append(self._with_one_more_move(remaining[-1], pending))
        return self._read(remaining[::-1], self.start, pending)

    def _with_one_more_move(self, remaining: np.ndarray, pending: int) -> np.ndarray:
        found = remaining.copy()
        for some in subsets(pending):
            best = np.minimum(found[some], (self.moving + remaining[some]).min(1))
            for axes in subsets(some)[1:]:
                best = np.minimum(best, self._all_reduces(axes) + remaining[some ^ axes])
            scatters = self.graph.scatters(some)
            if some and len(scatters.outer):
                after = self.scattering[some] - self.remaining[some ^ scatters.reduced, scatters.inner]
                np.minimum.at(best, scatters.outer, after + remaining[some ^ scatters.reduced, scatters.inner])
            found[some] = np.where(self.graph.used & some == 0, best, NEVER)
        return found

    def _read(self, remaining: list[np.ndarray], at: int, pending: int) -> list[Edge]:
        """The edges of the plan: each shortens the remaining time by its own time. Ties go as plans are compared."""
        edges = []
        for now, then in pairwise(remaining):
            every = [
                ((edge.sent, edge.peak, *edge.to.written(), edge.move.kind), edge, to, rest)
                for rest in (pending ^ axes for axes in subsets(pending))
                for to in np.nonzero(then[rest] <= now[pending, at])[0].tolist()
                for edge in self._between(at, pending, to, rest)
                if edge.ps + then[rest, to] == now[pending, at] and edge.peak <= self.max_bytes
            ]
            _, edge, at, pending = min(every, key=lambda each: each[0])
            edges.append(edge)
        return edges

    def _between(self, at: int, pending: int, to: int, rest: int) -> list[Edge]:
        before, after = self._state(at, pending), self._state(to, rest)
        return [] if before == after else list(self.space.edges(before, after))
