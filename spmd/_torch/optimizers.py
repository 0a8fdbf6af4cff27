"""Optimisers: the hooks of their steps, and the steps that a GradScaler takes or skips."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks


def step_hooks(optimizer: Optimizer) -> list[Callable]:
    """The functions that run before and after a step of the optimiser: its own, and those of all optimisers."""
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return list(chain(*(hooks.values() for hooks in (*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))))


def is_torchs_own(optimizer: Optimizer) -> bool:
    """Whether the steps of the optimiser are torch's own code."""
    own = type(optimizer).__module__, inspect.unwrap(type(optimizer).step).__module__
    return all(name.startswith("torch.optim.") for name in own)


NOTED_IN_OPTIMIZERS = frozenset({
    "_opt_called", "_zero_grad_profile_name", "_warned_capturable_if_run_uncaptured", "_step_supports_amp_scaling",
    "_need_device_dtype_check_for_fused", "_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks",
    "_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks",
})  # fmt: skip
"""Attributes in which torch notes things of optimisers that no step computes with."""


def only_counts(step: Any) -> bool:
    """Whether a step in an optimiser's attributes is one that a learning-rate scheduler has put there: it counts."""
    return hasattr(step, "_wrapped_by_lr_sched") or hasattr(step, "_with_counter")


def note_step(optimizer: Optimizer) -> None:
    """Note that the optimiser has made a step, for learning-rate schedulers, which ask for it."""
    optimizer._opt_called = True


@contextlib.contextmanager
def scaled_steps(run: Callable[[Optimizer, torch.Tensor, Callable[[], Any]], Any]) -> Iterator[None]:
    """Inside, in this thread, a GradScaler calls `run(optimizer, found_inf, step)` for a step that it may skip.

    torch asks `found_inf` for its value. One thread at a time may be inside.
    """
    real, thread = GradScaler._maybe_opt_step, threading.get_ident()

    def maybe_step(self: GradScaler, optimizer: Optimizer, state: dict, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return real(self, optimizer, state, *args, **kwargs)
        found = sum(state["found_inf_per_device"].values())
        return run(optimizer, found, functools.partial(optimizer.step, *args, **kwargs))

    GradScaler._maybe_opt_step = maybe_step
    try:
        yield
    finally:
        GradScaler._maybe_opt_step = real
