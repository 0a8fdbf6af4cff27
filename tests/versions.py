"""What older versions of torch, among those that spmd runs on, do not have: for tests that use torch's own."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol

TORCH = tuple(map(int, torch.__version__.split(".")[:2]))

GLOO_HAS_ALL_TO_ALL_OF_LISTS = TORCH >= (2, 12)
NEW_GROUPS_KEEP_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters

# Collectives under the names that all versions have, or else the older ones.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather_autograd = getattr(funcol, "all_gather_single_autograd", None) or funcol.all_gather_tensor_autograd


def aminmax(x: torch.Tensor, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """torch.aminmax, without the gradient that torch 2.11 does not have."""
    return torch.aminmax(x if TORCH >= (2, 12) else x.detach(), **kwargs)
