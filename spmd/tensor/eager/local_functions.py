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
    return KERNELS.get(op) or QUICK_FUNCTIONS.get(op) or _torch.cpp_callable(op)


def bound_slice(dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Callable[..., Any]:
    """What a rank runs on its block alone for a slice with these arguments; an index takes less time than the op.

        bound_slice(1, 0, 8)(block)     # block[:, 0:8]
    """
    bounds, whole = slice(start, end, step), slice(None)
    return operator.itemgetter((*[whole] * dim, bounds) if dim >= 0 else (..., bounds, *[whole] * (-1 - dim)))


BOUND = {aten.slice.Tensor: bound_slice}
"""For an op that gives a view of one block, what makes a function of that block alone from its other arguments."""

QUICK_FUNCTIONS = {
    aten.linear.default: torch.nn.functional.linear, aten.matmul.default: torch.matmul, aten.add.Tensor: torch.add,
    aten.sub.Tensor: torch.sub, aten.mul.Tensor: torch.mul, aten.div.Tensor: torch.div, aten.mm.default: torch.mm,
    aten.bmm.default: torch.bmm, aten.relu.default: torch.relu, aten.exp.default: torch.exp, aten.t.default: torch.t,
    aten.where.self: torch.where, aten.clone.default: torch.clone, aten.detach.default: torch.detach,
    aten.neg.default: torch.neg, aten.transpose.int: torch.transpose, aten.unsqueeze.default: torch.unsqueeze,
    aten.gt.Scalar: torch.gt, aten.tanh.default: torch.tanh, aten.mul.Scalar: torch.mul,
    aten.sqrt.default: torch.sqrt, aten.sigmoid.default: torch.sigmoid, aten.embedding.default: torch.embedding,
    aten.cat.default: torch.cat, aten.select.int: torch.select, aten.sum.dim_IntList: torch.sum,
    aten.view.default: torch.Tensor.view, aten.sum.default: torch.sum, aten.pow.Tensor_Scalar: torch.pow,
    aten.native_layer_norm.default: torch.native_layer_norm, aten.add_.Tensor: torch.Tensor.add_,
    aten.mul_.Tensor: torch.Tensor.mul_, aten.addcmul_.default: torch.Tensor.addcmul_,
    aten.addcdiv_.default: torch.Tensor.addcdiv_, aten.lerp_.Scalar: torch.Tensor.lerp_,
    aten.div_.Tensor: torch.Tensor.div_,
}  # fmt: skip
"""For an overload a function of torch that runs the same op, and that is called in less time."""
