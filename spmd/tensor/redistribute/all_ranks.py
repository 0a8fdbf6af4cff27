"""The blocks of all ranks at once, as arrays over the axes that matter.

    f32[8@dp, 6] on dp2 tp4     dim 0 starts at [[0], [4]]: the same along tp, so the array has one entry there

A mesh of many thousand ranks takes no more memory than its axes need, and no loop over its ranks. The arrays broadcast
to the shape of the mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from spmd.tensor.spec import Spec

Sides = list[tuple[np.ndarray, np.ndarray]]
"""For each dim, where the blocks of the ranks start and where they stop."""


def sides(spec: Spec) -> Sides:
    """Where the block of every rank starts and stops, in each dim."""
    every = zip(spec.shape, spec.units, spec.dims, strict=True)
    return [interval_arrays(size, unit if axes else 1, axes, spec.mesh.shape) for size, unit, axes in every]


def interval_arrays(size: int, unit: int, axes: Sequence[int], ns: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Start and stop of every rank's block along one dim that these axes shard, on a mesh of shape `ns`.

    >>> [x.tolist() for x in interval_arrays(5, 1, (1,), (2, 2))]      # axis 0 does not matter
    [[[0, 3]], [[3, 5]]]
    """
    start = np.zeros((1,) * len(ns), np.int64)
    length = start + size // unit
    for a in axes:
        place = np.arange(ns[a]).reshape([-1 if i == a else 1 for i in range(len(ns))])
        step = -(-length // ns[a])
        offset = np.minimum(step * place, length)
        start, length = start + offset, np.minimum(step, length - offset)
    return start * unit, (start + length) * unit


def volumes(of: Sides) -> np.ndarray | int:
    """How many elements the block of each rank has."""
    return functools.reduce(np.multiply, [stop - start for start, stop in of], 1)


def overlaps(a: Sides, b: Sides) -> np.ndarray | int:
    """How many elements of its block in b each rank has in a."""
    lengths = [np.maximum(np.minimum(q, s) - np.maximum(p, r), 0) for (p, q), (r, s) in zip(a, b, strict=True)]
    return functools.reduce(np.multiply, lengths, 1)


def most_in_group(counts: np.ndarray | int, axes: Sequence[int]) -> np.ndarray:
    """For each rank, the largest number in its group along the axes."""
    counts = np.asarray(counts)
    return counts.max(tuple(axes), keepdims=True) if counts.ndim else counts


def of_rank(counts: np.ndarray | int, coordinate: Sequence[int]) -> int:
    """The number of the rank at a coordinate."""
    counts = np.asarray(counts)
    return int(counts[tuple(min(c, n - 1) for c, n in zip(coordinate, counts.shape, strict=False))])
