"""Products of rows with the weights of the expert that each is for: rows are in order of their experts.

    x [rows, i], w [experts, i, o], sizes [experts]  ->  y [rows, o], zero behind the rows that are some expert's

Sizes are numbers of rows that depend on data. So these are ops of their own, whose shapes do not depend on them, and
whose time does: where they run, sizes are read from host memory.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

_library = torch.library.Library("spmd", "FRAGMENT")
_library.define("product_by_expert(Tensor x, Tensor w, Tensor sizes) -> Tensor")
_library.define("gradients_by_expert(Tensor x, Tensor g, Tensor sizes) -> Tensor")
_ops = torch.ops.spmd


def product_by_expert(x: torch.Tensor, w: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """[rows, i], [experts, i, o], [experts] in host memory -> [rows, o]: the first sizes[0] rows times w[0], and so on.

    >>> product_by_expert(torch.ones(3, 1), torch.tensor([[[1.0]], [[2.0]]]), torch.tensor([1, 1]))
    tensor([[1.],
            [2.],
            [0.]])
    """
    return _ProductByExpert.apply(x, w, sizes)


class _ProductByExpert(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, sizes):
        ctx.save_for_backward(x, w, sizes)
        return _ops.product_by_expert(x, w, sizes)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        x, w, sizes = ctx.saved_tensors
        of_x = _ops.product_by_expert(g, w.mT, sizes) if ctx.needs_input_grad[0] else None
        return of_x, _ops.gradients_by_expert(x, g, sizes) if ctx.needs_input_grad[1] else None, None


# ---- the ops ----------------------------------------------------------------------------------


def _parts(sizes: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """The experts that have rows, and their rows."""
    at = 0
    for i, n in enumerate(sizes.tolist()):
        if n:
            yield i, slice(at, at + n)
        at += n


@torch.library.impl(_library, "product_by_expert", "CompositeExplicitAutograd")
def _product(x: torch.Tensor, w: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    out = x.new_zeros(len(x), w.shape[2])
    for i, rows in _parts(sizes):
        torch.mm(x[rows], w[i], out=out[rows])
    return out


@torch.library.impl(_library, "gradients_by_expert", "CompositeExplicitAutograd")
def _gradients(x: torch.Tensor, g: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    out = x.new_zeros(len(sizes), x.shape[1], g.shape[1])
    for i, rows in _parts(sizes):
        torch.mm(x[rows].T, g[rows], out=out[i])
    return out


@torch.library.impl(_library, "product_by_expert", "Meta")
def _product_without_data(x: torch.Tensor, w: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    return x.new_empty(len(x), w.shape[2])


@torch.library.impl(_library, "gradients_by_expert", "Meta")
def _gradients_without_data(x: torch.Tensor, g: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    return x.new_empty(len(sizes), x.shape[1], g.shape[1])
