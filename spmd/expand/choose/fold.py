"""A problem without the variables that follow from others.

    product -> view -> transpose -> product        product -> product, with one table of costs

A variable with one move follows from what is at the other end, and one with two of them from both; so it is decided for
each case beforehand, and gone. One that makes what several others read, from one other, becomes part of how that value
is made. What is left has the same least cost, and the bound of the relaxation is the same or better: it is exact along
what was folded. Folded are moves between cells that are met nowhere else, so that in all equal cells the same is
folded. The search gains, too: where a product changes, the views between follow at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from spmd.expand.choose.problem import FIXED, End, Problem, Value


@dataclass(frozen=True, eq=False)
class Follower:
    """A variable that was folded: it takes what is cheapest beside others. values: those that it had then."""

    variable: int
    work: np.ndarray
    values: tuple[Value, ...]

    def option(self, x: Sequence[int]) -> int:
        """What it takes, given the others."""
        return int(sum([value.costs_of(self.variable, x) for value in self.values], self.work).argmin())


@dataclass(frozen=True, eq=False)
class Link:
    """What a variable pays with another one. costs: [option, place]. end: the other's place for each of its options."""

    costs: np.ndarray
    end: End


@dataclass(frozen=True, eq=False)
class Folded:
    """A problem that is left, the variables of the whole one in it, and those that follow, in the order of folding."""

    problem: Problem
    kept: list[int]
    followers: list[Follower]

    def fold(self, x: Sequence[int]) -> list[int]:
        """The part of an assignment that is left."""
        return [x[i] for i in self.kept]

    def unfold(self, x: Sequence[int]) -> list[int]:
        """The whole assignment of one of what is left."""
        found = [0] * (len(self.kept) + len(self.followers))
        for i, option in zip(self.kept, x, strict=True):
            found[i] = option
        for follower in reversed(self.followers):
            found[follower.variable] = follower.option(found)
        return found


def folded(problem: Problem) -> Folded:
    """Fold all variables that can be.

    >>> costs = np.array([[0.0, 5.0], [5.0, 0.0]])
    >>> a, b, c = (End(i, np.array([0, 1])) for i in range(3))
    >>> chain = Problem([np.array([0.0, 9.0]), np.zeros(2), np.array([9.0, 0.0])],
    ...                 [Value(1, costs, a, (b,)), Value(1, costs, b, (c,))])
    >>> found = folded(chain)
    >>> found.kept, found.problem.constant, found.unfold([])
    ([], 5.0, [0, 0, 1])
    """
    return _Folding(problem).result()


