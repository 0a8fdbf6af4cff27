"""Whether the tensors of a state are as they were: placements, flags, views, hooks, attributes and gradients."""

from __future__ import annotations

from operator import attrgetter, is_
from typing import Any

import torch

from spmd import _torch
from spmd.expand.bound_program import BoundProgram
from spmd.expand.state import Slot, Tensors
from spmd.tensor.spec import spec_of_value

_spec, _memory, _block = attrgetter("_spec"), attrgetter("_memory"), attrgetter("_local_tensor")
_flag, _grad = attrgetter("requires_grad"), attrgetter("grad")
_hooks, _later_hooks = attrgetter("_backward_hooks"), attrgetter("_post_accumulate_grad_hooks")

ANY = object()
"""Of a gradient: whether and where it is makes no difference."""


class Kept:
    """The tensors of a state, and what is asked of them at each call."""

    def __init__(self, tensors: Tensors, bound: BoundProgram) -> None:
        self.slots = {slot: t for slot, t in tensors.items() if slot.kind != "grad"}
        self.all = list(self.slots.values())
        self.parameters = {slot.path: t for slot, t in self.slots.items() if slot.kind == "parameter"}
        self._trained = list(self.parameters.values())
        flagged = [t for slot, t in self.slots.items() if slot.kind != "optimizer"]  # no gradient gets to its state
        self._asked = [(of, each, list(map(of, each))) for of, each in (
            (_spec, self.all), (_flag, flagged), (_memory, self.all), (_hooks, self._trained),
            (_later_hooks, self._trained),
        )]  # fmt: skip
        self._dicts = [vars(t) for slot, t in self.slots.items() if slot.kind in ("parameter", "buffer")]
        self._lengths = list(map(len, self._dicts))
        self._shared = [i for i, t in enumerate(self.all) if t._memory is not None]
        self._gradients = [_expected(tensors, path, p, bound) for path, p in self.parameters.items()]
        self._any_gradients = all(each is ANY for each in self._gradients)

    def are_as_before(self) -> bool:
        """Whether the tensors have the placements, flags, views, hooks and attributes that they had."""
        try:
            with _torch.without_torch_function():  # a third of the time
                same = all([all(map(is_, map(of, each), found)) for of, each, found in self._asked])
        except AttributeError:  # one is no DTensor any more
            return False
        same = same and list(map(len, self._dicts)) == self._lengths
        return same and all(self.all[i]._copy is None for i in self._shared)

    def blocks(self) -> list[torch.Tensor]:
        """This rank's blocks, up to date."""
        found = list(map(_block, self.all))
        for i in self._shared:
            found[i] = self.all[i]._current_block
        return found

    def gradients(self) -> list[Any] | None:
        """The gradients that are there, by parameter, if the program is right for them."""
        with _torch.without_torch_function():
            found = list(map(_grad, self._trained))
        if not self._any_gradients and not all(map(_is_expected, found, self._gradients)):
            return None
        return found


def are_in_place(tensors: Tensors) -> bool:
    """Whether all of them are DTensors that show their own memory."""
    return all(spec_of_value(t) is not None and t._copy is None for t in tensors.values())


def _expected(tensors: Tensors, path: str, p: torch.Tensor, bound: BoundProgram) -> Any:
    """The spec of the gradient of a parameter, None for none, or ANY."""
    slot = Slot("grad", path)
    if bound.captured.ignores_gradients and p.requires_grad and slot not in bound.read:
        return ANY
    return tensors[slot]._spec if slot in tensors else None


def _is_expected(gradient: Any, expected: Any) -> bool:
    if expected is ANY or gradient is None or expected is None:
        return expected is ANY or gradient is expected
    return spec_of_value(gradient) is expected and gradient._copy is None and not gradient.requires_grad
