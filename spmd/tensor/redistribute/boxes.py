"""Boxes: which part of a tensor a rank holds, and which parts it cuts out of its block for others.

A box is an interval (start, stop) for each dim. The block of every rank is a box, however many axes shard a dim and in
whatever order. So a move only cuts boxes out of a block, and joins boxes to a block:

    >>> overlap(((0, 4), (0, 6)), ((2, 8), (0, 3)))
    ((2, 4), (0, 3))
    >>> relative_to(((2, 4), (0, 3)), ((0, 4), (0, 6)))     # counted from the first corner of the second
    ((2, 4), (0, 3))

Boxes alone decide how to cut and to join; no value of a tensor is read. The code is plain torch, so it can be recorded
in a graph as well as run.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

Box = tuple[tuple[int, int], ...]


def volume(box: Box) -> int:
    """How many elements the box has."""
    return prod([stop - start for start, stop in box])


def shape_of(box: Box) -> tuple[int, ...]:
    """The lengths of its sides."""
    return tuple([stop - start for start, stop in box])


def overlap(a: Box, b: Box) -> Box:
    """The box of the elements that are in both; a box of no elements if there are none."""
    return tuple([(max(x[0], y[0]), max(x[0], y[0], min(x[1], y[1]))) for x, y in zip(a, b, strict=True)])


def relative_to(part: Box, whole: Box) -> Box:
    """The part, counted from the first corner of the whole."""
    return tuple([(start - o, stop - o) for (start, stop), (o, _) in zip(part, whole, strict=True)])


# ---- cutting ----------------------------------------------------------------------------------


def cut(x: torch.Tensor, shape: Sequence[int], boxes: Sequence[Box]) -> torch.Tensor:
    """These boxes of x, which has this shape: each box row-major, one after the other, in one row."""
    boxes = [box for box in boxes if volume(box)]
    if _are_consecutive_rows(boxes, shape):
        return x.reshape(-1)
    pieces = [narrowed(x, box, shape) for box in boxes]
    if len(pieces) > 1 and len(shape) and len({shape_of(box)[1:] for box in boxes}) == 1:
        return torch.cat(pieces, 0).reshape(-1)  # one copy, wherever the pieces are
    flat = [piece.reshape(-1) for piece in pieces]
    return flat[0] if len(flat) == 1 else torch.cat(flat, 0) if flat else x.new_empty(0)


def narrowed(x: torch.Tensor, box: Box, shape: Sequence[int]) -> torch.Tensor:
    """The view of this box of x, which has this shape."""
    for dim, ((start, stop), size) in enumerate(zip(box, shape, strict=True)):
        if stop - start != size:
            x = x.narrow(dim, start, stop - start)
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
    sizes = [volume(box) for box in filled]
    pieces = y.split(sizes, 0)
    return _tiled([(box, pieces[i].view(shape_of(box))) for i, box in enumerate(filled)], 0)


def joined_padded(y: torch.Tensor, boxes: Sequence[Box], shape: Sequence[int], row: int) -> torch.Tensor:
    """The same, if each box is padded to a row of this length in y."""
    if all(volume(box) == row for box in boxes):
        return joined(y, boxes, shape)
    pieces = y.split([row] * len(boxes), 0)
    filled = [(box, pieces[i]) for i, box in enumerate(boxes) if volume(box)]
    return _tiled([(box, p.narrow(0, 0, volume(box)).view(shape_of(box))) for box, p in filled], 0)


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
        if box[0][0] != at or any(side != (0, size) for side, size in zip(box[1:], shape[1:], strict=True)):
            return False
        at = box[0][1]
    return bool(boxes) and at == shape[0]


def _tiled(parts: list[tuple[Box, torch.Tensor]], dim: int) -> torch.Tensor:
    """The tensors joined as their boxes tile: first the tensors of one row along dim, then the rows."""
    if len(parts) == 1:
        return parts[0][1]
    rows: dict[tuple[int, int], list[tuple[Box, torch.Tensor]]] = {}
    for part in sorted(parts, key=lambda part: part[0]):
        rows.setdefault(part[0][dim], []).append(part)
    bands = [_tiled(row, dim + 1) for row in rows.values()]
    return bands[0] if len(bands) == 1 else torch.cat(bands, dim)
