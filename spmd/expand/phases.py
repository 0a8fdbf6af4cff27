"""Which pass of a step made each node of its capture, and where gradients were made.

    phase 0, 2, ...   forward passes, and at the end the update
    phase 1, 3, ...   backward passes: autograd's engine ran
    gradient(g, "model.up.weight")    the engine hands over the gradient of a parameter

Both are noted while the step runs, so no name of an op plays a role. `gradient` is an op of our own: it gives its
operand as a new tensor, so that a write into the gradient, such as clipping, is no write into a view of something else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from spmd import _torch

_library = torch.library.Library("spmd", "FRAGMENT")
_library.define("gradient(Tensor gradient, str parameter) -> Tensor")
_library.impl("gradient", lambda gradient, parameter: gradient.clone(), "CompositeExplicitAutograd")


class _Marked(torch.autograd.Function):
    """`gradient` with its derivative, for gradients of gradients."""

    @staticmethod
    def forward(ctx, gradient, parameter):
        return torch.ops.spmd.gradient(gradient, parameter)

    @staticmethod
    def backward(ctx, of_gradient):
        return of_gradient, None


def mark(gradient: torch.Tensor, path: str) -> torch.Tensor:
    """The gradient of a parameter, marked. Without a path it stays as it is."""
    return _Marked.apply(gradient, path) if path else gradient


def mark_gradient(parameter: torch.Tensor, path: str) -> None:
    """Mark each gradient that a backward pass makes of this parameter. It may be a traced tensor alone."""
    if parameter.requires_grad:
        parameter.register_hook(lambda gradient: mark(gradient, path))


@dataclass
class Phases:
    """When autograd's engine ran during a capture.

    ends: the last node that was made before each start and each end of the engine; None where there was none.
    """

    running: bool = False
    ends: list[fx.Node | None] = field(default_factory=list)

    def note(self) -> None:
        """Call before each op."""
        if _torch.in_backward() != self.running and (mode := _torch.proxy_mode()) is not None:
            self.running = not self.running
            self.ends.append(next(iter(reversed(mode.tracer.graph.nodes)), None))

    def mark(self, graph: fx.Graph) -> None:
        """Give each node the number of its phase."""
        phase = self.ends.count(None)
        for node in graph.nodes:
            node.meta["phase"] = phase
            phase += self.ends.count(node)


def fill_phases(graph: fx.Graph) -> None:
    """Give nodes that were inserted later the phase of the node before them."""
    phase = 0
    for node in graph.nodes:
        phase = node.meta.setdefault("phase", phase)
