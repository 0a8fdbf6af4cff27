"""Better sets of units than those that ways put together: found by freeing one unit more or less, or another one.

    freed {gelu, up}, 21.3 us  ->  {gelu, dropout}, 19.3 us, with as many bytes alive at most

Ways are made of the sets of their segments, so what only pays across them may be missed. Here whole sets are changed,
and what they do is counted as a whole. Of all that were seen those are kept of which no other one is faster with as few
bytes, and the sets around each of these are looked at, until there is nothing new, or enough was seen. No budget is
asked for: what is found is a way of all segments for any of them, so more memory never takes longer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

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
class _Found:
    """A set of units with what it does, and the most bytes that are alive then."""

    freed: frozenset[int]
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
    seen: set[frozenset[int]] = field(default_factory=set)

    def ways(self) -> Iterator[Way]:
        forced = self.spans.lookup.values.forced
        for chosen in self._chosen():
            self._look(forced.union(*(way.freed for way in chosen.ways)))
        known, done = set(self.seen), set()
        while todo := [found for found in self.best if found.freed not in done]:
            for found in todo:
                done.add(found.freed)
                if found in self.best:
                    self._look_around(found.freed)
        for found in self.best:
            if found.freed not in known:
                yield Way(0, len(self.spans.units), found.freed, found.effect)

    def _chosen(self) -> Iterator[Chosen]:
        """The choices of ways for all budgets, from the largest to the smallest."""
        chosen = self.choice.unlimited
        while chosen is not None:
            yield chosen
            chosen = self.choice.least_time(chosen.peak - 1)

    def _look_around(self, freed: frozenset[int]) -> None:
        units = frozenset(self.spans.between(0, len(self.spans.units)))
        more, less = sorted(units - freed), sorted(units & freed)
        for u in more:
            self._look(freed | {u})
        for u in less:
            self._look(freed - {u})
            for v in more:
                self._look(freed - {u} | {v})

    def _look(self, freed: frozenset[int]) -> None:
        if freed in self.seen or len(self.seen) >= MOST_SEEN:
            return
        self.seen.add(freed)
        try:
            effect = self.spans.lookup.effect(freed)
        except CannotRecompute:
            return
        new = _Found(freed, effect, self.choice.peak_with([effect]))
        if not any(found.beats(new) for found in self.best):
            self.best = [found for found in self.best if not new.beats(found)] + [new]
