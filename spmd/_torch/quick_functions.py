"""Functions of torch that run the same op as an overload, and that are called in less time.

    torch.ops.aten.mul_.Tensor(x, y)         a Python call, then values boxed by the schema       3.3 us
    quick_function(aten.mul_.Tensor)(x, y)   `torch.Tensor.mul_`, whose arguments are parsed      1.2 us

What an overload is given by position, or by name where it takes it by name alone, the function takes in the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from spmd._torch.ops import OpOverload

aten = torch.ops.aten

_NAMES: dict[Any, str] = {
    torch: """
        add.Tensor sub.Tensor mul.Tensor mul.Scalar div.Tensor neg exp log sqrt rsqrt reciprocal abs sin cos tanh
        sigmoid relu pow.Tensor_Scalar maximum minimum where.self addcmul addcdiv lerp.Scalar logical_not
        eq.Scalar ne.Scalar gt.Scalar ge.Scalar lt.Scalar le.Scalar eq.Tensor
        mm bmm addmm baddbmm matmul embedding native_layer_norm _softmax _log_softmax
        _softmax_backward_data _log_softmax_backward_data
        sum sum.dim_IntList mean mean.dim amax cumsum cat stack index_select gather
        t transpose.int permute select.int unsqueeze squeeze.dim reshape split_with_sizes clone detach
        zeros_like ones_like
    """,
    torch.Tensor: """
        add_.Tensor sub_.Tensor mul_.Tensor div_.Tensor addcmul_ addcdiv_ lerp_.Scalar sqrt_ neg_ zero_ copy_
        view expand masked_fill.Scalar
    """,
    torch._C._nn: "linear gelu silu",
}
"""Where there is a function of the name of an overload that runs it."""


def _overload(name: str) -> OpOverload:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet), overload or "default")


QUICK_FUNCTIONS: dict[OpOverload, Callable[..., Any]] = {
    _overload(name): getattr(where, name.partition(".")[0]) for where, names in _NAMES.items() for name in names.split()
} | {aten.split.Tensor: torch._VF.split, aten._local_scalar_dense.default: torch.Tensor.item}


def quick_function(op: OpOverload) -> Callable[..., Any]:
    """A function that runs the op, without the Python around it.

    >>> quick_function(aten.mul_.Tensor) is torch.Tensor.mul_
    True
    """
    return QUICK_FUNCTIONS.get(op, op._op)
