"""How tensors are encoded for the network where a backend cannot send or reduce them as they are.

    >>> x = torch.tensor([True, False])
    >>> reduced_as(x.dtype, "sum")          # true + true is true: the larger of 1 and 1
    (torch.uint8, 'max')

- Dtypes that gloo or NCCL cannot reduce are widened. Dtypes that they cannot send are sent as bytes.
- Not both of them have an average, so an average is a sum and a division.
- A maximum of a backend may lose a NaN. So each element is sent with a mark that says whether it is NaN.

Everything here is plain torch code on one tensor, so it can be run or recorded in a graph.
"""

from __future__ import annotations

from math import prod

import torch

REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")

WIDENED = {torch.int16: torch.int32, torch.uint16: torch.int32, torch.uint32: torch.int64}
"""Dtypes that backends cannot reduce, and the dtypes they are reduced as, which hold every term."""

BYTES_ONLY = {
    torch.int16, torch.uint16, torch.uint32, torch.uint64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.complex32, torch.complex64, torch.complex128,
}  # fmt: skip
"""Dtypes that some backend cannot send in some collective."""

_OF_BOOLS = {"sum": "max", "product": "min", "min": "min", "max": "max", "bor": "max", "band": "min"}


def reduced_as(dtype: torch.dtype, op: str) -> tuple[torch.dtype, str]:
    """The dtype and the op that the backend gets for a reduction. An average is sent as a sum; divide the result.

    ValueError for an unknown op, TypeError for an op that the dtype does not have.
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
    """Whether the backend could lose NaNs, so that marks are sent with the elements."""
    return op in ("max", "min") and dtype.is_floating_point


def with_marks(x: torch.Tensor, dtype: torch.dtype, op: str) -> torch.Tensor:
    """[...] -> [2 * numel]: the elements, then for each a mark whether it is NaN.

    The mark of a NaN is 1 for "max" and -1 for "min", otherwise 0; so a NaN on any rank survives the reduction.
    """
    sign = 1 if op == "max" else -1
    return torch.cat([x.reshape(-1), torch.isnan(x).reshape(-1).to(dtype) * sign], 0)


def without_marks(y: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """[2 * numel] -> `shape`: the result of a reduction of tensors that `with_marks` made."""
    halves = y.split([prod(shape)] * 2, 0)
    return halves[0].masked_fill(halves[1] != 0, torch.nan).view(shape)


def as_reals(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[n] complex -> [2 * n] real; other dtypes stay as they are."""
    return torch.view_as_real(x).reshape(-1) if dtype.is_complex else x


def from_reals(y: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[2 * n] real -> [n] of the dtype if that is complex: the inverse of `as_reals`."""
    return torch.view_as_complex(y.reshape(-1, 2)) if dtype.is_complex else y


def as_rows_of_bytes(x: torch.Tensor) -> torch.Tensor:
    """[rows, ...] -> uint8 [rows, bytes of a row]."""
    return as_bytes(x).reshape(x.shape[0], prod(x.shape[1:]) * x.itemsize)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """Any tensor -> uint8 [bytes]."""
    flat = x.resolve_conj().contiguous().reshape(-1)
    if flat.stride(0) != 1:  # a tensor of a single element may have any stride and still be contiguous
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def from_rows_of_bytes(y: torch.Tensor, dtype: torch.dtype, row: tuple[int, ...]) -> torch.Tensor:
    """uint8 [rows, bytes] -> [rows, *row] of the dtype."""
    return y.reshape(-1).view(dtype).reshape(y.shape[0], *row)  # flattened first, because rows may have no bytes
