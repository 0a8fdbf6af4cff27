"""What `x[i, :, j]` gives, in shape and strides.

torch's own account of it, on tensors without data, leaves out the strides of the indices, and the dims of an index that
stands before a 0-dim one. Here it is done as the kernel does: x, with the dims of the indices in place of those they
point along, and the indices are operands of one elementwise loop, which orders the dims of a new result as theirs.

    >>> result_strides([2, 3], [[1, 2]])  # a result lies as its operand
    (1, 2)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spmd.tensor.call import TensorMeta
from spmd.tensor.spec import contiguous


def indexed(x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> TensorMeta:
    """The result of `x[indices]`, all of them on the meta device, and none of the indices a mask.

    >>> x = torch.empty(2, 3, device="meta").t()
    >>> indexed(x.unsqueeze(0), [None, torch.empty(4, dtype=torch.int64, device="meta")])
    TensorMeta(shape=(1, 4, 2), stride=(8, 2, 1), dtype=torch.float32)
    """
    at = [d for d, i in enumerate(indices) if i is not None]
    given = torch.broadcast_tensors(*(indices[d] for d in at))
    place = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    rest = [d for d in range(x.ndim) if d not in at]
    before, after = rest[:place], rest[place:]
    shape = (*(x.shape[d] for d in before), *given[0].shape, *(x.shape[d] for d in after))
    shown = [*(x.stride(d) for d in before), *[0] * given[0].ndim, *(x.stride(d) for d in after)]
    pointers = [i.reshape([1] * len(before) + list(i.shape) + [1] * len(after)) for i in given]
    stretched = [[0 if i.shape[d] != n else i.stride(d) for d, n in enumerate(shape)] for i in pointers]
    return TensorMeta(shape, result_strides(shape, [shown, *stretched]), x.dtype)


def result_strides(shape: Sequence[int], operands: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Strides of the new result of an elementwise op, from those of its operands, 0 where they are stretched.

    This is TensorIteratorBase::reorder_dimensions: an insertion sort, whose answers need not be transitive.
    """
    order = list(range(len(shape)))[::-1]
    for i in range(1, len(order)):
        at = i
        for before in range(i - 1, -1, -1):
            sign = _compare(shape, operands, order[before], order[at])
            if sign < 0:
                break
            if sign > 0:
                order[before], order[at], at = order[at], order[before], before
    if order == sorted(order, reverse=True):
        return contiguous(shape)
    strides, step = [0] * len(shape), 1
    for d in order:
        strides[d], step = step, step * shape[d]
    return tuple(strides)


def _compare(shape: Sequence[int], operands: Sequence[Sequence[int]], a: int, b: int) -> int:
    """Whether dim a is to be within dim b (-1) or around it (1), as the first operand says that knows."""
    for strides in operands:
        if strides[a] and strides[b]:
            if strides[a] != strides[b]:
                return -1 if strides[a] < strides[b] else 1
            if shape[a] > shape[b]:
                return 1
    return 0
