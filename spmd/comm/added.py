"""Add up terms that were exchanged: how a rank gets its part of a sum where a backend has no real reduce-scatter.

    [n * r] on each of n ranks    ->    all-to-all: the n terms of this rank's r elements    ->    their sum

gloo's reduce-scatter is an all-reduce whose result is cut: it sends twice the bytes, and on 2 and 4 ranks of one host
it takes 1.2 to 2.2 times as long as this. The terms are added in the order of the ranks, so the result is the same to
the bit however large the blocks are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from spmd.comm import wire
from spmd.comm.transport import Transport

FEW_RANKS = 32
"""What is written for more ranks than these, such as terms and sizes, is not a node, a number or a box each."""

COMBINE = {"sum": torch.add, "avg": torch.add, "product": torch.mul, "max": torch.maximum, "min": torch.minimum}


def adds_terms(carrier: Transport, device_type: str, dtype: torch.dtype, op: str) -> bool:
    """Whether a reduce-scatter of this dtype, as it is sent, is an exchange of terms that are added here."""
    return carrier.exchanges_terms(device_type) and op in COMBINE and dtype not in wire.BYTES_ONLY


def added(terms: Any, op: str, n: int) -> Any:
    """n terms, combined one by one by the reduction `op`.

    >>> added([torch.tensor([1, 5]), torch.tensor([2, 3])], "max", 2)
    tensor([2, 5])
    """
    total = terms[0]
    for i in range(1, n):
        total = COMBINE[op](total, terms[i])
    return total


def added_rows(y: torch.Tensor, op: str, n: int, row: int) -> torch.Tensor:
    """The same of n terms that are rows of this length, one behind the other.

    In a graph these are n - 1 ops, and for many terms one call of this function.
    """
    if n > FEW_RANKS and isinstance(y, fx.Proxy):
        return y.tracer.create_proxy("call_function", added_rows, (y, op, n, row), {})
    return added(y.split([row] * n, 0), op, n)
