"""A lower bound on the objective of a problem, and what each option costs at least.

The problem is taken apart: each variable by itself, and each reader of a value by itself with its maker. Potentials
move cost between the parts, so that their least costs add up to as much as possible (the dual of the linear relaxation;
sequential reweighted message passing: V. Kolmogorov, "A new look at reweighted message passing", 2015). Whatever the
potentials are, the sum of the least costs is a bound: no assignment costs less.

Readers that need a value alike share one move. So the cost of a move is shared out among the readers, in parts that add
up to it, and what a reader does not use of its part goes to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from spmd.expand.choose.problem import FIXED, Problem, Value


@dataclass(eq=False)
class Edge:
    """A value and one of its readers. share: [layout made, layout needed], this reader's part of the cost.

    maker, reader: the variables. rows, columns: the layouts that `share` has numbers for. made, needed: for each option
    of the maker its row of `share`, for each of the reader its column. out, into: potentials that the maker and the
    reader have moved to this edge. limit: what all edges of the value pay together, for each of all layouts.
    """

    value: int
    maker: int
    reader: int
    made: np.ndarray
    needed: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    share: np.ndarray
    out: np.ndarray
    into: np.ndarray
    limit: np.ndarray

    def to_maker(self) -> np.ndarray:
        """The least cost for each layout made; moves all of it away from the edge."""
        found = (self.share + self.into).min(1)
        self.out = -found
        return found

    def to_reader(self) -> np.ndarray:
        """The least cost for each layout needed; moves all of it away from the edge."""
        found = (self.share + self.out[:, None]).min(0)
        self.into = -found
        return found

    def rest(self) -> np.ndarray:
        """The cost that is left on the edge."""
        return self.share + self.out[:, None] + self.into


NOT_WANTED = -1e15
"""In the place of potentials: a reader never needs this layout."""


class Bound:
    """The relaxation of a problem. least: the best bound so far. allowed: for each variable the options left."""

    def __init__(self, problem: Problem, allowed: Sequence[np.ndarray]) -> None:
        self.problem, self.allowed = problem, list(allowed)
        self.cost = [w[a] for w, a in zip(problem.work, self.allowed, strict=True)]
        self.cost.append(np.zeros(1))  # of what is fixed
        self.allowed.append(np.zeros(1, int))
        self.edges: list[Edge] = []
        self.groups: list[list[Edge]] = []
        for v, value in enumerate(problem.values):
            self._add(v, value)
        self.incident: list[list[tuple[Edge, bool]]] = [[] for _ in self.cost]
        for e in self.edges:
            self.incident[e.maker].append((e, True))
            self.incident[e.reader].append((e, False))
        self.least = -np.inf

    # ---- edges ----------------------------------------------------------------------------------
    def _add(self, v: int, value: Value) -> None:
        """The edges of a value. If it has one reader and an end is fixed, it is part of the other end's cost."""
        made = self._layouts(value.maker)
        rows, row_of = np.unique(made, return_inverse=True)
        needs = [np.unique(self._layouts(end), return_inverse=True) for end in value.readers]
        share = self._shares(value, [columns for columns, _ in needs])
        limit = value.weight * value.costs[rows]
        group = []
        for end, (columns, column_of) in zip(value.readers, needs, strict=True):
            table = share[rows][:, columns]
            if end.variable == value.maker.variable != FIXED:
                self._alone(end.variable, table[row_of, column_of])
                limit[:, columns] -= table
            elif len(needs) == 1 and value.maker.variable == FIXED:
                self._alone(end.variable, table[0][column_of])
            elif len(needs) == 1 and end.variable == FIXED:
                self._alone(value.maker.variable, table[row_of, 0])
            else:
                ends = value.maker.variable % len(self.cost), end.variable % len(self.cost)  # what is fixed comes last
                zeros = np.zeros(len(rows)), np.zeros(len(columns))
                group.append(Edge(v, *ends, row_of, column_of, rows, columns, table, *zeros, limit))
        for e in group:
            e.limit = limit
        self.edges += group
        if len(group) > 1:
            self.groups.append(group)

    def _alone(self, i: int, cost: np.ndarray) -> None:
        """Add to the cost of a variable by itself."""
        self.cost[i] = self.cost[i] + cost

    def _layouts(self, end) -> np.ndarray:
        return end.layouts[:1] if end.variable == FIXED else end.layouts[self.allowed[end.variable]]

    @staticmethod
    def _shares(value: Value, needs: list[np.ndarray]) -> np.ndarray:
        """The cost of each move, in equal parts for the readers that may need it."""
        wanted = np.zeros(len(value.costs))
        for each in needs:
            wanted[each] += 1
        return value.weight * value.costs / np.maximum(wanted, 1)

    # ---- sweeps ---------------------------------------------------------------------------------
    def improve(self, sweeps: int) -> float:
        """Sweep forward and backward over the variables. Returns the best bound so far."""
        for _ in range(sweeps):
            n = len(self.cost)
            self._sweep(range(n), lambda i, j: j > i)
            self._sweep(range(n - 1, -1, -1), lambda i, j: j < i)
            self._remember()
            self._spread()
            for group in self.groups:
                self._share_again(group)
            self._remember()
        return self.least

    def _sweep(self, order, is_later) -> None:
        for i in order:
            cost = self._collect(i)
            later = [(e, makes) for e, makes in self.incident[i] if is_later(i, e.reader if makes else e.maker)]
            weight = 1 / max(len(later), len(self.incident[i]) - len(later), 1)
            for e, makes in later:
                self._give(i, e, makes, cost, weight)

    def _spread(self) -> None:
        """Give to the edges of each variable what its options cost more than the cheapest: it is slack to share out."""
        for i, incident in enumerate(self.incident):
            cost = self._now(i)
            for e, makes in incident:
                self._give(i, e, makes, cost, 1 / len(incident))

    @staticmethod
    def _share_again(group: list[Edge]) -> None:
        """Share out the costs of a value's moves again, so that its readers have equally much left of them.

        That level is found as water finds it: readers whose potentials give more than the level pay nothing.
        """
        limit = group[0].limit
        moved = np.full((len(group), *limit.shape), NOT_WANTED)
        for e, own in zip(group, moved, strict=True):
            own[:, e.columns] = -e.out[:, None] - e.into
        ordered = -np.sort(-moved, axis=0)
        levels = (limit - ordered.cumsum(0)) / np.arange(1, len(group) + 1)[:, None, None]
        pays = levels + ordered > 0
        level = np.take_along_axis(levels, np.maximum(pays.sum(0) - 1, 0)[None], 0)[0]
        for e, own in zip(group, moved, strict=True):
            e.share = np.maximum(level + own, 0)[:, e.columns]

    def _collect(self, i: int) -> np.ndarray:
        """All cost that its edges can give to a variable, with its own cost, for each option."""
        total = self.cost[i].copy()
        for e, makes in self.incident[i]:
            total += e.to_maker()[e.made] if makes else e.to_reader()[e.needed]
        return total

    @staticmethod
    def _give(i: int, e: Edge, makes: bool, cost: np.ndarray, weight: float) -> None:
        index, size = (e.made, len(e.out)) if makes else (e.needed, len(e.into))
        least = np.full(size, np.inf)
        np.minimum.at(least, index, cost)
        if makes:
            e.out = e.out + weight * least
        else:
            e.into = e.into + weight * least

    def _now(self, i: int) -> np.ndarray:
        """The cost of each option of a variable by itself."""
        total = self.cost[i].copy()
        for e, makes in self.incident[i]:
            total -= e.out[e.made] if makes else e.into[e.needed]
        return total

    def _remember(self) -> None:
        alone = [self._now(i) for i in range(len(self.cost))]
        found = sum([float(c.min()) for c in alone]) + sum([float(e.rest().min()) for e in self.edges])
        if found > self.least:
            self.least = found

    # ---- options left -------------------------------------------------------------------------
    def prune(self, most: float) -> int:
        """Drop all options with which every assignment costs more than `most`. Returns how many are left in all."""
        slack = most - self.value_now() + 1e-6 + 1e-9 * abs(most)  # rounding drops no option
        excess = [self.excess(i) for i in range(len(self.cost))]
        masks = [each <= max(slack, each.min()) for each in excess]
        if not all(mask.all() for mask in masks):
            self.restrict(masks)
        return sum(map(len, self.cost))

    def restrict(self, masks: Sequence[np.ndarray]) -> None:
        """Keep the options of these masks, and what the edges know about them."""
        self.allowed = [a[m] for a, m in zip(self.allowed, masks, strict=True)]
        self.cost = [c[m] for c, m in zip(self.cost, masks, strict=True)]
        for e in self.edges:
            rows, e.made = np.unique(e.made[masks[e.maker]], return_inverse=True)
            columns, e.needed = np.unique(e.needed[masks[e.reader]], return_inverse=True)
            e.rows, e.columns, e.limit = e.rows[rows], e.columns[columns], e.limit[rows]
            e.share, e.out, e.into = e.share[np.ix_(rows, columns)], e.out[rows], e.into[columns]

    # ---- what options cost ----------------------------------------------------------------------
    def excess(self, i: int) -> np.ndarray:
        """How much the bound grows if the variable takes each option, at least, by the potentials as they are."""
        total = self._now(i)
        for e, makes in self.incident[i]:
            rest = e.rest()
            least = rest.min()
            total = total + (rest.min(1)[e.made] if makes else rest.min(0)[e.needed]) - least
        return total - self._now(i).min()

    def value_now(self) -> float:
        """The bound by the potentials as they are."""
        alone = [float(self._now(i).min()) for i in range(len(self.cost))]
        return sum(alone) + sum([float(e.rest().min()) for e in self.edges])
