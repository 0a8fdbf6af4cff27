"""The moves of one value, and the least that they cost for each layout at one of its ends.

    cost(made, needs)  =  the cost from `made` to each *distinct* layout among the needs  +  what each end adds

Readers that need a value alike share one move. So the least cost is the least over all ways to part the readers into
groups, each of which needs one layout: with three readers five partitions, found by a table over sets of readers.
What an end adds for a layout is what a bound has put there (`bound.py`); `NEVER` where no option has the layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

NEVER = 1e15
"""Microseconds of what does not happen. Finite, because differences of it are formed."""

MOST_READERS = 7
"""Readers of a value that are looked at together: there are 127 sets of them."""

IN_CACHE = 1 << 16
"""Numbers of a table that is made at once."""

_least = np.minimum.reduce  # as the method `min`, and quicker for the small tables here


@dataclass(eq=False)
class OneReader:
    """A value with one reader. costs: [made, needed]."""

    costs: np.ndarray

    def least_at(self, ends: Sequence[np.ndarray], slot: int) -> np.ndarray:
        """The least cost for each layout of one end, without what this one adds. ends: what each adds, the maker's
        first.

        >>> OneReader(np.array([[0.0, 5.0], [5.0, 0.0]])).least_at([np.zeros(2), np.array([3.0, 0.0])], 0)
        array([3., 0.])
        """
        made, needed = ends
        if slot == 0:
            return _least(self.costs + needed, 1)
        return _least(self.costs + made[:, None], 0)

    def of(self, made: np.ndarray, needed: np.ndarray) -> OneReader:
        """The same for these layouts alone."""
        return OneReader(self.costs[np.ix_(made, needed)])


@dataclass(eq=False)
class TwoReaders(OneReader):
    """A value with two readers: they share a move, or each has its own. held: [made, from], if it is moved once for
    both of them before."""

    held: np.ndarray | None = None

    def least_at(self, ends: Sequence[np.ndarray], slot: int) -> np.ndarray:
        """The least cost for each layout of one end, without what this one adds.

        >>> value = TwoReaders(np.array([[0.0, 5.0], [5.0, 0.0]]))  # made in layout 0; both readers need layout 1
        >>> value.least_at([np.array([0.0, NEVER]), np.array([NEVER, 0.0]), np.array([NEVER, 0.0])], 0)[:1]
        array([5.])
        """
        made, one, other = ends
        if slot == 0:
            first = self.costs + one
            served = np.minimum(_least(first, 1) + _least(self.costs + other, 1), _least(first + other, 1))
            return served if self.held is None else _least(self.held + served, 1)
        other = other if slot == 1 else one
        if self.held is not None:
            made = _least(self.held + made[:, None], 0)
        with_other = self.costs + other
        alone = self.costs + (_least(with_other, 1) + made)[:, None]
        with_other += made[:, None]
        return _least(np.minimum(alone, with_other, out=alone), 0)

    def of(self, made: np.ndarray, needed: np.ndarray) -> TwoReaders:
        """The same for these layouts alone."""
        if self.held is None:
            return type(self)(self.costs[np.ix_(made, needed)])
        return type(self)(self.costs[:, needed], self.held[made])


@dataclass(eq=False)
class ThreeReaders(TwoReaders):
    """A value with three readers: two of them may share a move, or all, or none."""

    def least_at(self, ends: Sequence[np.ndarray], slot: int) -> np.ndarray:
        """The least cost for each layout of one end, without what this one adds.

        >>> value = ThreeReaders(np.array([[0.0, 5.0], [5.0, 0.0]]))  # made in layout 0; all readers need layout 1
        >>> value.least_at([np.array([0.0, NEVER]), *[np.array([NEVER, 0.0])] * 3], 0)[:1]
        array([5.])
        """
        made, *needed = ends
        if slot == 0:
            return self._by_maker(*needed)
        del needed[slot - 1]
        a, b = self.costs + needed[0], self.costs + needed[1]
        both = a + needed[1]
        alone_a, alone_b = _least(a, 1), _least(b, 1)
        if self.held is not None:
            made = _least(self.held + made[:, None], 0)
        found = self.costs + np.minimum(alone_a + alone_b, _least(both, 1))[:, None]
        a += alone_b[:, None]
        b += alone_a[:, None]
        for with_others in (a, b, both):
            np.minimum(found, with_others, out=found)
        found += made[:, None]
        return _least(found, 0)

    def _by_maker(self, *needed: np.ndarray) -> np.ndarray:
        """The least cost for each layout in which the value is made."""
        a, b, c = [self.costs + each for each in needed]
        alone = [_least(each, 1) for each in (a, b, c)]
        served = alone[0] + alone[1] + alone[2]
        a += needed[1]  # the first and the second
        b += needed[2]
        c += needed[0]
        for pair, other in ((a, alone[2]), (b, alone[0]), (c, alone[1])):
            np.minimum(served, _least(pair, 1) + other, out=served)
        a += needed[2]
        np.minimum(served, _least(a, 1), out=served)
        return served if self.held is None else _least(self.held + served, 1)


@dataclass(eq=False)
class Readers:
    """A value with several readers. costs: [from, needed]. number: of readers. held: [made, from], if it is moved once
    for all of them before."""

    costs: np.ndarray
    number: int
    held: np.ndarray | None = None

    def __post_init__(self) -> None:
        self._to_needed = np.ascontiguousarray(self.costs.T)  # where minima are taken over the first dim, they are fast
        self._room: dict[tuple[int, ...], np.ndarray] = {}

    def least_at(self, ends: Sequence[np.ndarray], slot: int) -> np.ndarray:
        """The least cost for each layout of one end, without what this one adds. ends: what each adds, the maker's
        first; all readers' are as long.

        >>> value = Readers(np.array([[0.0, 5.0], [5.0, 0.0]]), 3)  # made in layout 0; all readers need layout 1
        >>> value.least_at([np.array([0.0, NEVER]), *[np.array([NEVER, 0.0])] * 3], 0)[:1]
        array([5.])
        """
        made, *needed = ends
        if slot == 0:
            served = self._parted(needed)[0][-1]
            return served if self.held is None else _least(self.held + served, 1)
        del needed[slot - 1]
        least, adds = self._parted(needed)
        if self.held is not None:
            made = _least(self.held + made[:, None], 0)
        beside = (least[::-1] + made).T  # [made, set]: the readers that are not in the set
        found = self._least_sum(self.costs, beside)
        found += adds.T
        return _least(found, 0)

    def of(self, made: np.ndarray, needed: np.ndarray) -> Readers:
        """The same for these layouts alone."""
        if self.held is None:
            return replace(self, costs=self.costs[np.ix_(made, needed)])
        return replace(self, costs=self.costs[:, needed], held=self.held[made])

    def _parted(self, needed: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """For each set of these readers the least cost by the layout made, and what its readers add to each layout:
        [set, made], [needed, set]. The least cost is that of all ways to part the set into groups."""
        sets = _sets(len(needed))
        adds = np.array(needed).T @ sets.bits
        least = self._least_sum(self._to_needed, adds)  # if the set is one group
        least[0] = 0.0
        for first, group, rest, starts in sets.steps:
            parted = least[group]
            parted += least[rest]
            np.minimum.reduceat(parted, starts, out=least[first : 2 * first])
        return least, adds

    def _least_sum(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """The least over i of a[i, j] + b[i, k]: [k, j]. The sums are written to the same place each time, all at once
        or for one k after the other, so that they stay in the cache."""
        apart = a.size * b.shape[1] > IN_CACHE
        shape = a.shape if apart else (len(a), b.shape[1], a.shape[1])
        if shape not in self._room:
            self._room[shape] = np.empty(shape)
        room = self._room[shape]
        if apart:
            return np.array([_least(np.add(a, each[:, None], out=room), 0) for each in b.T])
        return _least(np.add(a[:, None], b[:, :, None], out=room), 0)


Moves = OneReader | TwoReaders | Readers


def moves_of(costs: np.ndarray, held: np.ndarray | None, readers: int) -> Moves:
    """The moves of a value with so many readers."""
    if readers > 3:
        return Readers(costs, readers, held)
    if readers > 1:
        return (ThreeReaders if readers == 3 else TwoReaders)(costs, held)
    return OneReader(costs if held is None else (held[:, :, None] + costs).min(1))


@dataclass(frozen=True, eq=False)
class _Sets:
    """The sets of so many readers, each a number of bits.

    bits: [reader, set]. steps: for 2, 4, 8 ..., the sets from there to twice as much: their last reader's groups, what
    is left of the set then, and where the groups of each set begin.
    """

    bits: np.ndarray
    steps: tuple[tuple[int, np.ndarray, np.ndarray, np.ndarray], ...]


@cache
def _sets(number: int) -> _Sets:
    bits = (np.arange(1 << number) >> np.arange(number)[:, None]) & 1
    steps = []
    for first in [1 << k for k in range(1, number)]:
        within = [[part for part in range(others + 1) if part & others == part] for others in range(first)]
        group = np.array([first + part for parts in within for part in parts])
        rest = np.array([others - part for others, parts in enumerate(within) for part in parts])
        steps.append((first, group, rest, np.cumsum([0, *map(len, within)])[:-1]))
    return _Sets(bits.astype(float), tuple(steps))
