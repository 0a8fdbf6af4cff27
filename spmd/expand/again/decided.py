"""Whether the numbers of a call decide as those did that a program was made for: a quick question to each call.

    decided = Decided(captured, ["lr"], state)
    decided.alike([0.1], blocks)
"""

from __future__ import annotations

from operator import is_
from typing import Any

from spmd import _torch
from spmd.expand.again.results import picker
from spmd.expand.captured import Captured
from spmd.expand.kept_numbers import hold_one_number, items, numbers_in
from spmd.expand.state import Tensors


class Decided:
    """What a program takes for granted about numbers: those that a call is given, and those in tensors of the state."""

    def __init__(self, captured: Captured, paths: list[str], state: Tensors) -> None:
        """paths: of the numbers that a call is given. state: the tensors of which `alike` gets the blocks."""
        self._captured, self._paths, self._state = captured, paths, state
        places = {slot: i for i, slot in enumerate(state)}
        self._equal = [picker([places[slot] for slot in several]) for several in captured.equal.values()]
        self._asks, self._slots = captured.decides, captured.deciding
        self._last: list[float] | None = None
        conditions = _torch.Conditions.of(captured.symbols).at(captured.sizes)
        at = {name: i for i, name in enumerate([*paths, *self._slots])}
        names = list(conditions.names.values())
        is_more_asked = captured.fixed or captured.environment or captured.assumed.ask_arguments
        self._is_plain = not is_more_asked and at.keys() >= set(names)
        self._holds = conditions.hold
        self._in_tensors = picker([places[slot] for slot in self._slots.values()])
        self._in_order = picker([at[name] for name in names if name in at])

    def alike(self, numbers: list[float], blocks: list[Any]) -> bool:
        """Whether the program is right for these, and for what tensors of the state hold. Their blocks are looked at as
        they are: a view that had to be copied is not brought up to date, for which it would send."""
        if not all([hold_one_number(several(blocks)) for several in self._equal]):
            return False
        return not self._asks or self._decide_alike(numbers, blocks)

    def _decide_alike(self, numbers: list[float], blocks: list[Any]) -> bool:
        if self._last is not None and all(map(is_, numbers, self._last)):
            return True
        if self._is_plain:
            alike = self._holds(self._in_order([*numbers, *items(self._in_tensors(blocks))]))
        else:
            known = dict(zip(self._paths, numbers, strict=True)) | numbers_in(self._state, self._slots.values())
            alike = self._captured.decides_alike(known)
        if alike and not self._slots and not self._captured.environment:  # the numbers alone decide
            self._last = numbers.copy()
        return alike
