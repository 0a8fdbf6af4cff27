"""Views that had to be copied, and still behave as views of their base.

    x = f32[4@dp]; v = x[1:]       v = f32[3], a view of the gathered x: a copy, on every rank
    v.mul_(2)                      the copy is written; then each rank writes its block of x from the copy
    x.add_(1); v                   the copy is gathered again before it is read

A `ViewCopy` is the memory of such views: the gathered base. All views made from one gather share it, and so do the
views of these views. Every tensor shares a `Memory` with all its views. It counts the writes; so a copy knows whether
it is up to date.

The cost is a gather at every write, and one at the first read after a write of the base. Where that is too much,
redistribute the base so that the dim is replicated.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from spmd import _torch
from spmd.sim import LocalTensor
from spmd.tensor.eager.fast_path import Memory, memory_of
from spmd.tensor.eager.user_writes import UserWrites, copies_held, note_alive, version_of
from spmd.tensor.modes import explicit
from spmd.tensor.redistribute.plan import Plan, plan

aten = torch.ops.aten

BITS = {aten._conj.default, aten._neg_view.default}
"""Views that only set a bit. The bit says how to read the memory."""


@dataclass(eq=False)
class ViewCopy:
    """The copy of a tensor, the base, that views of it show.

    memory: the copy, which is `base_block` moved by `plan`. bit: the op of a view that sets a bit; the copy is read by
    it. base_block: the base's local tensor. base_copy: the copy that the base shows, if the base is such a view itself.
    shared: the memory of base and views, which counts writes. writes_seen: the count when the copy was last up to date.
    user: the user's own writes into blocks of the copy. user_writes_seen: those, and those into the base, at that time.
    root: the tensor that all of them are views of, as long as it lives.
    """

    memory: torch.Tensor
    plan: Plan
    bit: _torch.OpOverload | None
    base_block: torch.Tensor
    base_copy: ViewCopy | None
    shared: Memory
    writes_seen: int
    root: Callable[[], Any]
    user: UserWrites = field(default_factory=UserWrites)
    user_writes_seen: tuple[int, int] = (0, 0)

    @classmethod
    def of(cls, base, memory: torch.Tensor, plan: Plan, bit: _torch.OpOverload | None = None) -> ViewCopy:
        shared = memory_of(base)
        root = weakref.ref(base._base if base._is_view() else base)
        return cls(memory, plan, bit, base._local_tensor, base._copy, shared, shared.writes, root)

    def __post_init__(self):
        note_alive(self)
        self.user_writes_seen = self._user_writes()

    def _user_writes(self) -> tuple[int, int]:
        """The user's own writes into the copy, and into the base."""
        blocks = version_of(self.shared.block) + version_of(self.base_block)  # the user may have had them before
        return self.user.count, blocks + (self.shared.user.count if self.shared.user is not None else 0)

    def lost_writes(self) -> bool:
        """Whether the user wrote into a block of the copy, and nobody into the base."""
        return self.user.count != self.user_writes_seen[0]

    def refresh(self) -> None:
        """Copy from the base, if it was written since. RuntimeError where the user wrote, and one rank alone knows."""
        if self.writes_seen == self.shared.writes:
            if self._user_writes()[1] != self.user_writes_seen[1]:
                raise _written_behind("it is a view of")
            return
        if self.lost_writes():
            raise _written_behind("is a view of it")
        explicit.check("reading a view of what was written since", [("x", self.plan)])
        if self.base_copy is not None:
            self.base_copy.refresh()
        self.memory.copy_(self._read(self.plan.run(self.base_block)))
        self.writes_seen, self.user_writes_seen = self.shared.writes, self._user_writes()

    def write_back(self) -> None:
        """Copy to the base, because the copy was written; and from there to the base of the base."""
        self.base_block.copy_(plan(self.plan.dst, self.plan.src).run(self._read(self.memory)))
        if self.base_copy is not None:
            self.base_copy.write_back()
        self.writes_seen, self.user_writes_seen = self.shared.writes, self._user_writes()

    def _read(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.bit is None else self.bit(x)

    # A copy of base and views together is a base and views, and so is what is loaded of both: all share one ViewCopy.
    def __deepcopy__(self, memo: dict[int, Any]) -> ViewCopy:
        memory, base_block = (copied_block(x, memo) for x in (self.memory, self.base_block))
        base_copy, shared = copy.deepcopy((self.base_copy, self.shared), memo)
        return ViewCopy(memory, self.plan, self.bit, base_block, base_copy, shared, self.writes_seen, _unknown)

    def __getstate__(self) -> dict[str, Any]:
        bit = None if self.bit is None else str(self.bit)
        kept = {name: x for name, x in vars(self).items() if name not in ("root", "user", "user_writes_seen")}
        return kept | {"plan": (self.plan.src, self.plan.dst), "bit": bit}

    def __setstate__(self, state: dict[str, Any]) -> None:
        bit = {str(op): op for op in BITS}.get(state["bit"])
        vars(self).update(state | {"plan": plan(*state["plan"]), "bit": bit, "root": _unknown, "user": UserWrites()})
        note_alive(self)
        self.user_writes_seen = self._user_writes()


def _unknown() -> bool:
    """For the `root` of a copy that was copied or loaded: somebody may hold the base."""
    return True


def in_stride_order(x: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """x with its dims in memory in the order of these strides; x itself if they are in that order already."""
    order = sorted(range(x.ndim), key=lambda d: (-stride[d], d))
    return x.permute(order).contiguous().permute([order.index(d) for d in range(x.ndim)])


def copied_block(x: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """A copy of a local tensor. Copies with one memo share memory where the local tensors do."""
    return copy.deepcopy(x, memo) if type(x) in (torch.Tensor, LocalTensor) else x.clone()


def block(x) -> torch.Tensor:
    """The local tensor of a DTensor, up to date. If x shows a copy, all ranks must ask."""
    if copies_held and x._memory is not None:
        _check_copies(x)
    if x._copy is not None:
        x._copy.refresh()
    return x._local_tensor


def handed_out(x, *, to_compiled_code: bool = False) -> torch.Tensor:
    """The local tensor of a DTensor, up to date, for somebody who may write into it without a word.

    Compiled code is the same on all ranks, so it is taken to write, and copies are gathered again. What a user writes
    is counted (`user_writes`).
    """
    local = block(x)
    memory = x._memory
    if memory is None or _torch.is_tracing(local):
        return local
    if x._copy is not None:
        x._copy.user.watch(local)
        copies_held[id(x._copy)] = x._copy
    elif to_compiled_code:
        memory.writes += 1
    else:
        memory.user = memory.user or UserWrites()
        memory.user.watch(local)
    return local


def _check_copies(x) -> None:
    """RuntimeError if the user wrote into a copy of the memory of x."""
    for held in list(copies_held.values()):
        if held.root() is not None and held.shared is x._memory and held is not x._copy and held.lost_writes():
            raise _written_behind("is a view of it")


def _written_behind(what: str) -> RuntimeError:
    return RuntimeError(
        f"read of a tensor, when the block of another that {what} was written through to_local(), or by code that "
        "torch.compile made: such a view is a copy where it cuts across shards, and the write did not reach this one. "
        "Write into the DTensor itself, or redistribute so that the dim of the view is replicated."
    )


def note_write(x) -> None:
    """Note that the local tensor of x was written, so that its other views show the write."""
    if x._memory is not None:
        x._memory.writes += 1
    if x._copy is not None:
        x._copy.write_back()
