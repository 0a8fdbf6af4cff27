"""Backward passes inside of each other, until torch goes on in a thread of autograd, as it does for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

DEEP = 70  # torch goes on in another thread after 60


def in_backward_passes(ask: Callable[[int], Any]) -> list[Any]:
    """What the function gives in each pass, the outermost first. It is called with how many are still to come."""
    seen = []

    class Deep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, depth):
            ctx.depth = depth
            return x.clone()

        @staticmethod
        def backward(ctx, g):
            seen.append(ask(ctx.depth))
            if ctx.depth:
                with torch.enable_grad():
                    Deep.apply(torch.ones(1, requires_grad=True), ctx.depth - 1).sum().backward()
            return g, None

    Deep.apply(torch.ones(1, requires_grad=True), DEEP).sum().backward()
    return seen
