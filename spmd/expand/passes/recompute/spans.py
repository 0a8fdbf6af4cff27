"""The segments of a program, and the ways to run each span of them: what is freed or copied, and what that does.

    ln, q, k, v, attention, add | ln, up, gelu, down, add | ln, ...      a cut where the least is alive between ops

Units of one segment are freed together in some way; what a segment leaves to the next one is kept, or both segments are
one span. So ways of spans that do not overlap can be put together: their bytes and microseconds add up. Spans that are
alike, such as those of equal blocks, are looked at once, and have the same ways.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations

import numpy as np

from spmd.expand.passes.recompute.again import CannotRecompute, Effect, Lookup
from spmd.expand.passes.recompute.copies import Copy, Window
from spmd.expand.passes.recompute.hosted import hosted_too
from spmd.expand.passes.recompute.values import Values

WINDOW = 6
"""A cut has the least bytes between ops among so many places on each side."""
LONGEST = 4
"""The most segments of a span."""
LONGEST_HOSTED = 2
"""The most segments of a span of which values wait in host memory, where there are more than `SOME`."""
MOST_TRIED = 9
"""Of a span with so many units all sets of them are tried."""
MOST_JOINED = 24
"""Of a longer span the sets of its parts are put together, at most so many of each."""
ALL_TRIED = 12
"""Of a program with so many units in all, too."""
SOME = 8
"""Where there are more segments than this, only ways on the hull of bytes and time are looked at: of many alike, some
take one corner of the hull and some the next."""
MANY = 24
"""Where there are more segments than this, spans are of two at most."""
SHARED = 0.25
"""A value that is read forward over more than this part of the program, such as a mask, belongs to no segment."""


@dataclass(frozen=True)
class Way:
    """A way to run the segments from one to before another: the units that are freed, and what that does, which says
    what is copied to host memory, too."""

    start: int
    stop: int
    freed: frozenset[int]
    effect: Effect


_Relative = tuple[float, tuple[tuple[tuple[bool, int], tuple[bool, int], int], ...], tuple[Copy, ...]]
"""An effect whose times are relative to a start of a segment: whether to that of its backward, and how far. Copies are
of units by number."""


@dataclass(frozen=True)
class Spans:
    """The segments of a program. units: of each segment, those that may be freed. until: for each unit the last
    segment that needs it for what is computed again. forced: of each segment, the units that are freed anyway.
    with_host: whether values may wait in host memory."""

    lookup: Lookup
    units: tuple[tuple[int, ...], ...]
    until: dict[int, int]
    forced: tuple[frozenset[int], ...]
    kinds: tuple[Hashable, ...]
    starts: tuple[tuple[int, int], ...]
    with_host: bool = False

    @classmethod
    def of(cls, values: Values, with_host: bool = False) -> Spans:
        """The segments of the program of these values."""
        return replace(_Cutter(values).spans(), with_host=with_host)

    def ways(self) -> Iterator[Way]:
        """All ways of all spans that are worth to be tried."""
        for i in range(len(self.units)):
            for j in range(i + 1, min(i + self._longest, len(self.units)) + 1):
                units, forced = self.between(i, j), frozenset().union(*self.forced[i:j])
                for freed, effect in self._ways(i, j):
                    yield Way(i, j, frozenset([units[n] for n in freed]) | forced, self._placed(i, effect, units))

    def _ways(self, i: int, j: int) -> list[tuple[tuple[int, ...], _Relative]]:
        """The ways of a span: which of its units are freed, by number, and what that does."""
        kind = self._kind(i, j)
        if kind not in self._known:
            units = self.between(i, j)
            at = {unit: n for n, unit in enumerate(units)}
            ways = self._found(i, j, units)
            self._known[kind] = [(tuple([at[u] for u in freed]), self._apart(i, e, at)) for freed, e in ways]
        return self._known[kind]

    @cached_property
    def _known(self) -> dict[Hashable, list[tuple[tuple[int, ...], _Relative]]]:
        return {}

    @cached_property
    def _is_small(self) -> bool:
        return sum(map(len, self.units)) <= ALL_TRIED

    @cached_property
    def _longest(self) -> int:
        if self._is_small:
            return len(self.units)
        return 2 if len(self.units) > MANY else LONGEST

    def between(self, i: int, j: int) -> list[int]:
        """The units that a span may free: nobody outside needs them."""
        return [u for s in range(i, j) for u in self.units[s] if self.until[u] < j]

    def _kind(self, i: int, j: int) -> Hashable:
        (f, b), ends = self.starts[i], self.starts[i:j]
        inside = tuple([self.until[u] < j for s in range(i, j) for u in self.units[s]])
        last = self.with_host and self.is_last(j)
        return self.kinds[i:j], tuple([(x - f, y - b) for x, y in ends]), inside, last

    @cached_property
    def groups(self) -> list[range]:
        """Segments whose backwards come before the forward of the next ones, as those of one of several batches."""
        first, latest, groups = 0, -1, []
        for s, (forward, backward) in enumerate(self.starts):
            if s > first and forward > latest:
                groups.append(range(first, s))
                first, latest = s, -1
            latest = max(latest, backward)
        return [*groups, range(first, len(self.starts))] if self.starts else []

    def is_last(self, j: int) -> bool:
        """Whether the segment before this one is the last of its batch, behind which the backward begins."""
        return any(j == group.stop for group in self.groups)

    def window(self, j: int, at_once: bool = False) -> Window:
        """When copies of a span may be under way that ends before this segment."""
        backward = self.starts[j - 1][1]
        last = backward - 1 if self.is_last(j) else self.starts[j][0] - 2  # freed before the next segment begins
        return Window(last, backward, at_once)

    # ---- times relative to a span -------------------------------------------------------------
    def _apart(self, i: int, effect: Effect, at: Mapping[int, int]) -> _Relative:
        """An effect with its times relative to the starts of a segment, forward and backward. at: numbers of units."""
        turn = 2 * self.lookup.values.turn

        def relative(t: int) -> tuple[bool, int]:
            return t > turn, t - 2 * self.starts[i][t > turn]

        copies = tuple([self._moved(copy, at[copy.unit], i, -1) for copy in effect.copies])
        return effect.us, tuple([(relative(a), relative(b), n) for a, b, n in effect.changes]), copies

    def _placed(self, i: int, effect: _Relative, units: Sequence[int]) -> Effect:
        starts, (us, changes, copies) = self.starts[i], effect
        moved = tuple([self._moved(copy, units[copy.unit], i, 1) for copy in copies])
        return Effect(us, tuple([(t + 2 * starts[s], u + 2 * starts[v], n) for (s, t), (v, u), n in changes]), moved)

    def _moved(self, copy: Copy, unit: int, i: int, sign: int) -> Copy:
        """A copy of a unit, so many starts later."""
        forward, backward = (sign * start for start in self.starts[i])
        return Copy(unit, copy.begins + forward, copy.leaves + forward, copy.returns + backward, copy.us)

    # ---- which sets are tried -----------------------------------------------------------------
    def _found(self, i: int, j: int, units: list[int]) -> list[tuple[list[int], Effect]]:
        """Sets of units of a span with their effects; those that another one is better than in all are left out."""
        inner = {u for s in range(i, j) for u in self.units[s]} if j == i + 1 else {
            u for s in range(i, j) for u in self.units[s] if self.until[u] < j and self.until[u] > s
        }  # fmt: skip
        forced, found = frozenset().union(*self.forced[i:j]), []
        for freed in self._sets(i, j, units):
            if j > i + 1 and inner.isdisjoint(freed):
                continue  # shorter spans do it
            try:
                found.append((list(freed), self.lookup.effect(forced.union(freed))))
            except CannotRecompute:
                continue
        on_hull = len(self.units) > SOME
        worth = best(found, on_hull)
        if not self.with_host or (on_hull and j > i + LONGEST_HOSTED):
            return worth
        windows = self.window(j), self.window(j, at_once=True)
        for freed, hosted, window in hosted_too(self.lookup, [freed for freed, _ in worth], units, *windows):
            try:
                worth.append((list(freed), self.lookup.effect(forced.union(freed), hosted, window)))
            except CannotRecompute:
                continue
        return best(worth, on_hull)

    def _sets(self, i: int, j: int, units: list[int]) -> Iterator[tuple[int, ...]]:
        if len(units) <= (ALL_TRIED if self._is_small else MOST_TRIED):
            for n in range(len(units) + 1):
                yield from combinations(units, n)
            return
        size = {u: sum([r.nbytes for r in self.lookup.values.units[u]]) for u in units}
        order = sorted(units, key=lambda u: (self.lookup.us(u) / max(1, size[u]), u))
        for n in range(len(order) + 1):
            yield tuple(sorted(order[:n]))
        if j == i + 1:
            large = sorted(sorted(units, key=lambda u: (-size[u], u))[:MOST_TRIED])
            for n in range(1, len(large) + 1):
                yield from combinations(large, n)
        else:
            yield from self._joined(i, j, units)

    def _joined(self, i: int, j: int, units: list[int]) -> Iterator[tuple[int, ...]]:
        """The sets of a shorter span, with those of its last segment, and what only the whole span may free."""
        first, last = self._freed(i, j - 1), self._freed(j - 1, j)
        inner = frozenset(units).difference(self.between(i, j - 1), self.between(j - 1, j))
        for n in range(1, min(len(inner), 2) + 1):
            for more in combinations(sorted(inner), n):
                for a in first:
                    yield from [tuple(sorted(a.union(b, more))) for b in last]

    def _freed(self, i: int, j: int) -> list[frozenset[int]]:
        """The sets of units of the ways of a span; of many, some that are evenly apart in time."""
        units, ways = self.between(i, j), self._ways(i, j)
        some = ways[:: -(-len(ways) // MOST_JOINED)] if ways else []
        return [frozenset([units[n] for n in freed]) for freed, _ in some]


def best(found: list[tuple[list[int], Effect]], on_hull: bool) -> list[tuple[list[int], Effect]]:
    """Leave out sets that take as long as another one or longer, and need as much memory everywhere. on_hull: also
    those above the hull of bytes and time."""
    times = sorted({t for _, effect in found for a, b, _ in effect.changes for t in (a, b)})
    place = {t: n for n, t in enumerate(times)}
    profiles = np.zeros((len(found), len(times) + 1), dtype=np.int64)
    for n, (_, effect) in enumerate(found):
        for a, b, nbytes in effect.changes:
            profiles[n, place[a]] += nbytes
            profiles[n, place[b]] -= nbytes
    profiles = np.cumsum(profiles, axis=1)
    kept: list[int] = []
    for n in sorted(range(len(found)), key=lambda n: (found[n][1].us, int(profiles[n].sum()), n)):
        if not kept or not np.all(profiles[kept] <= profiles[n], axis=1).any():
            kept.append(n)
    if on_hull:
        kept = _hull(kept, profiles.min(axis=1), [effect.us for _, effect in found])
    return [found[n] for n in kept]


def _hull(kept: list[int], nbytes: np.ndarray, us: Sequence[float]) -> list[int]:
    """Of these, in order of their time, the corners of the lower hull of bytes and time."""
    corners: list[int] = []
    for n in kept:
        if corners and nbytes[n] >= nbytes[corners[-1]]:
            continue
        while len(corners) > 1 and _is_above(corners[-1], corners[-2], n, nbytes, us):
            corners.pop()
        corners.append(n)
    return corners


def _is_above(n: int, before: int, after: int, nbytes: np.ndarray, us: Sequence[float]) -> bool:
    """Whether a choice lies above the line between two others."""
    slope = (us[after] - us[before]) * float(nbytes[before] - nbytes[n])
    return (us[n] - us[before]) * float(nbytes[before] - nbytes[after]) >= slope


# ---- where the segments are ---------------------------------------------------------------------


@dataclass(frozen=True)
class _Cutter:
    values: Values

    def spans(self) -> Spans:
        lookup = Lookup(self.values)
        free = [u for u in self.values.units if u not in self.values.forced and _can(lookup, u)]
        cuts = self._cuts(free)
        numbers = sorted({bisect_left(cuts, u) for u in free})
        segment = {u: numbers.index(bisect_left(cuts, u)) for u in free}
        forced: list[set[int]] = [set() for _ in numbers]
        for u in self.values.units:
            if u in self.values.forced and numbers:
                forced[min(bisect_left(numbers, bisect_left(cuts, u)), len(numbers) - 1)].add(u)
        until = dict(segment)
        for u in free:
            for needed in lookup.needs(u):
                if needed in until:
                    until[needed] = max(until[needed], segment[u])
        units = tuple(tuple([u for u in free if segment[u] == s]) for s in range(len(numbers)))
        edges = [-1, *cuts, len(self.values.nodes)]
        ranges = [(edges[n] + 1, edges[n + 1] + 1) for n in numbers]
        starts = tuple(
            (first, min([r.after for u in part for r in self.values.units[u]]))
            for (first, _), part in zip(ranges, units, strict=True)
        )
        kinds = tuple(self._kind(*r, start) for r, start in zip(ranges, starts, strict=True))
        return Spans(lookup, units, until, tuple(map(frozenset, forced)), kinds, starts)

    def _cuts(self, free: Sequence[int]) -> list[int]:
        """The places behind which the least is alive of what is still read forward."""
        if not free:
            return []
        first, turn = min(free), self.values.turn
        length = turn - first + 1
        nbytes, which = np.zeros(length + 1, dtype=np.int64), np.zeros(length + 1, dtype=np.int64)
        for r in self.values.roots.values():
            last = r.before if r.unit in self.values.units else min(r.touches[-1], turn)
            if first <= r.place < last and last - r.place <= SHARED * length:
                for counts, x in ((nbytes, r.nbytes), (which, r.place)):
                    counts[r.place - first] += x
                    counts[last - first] -= x
        nbytes, which = np.cumsum(nbytes)[:length], np.cumsum(which)[:length]
        cuts, before = [], -1
        for p in range(length - 1):
            near = nbytes[max(0, p - WINDOW) : p + WINDOW + 1]
            if nbytes[p] == near.min() and nbytes[p] and which[p] != before:
                cuts.append(first + p)
                before = which[p]
        return cuts

    def _kind(self, first: int, last: int, start: tuple[int, int]) -> Hashable:
        """What a segment does, with all places relative to its starts."""
        values, tasks = self.values, self.values.work.tasks
        found = []
        for i in range(first, min(last, values.turn + 1)):
            near = [r for r in tasks[i].reads if values.root(r) in values.roots]
            reads = tuple([i - r if i - r < last - first + WINDOW else None for r in near])
            touches = ()
            if i in values.roots:
                touches = tuple([t - i if t <= values.turn else (t - start[1],) for t in values.roots[i].touches])
            sends = tasks[i].sends and tasks[i].sends.us
            found.append((tasks[i].us, tasks[i].makes, sends, reads, touches))
        return tuple(found)


def _can(lookup: Lookup, unit: int) -> bool:
    try:
        lookup.needs(unit)
        return True
    except CannotRecompute:
        return False
