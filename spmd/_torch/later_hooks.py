"""Hooks of a parameter that autograd does not call: its gradient is ready later than autograd knows.

    take_post_hooks(p).set_own(self, made)
    p.register_post_accumulate_grad_hook(step)         # as users do, before or behind it
    loss.backward()                                    # calls made(p) alone
    run_post_hooks(p)                                  # calls step(p)

torch keeps hooks in dicts, whose values it reads behind the methods of their class. So a dict whose methods put hooks
elsewhere has none for torch, and all for Python code.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch


class LaterHooks(OrderedDict):
    """A table of hooks that torch finds empty but for `own`. later: the table that users' hooks are put into."""

    def __init__(self, later: OrderedDict | None):
        super().__init__()
        self.later = OrderedDict() if later is None else later  # the old one: handles remove hooks from it

    def set_own(self, owner: Any, hook: Callable | None) -> None:
        """The hook of this owner, which torch calls; None for none."""
        if hook is not None:
            OrderedDict.__setitem__(self, id(owner), hook)
        elif OrderedDict.__contains__(self, id(owner)):
            OrderedDict.__delitem__(self, id(owner))

    def __setitem__(self, key: Any, hook: Callable) -> None:
        self.later[key] = hook

    def __getitem__(self, key: Any) -> Callable:
        return self.later[key]

    def __delitem__(self, key: Any) -> None:
        del self.later[key]

    def __contains__(self, key: Any) -> bool:
        return key in self.later

    def __iter__(self) -> Iterator[Any]:
        return iter(self.later)

    def __len__(self) -> int:
        return len(self.later)

    def keys(self):
        return self.later.keys()

    def values(self):
        return self.later.values()

    def items(self):
        return self.later.items()


def take_post_hooks(p: torch.Tensor) -> LaterHooks:
    """The hooks that get a parameter with its gradient, which are called by `run_post_hooks` from now on."""
    if not isinstance(p._post_accumulate_grad_hooks, LaterHooks):
        p._post_accumulate_grad_hooks = LaterHooks(p._post_accumulate_grad_hooks)
    return p._post_accumulate_grad_hooks


def take_hooks(p: torch.Tensor) -> None:
    """Let autograd call the hooks of a leaf only with gradients that it has itself, and not where there is none."""
    if isinstance(p._backward_hooks, LaterHooks):
        return
    is_there = []

    def given(gradient: torch.Tensor | None) -> torch.Tensor | None:
        is_there[:] = [gradient is not None]
        return gradient if gradient is None else run_gradient_hooks(p, gradient)

    def behind(p: torch.Tensor) -> None:
        if any(is_there):
            run_post_hooks(p)

    p._backward_hooks = LaterHooks(p._backward_hooks)
    p._backward_hooks.set_own(LaterHooks, given)
    take_post_hooks(p).set_own(LaterHooks, behind)


def has_hooks(p: torch.Tensor) -> bool:
    """Whether somebody waits for the gradient of a parameter, or changes it."""
    return bool(p._backward_hooks or p._post_accumulate_grad_hooks)


def run_gradient_hooks(p: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Call the hooks that get a gradient and may return another one. Returns the last."""
    for hook in list((p._backward_hooks or {}).values()):
        found = hook(gradient)
        gradient = gradient if found is None else found
    return gradient


def run_post_hooks(p: torch.Tensor) -> None:
    """Call the hooks that get a parameter when its gradient is there."""
    for hook in list((p._post_accumulate_grad_hooks or {}).values()):
        hook(p)
