"""What single-device torch would return: shapes, strides and dtypes, without data."""

from __future__ import annotations

import torch

from spmd import _torch
from spmd._torch import pytree
from spmd.tensor.call import TensorMeta
from spmd.tensor.spec import Spec


def out_metas(op, args: tuple, kwargs: dict, device: torch.device) -> tuple[TensorMeta | None, ...]:
    """One `TensorMeta` per result of the op on tensors of these specs; None where it returns no tensor."""
    with _torch.FakeTensorMode():
        fakes = pytree.tree_map_only(Spec, lambda spec: _fake(spec, device), (args, kwargs))
        out = op(*fakes[0], **fakes[1])
    leaves = pytree.tree_leaves(out)
    return tuple(TensorMeta.of(t) if isinstance(t, torch.Tensor) else None for t in leaves)


def _fake(spec: Spec, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=device)
