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

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from spmd import _torch
from spmd.tensor import explicit
from spmd.tensor.hot import Memory, memory_of
from spmd.tensor.redistribute.plan import Plan, plan


@dataclass(eq=False)
class Copy:
    """What views of a tensor, their base, show.

    memory: the copy, `block` as `plan` moves it; of a view that sets a bit, read so (`bit`).
    block: the base's local tensor. below: what that shows, if it is a copy itself.
    shared: the writes to all this memory; `seen` of them when the copy was last like its base.
    """

    memory: torch.Tensor
    plan: Plan
    bit: _torch.OpOverload | None
    block: torch.Tensor
    below: Copy | None
    shared: Memory
    seen: int

    @classmethod
    def of(cls, base, memory: torch.Tensor, plan: Plan, bit: _torch.OpOverload | None = None) -> Copy:
        shared = memory_of(base)
        return cls(memory, plan, bit, base._local_tensor, base._copy, shared, shared.writes)

    def refresh(self) -> None:
        """Make the copy like its base, if that was written since."""
        if self.seen == self.shared.writes:
            return
        explicit.check("reading a view of what was written since", [("x", self.plan)])
        if self.below is not None:
            self.below.refresh()
        self.memory.copy_(self._read(self.plan.run(self.block)))
        self.seen = self.shared.writes

    def deliver(self) -> None:
        """Make the base like the copy, which was written; and what the base shows, in its turn."""
        self.block.copy_(plan(self.plan.dst, self.plan.src).run(self._read(self.memory)))
        if self.below is not None:
            self.below.deliver()
        self.seen = self.shared.writes

    def _read(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.bit is None else self.bit(x)


def laid_out(x: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """x with its dims in memory in the order that these strides have; x itself if they are so already."""
    order = sorted(range(x.ndim), key=lambda d: (-stride[d], d))
    return x.permute(order).contiguous().permute([order.index(d) for d in range(x.ndim)])


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
