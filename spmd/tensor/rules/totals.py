"""Norms of one tensor, and of many at once: what they owe is reduced together.

    vector_norm(f32[1000@dp])             a sum over dp of squares, and its root
    _foreach_norm of 100 such tensors     100 sums, stacked: one all-reduce, and its roots

That is what `clip_grad_norm_(parameters, max_norm, foreach=True)` asks. Tensors go together that lie on one mesh and
owe the same reduction; what lies whole owes none. When a graph is captured it is not known how tensors lie: then each
goes by itself, and passes put the reductions together.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from math import inf

import torch

from spmd.tensor.call import dims_of
from spmd.tensor.rules.norms import cast

aten = torch.ops.aten


OWN_ROOTS = (0, 1, inf, -inf)
"""Orders of norms that need no root: sums and extremes are the norms themselves."""


# ---- one tensor -------------------------------------------------------------------------------


def vector_norm(self, ord=2, dim=None, keepdim=False, *, dtype=None):
    """`(sum |x|^p)^(1/p)`: a sum over the ranks, and then a root. Half precision is summed in float, as torch does."""
    x = self if dtype in (None, self.dtype) else aten._to_copy.default(self, dtype=dtype)
    if not x.dtype.is_floating_point:  # integers are torch's error to raise; of complex numbers the parts are squared
        return NotImplemented
    return cast(_root(_powers(_wide(x), ord, list(dims_of(dim, x.ndim)), keepdim), ord), x.dtype)


def _powers(x, p, dims, keepdim=False):
    """What ranks do together of a norm of floats. Of an empty tensor the maximum is an error, as in torch."""
    if p == 0:
        return aten.sum.dim_IntList(aten.ne.Scalar(x, 0), dims, keepdim, dtype=x.dtype)
    if p == 2:
        return aten.sum.dim_IntList(aten.mul.Tensor(x, x), dims, keepdim)
    size = aten.abs.default(x)
    if p in (inf, -inf):
        return (aten.amax if p > 0 else aten.amin).default(size, dims, keepdim)
    return aten.sum.dim_IntList(size if p == 1 else aten.pow.Tensor_Scalar(size, p), dims, keepdim)


def _root(powers, p):
    if p in OWN_ROOTS:
        return powers
    return aten.sqrt.default(powers) if p == 2 else aten.pow.Tensor_Scalar(powers, 1 / p)


def _wide(x: torch.Tensor) -> torch.Tensor:
    return cast(x, torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x


# ---- many tensors -----------------------------------------------------------------------------


def foreach_norm(self, ord=2, dtype=None):
    """The norm of each: of those that go together the powers are stacked, and their roots taken at once."""
    wanted = [dtype or x.dtype for x in self]
    if not all(to.is_floating_point for to in wanted):
        return [aten.linalg_vector_norm.default(x, ord, dtype=dtype) for x in self]
    powers = [_powers(_wide(cast(x, to)), ord, list(range(x.ndim))) for x, to in zip(self, wanted, strict=True)]
    norms: dict[int, torch.Tensor] = {}
    for places in owing_alike(powers):
        norms |= zip(places, _roots([powers[i] for i in places], ord), strict=True)
    return [cast(norms[i], to) for i, to in enumerate(wanted)]


def _roots(powers: Sequence[torch.Tensor], p) -> Sequence[torch.Tensor]:
    """The root of each; what several owe is done before, at once."""
    if len(powers) == 1:
        return [_root(powers[0], p)]
    stack = aten.stack.default(powers)
    return aten.unbind.int(aten.abs.default(stack) if p in OWN_ROOTS else _root(stack, p))


def owing_alike(numbers: Sequence[torch.Tensor]) -> Iterable[list[int]]:
    """The places of numbers of one dtype that lie on one mesh and owe the same; of others each alone."""
    groups: dict[Hashable, list[int]] = {}
    for i, x in enumerate(numbers):
        spec = getattr(x, "_spec", None)
        groups.setdefault((x.dtype, i if spec is None else (spec.mesh, spec.partial)), []).append(i)
    return groups.values()
