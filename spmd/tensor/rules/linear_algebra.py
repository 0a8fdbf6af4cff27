"""Decompositions of ops on one matrix whose rows or columns are sharded, where the work can still be shared.

    linalg_inv_ex(f32[n@tp, n])       X A = 1: each rank solves for its rows of X
    lu_unpack(f32[n@tp, n], pivots)   two triangles of the blocks

A batch of matrices that is sharded along the batch needs none of this. Left out: ops whose work cannot be shared so,
such as svd and qr.
"""

from __future__ import annotations

import torch

from spmd.tensor.rules.decomposition_table import Table, decomposition_registrar
from spmd.tensor.rules.norms import is_distributed, is_sharded
from spmd.tensor.rules.scans import positions

aten = torch.ops.aten

matrix_decompositions: Table = {}
"""From an op to a function of the same arguments. The function returns NotImplemented where the op is better."""

register_decomposition = decomposition_registrar(matrix_decompositions)


def _diagonal(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """The places of the diagonal in a matrix of so many rows and columns, on the mesh of x."""
    return aten.eq.Tensor(positions(x, rows, 0, 2), positions(x, columns, 1, 2))


def _identity_like(x: torch.Tensor) -> torch.Tensor:
    """The identity, sharded like the square matrix x."""
    return aten.masked_fill.Scalar(aten.zeros_like.default(x), _diagonal(x, *x.shape), 1)


def _is_sharded_matrix(x: torch.Tensor) -> bool:
    return x.ndim == 2 and x.shape[0] == x.shape[1] and is_sharded(x, [0, 1])


@register_decomposition(aten.linalg_inv_ex.default)
def linalg_inv_ex(A, *, check_errors=False):
    """`X A = 1` shares the rows of X, `A X = 1` its columns."""
    if check_errors or not _is_sharded_matrix(A):
        return NotImplemented
    out = aten._linalg_solve_ex.default(A, _identity_like(A), left=not is_sharded(A, [0]))
    return out[0], out[3]


@register_decomposition(aten.cholesky_inverse.default)
def cholesky_inverse(self, upper=False):
    """The inverse is symmetric, so its rows may be columns."""
    if not _is_sharded_matrix(self) or self.is_complex():
        return NotImplemented
    identity = _identity_like(self)
    columns = aten.transpose.int(identity, 0, 1) if is_sharded(self, [0]) else identity
    return aten.cholesky_solve.default(columns, self, upper)


@register_decomposition(aten.lu_unpack.default)
def lu_unpack(LU_data, LU_pivots, unpack_data=True, unpack_pivots=True):
    """The permutation is made of the pivots alone. L has ones on its diagonal."""
    if LU_data.ndim != 2 or not is_distributed(LU_data, LU_pivots) or not LU_data.numel():
        return NotImplemented
    m, n = LU_data.shape
    k = min(m, n)
    nothing = aten.new_empty.default(LU_data, [0])
    p, lower, upper = nothing, nothing, nothing
    if unpack_pivots:
        like = aten.expand.default(aten.new_zeros.default(LU_data, [1, 1, 1]), [1, m, n])
        p = aten.lu_unpack.default(like, aten.unsqueeze.default(LU_pivots, 0), unpack_data=False)[0]
        p = aten.squeeze.dims(p, [0])
    if unpack_data:
        lower = aten.tril.default(aten.slice.Tensor(LU_data, 1, 0, k), -1)
        lower = aten.masked_fill.Scalar(lower, _diagonal(LU_data, m, k), 1)
        upper = aten.triu.default(aten.slice.Tensor(LU_data, 0, 0, k))
    return p, lower, upper
