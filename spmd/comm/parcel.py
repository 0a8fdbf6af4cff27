"""What a collective sends of a tensor, and what makes its result of what comes back.

    parcel = to_gather(x, 1, n)         # sent: x, contiguous
    parcel.opened(arrived)              # [n * rows, k] as it came -> [rows, n * k]

Nothing is launched here: the same parcels go alone or several at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from spmd.comm import wire

Shape = Sequence[int]


class Parcel(NamedTuple):
    """A tensor as it is sent; the reduction as it is sent; shape and dtype of the result.

    `opened` makes the result from what has arrived; None where that is the result.
    """

    sent: torch.Tensor
    op: str
    shape: Shape
    dtype: torch.dtype
    opened: Callable[[torch.Tensor], torch.Tensor] | None


def to_reduce(x: torch.Tensor, reduce_op: str, n: int) -> Parcel:
    """For an all-reduce over n ranks."""
    sent_as, op = wire.reduced_as(x.dtype, reduce_op)
    shape = x.shape
    if wire.marks_nan(x.dtype, op):
        return Parcel(wire.with_marks(x, x.dtype, op), op, shape, x.dtype, lambda y: wire.without_marks(y, shape))
    return Parcel(x.to(sent_as).contiguous(), op, shape, x.dtype, _restored(x.dtype, sent_as, reduce_op, n))


def to_gather(x: torch.Tensor, dim: int, n: int) -> Parcel:
    """For an all-gather that joins the tensors of n ranks on dim."""
    x = x.reshape(1) if x.ndim == 0 else x
    dim, dtype, shape = checked_dim("all_gather_tensor", dim, x), x.dtype, x.shape
    as_bytes = dtype in wire.BYTES_ONLY

    def opened(y: torch.Tensor) -> torch.Tensor:
        y = wire.from_rows_of_bytes(y, dtype, shape[1:]) if as_bytes else y
        return torch.cat(y.split([shape[0]] * n), dim) if dim else y

    joined = (*shape[:dim], n * shape[dim], *shape[dim + 1 :])
    return Parcel(_rows(x), "", joined, dtype, opened if as_bytes or dim else None)


def to_reduce_scatter(x: torch.Tensor, reduce_op: str, dim: int, n: int) -> Parcel:
    """For a reduce-scatter of dim over n ranks."""
    sent_as, op = wire.reduced_as(x.dtype, reduce_op)
    dim = checked_dim("reduce_scatter_tensor", dim, x)
    parts = equal_parts("reduce_scatter_tensor", x, dim, n)
    shape = parts[0].shape
    if wire.marks_nan(x.dtype, op):
        sent = torch.stack([wire.with_marks(part, x.dtype, op) for part in parts])
        return Parcel(sent, op, shape, x.dtype, lambda y: wire.without_marks(y.reshape(-1), shape))
    sent = torch.cat(parts) if dim else x.contiguous()
    return Parcel(sent.to(sent_as), op, shape, x.dtype, _restored(x.dtype, sent_as, reduce_op, n))


def to_exchange(x: torch.Tensor, rows: int, shape: Shape | None) -> Parcel:
    """For an all-to-all by which `rows` rows come.

    shape: that of the result, where it is not rows like those of x; zeros where no row comes.
    """
    dtype, row, as_bytes = x.dtype, x.shape[1:], x.dtype in wire.BYTES_ONLY

    def opened(y: torch.Tensor) -> torch.Tensor:
        y = wire.from_rows_of_bytes(y, dtype, row) if as_bytes else y
        if shape is None:
            return y
        return y.reshape(shape) if rows else y.new_zeros(shape)

    plain = not as_bytes and (shape is None or tuple(shape) == (rows, *row))
    return Parcel(_rows(x), "", (rows, *row) if shape is None else shape, dtype, None if plain else opened)


def to_broadcast(x: torch.Tensor) -> Parcel:
    """For a broadcast."""
    dtype, shape = x.dtype, x.shape
    if dtype not in wire.BYTES_ONLY:
        return Parcel(x.contiguous(), "", shape, dtype, None)
    sent = wire.as_rows_of_bytes(x.reshape(1, *shape))
    return Parcel(sent, "", shape, dtype, lambda y: wire.from_rows_of_bytes(y, dtype, shape).reshape(shape))


def equal_parts(kind: str, x: torch.Tensor, dim: int, n: int) -> tuple[torch.Tensor, ...]:
    """x in n parts of one size along dim. ValueError where the dim does not divide."""
    return x.split([equal_part(kind, x, dim, n)] * n, dim)


def equal_part(kind: str, x: torch.Tensor, dim: int, n: int) -> int:
    """The size along dim of each of n equal parts of x. ValueError where the dim does not divide."""
    if x.shape[dim] % n:
        raise ValueError(
            f"{kind}: dim {dim} of {list(x.shape)} has {x.shape[dim]} entries, which {n} ranks cannot share evenly. "
            "Pad it first, or say who gets how much with all_to_all_single."
        )
    return x.shape[dim] // n


def checked_dim(kind: str, dim: int, x: torch.Tensor) -> int:
    """The dim counted from the front. IndexError where the tensor has no such dim."""
    if not -x.ndim <= dim < x.ndim:
        raise IndexError(f"{kind}: dim {dim} is not in a tensor of shape {list(x.shape)}")
    return dim % x.ndim


def _rows(x: torch.Tensor) -> torch.Tensor:
    return wire.as_rows_of_bytes(x) if x.dtype in wire.BYTES_ONLY else x.contiguous()


def _restored(dtype: torch.dtype, sent_as: torch.dtype, reduce_op: str, n: int) -> Callable | None:
    """What makes the result of a reduction from what came back; None where that is the result."""
    if reduce_op == "avg":
        return lambda y: y / n
    return (lambda y: y.to(dtype)) if sent_as != dtype else None