class _Folding:
    """A problem while it is folded. values: by number. near: for each variable the numbers of its values. own: values
    that each cell of their variables meets once, and no other cell does."""

    def __init__(self, problem: Problem) -> None:
        self.work, self.cells, self.constant = list(problem.work), problem.cells, problem.constant
        kinds = Counter(value.kind for value in problem.values)
        apart = {value.kind for value in problem.values if _free_ends(value) > 1}
        self.values: dict[int, Value] = {}
        self.near: list[dict[int, None]] = [{} for _ in self.work]
        self.own: set[int] = set()
        self.followers: list[Follower] = []
        self._tables: dict[tuple, np.ndarray] = {}
        for value in problem.values:
            if value.kind not in apart and _free_ends(value) == 1:
                self._pay(value)
            else:
                self._add(value, value.kind is None or kinds[value.kind] == 1)
        waiting = dict.fromkeys(range(len(self.work)))
        while waiting:
            i = next(iter(waiting))
            del waiting[i]
            if all(v in self.own for v in self.near[i]):
                waiting.update(dict.fromkeys(self._folded(i)))
        self._join()

    def _add(self, value: Value, alone: bool = True) -> None:
        """Add a value. What nobody or one variable decides is added up at once."""
        own = alone and all(self.cells[i] == value.weight for i in value.free)
        if not value.free:
            self.constant += value.cost(())
        elif own and len(value.free) == 1:
            self._pay(value)
        else:
            v = len(self.values)
            self.values[v] = value
            if own:
                self.own.add(v)
            for i in value.free:
                self.near[i][v] = None

    def _pay(self, value: Value) -> None:
        """Let the one variable that decides a value pay for it."""
        (i,) = value.free
        self.work[i] = self.work[i] + value.costs_of(i, {})

    def _drop(self, v: int) -> None:
        for j in self.values[v].free:
            del self.near[j][v]
        self.values[v] = None

    # ---- folding --------------------------------------------------------------------------------
    def _folded(self, i: int) -> list[int]:
        """Fold a variable, if it can be. Returns those that were near."""
        values = [self.values[v] for v in self.near[i]]
        wide = [value for value in values if len(value.free) > 2]
        links = [value for value in values if len(value.free) == 2]
        others = sorted({j for value in links for j in value.free} - {i})
        if not wide and len(others) <= 2:
            fold = self._between
        elif len(wide) == 1 and len(others) <= 1 and all(end.variable != i for end in wide[0].readers):
            fold = self._making
        elif len(wide) == 1 and not links and _is_table(wide[0]):
            fold = self._reading
        else:
            return []
        numbers, found = list(self.near[i]), fold(i, wide, [self._link(i, j, links) for j in others])
        self.followers.append(Follower(i, self.work[i], tuple(values)))
        for v in numbers:
            self._drop(v)
        if found is not None:
            self._add(found)
        return sorted({j for value in values for j in value.free} - {i})

    def _between(self, i: int, wide: Sequence[Value], links: Sequence[Link]) -> Value | None:
        """What the neighbours of a variable pay instead of it: at most two."""
        weight, work = self.cells[i], self.work[i] / self.cells[i]
        if len(links) == 2:
            a, b = links
            return Value(float(weight), self._through(a.costs + work[:, None], b.costs), a.end, (b.end,))
        if not links:
            self.constant += weight * float(work.min())
        for link in links:
            j, costs = link.end.variable, (link.costs + work[:, None]).min(0)
            self.work[j] = self.work[j] + weight * costs[link.end.layouts]
        return None

    def _making(self, i: int, wide: Sequence[Value], links: Sequence[Link]) -> Value:
        """A value that is made by what its maker reads, at most one other."""
        (value,) = wide
        (link,) = links or [Link(np.zeros((len(self.work[i]), 1)), End(FIXED, np.zeros(1, int)))]
        places, at = np.unique(value.maker.layouts, return_inverse=True)
        made = np.full((len(places), link.costs.shape[1]), np.inf)
        np.minimum.at(made, at, link.costs + (self.work[i] / self.cells[i])[:, None])
        if value.held is None:
            return replace(value, maker=link.end, held=made.T, costs=value.costs[places])
        return replace(value, maker=link.end, held=self._through(made, value.held[places]))

    def _reading(self, i: int, wide: Sequence[Value], links: Sequence[Link]) -> Value:
        """A value for two of its ends, where a reader follows: it needs what another one does, or what is cheapest."""
        (value,) = wide
        (mine,) = [end for end in value.readers if end.variable == i]
        one, *rest = [end for end in value.readers if end.variable != i]
        least = np.full(value.costs.shape[1], np.inf)
        np.minimum.at(least, mine.layouts, self.work[i] / self.cells[i])
        alone = (value.costs + least).min(1)[:, None]
        if rest:  # made in one layout
            made = value.maker.layouts[0]
            moved = value.costs[made] + np.where(np.eye(len(least), dtype=bool), 0.0, value.costs[made][:, None])
            costs = moved + np.minimum(alone[made], np.minimum(least, least[:, None]))
            return Value(value.weight, costs, one, tuple(rest))
        costs = value.costs + np.minimum(alone, least)
        costs = costs if value.held is None else self._through(value.held.T, costs)
        return Value(value.weight, costs, value.maker, (one,))

    def _through(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """The least of both over all options; found once for layers that are alike."""
        key = a.shape, a.tobytes(), b.shape, b.tobytes()
        if key not in self._tables:
            self._tables[key] = _through(a, b)
        return self._tables[key]

    def _join(self) -> None:
        """Let values between the same two variables be one."""
        pairs: dict[tuple[int, ...], list[int]] = {}
        for v in sorted(self.own):
            if self.values[v] is not None and len(self.values[v].free) == 2:
                pairs.setdefault(self.values[v].free, []).append(v)
        for (i, j), numbers in pairs.items():
            if len(numbers) > 1:
                link = self._link(i, j, [self.values[v] for v in numbers])
                for v in numbers:
                    self._drop(v)
                self._add(Value(float(self.cells[i]), link.costs, End(i, np.arange(len(self.work[i]))), (link.end,)))

    # ---- links ----------------------------------------------------------------------------------
    def _link(self, i: int, j: int, links: Sequence[Value]) -> Link:
        """All that a variable pays with another one."""
        found = [self._seen(value, i, j) for value in links if j in value.free]
        if len(found) == 1:
            return found[0]
        costs = sum([link.costs[:, link.end.layouts] for link in found])
        return Link(costs, End(j, np.arange(len(self.work[j]))))

    def _seen(self, value: Value, i: int, j: int) -> Link:
        """A value between two variables, as one of them sees it."""
        ends = [end for end in (value.maker, *value.readers) if end.variable == j]
        places, first, at = np.unique(
            np.array([end.layouts for end in ends]), axis=1, return_index=True, return_inverse=True
        )
        if len(value.readers) > 1 or value.held is not None:
            costs = np.array([value.costs_of(i, {j: option}) for option in first.tolist()]).T / value.weight
        elif value.maker.variable == i:
            costs = value.costs[np.ix_(value.maker.layouts, places[0])]
        else:
            costs = value.costs[np.ix_(places[0], value.readers[0].layouts)].T
        return Link(costs, End(j, at.ravel()))

    def result(self) -> Folded:
        """What is left."""
        gone = {follower.variable for follower in self.followers}
        kept = [i for i in range(len(self.work)) if i not in gone]
        number = {i: k for k, i in enumerate(kept)} | {FIXED: FIXED}

        def renumbered(end: End) -> End:
            return replace(end, variable=number[end.variable])

        values = [
            replace(value, maker=renumbered(value.maker), readers=tuple(map(renumbered, value.readers)))
            for value in self.values.values()
            if value is not None
        ]
        problem = Problem([self.work[i] for i in kept], values, [self.cells[i] for i in kept], self.constant)
        return Folded(problem, kept, self.followers)


def _free_ends(value: Value) -> int:
    return sum(end.variable != FIXED for end in (value.maker, *value.readers))


def _is_table(value: Value) -> bool:
    """Whether a value is a table of two ends, if one of its readers follows; each end is another variable."""
    if not len(value.free) == _free_ends(value) == 3:
        return False
    two = len(value.readers) == 2
    return two or (len(value.readers) == 3 and value.maker.variable == FIXED and value.held is None)


def _through(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The least of both over all options, by the places at both ends: [place, place]; a, b: [option, place]."""
    found, beside = a[0][:, None] + b[0], np.empty((a.shape[1], b.shape[1]))
    for one, other in zip(a[1:], b[1:], strict=True):
        np.minimum(found, np.add(one[:, None], other, out=beside), out=found)
    return found
