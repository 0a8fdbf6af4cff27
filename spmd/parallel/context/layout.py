"""Which positions of a sequence each rank has, and what of them the rows of a rank see.

    in_order((2, 2, 2))     rank 0 has 0 1, rank 1 has 2 3, rank 2 has 4 5
    balanced(12, 3)         0 1 10 11, 2 3 8 9, 4 5 6 7: a chunk from the front and one from the back

Of a causal mask the first rows see little and the last ones all; so in order the last rank works twice as long as the
average, and balanced all work alike. Chunks of two ranks do not overlap, so no mask is made between two ranks: rows see
a whole number of the other's chunks. Only among a rank's own positions, which are in order, the kernel masks.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

Chunk = tuple[int, int]
"""The first position, and the one behind the last."""


@dataclass(frozen=True)
class Layout:
    """The chunks of each rank of an axis, in order of their positions."""

    chunks: tuple[tuple[Chunk, ...], ...]

    @property
    def lengths(self) -> tuple[int, ...]:
        """How many positions each rank has."""
        return tuple(sum(stop - start for start, stop in chunks) for chunks in self.chunks)

    def positions(self, place: int) -> list[int]:
        """The positions of a rank."""
        return [i for start, stop in self.chunks[place] for i in range(start, stop)]

    @functools.cached_property
    def order(self) -> tuple[int, ...]:
        """The positions as the ranks have them, one rank after the other."""
        return tuple(i for place in range(len(self.chunks)) for i in self.positions(place))

    @property
    def is_in_order(self) -> bool:
        return self.order == tuple(range(len(self.order)))


def in_order(lengths: Sequence[int]) -> Layout:
    """One chunk for each rank, of these lengths."""
    stops = list(accumulate(lengths))
    return Layout(tuple(((stop - n, stop),) for n, stop in zip(lengths, stops, strict=True)))


def balanced(size: int, n: int) -> Layout:
    """Two chunks for each of n ranks: from the front, and as far from the back. All are as long, or one longer.

    >>> balanced(12, 3).order
    (0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7)
    >>> balanced(7, 2).chunks
    (((0, 1), (5, 7)), ((1, 3), (3, 5)))
    """
    bounds = [i * size // (2 * n) for i in range(2 * n + 1)]
    chunks = list(pairwise(bounds))
    return Layout(tuple((chunks[i], chunks[-1 - i]) for i in range(n)))


@dataclass(frozen=True)
class Tile:
    """Some rows of a rank and the keys of a rank that all of them see; if causal, each up to its own place."""

    rows: Chunk
    keys: Chunk
    causal: bool = False


@functools.lru_cache(maxsize=4096)
def tiles(rows: Layout, keys: Layout, place: int, owner: int, causal: bool) -> tuple[Tile, ...]:
    """What the rows of the rank at `place` see of the keys of `owner`. Causal: both layouts are one.

    >>> tiles(balanced(8, 2), balanced(8, 2), 0, 1, True)
    (Tile(rows=(2, 4), keys=(0, 4), causal=False),)
    """
    n, m = rows.lengths[place], keys.lengths[owner]
    if not causal or place == owner:
        return (Tile((0, n), (0, m), causal),) if n and m else ()
    found: dict[int, Chunk] = {}
    row = 0
    for start, stop in rows.chunks[place]:
        seen = sum(b - a for a, b in keys.chunks[owner] if b <= start)
        if seen and stop > start:
            found[seen] = (found.get(seen, (row, row))[0], row + stop - start)
        row += stop - start
    return tuple(Tile(each, (0, seen)) for seen, each in found.items())
