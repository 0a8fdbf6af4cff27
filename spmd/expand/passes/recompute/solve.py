"""Choose a way for each segment: the least time in which the memory is kept, exactly.

A segment that was freed has less alive from the end of its forward to the start of its backward, at all times alike.
So what the segments before it have freed is one number for all times of a segment, in its forward and in its backward:

    alive(t) + freed before + change(t) <= limit          at each time t of the span of a way

Segments are taken in order, and of all choices so far those are kept of which no other one is faster and frees as much
(a shortest path with a resource). That is exact: no choice that is left out could become part of a better one. Nothing
depends on the clock, so all ranks find the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from spmd.expand.passes.recompute.again import Effect
from spmd.expand.passes.recompute.spans import Way

MOST_KEPT = 2_000
"""The most choices that are kept behind a segment; where there are more, bytes are rounded up to fewer values."""
UNLIMITED = 1 << 60


@dataclass(frozen=True)
class Chosen:
    """The ways that are taken, the microseconds that they add, and the most bytes that are alive."""

    ways: tuple[Way, ...]
    us: float
    peak: int


@dataclass(frozen=True)
class _Leg:
    """A way as a leg of a path. needs: the limit above which it fits when nothing was freed before. idle: what it
    changes between its forward and its backward."""

    way: Way
    needs: int
    idle: int


@dataclass(frozen=True)
class _Path:
    """Ways that are taken one after the other. needs: the least limit that they fit into: of each larger one, up to the
    limit that they were found for, they take the least time."""

    ways: tuple[Way, ...]
    needs: int


@dataclass(frozen=True)
class _Alike:
    """Legs with the same ends, by their numbers among all that end there; and what they need, change and take."""

    start: int
    numbers: np.ndarray
    needs: np.ndarray
    idle: np.ndarray
    us: np.ndarray

    @classmethod
    def of(cls, start: int, numbers: Sequence[int], legs: Sequence[_Leg]) -> _Alike:
        some = [legs[n] for n in numbers]
        needs, idle = (np.array([getattr(leg, k) for leg in some], dtype=np.int64) for k in ("needs", "idle"))
        return cls(start, np.array(numbers, dtype=np.int64), needs, idle, np.array([leg.way.effect.us for leg in some]))


@dataclass
class _Kept:
    """Choices up to a segment that are worth to go on with: by bytes, each faster than the one before. back: the leg
    that was taken last, and the choice that it was taken from."""

    nbytes: np.ndarray
    us: np.ndarray
    back: np.ndarray


@dataclass(frozen=True)
class Choice:
    """What there is to choose from.

    ways: of all spans. alive: bytes by half place, when all that can be freed is kept. starts: of each segment, the
    places where its forward and its backward begin. groups: as `Spans.groups`.
    """

    ways: Sequence[Way]
    alive: np.ndarray
    starts: Sequence[tuple[int, int]]
    groups: Sequence[range]

    def least_time(self, limit: int) -> Chosen | None:
        """The least time in which no more bytes are alive; None if none of the ways keep to them."""
        found = self._within(limit)
        return found if found or self._least.peak > limit else self._least

    def _within(self, limit: int) -> Chosen | None:
        """The same as far as bytes are known before the ways are put together, when each segment is taken to free one
        number of them. What that is rounded up by may be more than what is left below the least peak."""
        aim = limit
        while (found := self._paths(aim)) is not None:
            chosen = self._chosen(found)
            if chosen.peak <= limit:
                return chosen
            # What a segment frees is not one number: some of it is read late. Down to `needs` the paths are the same.
            aim = min(aim - (chosen.peak - limit), found.needs - 1)
        return None

    def _chosen(self, path: _Path) -> Chosen:
        effects = [way.effect for way in path.ways]
        return Chosen(path.ways, sum([effect.us for effect in effects]), self.peak_with(effects))

    def _paths(self, limit: int) -> _Path | None:
        paths = [self._path(group, limit, self._grain(group)) for group in self.groups]
        if None in paths or (not paths and int(self.alive.max()) > limit):
            return None
        ways = tuple([way for path in paths for way in path.ways])
        return _Path(ways, max([path.needs for path in paths], default=0))

    def least_peak(self) -> Chosen:
        """The least time in which the least bytes are alive."""
        return self._least

    @cached_property
    def _least(self) -> Chosen:
        path = self._paths(self.least_foreseen)
        return self._down_from(self.unlimited if path is None else self._chosen(path))

    @cached_property
    def least_foreseen(self) -> int:
        """The least limit by what ways free at most: some of it is read late, so more is alive."""
        low, high = 0, self.unlimited.peak
        while low < high:
            middle = (low + high) // 2
            if all(self._fits(group, middle) for group in self.groups):
                high = middle
            else:
                low = middle + 1
        return low

    def _down_from(self, chosen: Chosen) -> Chosen:
        """The least time in which the least bytes are alive, from a choice that needs more, or as many."""
        low = self.least_foreseen
        while chosen.peak - low > low >> 10:
            middle = (low + chosen.peak) // 2
            if (found := self._within(middle)) is None:
                low = middle + 1
            else:
                chosen = found
        return chosen

    def better_peak(self, than: Chosen) -> Chosen | None:
        """What `least_peak` finds, where it is fewer bytes than those of another choice, or less time in as many."""
        if self.least_foreseen > than.peak or (found := self._within(than.peak)) is None:
            return None
        return self._down_from(found) if _peak_and_time(found) < _peak_and_time(than) else None

    def _fits(self, group: range, limit: int) -> bool:
        """Whether some choice keeps to a limit: the one that frees most up to each segment."""
        grain, least = self._grain(group), {group.start: 0}
        for at in range(group.start + 1, group.stop + 1):
            fine = [leg for leg in self._legs[at] if least.get(leg.way.start, UNLIMITED) <= limit - leg.needs]
            if fine:
                least[at] = min([least[leg.way.start] + _rounded(leg.idle, grain) for leg in fine])
        return group.stop in least

    @cached_property
    def unlimited(self) -> Chosen:
        """The least time of all."""
        return self._within(UNLIMITED)

    def peak_with(self, effects: Sequence[Effect]) -> int:
        """The most bytes that are alive, when all these have their effects."""
        changes = np.zeros(len(self.alive) + 1, dtype=np.int64)
        for effect in effects:
            for start, stop, nbytes in effect.changes:
                changes[start] += nbytes
                changes[stop] -= nbytes
        return int((self.alive + np.cumsum(changes)[:-1]).max())

    # ---- segments -----------------------------------------------------------------------------
    @cached_property
    def _legs(self) -> dict[int, list[_Leg]]:
        """By segment, the legs that end before it."""
        found: dict[int, list[_Leg]] = {}
        group_of = {s: group for group in self.groups for s in group}
        for way in self.ways:
            group = group_of[way.start]
            if way.stop <= group.stop:
                needs = max([self._most(way, *window) for window in self._windows(way, group)])
                found.setdefault(way.stop, []).append(_Leg(way, needs, self._idle(way, group)))
        return found

    def _windows(self, way: Way, group: range) -> Iterator[tuple[int, int]]:
        """The half places of a span: of its forward, and of its backward."""
        last = way.stop == group.stop
        backward = 2 * self.starts[way.stop - 1][1] - 1
        forward = 2 * self.starts[way.start][0] - 1 if way.start > group.start else 0
        yield max(0, forward), backward if last else 2 * self.starts[way.stop][0] - 1
        ends = 2 * self.starts[way.start - 1][1] - 1 if way.start > group.start else len(self.alive)
        yield backward, ends

    def _most(self, way: Way, first: int, last: int) -> int:
        """The most bytes that are alive in a window, if this way is taken and nothing is freed before."""
        if last <= first:
            return 0
        changes = np.zeros(last - first + 1, dtype=np.int64)
        for start, stop, nbytes in way.effect.changes:
            changes[min(max(start, first), last) - first] += nbytes
            changes[min(max(stop, first), last) - first] -= nbytes
        return int((self.alive[first:last] + np.cumsum(changes)[:-1]).max())

    def _idle(self, way: Way, group: range) -> int:
        if way.stop == group.stop:
            return 0
        t = 2 * self.starts[way.stop][0]
        return sum([nbytes for start, stop, nbytes in way.effect.changes if start <= t < stop])

    # ---- paths --------------------------------------------------------------------------------
    def _grain(self, group: range) -> int:
        """What bytes are rounded up to: the same for all limits, so that more memory never takes longer."""
        if group not in self._grains:
            grain = 1
            while (kept := self._kept(group, UNLIMITED, grain)) is None:
                grain *= 16
            self._grains[group], self._unlimited[group] = grain, kept
        return self._grains[group]

    @cached_property
    def _unlimited(self) -> dict[range, dict[int, _Kept]]:
        """What is kept without a limit, by group."""
        return {}

    @cached_property
    def _grains(self) -> dict[range, int]:
        return {}

    def _path(self, group: range, limit: int, grain: int) -> _Path | None:
        kept = self._unlimited[group] if limit == UNLIMITED else self._kept(group, limit, grain)
        at, ways, needs, choice = group.stop, [], 0, len(kept[group.stop].us) - 1
        if choice < 0:
            return None
        while at > group.start:
            number, before = kept[at].back[choice]
            leg = self._legs[at][number]
            at, choice = leg.way.start, int(before)
            ways.append(leg.way)
            needs = max(needs, leg.needs + int(kept[at].nbytes[choice]))
        return _Path(tuple(ways[::-1]), needs)

    def _kept(self, group: range, limit: int, grain: int) -> dict[int, _Kept] | None:
        """By segment, the choices of ways up to it that fit. None if there are too many."""
        none = np.zeros(1, dtype=np.int64)
        kept = {group.start: _Kept(none, np.zeros(1), np.zeros((1, 2), dtype=np.int64))}
        for at in range(group.start + 1, group.stop + 1):
            parts = [_extended(kept[alike.start], alike, limit, grain) for alike in self._alike[at]]
            kept[at] = _undominated(*map(np.concatenate, zip(*parts, strict=True)))
            if len(kept[at].us) > MOST_KEPT:
                return None
        return kept

    @cached_property
    def _alike(self) -> dict[int, list[_Alike]]:
        """By segment, the legs that end before it, by where they start."""
        found: dict[int, dict[int, list[int]]] = {at: {} for at in self._legs}
        for at, legs in self._legs.items():
            for n, leg in enumerate(legs):
                found[at].setdefault(leg.way.start, []).append(n)
        return {
            at: [_Alike.of(start, numbers, self._legs[at]) for start, numbers in by_start.items()]
            for at, by_start in found.items()
        }


@dataclass(frozen=True)
class Either:
    """The better one of several things to choose from, at each limit. Which ways are looked at depends on what there is
    to choose from, so more freedom may find less; who is asked here finds at least what the best of them does."""

    choices: tuple[Choice, ...]

    def least_time(self, limit: int) -> Chosen | None:
        """The least time in which no more bytes are alive; None if none of the ways keep to them."""
        found = [chosen for choice in self.choices if (chosen := choice.least_time(limit))]
        return min(found, key=_time_and_peak, default=None)

    def least_peak(self) -> Chosen:
        """The least time in which the least bytes are alive."""
        return self._least

    @cached_property
    def _least(self) -> Chosen:
        first, *others = sorted(self.choices, key=lambda choice: choice.least_foreseen)
        least = first.least_peak()
        for choice in others:
            least = choice.better_peak(least) or least
        return least

    @property
    def unlimited(self) -> Chosen:
        """The least time of all."""
        return min([choice.unlimited for choice in self.choices], key=_time_and_peak)

    @property
    def ways(self) -> Sequence[Way]:
        """The ways of all."""
        return [way for choice in self.choices for way in choice.ways]

    def peak_with(self, effects: Sequence[Effect]) -> int:
        """The most bytes that are alive, when all these have their effects."""
        return self.choices[0].peak_with(effects)


def _time_and_peak(chosen: Chosen) -> tuple[float, int]:
    return chosen.us, chosen.peak


def _peak_and_time(chosen: Chosen) -> tuple[int, float]:
    return chosen.peak, chosen.us


def _extended(kept: _Kept, alike: _Alike, limit: int, grain: int) -> tuple[np.ndarray, ...]:
    """The choices that legs make of others, where they fit."""
    leg, before = np.nonzero(kept.nbytes <= limit - alike.needs[:, None])
    nbytes = kept.nbytes[before] + -(-alike.idle[leg] // grain) * grain
    return nbytes, kept.us[before] + alike.us[leg], np.stack([alike.numbers[leg], before], axis=1)


def _rounded(nbytes: int, grain: int) -> int:
    return -(-nbytes // grain) * grain


def _undominated(nbytes: np.ndarray, us: np.ndarray, back: np.ndarray) -> _Kept:
    """Those of which no other one is as fast with as few bytes."""
    order = np.argsort(nbytes, kind="stable")  # fast, as the choices of each leg are in order
    us = us[order]
    fine = np.flatnonzero(us < np.concatenate([[np.inf], np.minimum.accumulate(us)[:-1]]))
    nbytes, us = nbytes[order[fine]], us[fine]
    last = np.append(nbytes[1:] != nbytes[:-1], True)[: len(fine)]  # of as many bytes the fastest
    return _Kept(nbytes[last], us[last], back[order[fine[last]]])
