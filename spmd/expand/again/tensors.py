"""Whether the tensors of a state are as they were: placements, flags, views, hooks, attributes and gradients."""

from __future__ import annotations

from collections.abc import Callable
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
        self._flags = _noted((_flag, flagged), (_hooks, self._trained), (_later_hooks, self._trained))
        self._places = _noted((_spec, self.all), (_memory, self.all))
        self._modules = [t for slot, t in self.slots.items() if slot.kind in ("parameter", "buffer")]
        self._lengths = self._lengths_now()
        self._shared = [i for i, t in enumerate(self.all) if t._memory is not None]
        self._gradients = [_expected(tensors, path, p, bound) for path, p in self.parameters.items()]
        self._any_gradients = all(each is ANY for each in self._gradients)
        self._note_attributes()

    def _note_attributes(self) -> None:
        """Note that the attributes are right as they are now: as long as nobody sets one, the blocks are these."""
        self._dicts = list(map(vars, self.all))
        self._unwritten = _torch.Unwritten(self._dicts)
        self.known_blocks = list(map(_block, self.all))

    def _lengths_now(self) -> list[int]:
        """How many attributes tensors of modules have, which users may give some."""
        return list(map(len, map(vars, self._modules)))

    def are_as_before(self) -> bool:
        """Whether the tensors have the placements, flags, views, hooks and attributes that they had."""
        with _torch.without_torch_function():  # a third of the time
            are_unwritten = all(map(is_, map(vars, self.all), self._dicts)) and self._unwritten.are_so()
            return _are_same(self._flags) and (are_unwritten or self._are_same_though_written())

    def _are_same_though_written(self) -> bool:
        try:
            same = _are_same(self._places) and self._lengths_now() == self._lengths
        except AttributeError:  # one is no DTensor any more
            return False
        if not same or any([self.all[i]._copy is not None for i in self._shared]):
            return False
        self._note_attributes()
        return True

    def blocks(self) -> list[torch.Tensor]:
        """This rank's blocks, up to date, where the tensors are as before."""
        if not self._shared:
            return self.known_blocks
        found = self.known_blocks.copy()
        for i in self._shared:
            found[i] = self.all[i]._current_block
        return found

    def present_gradients(self) -> list[Any]:
        """The gradients that are there."""
        return [g for g in map(_grad, self._trained) if g is not None]

    def gradients(self) -> list[Any] | None:
        """The gradients that are there, by parameter, if the program is right for them; none where it is for any."""
        if self._any_gradients:
            return []
        with _torch.without_torch_function():
            found = list(map(_grad, self._trained))
        return found if all(map(_is_expected, found, self._gradients)) else None


Noted = list[tuple[Callable[[torch.Tensor], Any], list[torch.Tensor], list[Any]]]
"""What is asked of tensors, and what it was."""


def _noted(*asked: tuple[Callable[[torch.Tensor], Any], list[torch.Tensor]]) -> Noted:
    return [(of, each, list(map(of, each))) for of, each in asked]


def _are_same(asked: Noted) -> bool:
    return all([all(map(is_, map(of, each), found)) for of, each, found in asked])


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
