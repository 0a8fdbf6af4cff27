"""Which units of a span are tried in host memory, beside the sets that are computed again.

    computed again {gelu, up}   ->   {gelu} with up in host memory, {up} with gelu, none with both, ...

Of few units all choices are tried. Of more, what is sent first is what takes longest to compute again for its bytes, or
what is made first, which has the most time to be copied beside the ops behind it; as much as can be copied beside the
ops of the span, and one more. For the least memory all are sent at once, in the order of their bytes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from spmd.expand.passes.recompute.again import Lookup
from spmd.expand.passes.recompute.copies import Window

ALL_TRIED = 5
"""Of so many units all choices are tried: to keep, to compute again, or to send."""
MOST_SETS = 5
"""Of more units, beside how many of the sets that are computed again others are tried in host memory."""

Tried = tuple[tuple[int, ...], frozenset[int], Window]
"""The units that are computed again, those in host memory, and when these are copied."""


def hosted_too(
    lookup: Lookup, sets: Sequence[Sequence[int]], units: Sequence[int], beside: Window, at_once: Window
) -> list[Tried]:
    """Choices to be tried in which something waits in host memory. sets: what is worth to be computed again, by time.
    beside, at_once: the windows in which copies may be made."""
    if len(units) <= ALL_TRIED:
        return [(*each, window) for each in _all(units) for window in (beside, at_once)]
    some = sets[::-1][:: -(-len(sets) // MOST_SETS)] if sets else ()
    lazy = dict.fromkeys([(*each, beside) for each in _some(lookup, some, units, beside)])
    return [*lazy, *[(*each, at_once) for each in _most(lookup, [*sets[:1], *some[:1]], units)]]


def _all(units: Sequence[int]) -> Iterator[tuple[tuple[int, ...], frozenset[int]]]:
    for choice in product(range(3), repeat=len(units)):
        if 2 in choice:
            again, hosted = ([u for u, c in zip(units, choice, strict=True) if c == way] for way in (1, 2))
            yield tuple(again), frozenset(hosted)


def _some(
    lookup: Lookup, sets: Sequence[Sequence[int]], units: Sequence[int], window: Window
) -> Iterator[tuple[tuple[int, ...], frozenset[int]]]:
    """Some that can be copied beside the ops."""
    free = lookup.clock.between(min(lookup.begins(u) for u in units), window.last)
    short = [u for u in units if lookup.copy_us(u) <= free]
    by_cost = sorted(short, key=lambda u: (-lookup.us(u) / max(1, lookup.nbytes(u)), u))
    for again in sets:
        for order in (by_cost, short):
            left, hosted = free, frozenset()
            for u in order:
                if left <= 0:
                    break
                left -= lookup.copy_us(u)
                hosted |= {u}
                yield tuple([v for v in again if v not in hosted]), hosted
        for u in short:
            yield tuple([v for v in again if v != u]), frozenset([u])


def _most(
    lookup: Lookup, sets: Sequence[Sequence[int]], units: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], frozenset[int]]]:
    """The largest ones, and with them all that are smaller."""
    order = sorted(units, key=lambda u: (-lookup.nbytes(u), u))
    for again in sets:
        for n in range(1, len(order) + 1):
            yield tuple([u for u in again if u not in order[:n]]), frozenset(order[:n])
        for u in units:
            yield tuple([v for v in again if v != u]), frozenset([u])
