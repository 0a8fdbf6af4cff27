"""The moves of one value, and the least that they cost for each layout at one of its ends.

    cost(made, needs)  =  the cost from `made` to each *distinct* layout among the needs  +  what each end adds

Readers that need a value alike share one move. So the least cost is the least over all ways to part the readers into
groups, each of which needs one layout: with three readers five partitions, found by a table over sets of readers.
What an end adds for a layout is what a bound has put there (`bound.py`); `NEVER` where no option has the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

NEVER = 1e15
"""Microseconds of what does not happen. Finite, because differences of it are formed."""

MOST_READERS = 7
"""Readers of a value that are looked at together: there are 127 sets of them."""


@dataclass(eq=False)
class OneReader:
    """A value with one reader. costs: [made, needed]."""

    costs: np.ndarray

    def least_at(self, ends: Sequence[np.ndarray], slot: int) -> np.ndarray:
        """The least cost for each layout of one end. ends: what each adds, the maker's first.

        >>> OneReader(np.array([[0.0, 5.0], [5.0, 0.0]])).least_at([np.zeros(2), np.array([3.0, 0.0])], 0)
        array([3., 0.])
        """
        made, needed = ends
        if slot == 0:
            return (self.costs + needed).min(1) + made
        return (self.costs + made[:, None]).min(0) + needed


@dataclass(eq=False)
class Readers:
    """A value with several readers. costs: [made, needed]. number: of readers."""

    costs: np.ndarray
    number: int

    def least_at(self, ends: Sequence[np.ndarray], slot: int) -> np.ndarray:
        """The least cost for each layout of one end. ends: what each adds, the maker's first; all readers' are as long.

        >>> value = Readers(np.array([[0.0, 5.0], [5.0, 0.0]]), 2)  # made in layout 0; both readers need layout 1
        >>> value.least_at([np.array([0.0, NEVER]), np.array([NEVER, 0.0]), np.array([NEVER, 0.0])], 0)[:1]
        array([5.])
        """
        sets = _sets(self.number)
        adds = sets.bits @ np.array(ends[1:])  # [set, needed]
        least = self._by_set((self.costs + adds[:, None]).min(2), sets)
        if slot == 0:
            return least[-1] + ends[0]
        mine = sets.having[slot - 1]
        others = least[len(least) - 1 - mine] + ends[0]  # [set, made]: the readers that are not in the set
        return ((self.costs + others[:, :, None]).min(1) + adds[mine]).min(0)

    def _by_set(self, alone: np.ndarray, sets: _Sets) -> np.ndarray:
        """For each set of readers and each layout made the least cost of all ways to part the set into groups.

        alone: the least cost if the set is one group.
        """
        least = alone
        least[0] = 0.0
        for whole, group, rest in sets.by_size:
            least[whole] = (alone[group] + least[rest]).min(1)
        return least


@dataclass(frozen=True, eq=False)
class _Sets:
    """The sets of so many readers, each a number of bits.

    bits: [set, reader]. having: for each reader the sets that have it. by_size: for sets of two, three ... readers the
    sets, for each the groups that its first reader may be in, and what is left of it then: [set], [set, group] twice.
    """

    bits: np.ndarray
    having: tuple[np.ndarray, ...]
    by_size: tuple[tuple[np.ndarray, np.ndarray, np.ndarray], ...]


@cache
def _sets(number: int) -> _Sets:
    every = np.arange(1 << number)
    bits = (every[:, None] >> np.arange(number)) & 1
    having = tuple(every[bits[:, r] == 1] for r in range(number))
    by_size = []
    for size in range(2, number + 1):
        whole = every[bits.sum(1) == size]
        group = np.array([[g for g in range(s + 1) if g & s == g and g & s & -s] for s in whole.tolist()])
        by_size.append((whole, group, whole[:, None] ^ group))
    return _Sets(bits.astype(float), having, tuple(by_size))
