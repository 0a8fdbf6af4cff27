"""`fill_diagonal_`, which torch writes as a fill of `as_strided`: here the diagonal is scattered into the tensor.

    similar.fill_diagonal_(-1e9)    each rank writes what its block has of the diagonal; nothing is sent
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch


def fill_diagonal_(x: torch.Tensor, fill_value: Any, wrap: bool = False) -> torch.Tensor:
    """Write a number into x where all indices are equal; with `wrap` a tall matrix has a diagonal after the other.

    In the place of the op: for DTensors, and for tensors of a trace, of which neither has one memory with strides.
    """
    if x.ndim < 2:
        raise RuntimeError(f"fill_diagonal_: x must have two dims or more, but is {list(x.shape)}")
    if x.ndim > 2 and any(n != x.shape[0] for n in x.shape[1:]):
        raise RuntimeError(f"fill_diagonal_: all dims must be of equal length, but x is {list(x.shape)}")
    if x.ndim > 2 or (wrap and x.shape[0] > x.shape[1]):
        return x.masked_fill_(_mask(x), fill_value)
    diagonal = x.detach().new_full((min(x.shape),), fill_value)
    return x.copy_(x.diagonal_scatter(diagonal))


def _mask(x: torch.Tensor) -> torch.Tensor:
    """Whether an element is on a diagonal. Below one of a matrix is a row without, and then the next one begins."""
    at = [torch.arange(n, device=x.device).view(-1, *[1] * (x.ndim - 1 - d)) for d, n in enumerate(x.shape)]
    first = at[0] % (x.shape[1] + 1)
    return reduce(torch.logical_and, [first == each for each in at[1:]])
