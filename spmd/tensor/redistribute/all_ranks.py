"""The blocks of all ranks at once, as arrays over the axes that matter.

    f32[8@dp, 6] on dp2 tp4     dim 0 starts at [[0], [4]]: the same along tp, so the array has one entry there

A mesh of many thousand ranks takes no more memory than its axes need, and no loop over its ranks. The arrays broadcast
to the shape of the mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from spmd.comm.chunk import Side, Unit, split_unit
from spmd.tensor.spec import Spec


class RankSides(NamedTuple):
    """Where the blocks of the ranks start and stop, in one dim.

    A rank has `count` intervals: one, or several of a packed dim. Each is `period` indices behind the one before, and
    start and stop are those of the first; the period of a dim that is not packed is its size. Count and period are
    arrays where the dim is cut in several ways, by the first dim of all arrays.
    """

    start: np.ndarray
    stop: np.ndarray
    count: np.ndarray | int
    period: np.ndarray | int

    def lengths(self) -> np.ndarray:
        """How many indices each rank has."""
        return (self.stop - self.start) * self.count

    def rows(self, which) -> RankSides:
        """The sides at these places along the first dim of all arrays."""
        return RankSides(*[x if isinstance(x, int) else x[which] for x in self])

    def below(self, index: np.ndarray) -> np.ndarray:
        """How many of its indices each rank has below this one."""
        blocks, rest = np.divmod(index, self.period)
        return blocks * (self.stop - self.start) + np.clip(rest, self.start, self.stop) - self.start

    def at_or_after(self, index: np.ndarray) -> np.ndarray:
        """The first index of each rank that is not below this one."""
        blocks, rest = np.divmod(index, self.period)
        rest = np.where(rest >= self.stop, self.period + self.start, np.maximum(rest, self.start))
        return blocks * self.period + rest

    def at_or_before(self, index: np.ndarray) -> np.ndarray:
        """Where the indices of each rank that are below this one stop."""
        blocks, rest = np.divmod(index, self.period)
        rest = np.where(rest <= self.start, self.stop - self.period, np.minimum(rest, self.stop))
        return blocks * self.period + rest

    def of_rank(self, coordinate: Sequence[int]) -> Side:
        """The side of one rank."""
        start, stop = of_rank(self.start, coordinate), of_rank(self.stop, coordinate)
        return tuple([edge + i * self.period for i in range(self.count) for edge in (start, stop)])


Sides = list[RankSides]
"""The sides of each dim."""


def common(a: RankSides, b: RankSides) -> np.ndarray:
    """How many indices each rank has in both.

    >>> from spmd.comm.chunk import Packed
    >>> halves, packed = interval_arrays(8, 1, (0,), (2,)), interval_arrays(8, Packed(2), (0,), (2,))
    >>> common(halves, packed).tolist(), common(packed, packed).tolist()
    ([2, 2], [4, 4])
    """
    first = np.maximum(np.minimum(a.stop, b.stop) - np.maximum(a.start, b.start), 0)
    if _is_one(a.count) and _is_one(b.count):
        return first
    one_by_one = a.below(b.stop) - a.below(b.start), b.below(a.stop) - b.below(a.start)
    found = np.where(np.equal(b.count, 1), one_by_one[0], one_by_one[1])
    found = np.where(np.equal(a.count, b.count), first * a.count, found)
    several = (np.minimum(a.count, b.count) > 1) & np.not_equal(a.count, b.count)
    return np.where(several, _interval_by_interval(a, b), found) if several.any() else found


def _is_one(count: np.ndarray | int) -> bool:
    return isinstance(count, int) and count == 1


def _interval_by_interval(a: RankSides, b: RankSides) -> np.ndarray:
    if np.max(a.count) < np.max(b.count):
        a, b = b, a
    found = np.zeros(1, np.int64)
    for k in range(int(np.max(b.count))):
        start, stop = b.start + k * b.period, b.stop + k * b.period
        found = found + np.where(np.less(k, b.count), a.below(stop) - a.below(start), 0)
    return found


def sides(spec: Spec) -> Sides:
    """Where the block of every rank starts and stops, in each dim."""
    every = zip(spec.shape, spec.units, spec.dims, strict=True)
    return [interval_arrays(size, unit if axes else 1, axes, spec.mesh.shape) for size, unit, axes in every]


def interval_arrays(size: int, unit: Unit, axes: Sequence[int], ns: Sequence[int]) -> RankSides:
    """Start and stop of every rank's block along one dim that these axes shard, on a mesh of shape `ns`.

    >>> [x.tolist() for x in interval_arrays(5, 1, (1,), (2, 2))[:2]]      # axis 0 does not matter
    [[[0, 3]], [[3, 5]]]
    """
    packed, inner = split_unit(unit)
    period = size // packed
    start = np.zeros((1,) * len(ns), np.int64)
    length = start + period // inner
    for a in axes:
        place = np.arange(ns[a]).reshape([-1 if i == a else 1 for i in range(len(ns))])
        step = -(-length // ns[a])
        offset = np.minimum(step * place, length)
        start, length = start + offset, np.minimum(step, length - offset)
    return RankSides(start * inner, (start + length) * inner, packed, max(period, 1))


def volumes(of: Sides) -> np.ndarray | int:
    """How many elements the block of each rank has."""
    return functools.reduce(np.multiply, [side.lengths() for side in of], 1)


def overlaps(a: Sides, b: Sides) -> np.ndarray | int:
    """How many elements of its block in b each rank has in a."""
    return functools.reduce(np.multiply, [common(p, q) for p, q in zip(a, b, strict=True)], 1)


def most_in_group(counts: np.ndarray | int, axes: Sequence[int]) -> np.ndarray:
    """For each rank, the largest number in its group along the axes."""
    counts = np.asarray(counts)
    return counts.max(tuple(axes), keepdims=True) if counts.ndim else counts


def of_rank(counts: np.ndarray | int, coordinate: Sequence[int]) -> int:
    """The number of the rank at a coordinate."""
    counts = np.asarray(counts)
    return int(counts[tuple(min(c, n - 1) for c, n in zip(coordinate, counts.shape, strict=False))])
