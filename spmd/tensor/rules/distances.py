"""Decompositions of distances: a sum over the ranks, and a root.

    dist(f32[n@dp], f32[n@dp])     the norm of the difference: a sum of squares over dp
    norm(f32[n@dp, d], 2, [0])     the same as `linalg_vector_norm`

The ops are kept if no operand is distributed.
"""

from __future__ import annotations

import torch

from spmd.tensor.rules.decomposition_table import Table, decomposition_registrar
from spmd.tensor.rules.norms import is_distributed
from spmd.tensor.rules.totals import vector_norm

aten = torch.ops.aten

distance_decompositions: Table = {}
"""From an op to a function of the same arguments. The function returns NotImplemented where the op is kept."""

register_decomposition = decomposition_registrar(distance_decompositions)


@register_decomposition(
    aten.norm.Scalar, aten.norm.ScalarOpt_dim, aten.norm.ScalarOpt_dtype, aten.norm.ScalarOpt_dim_dtype
)
def norm(self, p=2, dim=None, keepdim=False, *, dtype=None):
    if not is_distributed(self) or not self.numel():
        return NotImplemented
    return vector_norm(self, 2 if p is None else p, dim, keepdim, dtype=dtype)


@register_decomposition(aten.dist.default)
def dist(self, other, p=2):
    if not is_distributed(self, other) or self.dtype != other.dtype or not self.numel() or not other.numel():
        return NotImplemented
    return vector_norm(aten.sub.Tensor(self, other), p)
