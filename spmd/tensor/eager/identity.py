"""A tensor that is placed on a mesh, or moved there, stays the object that it is.

    optimizer = AdamW(model.parameters())
    distribute_module(model, mesh)            # optimizer now trains DTensors: the same `nn.Parameter` objects

So whoever holds a parameter holds the one that is trained: optimisers, running averages, tied attributes, hooks. Where
that cannot be, `check_can_become` raises before anything is changed.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from spmd import _torch
from spmd.tensor.eager.conversions import redistributed
from spmd.tensor.eager.dtensor import DTensor, distributed
from spmd.tensor.spec import Spec


def check_can_become(what: str, named: Iterable[tuple[object, torch.Tensor]]) -> None:
    """Raise RuntimeError for the first of these tensors that cannot become a DTensor and stay the object that it is."""
    plain = [(name, x) for name, x in named if not isinstance(x, DTensor)]
    for (name, _), why in zip(plain, _torch.obstacles([x for _, x in plain], DTensor), strict=True):
        if why is not None:
            raise RuntimeError(
                f"{what}: {name} {why}; so it cannot become a DTensor and stay the object that optimisers and others "
                "hold. Delete what holds it, or put nn.Parameter(x.detach().clone()) in its place before; what holds "
                "the old one then has to be made again."
            )


def placed(t: torch.Tensor, spec: Spec) -> DTensor:
    """The tensor with this spec, as a leaf: itself if it has the spec, else a new one, from the first rank's values."""
    if getattr(t, "_spec", None) is spec:
        return t
    moved = redistributed if isinstance(t, DTensor) else distributed
    return moved(t.detach(), spec).requires_grad_(t.requires_grad and t.is_leaf)


def become(x: torch.Tensor, new: DTensor) -> None:
    """x becomes `new`: its class, layout, memory and gradient. It stays the same object, with its own attributes."""
    if x is new:
        return
    if isinstance(x, DTensor):
        x.data, x.grad = new, new.grad
    else:
        _torch.become(x, new)
