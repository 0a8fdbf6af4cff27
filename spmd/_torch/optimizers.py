"""Optimisers: the hooks of their steps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain

from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def step_hooks(optimizer: Optimizer) -> list[Callable]:
    """The functions that run before and after a step of the optimiser: its own, and those of all optimisers."""
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return list(chain(*(hooks.values() for hooks in (*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))))
