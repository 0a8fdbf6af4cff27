"""Decompositions of ops that put several tensors together: paddings and one `cat`.

    block_diag([f32[3@dp, 2], f32[2@dp, 4]])     both are padded to 6 columns; then their rows are concatenated
"""

from __future__ import annotations

from math import prod

import torch

from spmd.tensor.rules.decomposition_table import Table, decomposition_registrar
from spmd.tensor.rules.norms import is_distributed

aten = torch.ops.aten

join_decompositions: Table = {}
"""From an op to a function of the same arguments. The function returns NotImplemented where the op is kept."""

register_decomposition = decomposition_registrar(join_decompositions)


@register_decomposition(aten.block_diag.default)
def block_diag(tensors):
    if not is_distributed(*tensors) or any(x.ndim > 2 for x in tensors):
        return NotImplemented
    matrices = [aten.view.default(x, [1] * (2 - x.ndim) + list(x.shape)) for x in tensors]
    width, start, rows = sum(x.shape[1] for x in matrices), 0, []
    for x in matrices:
        rows.append(aten.constant_pad_nd.default(x, [start, width - start - x.shape[1]]))
        start += x.shape[1]
    return aten.cat.default(rows, 0)


@register_decomposition(aten._chunk_cat.default)
def chunk_cat(tensors, dim, num_chunks):
    """Each tensor is padded to so many equal chunks along `dim`. The rests of the chunks are concatenated."""
    dim = dim % min(x.ndim for x in tensors)
    if not is_distributed(*tensors) or not all(x.numel() for x in tensors):
        return NotImplemented
    parts = []
    for x in tensors:
        more = -x.shape[dim] % num_chunks
        x = aten.constant_pad_nd.default(x, [*[0, 0] * (x.ndim - 1 - dim), 0, more])
        shape = [*x.shape[:dim], num_chunks, prod(x.shape[dim:]) // num_chunks]
        parts.append(aten.reshape.default(x, shape))
    return aten.cat.default(parts, dim + 1)
