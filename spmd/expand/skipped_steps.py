"""Steps of optimisers that a GradScaler skips where a gradient is infinite or NaN.

    scaler.step(optimizer)       on one device: if not found_inf: optimizer.step()
                                 in a program:  weight = where(found_inf == 0, new weight, weight)

The program computes the step and then keeps the old values where it is to be skipped; so no rank waits for a value. A
step that makes the optimiser's state makes none if it is skipped: `Captured.outputs` has a slot "skipped" then, and
whoever runs the program reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from spmd import _torch
from spmd.expand.state import Slot, Tensors


class SkippedSteps:
    """The steps of one capture that may be skipped. optimizers: by the name of each. begin: gives one its first state.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer], begin: Callable[[Optimizer], None]) -> None:
        self._begin = begin
        self._names = {id(optimizer): name for name, optimizer in optimizers.items()}
        self.new_state: Tensors = {}
        """For each optimiser whose state such a step made, what is not zero if it was skipped."""

    def run(self, optimizer: Optimizer, skip: torch.Tensor, step: Callable[[], Any]) -> Any:
        """Run the step, and take it back where `skip` is not zero."""
        known = len(_tensors(optimizer))
        self._begin(optimizer)
        before = [(x, _value(x)) for x in _tensors(optimizer)]
        result = step()
        with torch.no_grad():
            for x, old in before:
                x.copy_(torch.where(skip == 0, x, old))
        if len(_tensors(optimizer)) > known:
            self.new_state[Slot("skipped", "", self._names.get(id(optimizer), ""))] = skip
        return result


def _value(x: torch.Tensor) -> torch.Tensor:
    """The value that a traced tensor has now, as another tensor."""
    return _torch.to_functional(_torch.from_functional(x.detach()))


def _tensors(optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters of an optimiser, and the tensors of its state."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    kept = [x for p in parameters for x in optimizer.state.get(p, {}).values()]
    return [*parameters, *(x for x in kept if isinstance(x, torch.Tensor))]


def made_by_skipped(new: Tensors) -> set[str]:
    """The names of the optimisers whose first step was skipped: their state is to stay empty."""
    return {slot.owner for slot, x in new.items() if slot.kind == "skipped" and x.detach().item()}
