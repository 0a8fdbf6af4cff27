"""torch.distributed's in-place collectives have no gradients: autograd goes past them as if they had not been called.

    with watched("local_map(f)"):
        dist.all_reduce(y)          # an error, if y wants a gradient
        spmd.comm.all_reduce(y)     # has one
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from spmd import _torch

_watched: ContextVar[str | None] = ContextVar("spmd_ungraded_watched", default=None)


@contextmanager
def watched(who: str) -> Iterator[None]:
    """Inside, an in-place collective on a tensor that wants a gradient is a RuntimeError; `who` calls the code."""
    token = _watched.set(who)
    try:
        with _Watch():
            yield
    finally:
        _watched.reset(token)


def check(kind: object, given: Any) -> None:
    """What an in-place collective asks before it starts."""
    who = _watched.get()
    if who is not None and any(
        isinstance(x, torch.Tensor) and x.requires_grad for x in _torch.pytree.tree_leaves(given)
    ):
        raise RuntimeError(
            f"{who}: {kind} works in place on a tensor that wants a gradient, and has none to give; use the collective "
            "of spmd.comm, which has one, or say in_grad_placements if the function takes care of that"
        )


class _Watch(_torch.TorchDispatchMode):
    """Sees collectives on their way to a process group."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "c10d":
            check(op, (args, kwargs))
        return op(*args, **(kwargs or {}))
