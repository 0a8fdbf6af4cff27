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
        made, *needed = ends
        if slot == 0:
            return self._parted(needed)[0][-1] + made
        mine = needed.pop(slot - 1)
        least, adds = self._parted(needed)
        beside = least[::-1] + made  # [set, made]: the readers that are not in the set
        return ((self.costs + beside[:, :, None]).min(1) + adds).min(0) + mine

    def _parted(self, needed: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """For each set of these readers the least cost by the layout made, and what its readers add to each layout.

        The least cost is that of all ways to part the set into groups.
        """
        sets = _sets(len(needed))
        adds = sets.bits @ np.array(needed)  # [set, needed]
        least = (self.costs + adds[:, None]).min(2)  # [set, made]: if the set is one group
        least[0] = 0.0
        for whole, group, rest in sets.by_size:
            least[whole] = (least[group] + least[rest]).min(1)
        return least, adds


@dataclass(frozen=True, eq=False)
class _Sets:
    """The sets of so many readers, each a number of bits.

    bits: [set, reader]. by_size: for sets of two, three ... readers the sets, for each the groups that its first reader
    may be in, and what is left of it then: [set], [set, group] twice.
    """

    bits: np.ndarray
    by_size: tuple[tuple[np.ndarray, np.ndarray, np.ndarray], ...]


@cache
def _sets(number: int) -> _Sets:
    every = np.arange(1 << number)
    bits = (every[:, None] >> np.arange(number)) & 1
    by_size = []
    for size in range(2, number + 1):
        whole = every[bits.sum(1) == size]
        group = np.array([[g for g in range(s + 1) if g & s == g and g & s & -s] for s in whole.tolist()])
        by_size.append((whole, group, whole[:, None] ^ group))
    return _Sets(bits.astype(float), tuple(by_size))
