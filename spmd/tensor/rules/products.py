"""Products of tensors of several dims: `linear`, `matmul`, and their gradients.

    linear           b t k, n k -> b t n
    matmul           b m k, b k n -> b m n
    linear_backward  b t k, b t n, n k -> b t k, n k

torch turns such tensors into matrices first. A matrix has one dim for batch and time together. If batch and time were
sharded by different axes, one of them would have to be moved. So `spmd.tensor.eager.composites` does not decompose
these ops.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from spmd.tensor.call import Call
from spmd.tensor.rules.decompositions import add_bias, register_decomposition
from spmd.tensor.rules.families import broadcast, rule_by_name
from spmd.tensor.rules.laws import BILINEAR
from spmd.tensor.rules.norms import rms_norm_backward
from spmd.tensor.rules.rule import Dims, Factor, Rule, laws
from spmd.tensor.spec import Spec

aten = torch.ops.aten

GRADIENTS = laws("sum avg: r p r -> p...")
"""The gradients of a product are linear in the gradient of its result."""


KEPT_AS_ONE_OP: dict[str, Callable[..., bool]] = {
    "linear": lambda x, weight: x.ndim > 1 and weight.ndim == 2,
    "matmul": lambda x, y: x.ndim > 2 or y.ndim > 2,
    "_fused_rms_norm": lambda *tensors: True,
}
"""Ops that torch decomposes, by name, and a test of the operands. With operands that pass, the op is kept as one op.

Products of only matrices and vectors do not pass.
"""


def is_kept_as_one_op(name: str, *operands: Any) -> bool:
    """Whether the op of this name is kept as one op for these two operands, given as tensors or specs."""
    return name in KEPT_AS_ONE_OP and KEPT_AS_ONE_OP[name](*operands)


def linear(call: Call) -> Rule | None:
    """`t k, n k -> t n` with any number of dims `t`. A bias is added afterwards, so there is no bias here."""
    if call["bias"] is not None or not is_kept_as_one_op("linear", *call.tensors[:2]):
        return None
    tokens = _tokens(call["input"])
    n, k = Factor("n"), Factor("k")
    return Rule(((*tokens, k), (n, k)), ((*tokens, n),), "sum", BILINEAR)


def linear_backward(call: Call) -> Rule | None:
    """`t k, t n, n k -> t k, n k`: each gradient only if it is wanted. The gradient of a bias is a separate sum."""
    of_input, _, of_bias = call["output_mask"]
    if of_bias:
        return None
    tokens = _tokens(call["self"])
    n, k = Factor("n"), Factor("k")
    x, out, weight = (*tokens, k), (*tokens, n), (n, k)
    ins = {"self": x, "grad_output": out, "weight": weight if of_input else out}
    return rule_by_name(call, ins, (x, weight, None), kind="sum", laws=GRADIENTS if of_input else ())


def _tokens(x: Spec) -> Dims:
    return tuple(map(Factor, range(x.ndim - 1)))


def matmul(call: Call) -> Rule | None:
    """`b m k, b k n -> b m n` with any number of dims `b`. One operand may have fewer of them."""
    x, y = call.tensors
    if not is_kept_as_one_op("matmul", x, y):
        return None
    m, k, n = map(Factor, "mkn")
    out = call.outs[0].shape
    rows, columns = (m,) * (x.ndim > 1), (n,) * (y.ndim > 1)
    batches = out[: len(out) - len(rows) - len(columns)]
    left = (*broadcast(x.shape[:-2], batches), *rows, k)
    right = (*broadcast(y.shape[:-2], batches), k, *columns)
    return Rule((left, right), ((*map(Factor, range(len(batches))), *rows, *columns),), "sum", BILINEAR)


# ---- decompositions ---------------------------------------------------------------------------


@register_decomposition(aten.linear.default)
def linear_and_bias(input, weight, bias=None):
    """The bias is added once, to the product."""
    return NotImplemented if bias is None else add_bias(bias, aten.linear.default(input, weight), 1, 1)


@register_decomposition(aten.linear_backward.default)
def gradients_and_bias(self, grad_output, weight, output_mask):
    """The gradient of the bias is a separate sum.

    The weight is passed on only for the gradient of the input. Otherwise the gradient would wait for an unused weight.
    """
    of_input, of_weight, of_bias = output_mask
    if not of_bias and (of_input or weight is grad_output):
        return NotImplemented
    input_grad, weight_grad = None, None
    if of_input or of_weight:
        used = weight if of_input else grad_output
        input_grad, weight_grad, _ = aten.linear_backward.default(
            self, grad_output, used, [of_input, of_weight, False]
        )
    return input_grad, weight_grad, _summed_rows(grad_output) if of_bias else None


def _summed_rows(x):
    return aten.sum.dim_IntList(x, list(range(x.ndim - 1)))


def matmul_backward(grad, self, other, mask):
    """Products of each operand with the gradient, summed over the batch dims that only the other operand has."""
    x, y = self, other
    if y.ndim == 1:
        grad, y = grad.unsqueeze(-1), y.unsqueeze(-1)
    if x.ndim == 1:
        grad, x = grad.unsqueeze(-2), x.unsqueeze(-2)
    of_self = of_other = None
    if mask[0]:
        of_self = _weight_gradient(grad.mT, y.mT) if x.ndim == 2 else _summed_to(x, torch.matmul(grad, y.mT))
    if mask[1]:
        of_other = _weight_gradient(x, grad) if y.ndim == 2 else _summed_to(y, torch.matmul(x.mT, grad))
    return _shaped_as(self, of_self), _shaped_as(other, of_other)


def _weight_gradient(x, y):
    """The gradient of a matrix that all batches use: `b t k, b t n -> k n`."""
    return aten.linear_backward.default(y, x, x, [False, True, False])[1]


def _shaped_as(x, grad):
    """The gradient in the shape of x. A vector was turned into a matrix before."""
    return grad if grad is None or grad.ndim == x.ndim else grad.reshape(x.shape)


def _summed_to(x, grad):
    return grad if grad.shape == x.shape else grad.sum_to_size(x.shape)


# ---- local kernels ----------------------------------------------------------------------------


def _linear_backward(self, grad_output, weight, output_mask):
    """The kernel of `linear_backward`, which torch has neither for CPU nor for CUDA."""
    rows = grad_output.flatten(0, -2)
    of_input = torch.mm(rows, weight).view_as(self) if output_mask[0] else None
    of_weight = torch.mm(rows.t(), self.flatten(0, -2)) if output_mask[1] else None
    return of_input, of_weight, rows.sum(0) if output_mask[2] else None


KERNELS = {
    aten.linear_backward.default: _linear_backward,
    aten._fused_rms_norm_backward.default: rms_norm_backward,
}
"""For ops that torch has no kernel for on CPU and CUDA: functions of plain tensors, or of fx proxies of them."""
