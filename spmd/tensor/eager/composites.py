"""Composite ops that DTensors run themselves, because torch's decomposition in C++ does not work for DTensors.

    torch.tensor_split(x, indices)      the C++ reads the memory of `indices`; a DTensor has no such memory

    F.scaled_dot_product_attention(..., is_causal=True)     the C++ makes a mask, a plain tensor

torch decomposes such an op before it calls `__torch_dispatch__`. So DTensors carry a dispatch key that no other tensor
has, and torch calls the functions of this table for that key. All other ops skip the key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmd import _torch
from spmd.tensor.eager import plain_tensors
from spmd.tensor.eager.prod_gradient import prod, prod_along
from spmd.tensor.eager.rms_norm import rms_norm
from spmd.tensor.rules import diagonals, spectra
from spmd.tensor.rules.einsum import product
from spmd.tensor.rules.products import is_kept_as_one_op, matmul_backward

aten = torch.ops.aten


def tensor_split(self: torch.Tensor, tensor_indices_or_sections: torch.Tensor, dim: int = 0) -> Sequence[torch.Tensor]:
    """Read the indices first: a number of sections, or the beginning of each part."""
    at = tensor_indices_or_sections
    if at.dtype != torch.int64 or at.ndim > 1:
        raise RuntimeError(
            f"tensor_split: indices must be a 0-D or 1-D tensor of int64, but are {at.dtype}{list(at.shape)}"
        )
    if at.ndim == 0:
        return aten.tensor_split.sections(self, at.item(), dim)
    return aten.tensor_split.indices(self, at.tolist(), dim)


def vander(x: torch.Tensor, N: int | None = None, increasing: bool = False) -> torch.Tensor:
    """Powers of each element: from the 0th to the N - 1st if `increasing`, by default in the reverse order."""
    if x.ndim != 1 or (N is not None and N < 0):
        raise RuntimeError(f"vander: x must have one dim and N must not be negative, but x is {list(x.shape)}, N {N}")
    n = len(x) if N is None else N
    x = x.unsqueeze(1) if x.is_floating_point() or x.is_complex() else x.unsqueeze(1).long()
    ones = torch.ones_like(x)
    powers = torch.cat([ones, x.expand(-1, n - 1).cumprod(1)], 1) if n > 1 else ones[:, :n]
    return powers if increasing else powers.flip(1)


def einsum(equation: str, tensors: Sequence[torch.Tensor], *, path: Sequence[int] | None = None) -> torch.Tensor:
    """A product of two operands keeps its dims; other equations are decomposed as by torch."""
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
"""Ops that make plain tensors from sizes and numbers, and combine them with DTensors: all of them in torch's op_db."""


def _allowing_plain_tensors(op: _torch.OpOverload) -> Callable:
    """The op as torch decomposes it. Plain tensors that it makes are allowed; plain arguments are checked before."""

    def run(*args: Any, **kwargs: Any) -> Any:
        plain_tensors.check_arguments(op, (args, kwargs))
        with plain_tensors.made_by_torch():
            return _torch.decomposed(op, *args, **kwargs)

    return run


_linear, _matmul = map(_torch.undecomposed, (aten.linear.default, aten.matmul.default))


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """linear with all dims of x kept; torch makes a matrix of x."""
    if is_kept_as_one_op("linear", x, weight):
        return _linear(x, weight, bias)
    with _torch.without_first():
        return aten.linear.default(x, weight, bias)


def matmul(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """matmul with all dims kept; torch makes matrices of the operands, or one batch."""
    if x.ndim == 2 == y.ndim:
        return torch.mm(x, y)
    if is_kept_as_one_op("matmul", x, y):
        return _matmul(x, y)
    with _torch.without_first():
        return aten.matmul.default(x, y)


def one_hot(self: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    """For each class a row with a one in its place. Each rank checks the classes of its block.

    For a subclass of Tensor torch does not check them, and a class out of range has a row of zeros.
    """
    if _torch.is_functorch_wrapper(self):
        with _torch.without_first():
            return aten.one_hot.default(self, num_classes)
    if self.dtype != torch.int64:
        raise RuntimeError(f"one_hot: classes must be int64, but are {self.dtype}")
    if num_classes < -1 or (num_classes < 1 and not self.numel()):
        raise RuntimeError(f"one_hot: num_classes is {num_classes}; give the number of classes of {list(self.shape)}")
    n = int(self.max()) + 1 if num_classes == -1 else num_classes
    in_range = torch.logical_and(self >= 0, self < n)
    fits = in_range.to_local().all()
    aten._assert_async.msg(fits, f"one_hot: a class is negative, or not smaller than the number of classes, {n}")
    with plain_tensors.made_by_torch():
        return (self.unsqueeze(-1) == torch.arange(n, device=self.device)).long()


def _made_of(op: _torch.OpOverload, function: Callable) -> Callable:
    """A function in the place of the op; torch's own way where it gives NotImplemented."""

    def run(*args: Any, **kwargs: Any) -> Any:
        plain_tensors.check_arguments(op, (args, kwargs))
        with plain_tensors.made_by_torch():
            out = function(*args, **kwargs)
            return _torch.decomposed(op, *args, **kwargs) if out is NotImplemented else out

    return run


def fill_diagonal_(self: torch.Tensor, fill_value: Any, wrap: bool = False) -> torch.Tensor:
    """torch writes a fill of `as_strided`."""
    with plain_tensors.made_by_torch():
        return diagonals.fill_diagonal_(self, fill_value, wrap)


composites = {
    aten.fill_diagonal_.default: fill_diagonal_,
    aten.stft.default: _made_of(aten.stft.default, spectra.stft),
    aten.stft.center: _made_of(aten.stft.center, spectra.centred_stft),
    aten.istft.default: _made_of(aten.istft.default, spectra.istft),
    aten.vander.default: vander,
    aten.tensor_split.tensor_indices_or_sections: tensor_split,
    aten.linear.default: linear,
    aten.matmul.default: matmul,
    aten.einsum.default: einsum,
    aten.one_hot.default: one_hot,
    aten.rms_norm.default: rms_norm,
    aten.prod.default: prod,
    aten.prod.dim_int: prod_along,
    aten.matmul_backward.default: matmul_backward,  # torch cannot differentiate it
    **{op: _allowing_plain_tensors(op) for op in MAKES_PLAIN},
}
"""For each op a function of the same arguments, some of them DTensors."""

DISPATCH_KEYS = _torch.FIRST_KEYS
"""The dispatch keys of DTensors, for which torch calls these functions."""

_torch.run_first(composites)
