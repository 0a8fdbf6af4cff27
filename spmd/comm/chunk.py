"""Where the blocks of a sharded dim begin and end.

A dim of `size` indices has `size / unit` units. The ordered axes split the units one after the other, each as
`torch.chunk` does: the chunk size is rounded up, and the last chunks are smaller or empty. Chunks of chunks differ from
one split over the product of the axes:

>>> [block(5, 1, (2, 4), (i, j))[1] for i in range(2) for j in range(4)]
[1, 1, 1, 0, 1, 1, 0, 0]

A *packed* dim is several equal blocks, one after the other, as in the weight of a fused q, k and v. The axes split each
of these blocks by itself, so a rank has as many intervals of the dim as there are blocks. The unit of such a dim says
so: it is `Packed`.

>>> [side(6, Packed(2), (2,), (i,)) for i in range(2)]      # 0 1 | 2 . 3 4 | 5
[(0, 2, 3, 5), (2, 3, 5, 6)]
"""

from __future__ import annotations

import functools
from math import gcd, isqrt, lcm, prod
from typing import NamedTuple


class Packed(NamedTuple):
    """The unit of a dim of so many equal blocks, each of which is sharded by itself, in units of `unit` indices."""

    blocks: int
    unit: int = 1


Unit = int | Packed
"""How many neighbouring indices of a dim stay together."""

Side = tuple[int, ...]
"""Which indices of a dim a rank has: where an interval starts and stops, and of a packed dim so for each interval."""


def split_unit(unit: Unit) -> tuple[int, int]:
    """Of how many blocks a dim with this unit is, and the unit inside a block.

    >>> split_unit(8), tuple(split_unit(Packed(3, 8)))
    ((1, 8), (3, 8))
    """
    return unit if isinstance(unit, Packed) else (1, unit)


def joined_unit(blocks: int, unit: int) -> Unit:
    """The unit of a dim of so many blocks: the inverse of `split_unit`."""
    return unit if blocks == 1 else Packed(blocks, unit)


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
    found = [(0, size // unit)]
    for n in ns:
        found = [each for start, length in found for each in _chunks(start, length, n)]
    return [(start * unit, length * unit) for start, length in found]


def _chunks(start: int, length: int, n: int) -> list[tuple[int, int]]:
    """All n chunks of an interval: ranks may be many more than it has indices, so most of them may be empty."""
    step = max(-(-length // n), 1)
    whole = [(start + at, step) for at in range(0, length - step + 1, step)]
    if rest := length % step:
        whole.append((start + length - rest, rest))
    return whole + [(start + length, 0)] * (n - len(whole))


def side(size: int, unit: Unit, ns: tuple[int, ...], at: tuple[int, ...]) -> Side:
    """The indices of the block at coordinates `at`, of a dim that may be packed."""
    if not isinstance(unit, Packed):
        start, length = block(size, unit, ns, at)
        return start, start + length
    period = size // unit.blocks
    start, length = block(period, unit.unit, ns, at)
    if not length:
        return size, size
    return tuple([edge + i * period for i in range(unit.blocks) for edge in (start, start + length)])


def length_of(size: int, unit: Unit, ns: tuple[int, ...], at: tuple[int, ...]) -> int:
    """How many indices the block at coordinates `at` has, of a dim that may be packed."""
    packed, inner = split_unit(unit)
    return packed * block(size // packed, inner, ns, at)[1]


def lengths(size: int, unit: Unit, ns: tuple[int, ...]) -> list[int]:
    """How many indices every block has, outermost axis slowest.

    >>> lengths(5, 1, (2,)), lengths(6, Packed(2), (2,))
    ([3, 2], [4, 2])
    """
    packed, inner = split_unit(unit)
    return [packed * length for _, length in blocks(size // packed, inner, ns)]


def is_unit_of(size: int, unit: Unit) -> bool:
    """Whether a dim of this size has a whole number of units, and of blocks if it is packed."""
    packed, inner = split_unit(unit)
    return size % packed == 0 and size // packed % inner == 0


@functools.lru_cache(maxsize=65536)
def smallest_unit(size: int, unit: Unit, ns: tuple[int, ...]) -> Unit:
    """The smallest unit that gives the same blocks. It is the canonical unit, because it depends on the blocks alone.

    Where one rank has all of each block of a packed dim, it has all of the dim, and the dim is not called packed.

    >>> smallest_unit(32, 8, (2,)), smallest_unit(30, 5, (4,)), smallest_unit(36, 6, (4,))
    (1, 5, 4)
    >>> smallest_unit(96, Packed(3, 8), (2,)), smallest_unit(6, Packed(3, 2), (2,))
    (Packed(blocks=3, unit=1), 6)
    """
    if isinstance(unit, Packed):
        return _smallest_packed(size, unit, ns)
    if size % unit:
        return unit  # the unit does not divide the size; the spec reports that
    if unit == 1 or not ns or (size // unit) % prod(ns) == 0:
        return 1
    want = blocks(size, unit, ns)
    shared = gcd(size, *(start for start, _ in want))  # every unit that gives these blocks divides it
    return next(u for u in divisors(shared) if blocks(size, u, ns) == want)


def _smallest_packed(size: int, unit: Packed, ns: tuple[int, ...]) -> Unit:
    period = size // unit.blocks
    if not is_unit_of(size, unit):
        return unit
    if period <= unit.unit:
        return smallest_unit(size, size, ns) if size else 1
    return joined_unit(unit.blocks, smallest_unit(period, unit.unit, ns))


def divisors(n: int) -> list[int]:
    """All divisors of n, the smallest first.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


@functools.lru_cache(maxsize=65536)
def aligned(size: int, unit: Unit, ns: tuple[int, ...], to: Unit) -> bool:
    """Whether every block begins at a multiple of `to`.

    If `to` is packed: whether the dim is of so many blocks, or of a multiple, in each of which that is so.

    >>> aligned(128, 1, (2,), 16), aligned(128, 1, (2,), 48), aligned(128, Packed(4), (2,), Packed(2, 16))
    (True, False, True)
    """
    (have, inner), (want, to) = split_unit(unit), split_unit(to)
    if have % want or (have > 1 and size // have % to):
        return False
    return inner % to == 0 or all(start % to == 0 for start, _ in blocks(size // have, inner, ns))


def unit_over(unit: Unit, to: Unit) -> Unit:
    """The unit of the factor of a dim: the dim has this unit, and is as many times the factor as `to` says.

    The dim must be `aligned` so. Both units divide the blocks of ranks, so their common multiple does, too.

    >>> unit_over(6, 2), unit_over(Packed(6, 4), Packed(3, 1))
    (3, Packed(blocks=2, unit=4))
    """
    (have, inner), (want, to) = split_unit(unit), split_unit(to)
    return joined_unit(have // want, lcm(inner, to) // to)


def unit_times(unit: Unit, to: Unit) -> Unit:
    """The unit of a dim whose factor has this unit: the inverse of `unit_over`.

    >>> unit_times(3, 2), unit_times(Packed(2, 4), Packed(3, 1))
    (6, Packed(blocks=6, unit=4))
    """
    (blocks, inner), (more, times) = split_unit(unit), split_unit(to)
    return joined_unit(blocks * more, inner * times)
