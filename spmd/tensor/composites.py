"""Ops that torch takes apart in C++, above dispatch, in a way that a DTensor cannot follow: done here instead.

    torch.tensor_split(x, indices)      the C++ reads the memory of `indices`; a DTensor has none of its own

    F.scaled_dot_product_attention(..., is_causal=True)     the C++ makes a mask, a plain tensor

Such an op is never seen by `__torch_dispatch__`, which comes after. So DTensors carry a dispatch key that no other
tensor has, and the ops of this table stop there. All others fall through it, and no tensor but a DTensor meets it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmd import _torch
from spmd.tensor import plain
from spmd.tensor.einsum import product
from spmd.tensor.rules.products import is_kept, matmul_backward

aten = torch.ops.aten


def tensor_split(self: torch.Tensor, tensor_indices_or_sections: torch.Tensor, dim: int = 0) -> Sequence[torch.Tensor]:
    """By indices that are read first: a number of sections, or where each part begins."""
    at = tensor_indices_or_sections
    if at.dtype != torch.int64 or at.ndim > 1:
        raise RuntimeError(
            f"tensor_split: indices must be a 0-D or 1-D tensor of int64, but are {at.dtype}{list(at.shape)}"
        )
    if at.ndim == 0:
        return aten.tensor_split.sections(self, at.item(), dim)
    return aten.tensor_split.indices(self, at.tolist(), dim)


def vander(x: torch.Tensor, N: int | None = None, increasing: bool = False) -> torch.Tensor:
    """Powers of each element, from the 0th to the N - 1st or, as they stand by default, the other way around."""
    if x.ndim != 1 or (N is not None and N < 0):
        raise RuntimeError(f"vander: x must have one dim and N must not be negative, but x is {list(x.shape)}, N {N}")
    n = len(x) if N is None else N
    x = x.unsqueeze(1) if x.is_floating_point() or x.is_complex() else x.unsqueeze(1).long()
    ones = torch.ones_like(x)
    powers = torch.cat([ones, x.expand(-1, n - 1).cumprod(1)], 1) if n > 1 else ones[:, :n]
    return powers if increasing else powers.flip(1)


def einsum(equation: str, tensors: Sequence[torch.Tensor], *, path: Sequence[int] | None = None) -> torch.Tensor:
    """A product of two with its dims kept."""
    out = product(equation, tensors)
    if out is not NotImplemented:
        return out
    with _torch.without_first():
        return aten.einsum.default(equation, tensors, path=path)


MAKES_PLAIN = (
    aten.scaled_dot_product_attention.default,  # a causal mask
    aten.combinations.default,  # a mask of pairs
    aten.quantile.default, aten.quantile.scalar, aten.nanquantile.default, aten.nanquantile.scalar,  # ranks
    aten.linalg_matrix_power.default, aten.matrix_power.default,  # an identity
)  # fmt: skip
"""Ops that make plain tensors of sizes and numbers, which then meet DTensors: all that op_db knows of."""


def _making_plain(op: _torch.OpOverload) -> Callable:
    """The op as it is, with what it makes told from what it is given."""

    def run(*args: Any, **kwargs: Any) -> Any:
        plain.check_arguments(op, (args, kwargs))
        with plain.made_by_torch():
            return _torch.apart(op, *args, **kwargs)

    return run


_linear, _matmul = map(_torch.as_one, (aten.linear.default, aten.matmul.default))


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """With all dims of x as they are; torch makes a matrix of them."""
    if is_kept("linear", x, weight):
        return _linear(x, weight, bias)
    with _torch.without_first():
        return aten.linear.default(x, weight, bias)


def matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """With all dims as they are; torch makes matrices of them, or one batch."""
    if x.ndim == 2 == y.ndim:
        return torch.mm(x, y)
    if is_kept("matmul", x, y):
        return _matmul(x, y)
    with _torch.without_first():
        return aten.matmul.default(x, y)


composites = {
    aten.vander.default: vander,
    aten.tensor_split.tensor_indices_or_sections: tensor_split,
    aten.linear.default: linear,
    aten.matmul.default: matmul,
    aten.einsum.default: einsum,
    aten.matmul_backward.default: matmul_backward,  # torch cannot differentiate it
    **{op: _making_plain(op) for op in MAKES_PLAIN},
}
"""From an op to a function of the same arguments, some of them DTensors."""

KEYS = _torch.FIRST_KEYS
"""What DTensors carry, that their ops may stop here."""

_torch.run_first(composites)
