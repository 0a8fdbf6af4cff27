"""Moves: the closed set of steps that change the layout of a tensor on the mesh.

    Slice          each rank keeps a smaller box of its block; nothing is sent
    View           the same block, seen with its dims split or joined; nothing is sent
    ToPartial      one rank keeps the tensor, or its block, the others hold the reduction's identity; nothing is sent
    Scale          a sum to an average and back; nothing is sent
    AllGather      shards of the axes to replicated
    AllToAll       shards of the axes to shards of the same axes of other dims
    Permute        the same blocks on other ranks: each rank sends its block to at most one other
    Exchange       any blocks to any blocks
    ReduceScatter  partial on the axes to any blocks inside the block of each rank
    AllReduce      partial on the axes to replicated
    ReduceInOrder  as ReduceScatter, but the terms are added in the order of the ranks; only where that is asked for
    Halo           each rank gets rows around its block as well; only for an op whose recipe asks for them
    HaloSum        and the other way: it adds what others have for the rows of its block

This module has the base and the moves that send nothing; `collective_moves.py` has those that send, `halo.py` the halo.

A move goes over one axis, or over several that form one group. It is a value. The specs before and after it (`Step`)
say where it leads from and to, and these decide all of it: the block of a rank is a box (`boxes.py`), and a rank sends
to another the box that the one has and the other wants. So even, uneven, empty, merged and reordered shards are one
case.

    AllGather((0,))  from  f32[8@dp, 4]  to  f32[8, 4]        each rank receives the blocks of the others

`start` and `finish` are the code of a move: plain calls on a tensor. A DTensor runs them, simulated ranks run them, and
fx records them. All that differs between ranks comes from the coordinate; no size is read from the tensor.

The time of a move is that of its collective, and of the copies that the move makes to pack and to order elements
(`copies`). Copies inside a collective are in the collective's own price.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, NamedTuple

import numpy as np
import torch

from spmd.comm import Transport
from spmd.comm.chunk import Packed, Side, Unit
from spmd.mesh import DeviceMesh, MeshTopoInfo, cost
from spmd.tensor.redistribute.boxes import Box, cut_one, intervals, overlap, relative_to, volume
from spmd.tensor.spec import Spec

Coordinate = tuple[int, ...]


class MoveContext(NamedTuple):
    """All that the code of a move reads: the specs before and after it, this rank's coordinate and its transport."""

    before: Spec
    after: Spec
    coordinate: Coordinate
    transport: Transport

    def group(self, axes: tuple[int, ...]) -> str:
        return self.transport.group(self.before.mesh, axes)

    def shape_before(self) -> tuple[int, ...]:
        return self.before.local_shape(self.coordinate)

    def shape_after(self) -> tuple[int, ...]:
        return self.after.local_shape(self.coordinate)


class Copied(NamedTuple):
    """How much a rank copies: `packed` elements once, to send them; `joined` elements `times` times, to order them."""

    packed: int = 0
    joined: int = 0
    times: int = 0

    def in_bytes(self, itemsize: int) -> Copied:
        """The same in bytes, with elements of this size."""
        return Copied(self.packed * itemsize, self.joined * itemsize, self.times)


class Parts(NamedTuple):
    """Microseconds of a move: of its collective, of the copies before it, and of those behind it."""

    sent: float
    packed: float = 0.0
    joined: float = 0.0


def _copy_us(nbytes: int, topology: MeshTopoInfo) -> float:
    return cost.copy_cost(nbytes, topology) if nbytes else 0.0


