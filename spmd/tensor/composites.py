"""Ops that torch takes apart in C++, above dispatch, in a way that a DTensor cannot follow: done here instead.

    torch.tensor_split(x, indices)      the C++ reads the memory of `indices`; a DTensor has none of its own

Such an op is never seen by `__torch_dispatch__`, which comes after. So DTensors carry a dispatch key that no other
tensor has, and the ops of this table stop there. All others fall through it, and no tensor but a DTensor meets it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from spmd import _torch

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


composites = {aten.tensor_split.tensor_indices_or_sections: tensor_split}
"""From an op to a function of the same arguments, some of them DTensors."""

KEYS = _torch.FIRST_KEYS
"""What DTensors carry, that their ops may stop here."""

_torch.run_first(composites)
