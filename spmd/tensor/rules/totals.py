"""Norms of one tensor, and of many tensors whose owed reductions are done together.

    vector_norm(f32[1000@dp])             a sum of squares over dp, and its root
    _foreach_norm of 100 such tensors     100 sums, stacked: one all-reduce, and then the roots

`clip_grad_norm_(parameters, max_norm, foreach=True)` calls `_foreach_norm`. Tensors are grouped if they are on the same
mesh and owe the same reduction; replicated tensors owe none. When a graph is captured, placements are not known yet.
Then each tensor is reduced alone, and passes combine the reductions later.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from math import inf

import torch

from spmd.tensor.call import dims_of
from spmd.tensor.rules.norms import cast

aten = torch.ops.aten


WITHOUT_ROOT = (0, 1, inf, -inf)
"""The orders of norms that need no root: there the sum, or the maximum or minimum, is the norm itself."""


# ---- one tensor -------------------------------------------------------------------------------


def vector_norm(self, ord=2, dim=None, keepdim=False, *, dtype=None):
    """`(sum |x|^p)^(1/p)`: a sum over the ranks, then a root. Half precision is summed in float32, as torch does."""
    x = self if dtype in (None, self.dtype) else aten._to_copy.default(self, dtype=dtype)
    if not x.dtype.is_floating_point:  # for integers torch raises its error; complex numbers would need their parts
        return NotImplemented
    return cast(_root(_powers(_upcast(x), ord, list(dims_of(dim, x.ndim)), keepdim), ord), x.dtype)


def _powers(x, p, dims, keepdim=False):
    """The part of a norm of floats that is reduced over the ranks. The maximum of an empty tensor is torch's error."""
    if p == 0:
        return aten.sum.dim_IntList(aten.ne.Scalar(x, 0), dims, keepdim, dtype=x.dtype)
    if p == 2:
        return aten.sum.dim_IntList(aten.mul.Tensor(x, x), dims, keepdim)
    size = aten.abs.default(x)
    if p in (inf, -inf):
        return (aten.amax if p > 0 else aten.amin).default(size, dims, keepdim)
    return aten.sum.dim_IntList(size if p == 1 else aten.pow.Tensor_Scalar(size, p), dims, keepdim)


def _root(powers, p):
    if p in WITHOUT_ROOT:
        return powers
    return aten.sqrt.default(powers) if p == 2 else aten.pow.Tensor_Scalar(powers, 1 / p)


def _upcast(x: torch.Tensor) -> torch.Tensor:
    return cast(x, torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


# ---- many tensors -----------------------------------------------------------------------------


def foreach_norm(self, ord=2, dtype=None):
    """The norm of each tensor. The sums of a group are stacked, reduced once, and their roots are taken at once."""
    wanted = [dtype or x.dtype for x in self]
    if not all(to.is_floating_point for to in wanted):
        return [aten.linalg_vector_norm.default(x, ord, dtype=dtype) for x in self]
    powers = [_powers(_upcast(cast(x, to)), ord, list(range(x.ndim))) for x, to in zip(self, wanted, strict=True)]
    norms: dict[int, torch.Tensor] = {}
    for group in group_by_owed_reduction(powers):
        norms |= zip(group, _roots([powers[i] for i in group], ord), strict=True)
    return [cast(norms[i], to) for i, to in enumerate(wanted)]


def _roots(powers: Sequence[torch.Tensor], p) -> Sequence[torch.Tensor]:
    """The root of each. If there are several, the stack makes their owed reductions one reduction."""
    if len(powers) == 1:
        return [_root(powers[0], p)]
    stack = aten.stack.default(powers)
    return aten.unbind.int(aten.abs.default(stack) if p in WITHOUT_ROOT else _root(stack, p))


def group_by_owed_reduction(numbers: Sequence[torch.Tensor]) -> Iterable[list[int]]:
    """The indices of scalars, in groups of one dtype and mesh that owe the same reduction.

    A tensor without a spec is a group of its own.
    """
    groups: dict[Hashable, list[int]] = {}
    for i, x in enumerate(numbers):
        spec = getattr(x, "_spec", None)
        groups.setdefault((x.dtype, i if spec is None else (spec.mesh, spec.partial)), []).append(i)
    return groups.values()
