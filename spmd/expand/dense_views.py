"""`as_strided` in a capture, written as views that say which elements they show.

    as_strided(f32[128], [4, 32, 1, 1], [32, 1, 1, 1])    ->    view(f32[128], [4, 32, 1, 1])
    as_strided(f32[8, 100], [8, 7, 16], [100, 14, 1])     ->    unfold(f32[8, 100], 1, 16, 14)

Strides are about memory, and the memory of a global tensor is on no rank. But where an operand and a result both show
all elements of the same memory, each once, the result is the operand with its dims in another order and taken apart
otherwise. Pooling to size 1, and views that functionalisation makes anew from their base, are such cases. Windows of
the last dim are what `unfold` shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

aten = torch.ops.aten


def as_strided(x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None = None) -> torch.Tensor:
    """The same as `aten.as_strided`, by views of dims; NotImplemented where it shows neither all elements of x once nor
    windows of its last dim.

    >>> as_strided(torch.arange(6), [3, 2], [1, 3])
    tensor([[0, 3],
            [1, 4],
            [2, 5]])
    """
    mine, theirs = memory_order(x.shape, x.stride()), memory_order(size, stride)
    same_memory = prod(size) == x.numel() and offset in (None, x.storage_offset())
    if mine is None or theirs is None or not same_memory:
        return _windows(x, size, stride, offset)
    if list(size) == list(x.shape) and mine == theirs:
        return aten.alias.default(x)
    flat = aten.view.default(aten.permute.default(x, mine), [x.numel()])
    ordered = aten.view.default(flat, [size[d] for d in theirs])
    return aten.permute.default(ordered, sorted(range(len(theirs)), key=theirs.__getitem__))


def _windows(x: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int | None) -> torch.Tensor:
    """Windows of the last dim of x, one behind the other; NotImplemented where something else is shown."""
    last = x.ndim - 1
    if last < 0 or len(size) != x.ndim + 1 or offset not in (None, x.storage_offset()):
        return NotImplemented
    outer = zip(size, stride, x.shape[:last], x.stride(), strict=False)
    if any(n != m or (n != 1 and step != other) for n, step, m, other in outer):
        return NotImplemented
    (count, width), (step, inner), one = size[last:], stride[last:], x.stride(last)
    if count < 1 or width < 1 or inner != one or step < one or step % one:
        return NotImplemented
    step = step // one
    if (count - 1) * step + width > x.shape[last]:
        return NotImplemented
    return x.unfold(last, width, step).narrow(last, 0, count)


def memory_order(size: Sequence[int], stride: Sequence[int]) -> list[int] | None:
    """The dims in the order of memory, the outermost first; None where they leave elements out or show some twice.

    >>> memory_order([3, 2], [1, 3]), memory_order([3, 2], [1, 4])
    ([1, 0], None)
    """
    order = sorted(range(len(size)), key=lambda d: (size[d] != 1, -stride[d]))  # where dims of size 1 are is the same
    expected = 1
    for d in reversed(order):
        if size[d] != 1 and stride[d] != expected:
            return None
        expected *= size[d]
    return order


DENSE_VIEWS = {aten.as_strided.default: as_strided}
"""A table of decompositions."""
