"""Tables: what a bucket sends to very many ranks, or gets from them, filled and read by one call each.

    xs: f32[256, 64], f32[256] in shards over 2,048 ranks      a table of 2,048 rows: 64 columns, and one more
    filled(xs, columns, 2048, dtype)                           256 of the rows, with a copy for each tensor
    block(row, columns[0], ...)                                the first tensor again

As ops, each tensor of a bucket would be cut, padded and put beside the others, five to seven nodes of a rank's graph,
and two or three copies. In a graph these functions are one node each. All that they are given are tensors and numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

Part = tuple[int, int, tuple[tuple[int, int], ...], int, int]
"""Boxes of a tensor, one for each of some neighbouring rows of a table: the first row, how many there are, the first
box, and along which dim and by how much each is further than the one before."""

Column = tuple[int, int, tuple[Part, ...]]
"""Where the boxes of a tensor are in a table: the first column, how many there are, and what is in their rows."""


def columns_of(widths: Sequence[int], parts: Sequence[tuple[Part, ...]]) -> tuple[Column, ...]:
    """The columns of tensors that stand side by side, each so wide."""
    starts = [sum(widths[:i]) for i in range(len(widths))]
    return tuple(zip(starts, widths, parts, strict=True))


def in_graph(function: Callable, first: Any, *args: Any) -> Any:
    """The result of a function; of proxies, one call of it."""
    proxy = first[0] if isinstance(first, (list, tuple)) else first
    if isinstance(proxy, fx.Proxy):
        return proxy.tracer.create_proxy("call_function", function, (first, *args), {})
    return function(first, *args)


def filled(xs: Sequence[torch.Tensor], columns: Sequence[Column], rows: int, dtype: torch.dtype) -> torch.Tensor:
    """A table with the boxes of tensors in their columns, one row behind the other. What is in no box is zero.

    >>> filled([torch.arange(3.0)], ((0, 1, ((0, 3, ((0, 1),), 0, 1),)),), 4, torch.float32)
    tensor([0., 1., 2., 0.])
    """
    width = sum([n for _, n, _ in columns])
    table = xs[0].new_zeros((rows, width), dtype=dtype)
    for x, (start, _, parts) in zip(xs, columns, strict=True):
        for part in parts:
            _in_table(table, start, part).copy_(_boxes(x, part))
    return table.view(-1)


def block(flat: torch.Tensor, column: Column, rows: int, shape: Sequence[int]) -> torch.Tensor:
    """The tensor of this shape that the boxes in some columns of a table tile. flat: its rows, one behind the other.

    >>> block(torch.arange(4.0), (0, 1, ((0, 3, ((0, 1),), 0, 1),)), 4, (3,))
    tensor([0., 1., 2.])
    """
    start, _, parts = column
    table, found = flat.view(rows, -1), flat.new_empty(shape)
    for part in parts:
        _boxes(found, part).copy_(_in_table(table, start, part))
    return found


def in_row(xs: Sequence[torch.Tensor], widths: Sequence[int]) -> torch.Tensor:
    """The elements of tensors in one row, each padded with zeros to so many.

    >>> in_row([torch.ones(1, 2), torch.ones(1)], (2, 2))
    tensor([1., 1., 1., 0.])
    """
    pieces: list[torch.Tensor] = []
    for x, n in zip(xs, widths, strict=True):
        pieces.append(x.reshape(-1))
        if x.numel() < n:
            pieces.append(x.new_zeros(n - x.numel()))
    return torch.cat(pieces)


def pieces(row: torch.Tensor, widths: Sequence[int], shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """A row in pieces of so many elements, each as a tensor of its shape: views of the first that it has.

    >>> [x.tolist() for x in pieces(torch.arange(4), (3, 1), ((1, 2), (1,)))]
    [[[0, 1]], [3]]
    """
    return [_first(piece, shape) for piece, shape in zip(row.split(list(widths)), shapes, strict=True)]


def _first(piece: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    n = torch.Size(shape).numel()
    return (piece if len(piece) == n else piece.narrow(0, 0, n)).view(shape)


def _in_table(table: torch.Tensor, start: int, part: Part) -> torch.Tensor:
    """The boxes of a part, as [boxes, *the shape of one], where they are in a table."""
    at, count, first, _, _ = part
    sizes = [stop - start for start, stop in first]
    return table.narrow(0, at, count).narrow(1, start, torch.Size(sizes).numel()).unflatten(1, sizes)


def _boxes(x: torch.Tensor, part: Part) -> torch.Tensor:
    """The same, where they are in the tensor: a view of it."""
    _, count, first, dim, step = part
    for d, (start, stop) in enumerate(first):
        n = stop - start + ((count - 1) * step if d == dim else 0)
        x = x if n == x.shape[d] else x.narrow(d, start, n)
    return x.unsqueeze(0) if count == 1 else x.unflatten(dim, (count, step)).movedim(dim, 0)
