"""Lower bounds: the bytes that some rank receives, whatever the moves are.

    f32[8@tp, 4] -> f32[8, 4]       4 ranks: a rank has 2 of 8 rows and lacks 6, so it receives 96 bytes at least

Without a reduction a rank has to receive the elements that it wants and has not; one exchange attains that.

With a reduction, p ranks hold the terms of each element. These terms take at least p - 1 messages to meet, and one
more for each further rank that wants the element; the first of these ranks receives it for nothing if it holds a term.
These are messages of all ranks together, so the busiest rank receives at least the mean of them. A rank also receives
at least as many elements as it wants, because no rank has the reduced values. (The bound is for "uncoded" messages:
terms, sums of terms, or values.)
"""

from __future__ import annotations

import itertools
from math import prod

import numpy as np

from spmd.tensor.redistribute.all_ranks import RankSides, Sides, overlaps, sides, volumes
from spmd.tensor.redistribute.boxes import Box, overlap, simple, volume
from spmd.tensor.spec import Spec


def lower_bound(src: Spec, dst: Spec) -> int:
    """Bytes that the busiest rank receives at least, when a tensor goes from src to dst.

    >>> from spmd.mesh import init_device_mesh
    >>> from spmd.tensor.spec import parse_spec
    >>> mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("x", "y"))
    >>> lower_bound(parse_spec("i8[64@y] +sum@x", mesh), parse_spec("i8[64@x,y]", mesh))     # .219 of 64
    14
    """
    kinds = dict(dst.partial)
    alike = [{kind, kinds.get(a)} <= {"sum", "avg"} or kinds.get(a) == kind for a, kind in src.partial]
    reduced = tuple(a for (a, _), same in zip(src.partial, alike, strict=True) if not same)
    made = set(kinds) - {a for (a, _), same in zip(src.partial, alike, strict=True) if same}
    kept = set(kinds) - made
    if made:
        return 0 if reduced else _bound_to_partial(src, dst, made)
    have, want = sides(src), sides(dst)
    if not reduced:
        return int(np.max(volumes(want) - overlaps(have, want))) * src.dtype.itemsize
    # Ranks that differ on an axis that stays Partial hold different tensors: one of these tensors is enough.
    first = tuple(slice(0, 1) if a in kept else slice(None) for a in range(src.mesh.ndim))
    blocks = np.broadcast_to(volumes(want), src.mesh.shape)[first]
    p = prod(src.mesh.shape[a] for a in reduced)
    messages = prod(src.shape) * (p - 1) + int(blocks.sum()) - _held_by_one(have, want, first)
    return max(-(-messages // blocks.size), int(blocks.max())) * src.dtype.itemsize


def _bound_to_partial(src: Spec, dst: Spec, made: set[int]) -> int:
    """The bound if axes become Partial: 0 if each element is in the block of some rank that may keep it."""
    lacks = 0
    for c in src.mesh.coordinates():
        others = itertools.product(*(range(n) if a in made else (c[a],) for a, n in enumerate(src.mesh.shape)))
        want = dst.box(c)
        held: set[Box] = {part for o in others for part in simple(overlap(want, src.box(o)))}
        lacks = max(lacks, (volume(want) - _union_volume(held)) // prod(src.mesh.shape[a] for a in made))
    return lacks * src.dtype.itemsize


def _held_by_one(have: Sides, want: Sides, first: tuple[slice, ...]) -> int:
    """How many elements are wanted by a rank that holds a term of them already, of the ranks that `first` chooses."""
    found: set[Box] = set()
    for edges in itertools.product(*[_shared_intervals(*each) for each in zip(have, want, strict=True)]):
        flat = [np.ravel(x) for x in np.broadcast_arrays(*[x[first] for interval in edges for x in interval])]
        every = np.unique(np.stack(flat, 1), axis=0).tolist() if flat else [[]]
        pairs = [zip(row[::2], row[1::2], strict=True) for row in every]
        found |= {tuple((lo, max(lo, hi)) for lo, hi in row) for row in pairs}
    return _union_volume(found)


def _shared_intervals(a: RankSides, b: RankSides) -> list[tuple[np.ndarray, np.ndarray]]:
    """What each interval of a side shares with each of another; of sides of one period those that can meet."""
    each = itertools.product(range(a.count), range(b.count))
    meet = [(i * a.period, j * b.period) for i, j in each if a.count != b.count or i == j]
    return [(np.maximum(a.start + p, b.start + q), np.minimum(a.stop + p, b.stop + q)) for p, q in meet]


def _union_volume(boxes: set[Box]) -> int:
    """How many elements are in at least one of the boxes."""
    boxes = {box for box in boxes if volume(box)}
    if not boxes:
        return 0
    first = next(iter(boxes))
    if not first:
        return 1
    bands: dict[tuple[int, int], set[Box]] = {}
    for box in boxes:
        bands.setdefault(box[0], set()).add(box[1:])
    if all(p[1] <= q[0] for p, q in itertools.pairwise(sorted(bands))):
        return sum((stop - start) * _union_volume(rest) for (start, stop), rest in bands.items())
    cuts = sorted({edge for box in boxes for edge in box[0]})
    total = 0
    for start, stop in itertools.pairwise(cuts):
        rest = {box[1:] for box in boxes if box[0][0] <= start and stop <= box[0][1]}
        total += (stop - start) * (_union_volume(rest) if rest else 0)
    return total
