"""Where the blocks of a sharded dim begin and end.

A dim of `size` indices has `size / unit` units. The ordered axes split the units one after the other, each as
`torch.chunk` does: the chunk size is rounded up, and the last chunks are smaller or empty. Chunks of chunks differ from
one split over the product of the axes:

>>> [block(5, 1, (2, 4), (i, j))[1] for i in range(2) for j in range(4)]
[1, 1, 1, 0, 1, 1, 0, 0]
"""

from __future__ import annotations

import functools
import itertools
from math import gcd, isqrt, prod


def chunk(length: int, n: int, i: int) -> tuple[int, int]:
    """Start and length of the i-th of n chunks.

    >>> [chunk(5, 4, i) for i in range(4)]
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    step = -(-length // n)
    start = min(step * i, length)
    return start, min(step, length - start)


def block(size: int, unit: int, ns: tuple[int, ...], at: tuple[int, ...]) -> tuple[int, int]:
    """Start and length of the block at coordinates `at` along axes of sizes `ns`, outermost first."""
    start, length = 0, size // unit
    for n, i in zip(ns, at, strict=True):
        offset, length = chunk(length, n, i)
        start += offset
    return start * unit, length * unit


def blocks(size: int, unit: int, ns: tuple[int, ...]) -> list[tuple[int, int]]:
    """Start and length of every block, outermost axis slowest.

    >>> blocks(30, 5, (4,))
    [(0, 10), (10, 10), (20, 10), (30, 0)]
    """
    return [block(size, unit, ns, at) for at in itertools.product(*map(range, ns))]


@functools.lru_cache(maxsize=65536)
def smallest_unit(size: int, unit: int, ns: tuple[int, ...]) -> int:
    """The smallest unit that gives the same blocks. It is the canonical unit, because it depends on the blocks alone.

    >>> smallest_unit(32, 8, (2,)), smallest_unit(30, 5, (4,)), smallest_unit(36, 6, (4,))
    (1, 5, 4)
    """
    if size % unit:
        return unit  # the unit does not divide the size; the spec reports that
    if unit == 1 or not ns or (size // unit) % prod(ns) == 0:
        return 1
    want = blocks(size, unit, ns)
    shared = gcd(size, *(start for start, _ in want))  # every unit that gives these blocks divides it
    return next(u for u in divisors(shared) if blocks(size, u, ns) == want)


def divisors(n: int) -> list[int]:
    """All divisors of n, the smallest first.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


@functools.lru_cache(maxsize=65536)
def aligned(size: int, unit: int, ns: tuple[int, ...], to: int) -> bool:
    """Whether every block begins at a multiple of `to`.

    >>> aligned(128, 1, (2,), 16), aligned(128, 1, (2,), 48)
    (True, False)
    """
    return unit % to == 0 or all(start % to == 0 for start, _ in blocks(size, unit, ns))
