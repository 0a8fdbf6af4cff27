"""A lower bound on the objective of a problem, and what each option costs at least.

The problem is taken apart: each variable by itself, and the moves of each value by themselves. They meet in *ports*: an
end of a value, where a variable has a layout for each of its options. Potentials, one for each layout of a port, move
cost between the two, so that the least costs of all parts add up to as much as possible (the dual of a linear
relaxation; sequential reweighted message passing: V. Kolmogorov, "A new look at reweighted message passing", 2015).
Whatever the potentials are, the sum of the least costs is a bound: no assignment costs less.

The moves of a value stay in one piece (`moves.py`), with all of its readers. Where the cost of a move is shared out
among the readers instead, the bound stops some per cent below; so it comes to the cost of the best assignment on nearly
all models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from spmd.expand.choose.moves import MOST_READERS, NEVER, OneReader, Readers
from spmd.expand.choose.problem import FIXED, End, Problem, Value

GIVE_ALL = 4
"""Sweeps in which variables keep nothing back."""


@dataclass(eq=False)
class Part:
    """The moves of a value. ends: what each end adds to their cost, by layout: less what is at the port's potential.

    version: how often the ends changed.
    """

    moves: OneReader | Readers
    ends: list[np.ndarray]
    ports: list[Port] = field(default_factory=list)
    version: int = 0

    def least(self) -> float:
        """The least cost of the moves, by the potentials as they are."""
        return float(self.moves.least_at(self.ends, 0).min())

    def shrink(self) -> None:
        """Forget the layouts that no option has."""
        used = [end < NEVER / 2 for end in self.ends]
        kept = [np.nonzero(each)[0] for each in (used[0], np.any(used[1:], axis=0))]
        if (len(kept[0]), len(kept[1])) == self.moves.costs.shape:
            return
        self.moves = replace(self.moves, costs=self.moves.costs[np.ix_(*kept)])
        self.ends = [end[kept[slot > 0]] for slot, end in enumerate(self.ends)]
        self.version += 1
        for port in self.ports:
            layouts = kept[port.slot > 0]
            port.potential, port.at = port.potential[layouts], np.searchsorted(layouts, port.at)
            port.sort()


@dataclass(eq=False)
class Port:
    """Where a variable meets a value, at one of its ends. at: the layout of each option, as a number of this port.

    potential: cost that has moved from the value to the variable, by layout. here: the layouts that some option has.
    order, starts: the options sorted by layout, and where each of `here` begins. seen: the version of the part when
    all that it can give had been taken.
    """

    part: Part
    slot: int
    variable: int
    at: np.ndarray
    potential: np.ndarray
    here: np.ndarray = field(init=False)
    order: np.ndarray = field(init=False)
    starts: np.ndarray = field(init=False)
    seen: int = -1

    def __post_init__(self) -> None:
        self.sort()

    def sort(self) -> None:
        """Bring `here`, `order` and `starts` in line with `at`."""
        self.order = np.argsort(self.at, kind="stable")
        self.here, self.starts = np.unique(self.at[self.order], return_index=True)

    def take(self) -> None:
        """Move all that the value can give to the variable."""
        part = self.part
        if self.seen == part.version:
            return
        found = np.zeros(len(self.potential))
        found[self.here] = part.moves.least_at(part.ends, self.slot)[self.here]
        self._move(found)
        self.seen = part.version

    def give(self, cost: np.ndarray, share: float) -> None:
        """Move this share of the variable's cost, by option, to the value."""
        found = np.zeros(len(self.potential))
        found[self.here] = -share * np.minimum.reduceat(cost[self.order], self.starts)
        self._move(found)

    def restrict(self, keep: np.ndarray) -> None:
        """Keep the options of a mask."""
        self.at = self.at[keep]
        before = self.here
        self.sort()
        self.part.ends[self.slot][np.setdiff1d(before, self.here)] = NEVER
        self.part.version += 1

    def _move(self, found: np.ndarray) -> None:
        self.potential = self.potential + found
        self.part.ends[self.slot] = self.part.ends[self.slot] - found
        self.part.version += 1