@dataclass(frozen=True)
class Move:
    """One step over a group of axes; the base of all moves."""

    axes: tuple[int, ...]

    kind: ClassVar[str]
    sends: ClassVar[bool] = True
    keeps_tensor: ClassVar[bool] = True
    """Whether the spec after the move says all about it: it has the tensor as before, laid out in another way."""
    priced: ClassVar[Callable[[float, tuple[int, ...], MeshTopoInfo], float]]
    """The price of the collective, by the bytes of all ranks of a group together."""

    def nbytes(self, before: Spec, after: Spec) -> int:
        """Bytes of the tensor that one rank hands to the collective (the largest rank's)."""
        return before.local_nbytes

    def received(self, before: Spec, after: Spec) -> np.ndarray | int:
        """Bytes that each rank receives from others, as an array that broadcasts to the shape of the mesh."""
        return 0

    def peak(self, before: Spec, after: Spec) -> int:
        """Bytes of memory that the busiest rank needs: its block before and after the move, and its packed elements."""
        return before.local_nbytes + after.local_nbytes

    @staticmethod
    def copies(have: Sequence[Box], want: Sequence[Box]) -> Copied:
        """How much the first rank of a group, which has the largest block, copies outside of the collective.

        have, want: the boxes of the group's ranks before and after the move.
        """
        return Copied()

    def cost(self, before: Spec, after: Spec, topology: MeshTopoInfo) -> float:
        """Modelled microseconds of the move over these links, copies included."""
        return sum(self.parts(before, after, topology))

    def parts(self, before: Spec, after: Spec, topology: MeshTopoInfo) -> Parts:
        """The modelled microseconds of the parts of the move over these links."""
        most, copied = int(np.max(self.received(before, after))), Copied()
        if cost.copies_are_priced(topology):
            first = (0,) * before.mesh.ndim
            copied = self.copies(*(members(spec, self.axes, first) for spec in (before, after)))
        return self.parts_of(most, copied.in_bytes(before.dtype.itemsize), topology)

    def us(self, received: float, copied: Copied, topology: MeshTopoInfo) -> float:
        """Modelled microseconds, if the busiest rank receives and copies so many bytes."""
        return sum(self.parts_of(received, copied, topology))

    def parts_of(self, received: float, copied: Copied, topology: MeshTopoInfo) -> Parts:
        """As `us`, part by part."""
        sent = self.collective_us(received, topology) if self.sends else 0.0
        return Parts(sent, _copy_us(copied.packed, topology), copied.times * _copy_us(copied.joined, topology))

    def collective_us(self, received: float, topology: MeshTopoInfo) -> float:
        """Modelled microseconds of the collective alone, if the busiest rank receives so many bytes."""
        return self.priced(group_bytes(received, self.axes, topology), self.axes, topology)

    def start(self, x, ctx: MoveContext):
        """Launch the move on this rank's block. The result may still be in flight."""
        raise NotImplementedError

    def finish(self, y, ctx: MoveContext):
        """Wait for the result of `start`, and return the block after the move."""
        return y

    def show(self, before: Spec, after: Spec) -> str:
        """The move as text: its axes by name, and the dims that it gathers or shards."""
        names = ",".join(map(before.mesh.axis_name, self.axes))
        return f"{self.kind}({', '.join([names, *self._details(before, after)])})"

    def _details(self, before: Spec, after: Spec) -> list[str]:
        return []


# ---- groups and sizes -------------------------------------------------------------------------


@functools.lru_cache(maxsize=16384)
def members(spec: Spec, axes: tuple[int, ...], coordinate: Coordinate) -> tuple[Box, ...]:
    """The boxes of the ranks, in order, that form a group along the axes with the rank at the coordinate."""
    return tuple(spec.box(at) for at in coordinates(spec.mesh, axes, coordinate))


@functools.lru_cache(maxsize=16384)
def coordinates(mesh: DeviceMesh, axes: tuple[int, ...], coordinate: Coordinate) -> tuple[Coordinate, ...]:
    """The coordinates of the ranks, in order, that form a group along the axes with the rank at the coordinate."""
    return tuple(itertools.product(*(range(n) if a in axes else (coordinate[a],) for a, n in enumerate(mesh.shape))))


def in_rows(axes: tuple[int, ...], dims: Sequence[tuple[int, ...]], units: Sequence[Unit]) -> bool:
    """Whether the blocks of a group along the axes are consecutive rows, in the order in which they arrive."""
    return not isinstance(units[0], Packed) and tuple(a for a in dims[0] if a in axes) == axes


def group_size(axes: Sequence[int], spec: Spec) -> int:
    """How many ranks a group along the axes has."""
    return prod(spec.mesh.shape[a] for a in axes)


def group_bytes(received: float, axes: Sequence[int], topology: MeshTopoInfo) -> float:
    """The bytes of all ranks of a group together, given the bytes that one receives from the others."""
    n = prod([topology.sizes[a] for a in axes])
    return received * n / (n - 1)


def dims_text(axes: Sequence[int], spec: Spec) -> str:
    """The dims that the axes shard, as text."""
    return "/".join(str(d) for d, sharding in enumerate(spec.dims) if set(sharding) & set(axes))


