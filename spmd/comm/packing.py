"""How a collective packs the tensor it sends, and unpacks the tensor it receives.

    packed = pack_all_gather(x, 1, n)   # packed.sent: x, contiguous
    packed.unpack(received)             # [n * rows, k], as received -> [rows, n * k]

Nothing is launched here: packed tensors are sent one by one or several at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from spmd.comm import wire
from spmd.comm.added import added

Shape = Sequence[int]


class Packed(NamedTuple):
    """A tensor as it is sent; the reduction as it is sent; shape and dtype of the result.

    `unpack` makes the result from the received tensor; None where the received tensor is the result.
    """

    sent: torch.Tensor
    op: str
    shape: Shape
    dtype: torch.dtype
    unpack: Callable[[torch.Tensor], torch.Tensor] | None


def pack_all_reduce(x: torch.Tensor, reduce_op: str, n: int) -> Packed:
    """Pack x for an all-reduce over n ranks."""
    sent_as, op = wire.reduced_as(x.dtype, reduce_op)
    shape = x.shape
    if wire.marks_nan(x.dtype, op):
        return Packed(wire.with_marks(x, x.dtype, op), op, shape, x.dtype, lambda y: wire.without_marks(y, shape))
    return Packed(x.to(sent_as).contiguous(), op, shape, x.dtype, _unpack_reduction(x.dtype, sent_as, reduce_op, n))


def pack_all_gather(x: torch.Tensor, dim: int, n: int) -> Packed:
    """Pack x for an all-gather that concatenates the tensors of n ranks on dim."""
    x = x.reshape(1) if x.ndim == 0 else x
    dim, dtype, shape = checked_dim("all_gather_tensor", dim, x), x.dtype, x.shape
    as_bytes = dtype in wire.BYTES_ONLY

    def unpack(y: torch.Tensor) -> torch.Tensor:
        y = wire.from_rows_of_bytes(y, dtype, shape[1:]) if as_bytes else y
        return torch.cat(y.split([shape[0]] * n), dim) if dim else y

    joined = (*shape[:dim], n * shape[dim], *shape[dim + 1 :])
    return Packed(_contiguous_rows(x), "", joined, dtype, unpack if as_bytes or dim else None)


def pack_reduce_scatter(x: torch.Tensor, reduce_op: str, dim: int, n: int) -> Packed:
    """Pack x for a reduce-scatter of dim over n ranks."""
    sent_as, op = wire.reduced_as(x.dtype, reduce_op)
    dim = checked_dim("reduce_scatter_tensor", dim, x)
    parts = equal_parts("reduce_scatter_tensor", x, dim, n)
    shape = parts[0].shape
    if wire.marks_nan(x.dtype, op):
        sent = torch.stack([wire.with_marks(part, x.dtype, op) for part in parts])
        return Packed(sent, op, shape, x.dtype, lambda y: wire.without_marks(y.reshape(-1), shape))
    sent = torch.cat(parts) if dim else x.contiguous()
    return Packed(sent.to(sent_as), op, shape, x.dtype, _unpack_reduction(x.dtype, sent_as, reduce_op, n))


def of_terms(packed: Packed, rows: Sequence[int]) -> Packed:
    """The same reduce-scatter, if what is received are its terms, of so many rows each."""
    unpack, op = packed.unpack or (lambda y: y), packed.op
    return packed._replace(unpack=lambda y: unpack(added(y.split(rows), op, len(rows))))


def pack_all_to_all(x: torch.Tensor, rows: int, shape: Shape | None) -> Packed:
    """Pack x for an all-to-all in which this rank receives `rows` rows.

    shape: the shape of the result if its rows differ from those of x; the result is zeros if no row is received.
    """
    dtype, row, as_bytes = x.dtype, x.shape[1:], x.dtype in wire.BYTES_ONLY

    def unpack(y: torch.Tensor) -> torch.Tensor:
        y = wire.from_rows_of_bytes(y, dtype, row) if as_bytes else y
        if shape is None:
            return y
        return y.reshape(shape) if rows else y.new_zeros(shape)

    plain = not as_bytes and (shape is None or tuple(shape) == (rows, *row))
    return Packed(_contiguous_rows(x), "", (rows, *row) if shape is None else shape, dtype, None if plain else unpack)


def pack_broadcast(x: torch.Tensor) -> Packed:
    """Pack x for a broadcast."""
    dtype, shape = x.dtype, x.shape
    if dtype not in wire.BYTES_ONLY:
        return Packed(x.contiguous(), "", shape, dtype, None)
    sent = wire.as_rows_of_bytes(x.reshape(1, *shape))
    return Packed(sent, "", shape, dtype, lambda y: wire.from_rows_of_bytes(y, dtype, shape).reshape(shape))


def equal_parts(kind: str, x: torch.Tensor, dim: int, n: int) -> tuple[torch.Tensor, ...]:
    """x in n parts of one size along dim. ValueError if n does not divide the size of dim."""
    return x.split([equal_part(kind, x, dim, n)] * n, dim)


def equal_part(kind: str, x: torch.Tensor, dim: int, n: int) -> int:
    """The size along dim of each of n equal parts of x. ValueError if n does not divide the size of dim."""
    if x.shape[dim] % n:
        raise ValueError(
            f"{kind}: dim {dim} of {list(x.shape)} has {x.shape[dim]} entries, which {n} ranks cannot share evenly. "
            "Pad it first, or say who gets how much with all_to_all_single."
        )
    return x.shape[dim] // n


def checked_dim(kind: str, dim: int, x: torch.Tensor) -> int:
    """The dim counted from the front. IndexError if the tensor has no such dim."""
    if not -x.ndim <= dim < x.ndim:
        raise IndexError(f"{kind}: dim {dim} is not in a tensor of shape {list(x.shape)}")
    return dim % x.ndim


def _contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    return wire.as_rows_of_bytes(x) if x.dtype in wire.BYTES_ONLY else x.contiguous()


def _unpack_reduction(dtype: torch.dtype, sent_as: torch.dtype, reduce_op: str, n: int) -> Callable | None:
    """The function that makes the result of a reduction from the received tensor; None where they are equal."""
    if reduce_op == "avg":
        return lambda y: y / n
    return (lambda y: y.to(dtype)) if sent_as != dtype else None
