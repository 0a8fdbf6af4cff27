"""The gradient of a product of elements, as torch computes it on one device.

    x = [2, 3, 4]    grad * prod / x                    no element is zero
    x = [2, 0, 4]    grad * the product of the others   some are: dividing by them would give NaN

torch chooses by the number of zeros. For a subclass of Tensor it always takes the second formula, which gives another
number where an element is NaN, and is a scan along the dim. Here the ranks count the zeros together and choose alike.

Left out: forward-mode AD, transforms of torch.func, autocast and traces, where nobody can read the number, or more than
autograd sees the op. There torch's own gradient is used. In explicit mode, which allows no count, it is the second
formula.
"""

from __future__ import annotations

import torch

from spmd import _torch
from spmd.tensor.modes import explicit

aten = torch.ops.aten


def prod(self: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
    """The product of all elements."""
    if _has_gradient_here(self, dtype):
        return _Product.apply(self if dtype is None else self.to(dtype))
    with _torch.without_first():
        return aten.prod.default(self, dtype=dtype)


def prod_along(
    self: torch.Tensor, dim: int, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """The products along a dim."""
    if _has_gradient_here(self, dtype):
        out = _ProductAlong.apply(self if dtype is None else self.to(dtype), dim)
        return out if keepdim else out.squeeze(dim)
    with _torch.without_first():
        return aten.prod.dim_int(self, dim, keepdim, dtype=dtype)


def _has_gradient_here(x: torch.Tensor, dtype: torch.dtype | None) -> bool:
    wants_gradient = x.requires_grad and torch.is_grad_enabled() and x.ndim > 0
    return wants_gradient and not _torch.is_seen_by_more(x) and not _torch.is_tracing(x)


class _Product(torch.autograd.Function):
    """The product of all elements."""

    @staticmethod
    def forward(ctx, x):
        with _torch.without_first():
            out = aten.prod.default(x)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, out = ctx.saved_tensors
        zeros = _number_of_zeros(x)
        if zeros > 1 and not torch.is_grad_enabled():  # with a graph: the gradient is zero, its derivative is not
            return torch.zeros_like(x)
        return grad * (_products_of_others(x.reshape(-1), 0).view_as(x) if zeros else out / x).conj()


class _ProductAlong(torch.autograd.Function):
    """The products along a dim, which stays with size 1."""

    @staticmethod
    def forward(ctx, x, dim):
        with _torch.without_first():
            out = aten.prod.dim_int(x, dim, True)
        ctx.dim = dim
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        x, out = ctx.saved_tensors
        return grad * (_products_of_others(x, ctx.dim) if _number_of_zeros(x) else out / x).conj(), None


def _number_of_zeros(x: torch.Tensor) -> int:
    """How many elements are zero: the same number on every rank. In explicit mode 1, for it may not be counted."""
    return 1 if explicit.is_on() else int((x == 0).sum())


def _products_of_others(x: torch.Tensor, dim: int) -> torch.Tensor:
    """For each element, the product of the other elements along the dim: of those before it and of those after it."""
    n = x.shape[dim]
    if not n:
        return x
    one = torch.ones_like(x.narrow(dim, 0, 1))
    before = torch.cat([one, x.narrow(dim, 0, n - 1)], dim).cumprod(dim)
    after = torch.cat([one, x.narrow(dim, 1, n - 1).flip(dim)], dim).cumprod(dim).flip(dim)
    return before * after
