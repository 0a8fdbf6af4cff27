"""The functions that a rank runs on its blocks. Some ops have another name by which they are called in less time."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from spmd import _torch
from spmd.tensor.rules.products import KERNELS

aten = torch.ops.aten


def local_function(op: _torch.OpOverload) -> Callable[..., Any]:
    """The function that a rank runs on its blocks for the op."""
    return KERNELS.get(op) or _torch.quick_function(op)


def bound_slice(dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Callable[..., Any]:
    """What a rank runs on its block alone for a slice with these arguments; an index takes less time than the op.

        bound_slice(1, 0, 8)(block)     # block[:, 0:8]
    """
    bounds, whole = slice(start, end, step), slice(None)
    return operator.itemgetter((*[whole] * dim, bounds) if dim >= 0 else (..., bounds, *[whole] * (-1 - dim)))


BOUND = {aten.slice.Tensor: bound_slice}
"""For an op that gives a view of one block, what makes a function of that block alone from its other arguments."""
