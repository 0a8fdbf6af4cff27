"""Writes into blocks that the user holds: `to_local()` gives the block itself, and spmd does not see a write into it.

    x = f32[4@dp]; v = x[1:]       v is a copy (`view_copies`)
    x.to_local().mul_(2); v        RuntimeError: v would show old values
    v.to_local().mul_(2); x        RuntimeError: x would show old values

torch counts the writes into a tensor, in its version. `UserWrites` adds up what was counted since blocks were handed
out. Where copies and their base could part, reading the other one is an error. To gather again, or to write back,
would need all ranks, and one rank alone may have written.

Left out: blocks made in inference mode, in which torch counts no writes.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch


class UserWrites:
    """How often the user wrote into the blocks of one memory that were handed out."""

    __slots__ = ("__weakref__", "_ended", "_held")

    def __init__(self):
        self._ended = 0
        self._held: dict[int, tuple[torch.Tensor, int]] = {}

    def watch(self, block: torch.Tensor) -> None:
        """Count writes into this block, and into views of it, from now on."""
        if id(block) in self._held:
            return
        counter = block.detach()  # has the version of the block, and outlives it
        self._held[id(block)] = counter, version_of(counter)
        weakref.finalize(block, self._end, id(block)).atexit = False

    def _end(self, key: int) -> None:
        counter, before = self._held.pop(key)
        self._ended += version_of(counter) - before

    @property
    def count(self) -> int:
        """The number of writes so far."""
        return self._ended + sum([version_of(counter) - before for counter, before in self._held.values()])

    @property
    def may_grow(self) -> bool:
        """Whether somebody still holds a block."""
        return bool(self._held)


def version_of(block: torch.Tensor | None) -> int:
    """How often the tensor was written, by code that is not below autograd; 0 where that is not known."""
    return 0 if block is None or block.is_inference() else block._version


copies_alive: set[int] = set()
"""The ids of all copies (`view_copies.ViewCopy`). While there are none, no tensor has to be asked for one."""


def note_alive(copy: Any) -> None:
    """Note a new copy."""
    copies_alive.add(id(copy))
    weakref.finalize(copy, copies_alive.discard, id(copy)).atexit = False


copies_held: dict[int, Any] = {}
"""The copies (`view_copies.ViewCopy`) that the user may write, or has written, by id."""


def any_copy_held() -> bool:
    """Whether there are such copies still. Those are forgotten whose base is gone, or that nobody wrote, or can."""
    for key, copy in list(copies_held.items()):
        if copy.root() is None or not (copy.user.may_grow or copy.lost_writes()):
            copies_held.pop(key, None)
    return bool(copies_held)
