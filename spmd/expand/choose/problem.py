"""A choice as a problem of numbers: variables with options, and values that are moved between them.

    minimise   sum of the work of each variable's option
             + for each value: the cost from the layout it is made in to each *distinct* layout that its readers need

A value is moved once for all readers that need it alike. `Problem.cost` is the one objective; the search, the bound and
the tests all use it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

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


@dataclass(frozen=True, eq=False)
class Value:
    """A value, or `weight` equal ones. costs: microseconds, [from, to].

    kind: the same for values whose surroundings are alike; None for a value that is of no other's kind.
    """

    weight: float
    costs: np.ndarray
    maker: End
    readers: tuple[End, ...]
    kind: Hashable = None

    def cost(self, x: Sequence[int]) -> float:
        """Microseconds of its moves under an assignment."""
        made = self.maker.at(x)
        return self.weight * sum([self.costs[made, t] for t in {end.at(x) for end in self.readers}])


@dataclass(eq=False)
class Problem:
    """work: for each variable the microseconds of each option. cells: how many equal cells each variable stands for."""

    work: list[np.ndarray]
    values: list[Value]
    cells: list[int] = field(default_factory=list)
    made_by: list[list[int]] = field(init=False)
    read_by: list[list[tuple[int, int]]] = field(init=False)

    def __post_init__(self) -> None:
        self.cells = self.cells or [1] * len(self.work)
        self.made_by = [[] for _ in self.work]
        self.read_by = [[] for _ in self.work]
        for v, value in enumerate(self.values):
            if value.maker.variable != FIXED:
                self.made_by[value.maker.variable].append(v)
            for r, end in enumerate(value.readers):
                if end.variable != FIXED:
                    self.read_by[end.variable].append((v, r))

    def kinds(self) -> list[list[Value]]:
        """The values, those of a kind together."""
        found: dict[Hashable, list[Value]] = {}
        for v, value in enumerate(self.values):
            found.setdefault((value.kind, v if value.kind is None else None), []).append(value)
        return list(found.values())

    def cost(self, x: Sequence[int]) -> float:
        """The objective, in microseconds: one option for each variable."""
        work = sum([float(w[i]) for w, i in zip(self.work, x, strict=True)])
        return work + sum([value.cost(x) for value in self.values])

    def costs_of(self, i: int, x: Sequence[int]) -> np.ndarray:
        """For each option of a variable the part of the objective that depends on it, all else as in x."""
        total = self.work[i].copy()
        for v in dict.fromkeys([*self.made_by[i], *[v for v, _ in self.read_by[i]]]):
            total += self.values[v].weight * self.of_value(self.values[v], i, x)
        return total

    def of_value(self, value: Value, i: int, x: Sequence[int]) -> np.ndarray:
        """For each option of a variable what the moves of one such value cost, all else as in x."""
        mine = [end.layouts for end in value.readers if end.variable == i]
        others = sorted({end.at(x) for end in value.readers if end.variable != i})
        if value.maker.variable == i:
            made = value.maker.layouts
            total = value.costs[made][:, others].sum(1) if others else np.zeros(len(made))
        else:
            made = value.maker.at(x)
            total = np.zeros(len(self.work[i]))
        for k, needs in enumerate(mine):
            paid = np.isin(needs, others)
            for earlier in mine[:k]:
                paid |= needs == earlier
            total = total + np.where(paid, 0.0, value.costs[made, needs])
        return total

    def neighbours(self, i: int) -> list[int]:
        """The variables that share a value with this one, in order."""
        found: set[int] = set()
        for v in [*self.made_by[i], *[v for v, _ in self.read_by[i]]]:
            ends = (self.values[v].maker, *self.values[v].readers)
            found |= {end.variable for end in ends}
        return sorted(found - {i, FIXED})
