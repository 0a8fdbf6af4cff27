"""Views that had to be copied, and show their base all the same.

    x = f32[4@dp]; v = x[1:]       v = f32[3], a view of x gathered: a copy, on every rank
    v.mul_(2)                      the copy is written, and x from the copy, each rank its block
    x.add_(1); v                   the copy is gathered anew before it is read

A `Copy` is the memory that such views show: what was gathered, whole. All views of one gathering share it, views of
these views too. Whether it is up to date is counted in the `Memory` that a tensor shares with all its views.

A gather at every write, and one at the first read after a write of the base, are what it costs. Redistribute the base
so that the dim is whole, where that is too much.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from spmd import _torch
from spmd.tensor import explicit
from spmd.tensor.hot import memory_of
from spmd.tensor.redistribute.plan import Plan, plan


@dataclass(eq=False)
class Copy:
    """What views of `base` show.

    memory: the copy, this rank's block of the base as `plan` moves it; of a view that sets a bit, read so (`bit`).
    seen: how often the base had been written when the copy was last like it.
    """

    base: Any
    memory: torch.Tensor
    plan: Plan
    bit: _torch.OpOverload | None
    seen: int

    @classmethod
    def of(cls, base, memory: torch.Tensor, plan: Plan, bit: _torch.OpOverload | None = None) -> Copy:
        return cls(base, memory, plan, bit, memory_of(base).writes)

    def refresh(self) -> None:
        """Make the copy like its base, if that was written since."""
        writes = self.base._memory.writes
        if self.seen != writes:
            explicit.check("reading a view of what was written since", [("x", self.plan)])
            self.memory.copy_(self._read(self.plan.run(block(self.base))))
            self.seen = writes

    def deliver(self) -> None:
        """Make the base like the copy, which was written; and what the base shows, in its turn."""
        self.base._local_tensor.copy_(plan(self.plan.dst, self.plan.src).run(self._read(self.memory)))
        if self.base._copy is not None:
            self.base._copy.deliver()
        self.seen = self.base._memory.writes

    def _read(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.bit is None else self.bit(x)


def block(x) -> torch.Tensor:
    """The local tensor of a DTensor, up to date; if it is a copy of what was written, all ranks must ask."""
    if x._copy is not None:
        x._copy.refresh()
    return x._local_tensor


def written(x) -> None:
    """Note that the local tensor of x was written: its other views are to see it."""
    if x._memory is not None:
        x._memory.writes += 1
    if x._copy is not None:
        x._copy.deliver()
