"""The shape and strides of the result of `x[i, :, j]`.

torch's meta kernel ignores the strides of the indices, and the dims of an index that comes before a 0-dim one. Here the
result is computed as the real kernel does it. The kernel runs one elementwise loop. Its operands are the indices, and x
with the dims of the indices in place of the indexed dims. The loop orders the dims of a new result like those of its
operands.

    >>> result_strides([2, 3], [[1, 2]])  # the result has the order of dims of its operand
    (1, 2)
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spmd.tensor.call import TensorMeta
from spmd.tensor.spec import contiguous


def index_result(x: torch.Tensor, indices: Sequence[torch.Tensor | None]) -> TensorMeta:
    """The metadata of `x[indices]`. x and the indices are on the meta device, and no index is a mask.

    >>> x = torch.empty(2, 3, device="meta").t()
    >>> index_result(x.unsqueeze(0), [None, torch.empty(4, dtype=torch.int64, device="meta")])
    TensorMeta(shape=(1, 4, 2), stride=(8, 2, 1), dtype=torch.float32)
    """
    at = [d for d, i in enumerate(indices) if i is not None]
    pointers = torch.broadcast_tensors(*(indices[d] for d in at))
    place = at[0] if at == list(range(at[0], at[-1] + 1)) else 0
    rest = [d for d in range(x.ndim) if d not in at]
    before, after = rest[:place], rest[place:]
    shape = (*(x.shape[d] for d in before), *pointers[0].shape, *(x.shape[d] for d in after))
    x_strides = [*(x.stride(d) for d in before), *[0] * pointers[0].ndim, *(x.stride(d) for d in after)]
    aligned = [i.reshape([1] * len(before) + list(i.shape) + [1] * len(after)) for i in pointers]
    index_strides = [[0 if i.shape[d] != n else i.stride(d) for d, n in enumerate(shape)] for i in aligned]
    return TensorMeta(shape, result_strides(shape, [x_strides, *index_strides]), x.dtype)


def result_strides(shape: Sequence[int], operands: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """The strides of the new result of an elementwise op, from the strides of its operands (0 where broadcast).

    This is TensorIteratorBase::reorder_dimensions: an insertion sort with a comparison that may not be transitive.
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
    """-1 if dim a is inside dim b, 1 if it is outside. The first operand that distinguishes them decides; 0 if none."""
    for strides in operands:
        if strides[a] and strides[b]:
            if strides[a] != strides[b]:
                return -1 if strides[a] < strides[b] else 1
            if shape[a] > shape[b]:
                return 1
    return 0
