"""Numbers that the state keeps in tensors of one element on the CPU: counts of steps, learning rates, flags.

    optimizer.step[weight], optimizer.step[bias]      one number, as long as both are equal

Their values are known before a program runs. So a step may decide by them, as RAdam does by the count of its steps: the
program then is right for the values that decide alike, and those that it depends on are read at each call.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from spmd.expand.state import Slot, Tensors
from spmd.mesh import per_rank

KINDS = ("optimizer", "hyper", "buffer")
Kept = dict[str, tuple[Slot, ...]]
"""For each number the tensors that hold it."""


def kept_numbers(tensors: Tensors) -> tuple[Kept, dict[str, float]]:
    """The numbers that the state keeps, by name, and their values. Equal ones of an optimiser are one number.

    Of infinity and NaN nothing can be said in advance.
    """
    slots = [slot for slot, t in tensors.items() if _is_number(slot, t)]
    kept: dict[str, list[Slot]] = {}
    value: dict[str, float] = {}
    for slot, number in zip(slots, _read([tensors[slot] for slot in slots]), strict=True):
        if not math.isfinite(number):
            continue
        alike = f"{slot.owner}.{slot.key} {tensors[slot].dtype} {number!r}" if slot.kind == "optimizer" else str(slot)
        name = str(kept[alike][0]) if alike in kept else str(slot)
        kept.setdefault(alike, []).append(slot)
        value[name] = number
    return {str(several[0]): tuple(several) for several in kept.values()}, value


def are_one(several: Iterable[tuple[Slot, ...]], numbers: Mapping[str, float]) -> bool:
    """Whether the tensors of each of these groups still hold one number. numbers: by the name of the tensor."""
    return all(numbers[str(slot)] == numbers[str(group[0])] for group in several for slot in group[1:])


def numbers_in(tensors: Tensors, slots: Iterable[Slot] | None = None) -> dict[str, float]:
    """The numbers that these tensors of the state hold, by name: of all that hold one, or of these slots."""
    asked = list(slots) if slots is not None else [slot for slot, t in tensors.items() if _is_number(slot, t)]
    read = _read([tensors[slot] for slot in asked]) if asked else ()
    return {str(slot): number for slot, number in zip(asked, read, strict=True)}


def _is_number(slot: Slot, t: torch.Tensor) -> bool:
    return slot.kind in KINDS and not t.ndim and t.device.type == "cpu" and not t.is_complex()


def _read(tensors: list[torch.Tensor]) -> list[float]:
    # As they are: to bring a view that had to be copied up to date would send.
    return _items([getattr(t, "_local_tensor", t) for t in tensors])


@per_rank
def _items(blocks: list[torch.Tensor]) -> list[float]:
    return [x.detach().item() for x in blocks]
