"""Numbers that the state keeps in tensors of one element on the CPU: counts of steps, learning rates, flags.

    optimizer.step[weight], optimizer.step[bias]      one number, as long as both are equal

Their values are known before a program runs. So a step may decide by them, as RAdam does by the count of its steps: the
program then is right for the values that decide alike, and those that it depends on are read at each call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch

from spmd.expand.state import Slot, Tensors
from spmd.mesh import per_rank

KINDS = ("optimizer", "hyper", "buffer")
Kept = dict[str, tuple[Slot, ...]]
"""For each number the tensors that hold it."""


class Apart:
    """Which tensors are not one number, though they may hold equal ones now: those that an earlier call found to differ
    where a program took them for one. So a step whose counts go ways of their own is not captured again and again.
    """

    def __init__(self) -> None:
        self._parts: dict[Slot, int] = {}
        self._many = 0

    def note(self, several: Sequence[Slot], numbers: Mapping[str, float]) -> None:
        """Tensors that were one number have these now. numbers: by the name of the tensor."""
        now = {slot: (self.of(slot), numbers[str(slot)]) for slot in several}
        parts: dict[tuple[int, float], int] = {}
        for kind in dict.fromkeys(now.values()):
            is_new = kind[0] in parts.values()
            self._many += is_new
            parts[kind] = self._many if is_new else kind[0]
        self._parts |= {slot: parts[kind] for slot, kind in now.items()}

    def of(self, slot: Slot) -> int:
        """Equal for tensors that may be one number."""
        return self._parts.get(slot, 0)


def kept_numbers(tensors: Tensors, apart: Apart | None = None) -> tuple[Kept, dict[str, float]]:
    """The numbers that the state keeps, by name, and their values. Equal ones of an optimiser are one number.

    apart: those that are not. Of infinity and NaN nothing can be said in advance.
    """
    apart = apart or Apart()
    slots = [slot for slot, t in tensors.items() if _is_number(slot, t)]
    kept: dict[str, list[Slot]] = {}
    value: dict[str, float] = {}
    for slot, number in zip(slots, _read([tensors[slot] for slot in slots]), strict=True):
        if not math.isfinite(number):
            continue
        of = f"{slot.owner}.{slot.key} {apart.of(slot)} {tensors[slot].dtype} {number!r}"
        alike = of if slot.kind == "optimizer" else str(slot)
        name = str(kept[alike][0]) if alike in kept else str(slot)
        kept.setdefault(alike, []).append(slot)
        value[name] = number
    return {str(several[0]): tuple(several) for several in kept.values()}, value


def parted(several: Sequence[Slot], numbers: Mapping[str, float]) -> str:
    """Where tensors that held one number hold two now, as a sentence; empty if not. numbers: by the name of the tensor.
    """
    read = [numbers[str(slot)] for slot in several]
    if are_one(read):
        return ""
    i = next(i for i, number in enumerate(read) if not are_one([read[0], number]))
    return f"{several[0]} is {read[0]!r} and {several[i]} is {read[i]!r}; they were equal, and one number"


def are_one(numbers: Sequence[float]) -> bool:
    """Whether all of these numbers are one.

    >>> are_one([1.0, 1.0]), are_one([1.0, 2.0]), are_one([0.0, -0.0])
    (True, False, False)
    """
    alike = set(numbers)
    return len(alike) < 2 and (0 not in alike or len(set(map(repr, numbers))) == 1)


@per_rank
def hold_one_number(blocks: Iterable[torch.Tensor]) -> bool:
    """Whether all of these blocks hold one number."""
    return are_one(list(map(torch.Tensor.item, blocks)))  # of most of the state: 0.2 us each


@per_rank
def items(blocks: Iterable[torch.Tensor]) -> list[float]:
    """The numbers that these blocks hold, one each."""
    return list(map(torch.Tensor.item, blocks))


def numbers_in(tensors: Tensors, slots: Iterable[Slot] | None = None) -> dict[str, float]:
    """The numbers that these tensors of the state hold, by name: of all that hold one, or of these slots."""
    asked = list(slots) if slots is not None else [slot for slot, t in tensors.items() if _is_number(slot, t)]
    read = _read([tensors[slot] for slot in asked]) if asked else ()
    return {str(slot): number for slot, number in zip(asked, read, strict=True)}


def _is_number(slot: Slot, t: torch.Tensor) -> bool:
    return slot.kind in KINDS and not t.ndim and t.device.type == "cpu" and not t.is_complex()


def _read(tensors: list[torch.Tensor]) -> list[float]:
    return _items(_blocks(tensors))


def _blocks(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    # As they are: to bring a view that had to be copied up to date would send.
    return [getattr(t, "_local_tensor", t) for t in tensors]


@per_rank
def _items(blocks: list[torch.Tensor]) -> list[float]:
    return [x.detach().item() for x in blocks]  # some are none yet, but say how they are made
