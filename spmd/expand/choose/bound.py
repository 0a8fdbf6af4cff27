"""A lower bound on the objective of a problem, and what each option costs at least.

The problem is taken apart: each variable by itself, and the moves of each value by themselves. They meet in *ports*: an
end of a value, where a variable has a layout for each of its options. Potentials, one for each layout of an end, move
cost between the two, so that the least costs of all parts add up to as much as possible (the dual of a linear
relaxation; sequential reweighted message passing: V. Kolmogorov, "A new look at reweighted message passing", 2015).
Whatever the potentials are, the sum of the least costs is a bound: no assignment costs less.

The moves of a value stay in one piece (`moves.py`), with all of its readers. Where the cost of a move is shared out
among the readers instead, the bound stops some per cent below; so it comes to the cost of the best assignment on nearly
all models.

A variable may stand for many cells, and a value for many equal ones. The bound holds also for assignments in which
these differ: equal values have equal potentials, and all cells of a variable meet values of the same kinds, so each of
them costs an equal part of what the variable does. Values are of one kind where their surroundings are alike up to a
distance, cells where they are up to a larger one; so several variables may be at the same end of a kind of values, each
with its share of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from spmd.expand.choose.moves import MOST_READERS, NEVER, Moves, moves_of
from spmd.expand.choose.problem import FIXED, Problem, Value

GIVE_ALL = 4
"""Sweeps in which variables keep nothing back. None where a variable stands for many cells: there it takes longer."""


@dataclass(eq=False)
class Part:
    """The moves of all values of a kind. ends: what each end adds to their cost, by layout: the cost that has moved to
    them from the variables there; `NEVER` for a layout that none has.

    version: how often the ends changed.
    """

    moves: Moves
    ends: list[np.ndarray]
    slots: list[Slot] = field(default_factory=list)
    version: int = 0

    def least(self) -> float:
        """The least cost of the moves, by the potentials as they are."""
        return float((self.moves.least_at(self.ends, 0) + self.ends[0]).min())

    def shrink(self) -> None:
        """Forget the layouts that no option has."""
        used = [end < NEVER / 2 for end in self.ends]
        kept = [np.nonzero(each)[0] for each in (used[0], np.any(used[1:], axis=0))]
        if [len(each) for each in kept] == [len(each) for each in used[:2]]:
            return
        self.moves = self.moves.of(*kept)
        self.ends[:] = [end[kept[at > 0]] for at, end in enumerate(self.ends)]
        self.version += 1
        for slot in self.slots:
            slot.keep(kept[slot.at > 0])


@dataclass(eq=False)
class Slot:
    """An end of a kind of values, where variables meet them. at: 0 for what makes them, then the readers.

    here: the layouts that some option has; absent: those that none has. seen: the version of the part when all that it
    can give had been taken.
    """

    part: Part
    at: int
    ports: list[Port] = field(default_factory=list)
    seen: int = -1

    @property
    def end(self) -> np.ndarray:
        """What this end adds to the cost of the values, by layout."""
        return self.part.ends[self.at]

    def find(self) -> None:
        """Find which layouts some option has."""
        some = np.zeros(len(self.end), bool)
        for port in self.ports:
            some[port.here] = True
        self.here, self.absent = some.nonzero()[0], (~some).nonzero()[0]
        self.is_full = not len(self.absent)

    def take(self) -> None:
        """Move all that the values can give to the variables: then with each layout here the values cost nothing."""
        part = self.part
        end = np.negative(part.moves.least_at(part.ends, self.at), out=part.ends[self.at])
        if not self.is_full:
            end[self.absent] = NEVER
        part.version += 1
        self.seen = part.version

    def give(self, amount: np.ndarray) -> None:
        """Move cost from the variables to the values. amount: for each of the layouts here."""
        end = self.part.ends[self.at]
        if self.is_full:
            end += amount
        else:
            end[self.here] += amount
        self.part.version += 1

    def keep(self, layouts: np.ndarray) -> None:
        """Keep these layouts, and number them anew."""
        for port in self.ports:
            port.at = np.searchsorted(layouts, port.at)
            port.here = np.searchsorted(layouts, port.here)
        self.find()


@dataclass(eq=False)
class Port:
    """Where a variable is at a slot. at: the layout of each of its options. share: how much of the slot is with it.

    here: the layouts that some option has. order, starts: the options by layout, and where each of `here` begins.
    """

    slot: Slot
    variable: int
    at: np.ndarray
    share: float
    here: np.ndarray = field(init=False)
    order: np.ndarray = field(init=False)
    starts: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.sort()

    def sort(self) -> None:
        """Bring `here`, `order` and `starts` in line with `at`."""
        self.order = self.at.argsort(kind="stable")
        at = self.at[self.order]
        first = np.ones(len(at), bool)
        np.not_equal(at[1:], at[:-1], out=first[1:])
        self.starts = first.nonzero()[0]
        self.here = at[self.starts]

    def least(self, cost: np.ndarray) -> np.ndarray:
        """The least cost of the options for each of the layouts here."""
        least = cost[self.order]
        return least if len(self.starts) == len(least) else np.minimum.reduceat(least, self.starts)

    def least_at_slot(self, cost: np.ndarray) -> np.ndarray:
        """The same for each layout of the slot; infinite where no option has it."""
        found = np.full(len(self.slot.end), np.inf)
        found[self.here] = self.least(cost)
        return found

    def restrict(self, keep: np.ndarray) -> None:
        """Keep the options of a mask."""
        slot, before = self.slot, self.slot.here
        self.at = self.at[keep]
        self.sort()
        slot.find()
        if len(slot.here) < len(before):
            slot.end[slot.absent] = NEVER
        slot.part.version += 1


class Bound:
    """The relaxation of a problem. least: the best bound so far. allowed: for each variable the options left."""

    def __init__(self, problem: Problem, allowed: Sequence[np.ndarray]) -> None:
        self.problem, self.allowed = problem, list(allowed)
        self.cost = [w[a] for w, a in zip(problem.work, self.allowed, strict=True)]
        self.constant = problem.constant
        self.parts: list[Part] = []
        self.ports: list[list[Port]] = [[] for _ in self.cost]
        for values in problem.kinds():
            self._add(values)
        self.order = range(len(self.cost))
        self._turns()
        self.least, self.sweeps = -np.inf, 0
        self.give_all = 0 if max(problem.cells, default=1) > 1 else GIVE_ALL

    # ---- parts ----------------------------------------------------------------------------------
    def _add(self, values: Sequence[Value]) -> None:
        """The parts of a kind of values. What one variable decides by itself is part of its cost."""
        slots = _slots(values)
        alone = {i for slot in slots for i in slot} - {FIXED}
        if not alone:
            self.constant += sum([value.cost(()) for value in values])
        elif sum(set(slot) != {FIXED} for slot in slots) == 1 or len(alone) == self.problem.cells[max(alone)] == 1:
            for value in values:
                self._alone(value)
        else:
            self._parts(values, slots)

    def _alone(self, value: Value) -> None:
        i = max(end.variable for end in (value.maker, *value.readers))
        self.cost[i] = self.cost[i] + value.costs_of(i, {})[self.allowed[i]]

    def _parts(self, values: Sequence[Value], slots: Sequence[dict[int, tuple[np.ndarray, float]]]) -> None:
        """One part, or several if there are more readers than are looked at together."""
        maker, *readers = slots
        pieces = [readers[k : k + MOST_READERS] for k in range(0, len(readers), MOST_READERS)]
        weight = sum([value.weight for value in values])
        costs, held = weight * values[0].costs, None
        if values[0].held is not None:
            held = weight / len(pieces) * values[0].held
        elif len(pieces) > 1:  # each pays an equal part of what several of them may need
            needed = [np.concatenate([self._layouts(*end) for slot in p for end in slot.items()]) for p in pieces]
            costs = costs / np.maximum(np.sum([np.isin(np.arange(len(costs)), n) for n in needed], axis=0), 1)
        for piece in pieces:
            self._part(costs, held, [maker, *piece])

    def _part(
        self, costs: np.ndarray, held: np.ndarray | None, slots: Sequence[dict[int, tuple[np.ndarray, float]]]
    ) -> None:
        layouts = [{i: self._layouts(i, end) for i, end in slot.items()} for slot in slots]
        known = [
            np.unique(np.concatenate([a for slot in side for a in slot.values()]))
            for side in (layouts[:1], layouts[1:])
        ]
        part = Part(moves_of(costs, held, len(slots) - 1).of(*known), [])
        for at, (slot, of) in enumerate(zip(slots, layouts, strict=True)):
            adds = np.full(len(known[at > 0]), NEVER)
            met = Slot(part, at)
            whole = sum([weight for _, weight in slot.values()])
            for i, (_, weight) in slot.items():
                numbers = np.searchsorted(known[at > 0], of[i])
                adds[numbers] = 0.0
                if FIXED not in slot:
                    met.ports.append(Port(met, i, numbers, weight / whole))
                    self.ports[i].append(met.ports[-1])
            part.ends.append(adds)
            if met.ports:
                met.find()
                part.slots.append(met)
        self.parts.append(part)

    def _layouts(self, i: int, end: tuple[np.ndarray, float]) -> np.ndarray:
        return end[0][:1] if i == FIXED else end[0][self.allowed[i]]

    def _turns(self) -> None:
        """For each variable the ports whose values are met again later, in each direction of a sweep.

        A variable with one port to itself has given all of its cost to it, once and for all.
        """
        at = {i: k for k, i in enumerate(self.order)}
        self.turns: tuple[list, list] = ([], [])
        for i in self.order:
            if self._gives_once(i):
                self._give(self.ports[i], self.now(i), 1.0)
                continue
            met = [
                (p, [at[q.variable] for s in p.slot.part.slots for q in s.ports if q is not p]) for p in self.ports[i]
            ]
            self.turns[0].append((i, [p for p, others in met if max(others, default=-1) > at[i]]))
            self.turns[1].append((i, [p for p, others in met if min(others, default=len(at)) < at[i]]))
        self.most = [max(len(a), len(b)) for (_, a), (_, b) in zip(*self.turns, strict=True)]
        self.turns[1].reverse()

    def _gives_once(self, i: int) -> bool:
        return len(self.ports[i]) == 1 and len(self.ports[i][0].slot.ports) == 1

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
                    if later:
                        self._give(later, cost, 1 / (len(later) if self.sweeps <= self.give_all else ports))
        self.least = max(self.least, self.value_now())
        return self.least

    def collected(self, i: int) -> np.ndarray:
        """The cost of each option of a variable with all that its values can give to it."""
        for port in self.ports[i]:
            if port.slot.seen != port.slot.part.version:
                port.slot.take()
        return self.now(i)

    def _give(self, ports: Sequence[Port], cost: np.ndarray, share: float) -> None:
        """Move this share of a variable's cost to each of these ports. What others at the slot cannot give stays."""
        part = share * cost
        for port in ports:
            if len(port.slot.ports) == 1:
                port.slot.give(port.least(part))
            else:
                port.slot.give(self._all_can_give(port, part))

    def _all_can_give(self, port: Port, part: np.ndarray) -> np.ndarray:
        """What all variables at the slot of a port can give."""
        slot = port.slot
        found = port.least_at_slot((part - part.min()) / port.share)
        for other in slot.ports:
            if other is not port:
                slack = self.now(other.variable)
                found = np.minimum(found, other.least_at_slot((slack - slack.min()) / other.share))
        return found[slot.here]

    def value_now(self) -> float:
        """The bound by the potentials as they are."""
        alone = [float(self.now(i).min()) for i in range(len(self.cost))]
        return self.constant + sum(alone) + sum([part.least() for part in self.parts])

    def now(self, i: int) -> np.ndarray:
        """The cost of each option of a variable by itself."""
        cost = self.cost[i].copy()
        for port in self.ports[i]:
            added = port.slot.part.ends[port.slot.at][port.at]
            cost -= added if port.share == 1.0 else port.share * added
        return cost

    # ---- options left -------------------------------------------------------------------------
    def prune(self, most: float) -> int:
        """Drop all options with which every assignment costs more than `most`. Returns how many are left in all.

        An option goes if none of the cells that the variable stands for can take it, whatever the others of them do.
        """
        slack = max(0.0, most - self.least) + 1e-6 + 1e-9 * abs(most)  # rounding drops no option
        for i in self.order:
            cost = self.collected(i)
            keep = cost - cost.min() <= slack * self.problem.cells[i]
            if not keep.all():
                self.allowed[i], self.cost[i] = self.allowed[i][keep], self.cost[i][keep]
                for port in self.ports[i]:
                    port.restrict(keep)
            if self._gives_once(i):
                self._give(self.ports[i], self.now(i), 1.0)
        for part in self.parts:
            part.shrink()
        return sum(map(len, self.cost))


def _slots(values: Sequence[Value]) -> list[dict[int, tuple[np.ndarray, float]]]:
    """For each slot of a kind of values the variables there with their layouts, and how many of the values they meet.

    The first slot is that of the makers. Readers at slots where the same variables need the same share one: where all
    potentials are alike the cheapest is that all need alike.
    """
    maker: dict[int, tuple[np.ndarray, float]] = {}
    readers: dict[int, dict[int, tuple[np.ndarray, float]]] = {}
    for value in values:
        ends = [(maker, value.maker)]
        ends += [(readers.setdefault(k if e.slot is None else e.slot, {}), e) for k, e in enumerate(value.readers)]
        for slot, end in ends:
            met = slot.get(end.variable, (end.layouts, 0.0))
            slot[end.variable] = met[0], met[1] + value.weight
    distinct = {tuple((i, slot[i][0].tobytes()) for i in sorted(slot)): slot for slot in readers.values()}
    return [maker, *distinct.values()]
