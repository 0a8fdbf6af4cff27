"""Hooks that users put on parameters: on gradients, and after a gradient has been added up.

    weight.register_hook(lambda gradient: gradient.clamp(-1, 1))
    weight.register_post_accumulate_grad_hook(update)            # an optimiser's step as soon as the gradient is there

A capture runs on other tensors, which get the same hooks. They see global gradients, as on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from spmd.expand.reads import Reads


def gradient_hooks(parameter: torch.Tensor) -> list[Callable]:
    """The hooks that get a gradient and may return another one, in order."""
    return [*hooks.values()] if (hooks := parameter._backward_hooks) else []


def accumulate_hooks(parameter: torch.Tensor) -> list[Callable]:
    """The hooks that get the parameter when its gradient is there, in order."""
    return [*hooks.values()] if (hooks := getattr(parameter, "_post_accumulate_grad_hooks", None)) else []


def hooks_of(parameters: Iterable[torch.Tensor]) -> list[Callable]:
    """All hooks of these parameters, each once."""
    hooks = [hook for p in parameters for hook in (*gradient_hooks(p), *accumulate_hooks(p))]
    return list({id(hook): hook for hook in hooks}.values()) if len(hooks) > 1 else hooks


def hooks_of_module(module: nn.Module) -> list[Callable]:
    """The hooks that a module itself runs, forward and backward."""
    return [hook for name in _OF_MODULES for hook in vars(module).get(name, {}).values()]


_OF_MODULES = "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"


def note_hooks(parameter: torch.Tensor, reads: Reads) -> None:
    """Note where the hooks of a parameter are."""
    for hooks in (parameter._backward_hooks, parameter._post_accumulate_grad_hooks):
        if hooks is not None:
            reads.box(hooks)


def copy_hooks(parameter: torch.Tensor, like: torch.Tensor) -> None:
    """Give a parameter the hooks of another one."""
    for hook in gradient_hooks(like):
        parameter.register_hook(hook)
    for hook in accumulate_hooks(like):
        parameter.register_post_accumulate_grad_hook(hook)
