"""Products of tensors of several dims, kept whole in a trace, as they are in eager calls.

    x @ w,   f32[B, T, k] by f32[k, n]      linear and its gradient, and not a view, a product of matrices, a view

Autograd sees such an op as one; what is written into the graph is an op of our own, for torch's functionalisation takes
apart those of torch that can be, and when the trace is done it is called by torch's name again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.overrides import TorchFunctionMode

from spmd import _torch
from spmd.tensor.einsum import product
from spmd.tensor.rules.products import matmul_backward

aten = torch.ops.aten



def _linear_shape(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], y.shape[0]))


def _matmul_shape(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.new_empty((*torch.broadcast_shapes(x.shape[:-2], y.shape[:-2]), x.shape[-2], y.shape[-1]))


_library = torch.library.Library("spmd", "DEF")
for _name, _shape in (("linear", _linear_shape), ("matmul", _matmul_shape)):
    _library.define(f"{_name}(Tensor x, Tensor y) -> Tensor")
    _library.impl(_name, _shape, "Meta")

IN_A_TRACE = {aten.linear.default: torch.ops.spmd.linear.default, aten.matmul.default: torch.ops.spmd.matmul.default}
"""The ops that are kept, as they are called while the graph is made."""


class Whole(TorchFunctionMode):
    """Inside, products of tensors of more than two dims come whole."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kept = KEPT.get(function)
        out = NotImplemented if kept is None else kept(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {})) if out is NotImplemented else out


def renamed(graph: fx.Graph) -> None:
    """Call what was kept by torch's names."""
    names = {ours: theirs for theirs, ours in IN_A_TRACE.items()}
    for node in graph.nodes:
        node.target = names.get(node.target, node.target)
        if node.target is aten.linear_backward.default and not node.args[3][2]:  # of which torch says another shape
            node.meta["val"] = (*node.meta["val"][:2], None)


_linear = _torch.as_one(aten.linear.default)


def linear(input: Any, weight: Any, bias: Any = None) -> Any:
    """The product, and then the bias; NotImplemented for what torch does well."""
    if not _is_meant(input, weight) or weight.ndim != 2 or input.shape[-1] != weight.shape[1]:
        return NotImplemented
    out = _linear(input, weight)
    return out if bias is None else out + bias


def matmul(input: Any, other: Any) -> Any:
    """A product with a matrix is a `linear`; one of batches is itself."""
    if not _is_meant(input, other) or input.shape[-1] != other.shape[-2]:
        return NotImplemented
    return _linear(input, other.mT) if other.ndim == 2 else _Matmul.apply(input, other)


def _is_meant(x: Any, y: Any) -> bool:
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor) or x.dtype != y.dtype:
        return False
    if x.ndim < 3 or y.ndim < 2:
        return False
    return not x.is_complex() and not torch.is_autocast_enabled(x.device.type)


class _Matmul(torch.autograd.Function):
    """`matmul`, of which torch has a derivative as one op, but not a second one."""

    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return torch.ops.spmd.matmul(x, y)

    @staticmethod
    def backward(ctx, grad):
        with Whole():  # autograd runs under the modes that were on in `forward`, which the mode itself had called
            return matmul_backward(grad, *ctx.saved_tensors, ctx.needs_input_grad)


def einsum(equation: Any, *operands: Any) -> Any:
    """A product of two with its dims kept."""
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    if not isinstance(equation, str) or not all(isinstance(x, torch.Tensor) for x in given):
        return NotImplemented
    with Whole():  # for the products that it is made of
        return product(equation, given)


KEPT = {
    F.linear: linear, torch.matmul: matmul, torch.Tensor.matmul: matmul, torch.Tensor.__matmul__: matmul,
    torch.einsum: einsum,
}  # fmt: skip
"""Functions by what is done instead."""
