"""What no plan can go below: bytes that some rank receives, whatever the moves.

Where nothing is reduced, a rank gets what it wants and has not, and one exchange attains that. Where p ranks hold the
terms of a reduction, the terms of an element meet in p - 1 messages at least, and one more goes to each further rank
that wants the element - the first of them gets it for nothing if it holds a term. That is a number of messages over all
ranks, so the busiest rank gets at least the mean of them; and each rank gets at least once all that it wants, for
nobody has it. ("Uncoded": messages are terms, sums of terms, or values.)
"""

from __future__ import annotations

import itertools
from math import prod

from spmd.tensor.redistribute.boxes import Box, overlap, volume
from spmd.tensor.spec import Spec


def lower_bound(src: Spec, dst: Spec) -> int:
    """Bytes that the busiest rank receives at least, of a tensor that goes from src to dst.

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
        return 0 if reduced else _lack_padded(src, dst, made)
    coordinates = src.mesh.coordinates()
    if not reduced:
        lacks = [volume(dst.box(c)) - volume(overlap(dst.box(c), src.box(c))) for c in coordinates]
        return max(lacks) * src.dtype.itemsize
    # Ranks that differ on an axis that stays Partial hold different tensors: one of these is looked at.
    ranks = [c for c in coordinates if all(c[a] == 0 for a in kept)]
    p = prod(src.mesh.shape[a] for a in reduced)
    wanted = sum(volume(dst.box(c)) for c in ranks)
    at_once = _held_by_one(src, dst, ranks)
    distinct = prod(src.shape)
    messages = distinct * (p - 1) + wanted - at_once
    return max(-(-messages // len(ranks)), max(volume(dst.box(c)) for c in ranks)) * src.dtype.itemsize


def _lack_padded(src: Spec, dst: Spec, made: set[int]) -> int:
    """Where axes become Partial: nothing, if each element is in the block of some rank that may keep it."""
    lacks = 0
    for c in src.mesh.coordinates():
        others = itertools.product(*(range(n) if a in made else (c[a],) for a, n in enumerate(src.mesh.shape)))
        want = dst.box(c)
        held: set[Box] = {overlap(want, src.box(o)) for o in others}
        lacks = max(lacks, (volume(want) - _union(held)) // prod(src.mesh.shape[a] for a in made))
    return lacks * src.dtype.itemsize


def _held_by_one(src: Spec, dst: Spec, ranks: list[tuple[int, ...]]) -> int:
    """How many elements are wanted by a rank that holds a term of them."""
    return _union({overlap(dst.box(c), src.box(c)) for c in ranks})


def _union(boxes: set[Box]) -> int:
    """How many elements are in some of the boxes."""
    boxes = {box for box in boxes if volume(box)}
    if not boxes:
        return 0
    first = next(iter(boxes))
    if not first:
        return 1
    cuts = sorted({edge for box in boxes for edge in box[0]})
    total = 0
    for start, stop in itertools.pairwise(cuts):
        total += (stop - start) * _union_rest({box[1:] for box in boxes if box[0][0] <= start and stop <= box[0][1]})
    return total


def _union_rest(boxes: set[Box]) -> int:
    return _union(boxes) if boxes else 0
