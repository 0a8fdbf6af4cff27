"""Whether a step reads the gradients that earlier steps left.

    optimizer.zero_grad(); loss.backward(); ...      reads none: with or without them, the step is the same

The first call of a training has no gradients, and all others have those of the call before. Where a capture shows that
the step clears every gradient before anything could read it, one program serves all calls.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.optim import Optimizer

from spmd import _torch


@dataclass
class GivenGradients:
    """What has happened to the gradients of parameters that a step was given. fate: by id of the parameter."""

    cleared: set[int] = field(default_factory=set)
    read: bool = False
    clearing: bool = False

    def ignored(self, parameters: Iterable[torch.Tensor]) -> bool:
        """Whether the step has not asked for the gradients of any of these parameters."""
        return not self.read and all(id(p) in self.cleared for p in parameters if p.requires_grad)

    @contextlib.contextmanager
    def watched(self, has_gone_back: Callable[[], bool]) -> Iterator[None]:
        """Inside, in a capture, it is noted who reads `.grad`. has_gone_back: whether a backward pass has begun.

        One thread at a time may be inside.
        """

        def clear(parameters: Iterable[torch.Tensor]) -> None:
            if not has_gone_back():
                self.cleared |= {id(p) for p in parameters}

        def note_read(x: torch.Tensor) -> None:
            self.read |= not self.clearing and id(x) not in self.cleared

        with (
            _torch.gradients_seen(note_read, lambda x: clear([x])),
            self._zero_grad_seen(Optimizer, clear, lambda o: [p for g in o.param_groups for p in g["params"]]),
            self._zero_grad_seen(nn.Module, clear, lambda module: list(module.parameters())),
        ):
            yield

    @contextlib.contextmanager
    def _zero_grad_seen(self, kind: type, clear: Callable, parameters_of: Callable) -> Iterator[None]:
        """Inside, `zero_grad` of the class clears the gradients of its parameters; that it looks at them is no read."""
        real = kind.zero_grad

        @functools.wraps(real)
        def zero_grad(owner, set_to_none: bool = True) -> None:
            if not set_to_none:
                return real(owner, set_to_none)
            self.clearing = True
            try:
                real(owner, set_to_none)
            finally:
                self.clearing = False
            clear(parameters_of(owner))

        kind.zero_grad = zero_grad
        try:
            yield
        finally:
            kind.zero_grad = real
