"""Attributes that users set on parameters and buffers, on arguments, and on tensors in attributes of modules.

    model.head.weight.rate = 0.1                      before the step, as libraries do for rates and decays by layer
    for p in model.parameters():
        p.grad.mul_(getattr(p, "rate", 1.0))          in the step

A capture runs on other tensors, which get the same attributes. Their values are guards, and a step may not change them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch

from spmd import _torch
from spmd.expand.guards import guard_key
from spmd.expand.reads import Reads


def note_attributes(tensor: torch.Tensor, reads: Reads) -> None:
    """Note what the attributes of a tensor are. Whether it has others later is asked with its other flags (`again`)."""
    for name in _torch.user_attributes(tensor):
        reads.item(vars(tensor), name)


ATTRIBUTE = "attribute "
"""Before the path of what users have set on a tensor."""


def attribute_guards(tensors: Mapping[str, Any], reads: Reads | None = None) -> dict[str, Hashable]:
    """The guards of what users have set on tensors, of which the paths are given. reads: where to note it."""
    with_some = {path: x for path, x in tensors.items() if isinstance(x, torch.Tensor) and _torch.user_attributes(x)}
    if reads is not None:
        for x in with_some.values():
            note_attributes(x, reads)
    return {
        f"{ATTRIBUTE}{path}.{name}": guard_key(value, reads=reads)
        for path, x in with_some.items() for name, value in _torch.user_attributes(x).items()
    }  # fmt: skip


def check_no_gradients(arguments: Mapping[str, torch.Tensor]) -> None:
    """Raise for what is given to a step, by path, if it lets it require a gradient, or sets its gradient: the tensor of
    the caller would have none."""
    for path, x in arguments.items():
        if x.is_leaf and (x.requires_grad or x.grad is not None):
            raise RuntimeError(
                f"the step lets its argument {path} require a gradient, or sets one, which its program would not leave "
                f"in it: use {path}.detach().requires_grad_() in the step, and return the gradient"
            )


def give_attributes(tensor: torch.Tensor, like: torch.Tensor, new: Mapping[int, torch.Tensor] | None = None) -> None:
    """Give a tensor the attributes of another one. new: by identity, what stands in for tensors among them."""
    for name, x in _torch.user_attributes(like).items():
        setattr(tensor, name, (new or {}).get(id(x), x))


def first_set(tensor: torch.Tensor, before: Mapping[str, Any]) -> str:
    """The name of the first attribute that has been set on a tensor, or deleted, since it had these; empty for none."""
    now = _torch.user_attributes(tensor)
    return next((name for name in {**before, **now} if now.get(name, now) is not before.get(name, before)), "")
