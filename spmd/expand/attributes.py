"""Attributes that users set on parameters and buffers.

    model.head.weight.rate = 0.1                      before the step, as libraries do for rates and decays by layer
    for p in model.parameters():
        p.grad.mul_(getattr(p, "rate", 1.0))          in the step

A capture runs on other tensors, which get the same attributes. Their values are guards, and a step may not change them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from spmd import _torch
from spmd.expand.reads import Reads


def note_attributes(tensor: torch.Tensor, reads: Reads) -> None:
    """Note what the attributes of a tensor are. Whether it has others later is asked with its other flags (`again`)."""
    for name in _torch.user_attributes(tensor):
        reads.item(vars(tensor), name)


def give_attributes(tensor: torch.Tensor, like: torch.Tensor, new: Mapping[int, torch.Tensor] | None = None) -> None:
    """Give a tensor the attributes of another one. new: by identity, what stands in for tensors among them."""
    for name, x in _torch.user_attributes(like).items():
        setattr(tensor, name, (new or {}).get(id(x), x))


def first_set(tensor: torch.Tensor, before: Mapping[str, Any]) -> str:
    """The name of the first attribute that has been set on a tensor, or deleted, since it had these; empty for none."""
    now = _torch.user_attributes(tensor)
    return next((name for name in {**before, **now} if now.get(name, now) is not before.get(name, before)), "")