class Bound:
    """The relaxation of a problem. least: the best bound so far. allowed: for each variable the options left."""

    def __init__(self, problem: Problem, allowed: Sequence[np.ndarray]) -> None:
        self.problem, self.allowed = problem, list(allowed)
        self.cost = [w[a] for w, a in zip(problem.work, self.allowed, strict=True)]
        self.constant = 0.0
        self.parts: list[Part] = []
        self.ports: list[list[Port]] = [[] for _ in self.cost]
        for value in problem.values:
            self._add(value)
        self.order = _order(problem)
        self._turns()
        self.least, self.sweeps = -np.inf, 0

    # ---- parts ----------------------------------------------------------------------------------
    def _add(self, value: Value) -> None:
        """The parts of a value. What one variable alone decides is part of its cost."""
        readers = {(end.variable, self._layouts(end).tobytes()): end for end in value.readers}
        ends = list(readers.values())
        variables = {end.variable for end in (value.maker, *ends)} - {FIXED}
        if len(variables) <= 1:
            self._alone(value, variables)
            return
        pieces = [ends[k : k + MOST_READERS] for k in range(0, len(ends), MOST_READERS)]
        costs = value.weight * value.costs
        if len(pieces) > 1:  # each pays an equal part of what several of them may need
            wanted = [np.isin(np.arange(len(costs)), [t for e in p for t in self._layouts(e)]) for p in pieces]
            costs = costs / np.maximum(np.sum(wanted, axis=0), 1)
        for piece in pieces:
            self._part(costs, value.maker, piece)

    def _alone(self, value: Value, variables: set[int]) -> None:
        for i in variables:
            self.cost[i] = self.cost[i] + value.weight * self.problem.of_value(value, i, ())[self.allowed[i]]
        if not variables:
            self.constant += value.cost(())

    def _part(self, costs: np.ndarray, maker: End, readers: Sequence[End]) -> None:
        made, needed = self._layouts(maker), [self._layouts(end) for end in readers]
        rows, columns = np.unique(made), np.unique(np.concatenate(needed))
        table = costs[np.ix_(rows, columns)]
        part = Part(OneReader(table) if len(readers) == 1 else Readers(table, len(readers)), [])
        for slot, (end, layouts) in enumerate(zip((maker, *readers), (made, *needed), strict=True)):
            known = columns if slot else rows
            at = np.searchsorted(known, layouts)
            adds = np.full(len(known), NEVER)
            adds[at] = 0.0
            part.ends.append(adds)
            if end.variable != FIXED:
                port = Port(part, slot, end.variable, at, np.zeros(len(known)))
                part.ports.append(port)
                self.ports[end.variable].append(port)
        self.parts.append(part)

    def _layouts(self, end: End) -> np.ndarray:
        return end.layouts[:1] if end.variable == FIXED else end.layouts[self.allowed[end.variable]]

    def _turns(self) -> None:
        """For each variable the ports whose values are met again later, in each direction of a sweep.

        A variable with one port has given all of its cost to it, once and for all.
        """
        at = {i: k for k, i in enumerate(self.order)}
        self.turns: tuple[list, list] = ([], [])
        for i in self.order:
            if len(self.ports[i]) == 1:
                self.ports[i][0].give(self.now(i), 1.0)
                continue
            met = [(p, [at[q.variable] for q in p.part.ports if q is not p]) for p in self.ports[i]]
            self.turns[0].append((i, [p for p, others in met if max(others, default=-1) > at[i]]))
            self.turns[1].append((i, [p for p, others in met if min(others, default=len(at)) < at[i]]))
        self.most = [max(len(a), len(b)) for (_, a), (_, b) in zip(*self.turns, strict=True)]
        self.turns[1].reverse()

    # ---- sweeps ---------------------------------------------------------------------------------
    def improve(self, sweeps: int) -> float:
        """Sweep forward and backward over the variables. Returns the best bound so far.

        In the first sweeps variables give all that they have. That is faster at the beginning and slower at the end
        than to keep back what the way back can give.
        """
        for _ in range(sweeps):
            self.sweeps += 1
            for turn, most in zip(self.turns, (self.most, self.most[::-1]), strict=True):
                for (i, later), ports in zip(turn, most, strict=True):
                    cost = self.collected(i)
                    share = 1 / (len(later) if self.sweeps <= GIVE_ALL else ports) if later else 0.0
                    for port in later:
                        port.give(cost, share)
        self.least = max(self.least, self.value_now())
        return self.least

    def collected(self, i: int) -> np.ndarray:
        """The cost of each option of a variable with all that its values can give to it."""
        cost = self.cost[i].copy()
        for port in self.ports[i]:
            port.take()
            cost += port.potential[port.at]
        return cost

    def value_now(self) -> float:
        """The bound by the potentials as they are."""
        alone = [float(self.now(i).min()) for i in range(len(self.cost))]
        return self.constant + sum(alone) + sum([part.least() for part in self.parts])

    def now(self, i: int) -> np.ndarray:
        """The cost of each option of a variable by itself."""
        cost = self.cost[i].copy()
        for port in self.ports[i]:
            cost += port.potential[port.at]
        return cost

    # ---- options left -------------------------------------------------------------------------
    def prune(self, most: float) -> int:
        """Drop all options with which every assignment costs more than `most`. Returns how many are left in all."""
        slack = max(0.0, most - self.least) + 1e-6 + 1e-9 * abs(most)  # rounding drops no option
        for i in self.order:
            cost = self.collected(i)
            keep = cost - cost.min() <= slack
            if not keep.all():
                self.allowed[i], self.cost[i] = self.allowed[i][keep], self.cost[i][keep]
                for port in self.ports[i]:
                    port.restrict(keep)
            if len(self.ports[i]) == 1:
                self.ports[i][0].give(self.now(i), 1.0)
        for part in self.parts:
            part.shrink()
        return sum(map(len, self.cost))


def _order(problem: Problem) -> list[int]:
    """The variables in order; those without work, where a value is held, come after what makes it."""
    makers = {v.readers[0].variable: v.maker.variable for v in problem.values if len(v.readers) == 1}
    key: dict[int, tuple[int, ...]] = {}
    for i, work in enumerate(problem.work):
        before = makers.get(i, FIXED)
        key[i] = (*key[before], i) if not work.any() and before in key else (i,)
    return sorted(key, key=key.__getitem__)
