"""Better sets of units than those that ways put together: found by treating one unit otherwise, or two.

    freed {gelu, up}, 21.3 us  ->  {gelu, dropout}, 19.3 us, with as many bytes alive at most

Ways are made of the sets of their segments, so what only pays across them may be missed. Here whole sets are changed,
and what they do is counted as a whole. Of all that were seen those are kept of which no other one is faster with as few
bytes, and the sets around each of these are looked at, until there is nothing new, or enough was seen. No budget is
asked for: what is found is a way of all segments for any of them, so more memory never takes longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from spmd.expand.passes.recompute.again import CannotRecompute, Effect
from spmd.expand.passes.recompute.solve import Choice, Chosen
from spmd.expand.passes.recompute.spans import SOME, Spans, Way

MOST_SEEN = 3_000
"""The most sets that are looked at."""


def better(spans: Spans, choice: Choice) -> tuple[Way, ...]:
    """Ways of all segments that are better than what the ways of their parts can do. None where there are many
    segments, of which each matters little, or several batches."""
    if len(choice.groups) != 1 or len(spans.units) > SOME:
        return ()
    return tuple(_Search(spans, choice).ways())


@dataclass(frozen=True)
class _Set:
    """The units that are freed, those in host memory, and whether nothing is computed while they are copied."""

    freed: frozenset[int]
    hosted: frozenset[int] = frozenset()
    at_once: bool = False

    def with_one(self, unit: int, way: int) -> _Set:
        """The set in which a unit is kept, computed again or in host memory: 0, 1 or 2."""
        one, none = frozenset([unit]), frozenset()
        freed, hosted = (one if way == n else none for n in (1, 2))
        return replace(self, freed=self.freed - one | freed, hosted=self.hosted - one | hosted)


@dataclass(frozen=True)
class _Found:
    """A set of units with what it does, and the most bytes that are alive then."""

    units: _Set
    effect: Effect
    peak: int

    def beats(self, other: _Found) -> bool:
        """Whether this set is no worse than the other one in both time and bytes."""
        return self.peak <= other.peak and self.effect.us <= other.effect.us


@dataclass
class _Search:
    """best: the sets that no other one beats. seen: all sets that were looked at."""

    spans: Spans
    choice: Choice
    best: list[_Found] = field(default_factory=list)
    seen: set[_Set] = field(default_factory=set)

    def ways(self) -> Iterator[Way]:
        for chosen in self._chosen():
            self._look(self._set(chosen))
        known, done = set() if self.spans.with_host else set(self.seen), set()
        while todo := [found for found in self.best if found.units not in done]:
            for found in todo:
                done.add(found.units)
                if found in self.best:
                    self._look_around(found.units)
        for found in self.best:
            if found.units not in known:
                yield Way(0, len(self.spans.units), found.units.freed, found.effect)

    def _chosen(self) -> Iterator[Chosen]:
        """The choices of ways for all budgets, from the largest to the smallest."""
        chosen = self.choice.unlimited
        while chosen is not None:
            yield chosen
            chosen = self.choice.least_time(chosen.peak - 1)

    def _set(self, chosen: Chosen) -> _Set:
        """The units of ways. Their copies may be made otherwise when the whole is looked at."""
        freed = self.spans.lookup.values.forced.union(*(way.freed for way in chosen.ways))
        return _Set(freed, frozenset([copy.unit for way in chosen.ways for copy in way.effect.copies]))

    def _look_around(self, units: _Set) -> None:
        free = self.spans.between(0, len(self.spans.units))
        ways = (0, 1, 2) if self.spans.with_host else (0, 1)
        if units.hosted:
            self._look(replace(units, at_once=not units.at_once))
        changed = [u for u in free if u in units.freed or u in units.hosted]
        for u in free:
            for way in ways:
                self._look(units.with_one(u, way))
        for u in changed:
            for v in free:
                if v not in changed:
                    for way in ways[1:]:
                        self._look(units.with_one(u, 0).with_one(v, way))

    def _look(self, units: _Set) -> None:
        if units in self.seen or len(self.seen) >= MOST_SEEN:
            return
        self.seen.add(units)
        window = self.spans.window(len(self.spans.units), units.at_once)
        try:
            effect = self.spans.lookup.effect(units.freed, units.hosted, window)
        except CannotRecompute:
            return
        new = _Found(units, effect, self.choice.peak_with([effect]))
        if not any(found.beats(new) for found in self.best):
            self.best = [found for found in self.best if not new.beats(found)] + [new]
