"""torch.distributed's in-place collectives have no gradients, and autograd ignores them. Here such a use is an error.

    with watched("local_map(f)"):
        dist.all_reduce(y)          # an error if y requires a gradient
        spmd.comm.all_reduce(y)     # has a gradient
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from spmd import _torch

_watched: _torch.Carried[str | None] = _torch.Carried("spmd_ungraded_watched", None)


@contextmanager
def watched(who: str) -> Iterator[None]:
    """Inside, an in-place collective on a tensor that requires a gradient is a RuntimeError; `who` names the caller."""
    token = _watched.set(who)
    try:
        with _CheckCollectives():
            yield
    finally:
        _watched.reset(token)


def check(kind: object, given: Any) -> None:
    """RuntimeError if an in-place collective gets a tensor that requires a gradient, inside `watched`."""
    who = _watched.get()
    if who is not None and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in _torch.pytree.tree_leaves(given)
    ):
        raise RuntimeError(
            f"{who}: {kind} works in place on a tensor that wants a gradient, and has none to give; use the collective "
            "of spmd.comm, which has one, or say in_grad_placements if the function takes care of that"
        )


class _CheckCollectives(_torch.TorchDispatchMode):
    """Checks the collectives that are called on process groups."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "c10d":
            check(op, (args, kwargs))
        return _torch.run_with_bits(op, *args, **(kwargs or {}))
