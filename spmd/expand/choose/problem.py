"""A choice as a problem of numbers: variables with options, and values that are moved between them.

    minimise   sum of the work of each variable's option
             + for each value: the cost from the layout it is made in to each *distinct* layout that its readers need

A value is moved once for all readers that need it alike. `Problem.cost` is the one objective; the search, the bound and
the tests all use it.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

FIXED = -1
"""In the place of a variable: there is nothing to choose."""


@dataclass(frozen=True, eq=False)
class End:
    """An end of a value: the variable that makes or reads it, and the number of a layout for each of its options.

    slot: what ends of values of one kind share where their surroundings are alike.
    """

    variable: int
    layouts: np.ndarray
    slot: Hashable = None

    def at(self, x: Sequence[int]) -> int:
        """The layout under an assignment."""
        return int(self.layouts[0 if self.variable == FIXED else x[self.variable]])

    def among(self, every: np.ndarray) -> np.ndarray:
        """The layout under each of many assignments: [variable, assignment]."""
        chosen = self.layouts[:1] if self.variable == FIXED else self.layouts[every[self.variable]]
        return np.broadcast_to(chosen, every.shape[1])


@dataclass(frozen=True, eq=False)
class Value:
    """A value, or `weight` equal ones. costs: microseconds, [from, to].

    held: the microseconds from where it is made to each layout that it may be held in for all readers, which are then
    those of `costs`; None if its readers move it from where it is made. kind: the same for values whose surroundings
    are alike; None for a value that is of no other's kind.
    """

    weight: float
    costs: np.ndarray
    maker: End
    readers: tuple[End, ...]
    kind: Hashable = None
    held: np.ndarray | None = None

    @cached_property
    def free(self) -> tuple[int, ...]:
        """The variables at its ends."""
        return tuple(sorted({end.variable for end in (self.maker, *self.readers)} - {FIXED}))

    def cost(self, x: Sequence[int]) -> float:
        """Microseconds of its moves under an assignment."""
        return self.weight * float(self._served(self.maker.at(x), {end.at(x) for end in self.readers}).min())

    def costs_in(self, every: np.ndarray) -> np.ndarray:
        """Microseconds of its moves under many assignments: [variable, assignment]."""
        made, *needs = [end.among(every) for end in (self.maker, *self.readers)]
        from_ = made if self.held is None else np.arange(len(self.costs))[:, None]  # [held in, assignment]
        found = 0.0 if self.held is None else self.held.T[:, made]
        for k, need in enumerate(needs):
            paid = np.any([need == other for other in needs[:k]], axis=0) if k else False
            found = found + np.where(paid, 0.0, self.costs[from_, need])
        return self.weight * (found if self.held is None else found.min(0))

    def held_at(self, x: Sequence[int]) -> int:
        """The layout in which it is held under an assignment."""
        return int(self._served(self.maker.at(x), {end.at(x) for end in self.readers}).argmin())

    def _served(self, made: int, needed: Collection[int]) -> np.ndarray:
        """What the moves to these layouts cost, by the layout in which the value is held."""
        if self.held is None:
            return self.costs[made, sorted(needed)].sum(keepdims=True)
        return self.held[made] + self.costs[:, sorted(needed)].sum(1)

    def costs_of(self, i: int, x: Sequence[int]) -> np.ndarray:
        """For each option of a variable what its moves cost, all else as in x."""
        mine = [end.layouts for end in self.readers if end.variable == i]
        others = sorted({end.at(x) for end in self.readers if end.variable != i})
        before = self.costs[:, others].sum(1)
        if self.maker.variable != i:
            return self.weight * self._from([self.maker.at(x)], before[:, None] + self._more(mine, others))[0]
        if not mine:
            return self.weight * self._from(self.maker.layouts, before)
        every = self._from(self.maker.layouts, before[:, None] + self._more(mine, others))
        return self.weight * np.diagonal(every)

    def _more(self, mine: Sequence[np.ndarray], others: Sequence[int]) -> np.ndarray:
        """What it costs to serve these readers, too, from each layout: [from, option]."""
        paid = np.zeros(self.costs.shape[1], bool)
        paid[others] = True
        more = np.where(paid[mine[0]], 0.0, self.costs[:, mine[0]])
        for k, needs in enumerate(mine[1:], 1):
            again = paid[needs] | (needs == np.array(mine[:k])).any(0)
            more = more + np.where(again, 0.0, self.costs[:, needs])
        return more

    def _from(self, made: np.ndarray | list[int], served: np.ndarray) -> np.ndarray:
        """The least cost from where it is made, if `served` is what it costs from each layout: [made, ...]."""
        if self.held is None:
            return served[made]
        held = self.held[made]
        return ((held if served.ndim == 1 else held[:, :, None]) + served).min(1)


@dataclass(eq=False)
class Problem:
    """work: for each variable the microseconds of each option. cells: how many equal cells each variable stands for.

    constant: what all assignments cost. near: for each variable its values.
    """

    work: list[np.ndarray]
    values: list[Value]
    cells: list[int] = field(default_factory=list)
    constant: float = 0.0
    near: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.cells = self.cells or [1] * len(self.work)
        self.near = [[] for _ in self.work]
        for v, value in enumerate(self.values):
            for i in value.free:
                self.near[i].append(v)

    def kinds(self) -> list[list[Value]]:
        """The values, those of a kind together."""
        found: dict[Hashable, list[Value]] = {}
        for v, value in enumerate(self.values):
            found.setdefault((value.kind, v if value.kind is None else None), []).append(value)
        return list(found.values())

    def cost(self, x: Sequence[int]) -> float:
        """The objective, in microseconds: one option for each variable."""
        work = sum([float(w[i]) for w, i in zip(self.work, x, strict=True)])
        return self.constant + work + sum([value.cost(x) for value in self.values])

    def costs(self, every: np.ndarray) -> np.ndarray:
        """The objective of many assignments: [variable, assignment]."""
        found = np.full(every.shape[1], self.constant)
        for work, x in zip(self.work, every, strict=True):
            found += work[x]
        for value in self.values:
            found += value.costs_in(every)
        return found

    def costs_of(self, i: int, x: Sequence[int]) -> np.ndarray:
        """For each option of a variable the part of the objective that depends on it, all else as in x."""
        return sum([self.values[v].costs_of(i, x) for v in self.near[i]], self.work[i])

    def neighbours(self, i: int) -> list[int]:
        """The variables that share a value with this one, in order."""
        return sorted({j for v in self.near[i] for j in self.values[v].free} - {i})
