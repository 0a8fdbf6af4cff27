"""Plans that a calibration cannot tell apart: of these the one with fewest moves.

A measured curve is off by its residual (`mesh/machine.py`), so a plan that is cheaper by less is not known to be. What
counts is how far a plan is from the cheapest of all, never from one another: so there is no chain of plans each of
which is as good as the next. Among the plans of fewest moves that are near enough, the cheapest is taken.
"""

from __future__ import annotations

from itertools import pairwise
from math import inf

import numpy as np

from spmd.mesh.cost import residual
from spmd.tensor.redistribute.moves import AllGather, AllReduce, AllToAll, Exchange, Permute, ReduceScatter
from spmd.tensor.redistribute.search import NEVER, Search, cheapest, subsets
from spmd.tensor.redistribute.states import Space, Way

MEASURED_AS = {
    AllGather: "all_gather", AllReduce: "all_reduce", AllToAll: "all_to_all", Exchange: "all_to_all",
    Permute: "permute", ReduceScatter: "reduce_scatter",
}  # fmt: skip


def simplest(space: Space, max_bytes: float = inf) -> list[Way] | None:
    """The ways from the start of the space to its goal: the fewest of those that may be the cheapest."""
    ways = cheapest(space, max_bytes)
    doubt = sum([_doubt(space, way) for way in ways or ()])
    if not doubt or len(ways) == 1:
        return ways
    return _Fewer(space, max_bytes).within(sum([way.ps for way in ways]) + doubt, len(ways)) or ways


def _doubt(space: Space, way: Way) -> int:
    """Picoseconds by which a move may take more, or less, than its price."""
    kind = MEASURED_AS.get(way.move)
    return int(way.ps * residual(kind, way.axes, space.topology)) if kind else 0


class _Fewer(Search):
    """The time that is left if so many moves are to be made at most: for 0 moves, 1, 2 and on."""

    def within(self, limit: int, fewer_than: int) -> list[Way] | None:
        """The cheapest plan of the fewest moves that takes no longer; None where that are as many, or more."""
        pending = self._bits(self.space.start.pending)
        left = [np.full_like(self.left, NEVER)]
        left[0][0, self.goals] = 0
        while left[-1][pending, self.start] > limit:
            if len(left) == fewer_than:
                return None
            left.append(self._one_more(left[-1], pending))
        return self._read(left[::-1], self.start, pending)

    def _one_more(self, left: np.ndarray, pending: int) -> np.ndarray:
        found = left.copy()
        for some in subsets(pending):
            best = np.minimum(found[some], (self.moving + left[some]).min(1))
            for axes in subsets(some)[1:]:
                best = np.minimum(best, self._all_reduces(axes) + left[some ^ axes])
            scatters = self.graph.scatters(some)
            if some and len(scatters.outer):
                after = self.scattering[some] - self.left[some ^ scatters.reduced, scatters.inner]
                np.minimum.at(best, scatters.outer, after + left[some ^ scatters.reduced, scatters.inner])
            found[some] = np.where(self.graph.used & some == 0, best, NEVER)
        return found

    def _read(self, left: list[np.ndarray], at: int, pending: int) -> list[Way]:
        """The moves after which so much less time is left as they take; of several the first as plans are compared."""
        ways = []
        for now, then in pairwise(left):
            every = [
                ((way.sent, way.peak, way.to.dims[::-1], way.to.units, way.move.kind), way, to, rest)
                for rest in (pending ^ axes for axes in subsets(pending))
                for to in np.nonzero(then[rest] <= now[pending, at])[0].tolist()
                for way in self._between(at, pending, to, rest)
                if way.ps + then[rest, to] == now[pending, at] and way.peak <= self.max_bytes
            ]
            _, way, at, pending = min(every, key=lambda each: each[0])
            ways.append(way)
        return ways

    def _between(self, at: int, pending: int, to: int, rest: int) -> list[Way]:
        before, after = self._state(at, pending), self._state(to, rest)
        return [] if before == after else list(self.space.ways(before, after))