# ---- nothing is sent --------------------------------------------------------------------------


@dataclass(frozen=True)
class Slice(Move):
    """Each rank keeps a smaller box. It is a copy, so that a write to it does not reach the old block."""

    kind = "slice"
    sends = False
    copies = staticmethod(lambda have, want: Copied(0, volume(want[0]), 1))

    def start(self, x, ctx):
        if not prod(ctx.shape_after()):
            return x.new_zeros(ctx.shape_after())
        have = ctx.before.box(ctx.coordinate)
        want = relative_to(overlap(have, ctx.after.box(ctx.coordinate)), have)
        return cut_one(x, ctx.shape_before(), want)

    def _details(self, before, after):
        return [dims_text(self.axes, after)]


@dataclass(frozen=True)
class View(Move):
    """The tensor seen with another shape, over no axes. A strided block of the one shape may be a box of the other."""

    kind = "view"
    sends = False

    def peak(self, before, after):
        return before.local_nbytes

    def start(self, x, ctx):
        return x.reshape(ctx.shape_after())

    def show(self, before, after):
        return f"view({', '.join(map(str, after.shape))})"


@dataclass(frozen=True)
class ToPartial(Move):
    """The axes become Partial: one rank of an axis keeps an element, or all do if that does not change the result."""

    reduce_op: str = "sum"
    kind = "to_partial"
    sends = False
    copies = staticmethod(lambda have, want: Copied(0, volume(want[0]), 1))

    def start(self, x, ctx):
        identity = _identity(self.reduce_op, ctx.before.dtype)
        padded = [a for a in self.axes if ctx.before.on(a).is_shard()]
        if self.reduce_op == "avg" and padded:
            x = x * prod(ctx.before.mesh.shape[a] for a in padded)
        if self._contributes_identity(ctx):
            x = torch.full_like(x, identity, memory_format=torch.contiguous_format)
        if not padded:
            return x.clone(memory_format=torch.contiguous_format)
        mine = relative_to(ctx.before.box(ctx.coordinate), ctx.after.box(ctx.coordinate))
        shape = list(ctx.shape_before())
        for dim, (side, size) in enumerate(zip(mine, ctx.shape_after(), strict=True)):
            x = _spread(x, shape, dim, side, size, identity)
            shape[dim] = size
        return x

    def _contributes_identity(self, ctx: MoveContext) -> bool:
        """Whether another rank, with the same block, keeps the elements: added twice they would change a sum."""
        if self.reduce_op not in ("sum", "product"):
            return False
        return any(ctx.coordinate[a] for a in self.axes if ctx.before.on(a).is_replicate())

    def _details(self, before, after):
        return [repr(self.reduce_op)]


def _spread(x, shape: list[int], dim: int, side: Side, size: int, fill: float | int | bool):
    """The tensor x, of this shape, at these indices of a dim of `size`, and `fill` in all other places."""
    pieces, at, edge = [], 0, 0
    for start, stop in intervals(side):
        pieces += [x.new_full((*shape[:dim], start - edge, *shape[dim + 1 :]), fill), x.narrow(dim, at, stop - start)]
        at, edge = at + stop - start, stop
    return torch.cat([*pieces, x.new_full((*shape[:dim], size - edge, *shape[dim + 1 :]), fill)], dim)


@dataclass(frozen=True)
class Scale(Move):
    """Partial sums become partial averages on these axes, or the other way."""

    kind = "scale"
    sends = False
    copies = staticmethod(lambda have, want: Copied(0, volume(want[0]), 1))

    def start(self, x, ctx):
        n = prod(ctx.before.mesh.shape[a] for a in self.axes)
        return x * n if ctx.after.on(self.axes[0]).is_partial("avg") else x / n

    def _details(self, before, after):
        return [repr(after.on(self.axes[0]).reduce_op)]


def _identity(op: str, dtype: torch.dtype) -> float | int | bool:
    """The identity of a reduction: as a term it does not change the result."""
    if op in ("sum", "avg"):
        return 0
    if op == "product":
        return 1
    if dtype is torch.bool:
        return op == "min"
    if not dtype.is_floating_point:
        return torch.iinfo(dtype).min if op == "max" else torch.iinfo(dtype).max
    return float("-inf") if op == "max" else float("inf")
