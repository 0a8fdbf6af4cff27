"""Whether tensors that must be equal on all ranks are."""

from __future__ import annotations

from typing import Any

import torch

from spmd.expand.state import named_leaves
from spmd.mesh import DeviceMesh
from spmd.mesh.rank import world_size
from spmd.tensor.redistribute.replicas import check_replicas


def check_equal(*tensors: Any, mesh: DeviceMesh | None = None) -> None:
    """Compare plain tensors between ranks, and what DTensors replicate. RuntimeError on all ranks if one differs.

    tensors: tensors, modules (parameters and buffers), optimisers, and lists, tuples or dicts of them. mesh: whose
    ranks compare the plain tensors; by default all ranks. A DTensor is compared over its own mesh: ranks that hold the
    same block must hold equal values. All these ranks must call it. Only digests are sent.

    The error names the first tensor that differs, and the ranks. NaN equals NaN of the same bits; 0.0 is not -0.0.

        spmd.debug.check_equal(model)          # before training: is every rank's model the same?
    """
    everyone = DeviceMesh("cpu", range(world_size())) if mesh is None else mesh
    by_mesh: dict[DeviceMesh, dict[str, torch.Tensor]] = {}
    for name, x in _named_tensors(tensors[0] if len(tensors) == 1 else list(tensors)):
        on = x._spec.mesh if hasattr(x, "_spec") else everyone
        by_mesh.setdefault(on, {})[name] = x
    for on, named in by_mesh.items():
        check_replicas(named, on, "check_equal")


def _named_tensors(tree: Any) -> list[tuple[str, torch.Tensor]]:
    found: list[tuple[str, torch.Tensor]] = []
    for path, leaf in named_leaves(tree):
        prefix = f"{path}." if path else ""
        if isinstance(leaf, torch.nn.Module):
            found += [(prefix + name, x) for name, x in (*leaf.named_parameters(), *leaf.named_buffers())]
        elif isinstance(leaf, torch.optim.Optimizer):
            found += [(prefix + name, x) for name, x in _named_tensors(leaf.state_dict())]
        elif isinstance(leaf, torch.Tensor):
            found.append((path or "the tensor", leaf))
    return found
