"""Boxes: which part of a tensor a rank holds, and which parts it cuts out of its block for others.

A box has a side for each dim, an interval (start, stop). The block of every rank is a box, however many axes shard a
dim and in whatever order. So a move only cuts boxes out of a block, and joins boxes to a block:

    >>> overlap(((0, 4), (0, 6)), ((2, 8), (0, 3)))
    ((2, 4), (0, 3))
    >>> relative_to(((2, 4), (0, 3)), ((0, 4), (0, 6)))     # counted from the first corner of the second
    ((2, 4), (0, 3))

The side of a packed dim has several intervals, one behind the other (start, stop, start, stop, ...):

    >>> overlap(((0, 2, 4, 6),), ((1, 5),))
    ((1, 2, 4, 5),)
    >>> relative_to(((1, 2, 4, 5),), ((0, 2, 4, 6),))
    ((1, 3),)

Boxes alone decide how to cut and to join; no value of a tensor is read. The code is plain torch, so it can be recorded
in a graph as well as run.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import prod

import torch

from spmd.comm.chunk import Side

Box = tuple[Side, ...]


def length(side: Side) -> int:
    """How many indices the side has."""
    return side[1] - side[0] if len(side) == 2 else sum(side[1::2]) - sum(side[::2])


def volume(box: Box) -> int:
    """How many elements the box has."""
    return prod([length(side) for side in box])


def shape_of(box: Box) -> tuple[int, ...]:
    """The lengths of its sides."""
    return tuple([length(side) for side in box])


def overlap(a: Box, b: Box) -> Box:
    """The box of the elements that are in both; a box of no elements if there are none."""
    return tuple([
        (max(x[0], y[0]), max(x[0], y[0], min(x[1], y[1]))) if len(x) == len(y) == 2 else _common(x, y)
        for x, y in zip(a, b, strict=True)
    ])  # fmt: skip


def relative_to(part: Box, whole: Box) -> Box:
    """The part, counted from the first corner of the whole."""
    return tuple([
        (x[0] - y[0], x[1] - y[0]) if len(x) == len(y) == 2 else _places(x, y)
        for x, y in zip(part, whole, strict=True)
    ])  # fmt: skip


# ---- sides of several intervals ---------------------------------------------------------------


def intervals(side: Side) -> list[tuple[int, int]]:
    """The intervals of a side, each with its start and stop."""
    return list(zip(side[::2], side[1::2], strict=True))


def _common(x: Side, y: Side) -> Side:
    i = j = 0
    found: list[int] = []
    while i < len(x) and j < len(y):
        start, stop = max(x[i], y[j]), min(x[i + 1], y[j + 1])
        if start < stop:
            found += (start, stop)
        i, j = (i + 2, j) if x[i + 1] < y[j + 1] else (i, j + 2)
    return tuple(found) or (x[0], x[0])


def _places(part: Side, whole: Side) -> Side:
    """The places of some indices among those of the whole. Intervals that meet there become one."""
    if not length(part):
        return 0, 0
    rest, before = iter(intervals(whole)), 0
    start, stop = next(rest)
    found: list[int] = []
    for a, b in intervals(part):
        while not start <= a < stop:
            before += stop - start
            start, stop = next(rest)
        place = before + a - start
        found[-1:] = [place + b - a] if found and found[-1] == place else [*found[-1:], place, place + b - a]
    return tuple(found)


def simple(box: Box) -> Iterator[Box]:
    """The box in parts: one for each choice of an interval of every side."""
    return itertools.product(*map(intervals, box))


def opened(boxes: Sequence[Box], shape: Sequence[int]) -> tuple[list[Box], list[int]]:
    """The same boxes of the tensor seen with more dims, in which sides are single intervals, as far as possible.

    A dim of which all boxes have as many intervals, one in each of so many equal parts, becomes two dims:

    >>> opened([((0, 2, 4, 6),), ((2, 4, 6, 8),)], [8])
    ([((0, 2), (0, 2)), ((0, 2), (2, 4))], [2, 4])
    """
    if all([len(side) == 2 for box in boxes for side in box]):
        return list(boxes), list(shape)
    columns: list[list[Side]] = []
    sizes: list[int] = []
    for size, sides in zip(shape, zip(*boxes, strict=True), strict=True):
        n = len(sides[0]) // 2
        if n > 1 and all([_repeats(side, n, size) for side in sides]):
            columns += [[(0, n)] * len(sides), [side[:2] for side in sides]]
            sizes += [n, size // n]
        else:
            columns.append(list(sides))
            sizes.append(size)
    return list(zip(*columns, strict=True)), sizes


def _repeats(side: Side, n: int, size: int) -> bool:
    """Whether the side has the same interval in each of n equal parts of a dim."""
    if len(side) != 2 * n or size % n or side[1] > size // n:
        return False
    return all([edge == side[i % 2] + i // 2 * (size // n) for i, edge in enumerate(side)])


# ---- cutting ----------------------------------------------------------------------------------


def cut(x: torch.Tensor, shape: Sequence[int], boxes: Sequence[Box]) -> torch.Tensor:
    """These boxes of x, which has this shape: each box row-major, one after the other, in one row."""
    boxes = [box for box in boxes if volume(box)]
    if _are_consecutive_rows(boxes, shape):
        return x.reshape(-1)
    boxes, sizes = opened(boxes, shape)
    if sizes:
        boxes = [(rows, *box[1:]) for box in boxes for rows in intervals(box[0])]
    x = seen_as(x, shape, sizes)
    pieces = [narrowed(x, box, sizes) for box in boxes]
    if len(pieces) > 1 and len(sizes) and len({shape_of(box)[1:] for box in boxes}) == 1:
        return torch.cat(pieces, 0).reshape(-1)  # one copy, wherever the pieces are
    flat = [piece.reshape(-1) for piece in pieces]
    return flat[0] if len(flat) == 1 else torch.cat(flat, 0) if flat else x.new_empty(0)


def seen_as(x: torch.Tensor, shape: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """The view of x, which has this shape, with some dims split, so that these are its sizes."""
    return x if len(shape) == len(sizes) else x.view(list(sizes))


def cut_one(x: torch.Tensor, shape: Sequence[int], box: Box) -> torch.Tensor:
    """This box of x, which has this shape, as a new tensor."""
    (seen,), sizes = opened([box], shape)
    part = narrowed(seen_as(x, shape, sizes), seen, sizes).clone(memory_format=torch.contiguous_format)
    return part if len(sizes) == len(shape) else part.view(shape_of(box))


def narrowed(x: torch.Tensor, box: Box, shape: Sequence[int]) -> torch.Tensor:
    """This box of x, which has this shape: a view, if no side has several intervals."""
    for dim, (side, size) in enumerate(zip(box, shape, strict=True)):
        if len(side) > 2:
            x = torch.cat([x.narrow(dim, start, stop - start) for start, stop in intervals(side)], dim)
        elif side[1] - side[0] != size:
            x = x.narrow(dim, side[0], side[1] - side[0])
    return x


def copies_to_cut(boxes: Sequence[Box], shape: Sequence[int]) -> int:
    """How many times `cut` copies these boxes. One more copy, for rows of several lengths, is not counted."""
    filled = [box for box in boxes if volume(box)]
    return int(bool(filled) and not _are_consecutive_rows(filled, shape))


# ---- joining ----------------------------------------------------------------------------------


def joined(y: torch.Tensor, boxes: Sequence[Box], shape: Sequence[int]) -> torch.Tensor:
    """The tensor of this shape that the boxes tile. In y they are one after the other, as `cut` leaves them."""
    filled = [box for box in boxes if volume(box)]
    if not prod(shape):
        return y.new_zeros(shape)
    if _are_consecutive_rows(filled, shape):
        return y.view(shape)
    pieces = y.split([volume(box) for box in filled], 0)
    return _tiling([(box, pieces[i]) for i, box in enumerate(filled)], shape)


def joined_padded(y: torch.Tensor, boxes: Sequence[Box], shape: Sequence[int], row: int) -> torch.Tensor:
    """The same, if each box is padded to a row of this length in y."""
    if all(volume(box) == row for box in boxes):
        return joined(y, boxes, shape)
    pieces = y.split([row] * len(boxes), 0)
    filled = [(box, pieces[i]) for i, box in enumerate(boxes) if volume(box)]
    return _tiling([(box, p.narrow(0, 0, volume(box))) for box, p in filled], shape)


def joined_table(y: torch.Tensor, boxes: Sequence[Box], shape: Sequence[int], row: int) -> torch.Tensor:
    """The same, if the rows of y, one for each box, lie apart. They are not put side by side before they are joined."""
    if not prod(shape) or copies_to_join(boxes, shape, row) == 0:
        own = y.clone(memory_format=torch.contiguous_format)  # a column would be a view of the table
        return joined_padded(own.reshape(-1), boxes, shape, row)
    filled = [(box, y.select(0, i)) for i, box in enumerate(boxes) if volume(box)]
    return _tiling([(box, x if volume(box) == row else x.narrow(0, 0, volume(box))) for box, x in filled], shape)


def _tiling(parts: list[tuple[Box, torch.Tensor]], shape: Sequence[int]) -> torch.Tensor:
    """The tensor of this shape that the boxes tile, each given as one row."""
    boxes, sizes = opened([box for box, _ in parts], shape)
    tiles = []
    for box, (_, row) in zip(boxes, parts, strict=True):
        tile, extent = row.view(shape_of(box)), shape_of(box)
        tiles += [(each, narrowed(tile, relative_to(each, box), extent)) for each in simple(box)]
    found = tiled(tiles, 0)
    return found if len(sizes) == len(shape) else found.reshape(list(shape))


def copies_to_join(boxes: Sequence[Box], shape: Sequence[int], row: int | None = None) -> int:
    """How many times `joined`, or `joined_padded` with such rows, copies: once for each dim that it joins along."""
    filled = [box for box in boxes if volume(box)]
    padded = row is not None and any([volume(box) != row for box in boxes])
    if not padded and _are_consecutive_rows(filled, shape):
        return 0
    return sum([len({box[dim] for box in filled}) > 1 for dim in range(len(shape))])


def _are_consecutive_rows(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Whether the boxes are consecutive rows, from the first to the last, of a tensor of this shape."""
    at = 0
    for box in boxes:
        if not box:
            return len(boxes) == 1
        if box[0][0] != at or len(box[0]) > 2:
            return False
        if any(side != (0, size) for side, size in zip(box[1:], shape[1:], strict=True)):
            return False
        at = box[0][1]
    return bool(boxes) and at == shape[0]


def tiled(parts: list[tuple[Box, torch.Tensor]], dim: int) -> torch.Tensor:
    """The tensors joined as their boxes tile: first the tensors of one row along dim, then the rows."""
    if len(parts) == 1:
        return parts[0][1]
    rows: dict[tuple[int, int], list[tuple[Box, torch.Tensor]]] = {}
    for part in sorted(parts, key=lambda part: part[0]):
        rows.setdefault(part[0][dim], []).append(part)
    bands = [tiled(row, dim + 1) for row in rows.values()]
    return bands[0] if len(bands) == 1 else torch.cat(bands, dim)
