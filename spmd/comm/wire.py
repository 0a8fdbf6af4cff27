"""What goes over the wire where a backend cannot send or reduce a tensor as it is.

    >>> x = torch.tensor([True, False])
    >>> reduced_as(x.dtype, "sum")          # true + true is true: the larger of 1 and 1
    (torch.uint8, 'max')

- Dtypes that gloo or NCCL cannot add are widened; those that they cannot send travel as bytes.
- Neither has an average that both have: it is a sum and a division.
- A maximum on the wire may lose a NaN, so for each element goes along a mark that says whether it is one.

Everything here is plain torch on one tensor, so it can be written into a graph as well as run.
"""

from __future__ import annotations

from math import prod

import torch

REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")

WIDENED = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
"""Dtypes that cannot be reduced on the wire, and those they are reduced as: any term fits."""

BYTES_ONLY = {
    torch.int16, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.complex32, torch.complex64, torch.complex128,
}  # fmt: skip
"""Dtypes that some backend cannot send in some collective."""

_OF_BOOLS = {"sum": "max", "product": "min", "min": "min", "max": "max", "bor": "max", "band": "min"}


def reduced_as(dtype: torch.dtype, op: str) -> tuple[torch.dtype, str]:
    """The dtype and the op that are sent for a reduction; an average is a sum still to be divided.

    ValueError or TypeError where there is no such reduction of the dtype.
    """
    if op not in REDUCE_OPS:
        raise ValueError(f"reduce_op is {op!r}; it must be one of {', '.join(REDUCE_OPS)}")
    _check_reducible(dtype, op)
    if dtype == torch.bool:
        return torch.uint8, _OF_BOOLS[op]
    return WIDENED.get(dtype, dtype), "sum" if op == "avg" else op


def _check_reducible(dtype: torch.dtype, op: str) -> None:
    whole = not dtype.is_floating_point and not dtype.is_complex
    if (
        (op == "avg" and whole)
        or (op == "bxor" and dtype == torch.bool)
        or (op in ("band", "bor", "bxor") and not whole)
        or (op in ("min", "max") and dtype.is_complex)
        or (op == "product" and dtype.is_complex)
        or (dtype.is_floating_point and dtype.itemsize == 1)
        or dtype == torch.uint64
    ):
        raise TypeError(f"{op} of {dtype} is no reduction that backends carry out; convert it, such as with x.float()")


def marks_nan(dtype: torch.dtype, op: str) -> bool:
    """Whether NaNs would be lost."""
    return op in ("max", "min") and dtype.is_floating_point


def with_marks(x: torch.Tensor, dtype: torch.dtype, op: str) -> torch.Tensor:
    """[...] -> [2 * numel]: the elements, and for each whether it is NaN, so that one NaN anywhere wins."""
    sign = 1 if op == "max" else -1
    return torch.cat([x.reshape(-1), torch.isnan(x).reshape(-1).to(dtype) * sign], 0)


def without_marks(y: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """What came back of what `with_marks` sent, as a tensor of this shape."""
    halves = y.split([prod(shape)] * 2, 0)
    return halves[0].masked_fill(halves[1] != 0, torch.nan).view(shape)


def as_reals(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[n] complex -> [2 * n] real; any other as it is."""
    return torch.view_as_real(x).reshape(-1) if dtype.is_complex else x


def from_reals(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The other way."""
    return torch.view_as_complex(y.reshape(-1, 2)) if dtype.is_complex else y


def as_rows_of_bytes(x: torch.Tensor) -> torch.Tensor:
    """[rows, ...] -> uint8 [rows, bytes of a row]."""
    return as_bytes(x).reshape(x.shape[0], prod(x.shape[1:]) * x.itemsize)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Any tensor -> uint8 [bytes]."""
    flat = x.resolve_conj().contiguous().reshape(-1)
    if flat.stride(0) != 1:  # which a single element may have, and is contiguous all the same
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def from_rows_of_bytes(y: torch.Tensor, dtype: torch.dtype, row: tuple[int, ...]) -> torch.Tensor:
    """uint8 [rows, bytes] -> [rows, *row] of the dtype."""
    return y.reshape(-1).view(dtype).reshape(y.shape[0], *row)  # flat, for rows may have no bytes
