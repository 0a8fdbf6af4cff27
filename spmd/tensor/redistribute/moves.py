"""Moves: the closed set of steps that change how a tensor lies on the mesh.

    Slice          a smaller box of what each rank has; nothing is sent
    View           the same block of the same tensor, seen with its dims taken apart or put together; nothing is sent
    ToPartial      one rank keeps the tensor, or its block of it, the others hold what changes nothing; nothing is sent
    Scale          sum to average and back; nothing is sent
    AllGather      shards of the axes to replicated
    AllToAll       shards of the axes to shards of the same axes of other dims
    Permute        the same blocks, held by other ranks: each rank sends its block to at most one other
    Exchange       any blocks to any blocks
    ReduceScatter  partial on the axes to any blocks inside what each rank has
    AllReduce      partial on the axes to replicated
    ReduceInOrder  as ReduceScatter, term by term in the order of the ranks; where that is asked for

A move goes over one axis or over several that form one group. It is a value; where it leads from and to is in the specs
around it (`Step`), and these decide all of it: a rank's block is a box (`boxes.py`), and what a rank sends to another
is what the one has and the other wants. So even, uneven, empty, merged and reordered shards are one case.

`start` and `finish` are a move's code: plain calls on a tensor, so that a DTensor runs them, simulated ranks run them,
and fx writes them down. Whatever differs between ranks comes from the coordinate; no size is read from the tensor.

A move takes as long as its collective and what it copies to pack and to put in order (`copies`); copies that a
collective makes itself are in its own price.

Gathers and reduce-scatters pad blocks that differ in size to the largest; all others send what there is. What the ranks
of a group need not send, because it is empty, none of them sends.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, NamedTuple

import torch

from spmd.comm import Transport, wire
from spmd.mesh import MeshTopoInfo, cost
from spmd.tensor.redistribute.boxes import (
    Box,
    copies_to_cut,
    copies_to_join,
    cut,
    joined,
    joined_padded,
    narrowed,
    overlap,
    shape_of,
    volume,
    within,
)
from spmd.tensor.spec import Spec

Coordinate = tuple[int, ...]
reduced_as = functools.lru_cache(maxsize=256)(wire.reduced_as)


@dataclass(frozen=True)
class At:
    """Where a move runs: the specs before and after it, this rank's coordinate, and its collectives."""

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
    """What a rank copies: elements that it packs once, and elements that it puts in order, so many times."""

    packed: int = 0
    joined: int = 0
    times: int = 0

    def each(self, nbytes: int) -> Copied:
        """The same in bytes, where an element has so many."""
        return Copied(self.packed * nbytes, self.joined * nbytes, self.times)


def _copy_us(nbytes: int, topology: MeshTopoInfo) -> float:
    return cost.copy_cost(nbytes, topology) if nbytes else 0.0


@dataclass(frozen=True)
class Move:
    """One step over the group of some axes; the base of all moves."""

    axes: tuple[int, ...]

    kind: ClassVar[str]
    sends: ClassVar[bool] = True

    def nbytes(self, before: Spec, after: Spec) -> int:
        """Bytes of the tensor that one rank hands to the collective (the largest rank's)."""
        return before.local_nbytes

    def received(self, before: Spec, after: Spec, coordinate: Coordinate) -> int:
        """Bytes that the rank at the coordinate gets from others."""
        return 0

    def peak(self, before: Spec, after: Spec) -> int:
        """Bytes of memory on the rank with most while the move runs: its block before and after, what is packed."""
        return before.local_nbytes + after.local_nbytes

    @staticmethod
    def copies(have: Sequence[Box], want: Sequence[Box]) -> Copied:
        """What a group's first rank, which has the largest block, copies of its own accord: `have` and `want` are the
        boxes of the group's ranks before and after."""
        return Copied()

    def cost(self, before: Spec, after: Spec, topology: MeshTopoInfo) -> float:
        """Modelled microseconds over these links, and of what is copied."""
        most = max(self.received(before, after, at) for at in before.mesh.coordinates()) if self.sends else 0
        if not cost.copies_cost(topology):
            return self.us(most, Copied(), topology)
        first = (0,) * before.mesh.ndim
        copied = self.copies(*(members(spec, self.axes, first) for spec in (before, after)))
        return self.us(most, copied.each(before.dtype.itemsize), topology)

    def us(self, received: float, copied: Copied, topology: MeshTopoInfo) -> float:
        """Modelled microseconds where the busiest rank gets so many bytes, and copies so many."""
        us = self.price(received, topology) if self.sends else 0.0
        return us + _copy_us(copied.packed, topology) + copied.times * _copy_us(copied.joined, topology)

    def price(self, received: float, topology: MeshTopoInfo) -> float:
        """Modelled microseconds where the busiest rank gets so many bytes from others."""
        raise NotImplementedError

    def start(self, x, at: At):
        """Launch the move on this rank's block; the result may be in flight."""
        raise NotImplementedError

    def finish(self, y, at: At):
        """Wait for what `start` launched and give the block after the move."""
        return y

    def show(self, before: Spec, after: Spec) -> str:
        """The move with its axes by name, and the dims that it makes whole or shards, for people."""
        names = ",".join(map(before.mesh.axis_name, self.axes))
        return f"{self.kind}({', '.join([names, *self._details(before, after)])})"

    def _details(self, before: Spec, after: Spec) -> list[str]:
        return []


# ---- nothing is sent --------------------------------------------------------------------------


@dataclass(frozen=True)
class Slice(Move):
    """Each rank keeps a smaller box. A copy, so that writes stay apart."""

    kind = "slice"
    sends = False
    copies = staticmethod(lambda have, want: Copied(0, volume(want[0]), 1))

    def start(self, x, at):
        if not prod(at.shape_after()):
            return x.new_zeros(at.shape_after())
        have = at.before.box(at.coordinate)
        want = within(overlap(have, at.after.box(at.coordinate)), have)
        return narrowed(x, want, at.shape_before()).clone(memory_format=torch.contiguous_format)

    def _details(self, before, after):
        return [_dims(self.axes, after)]


@dataclass(frozen=True)
class View(Move):
    """The tensor seen with another shape, in which a block may be a box where it was none; over no axes."""

    kind = "view"
    sends = False

    def peak(self, before, after):
        return before.local_nbytes

    def start(self, x, at):
        return x.reshape(at.shape_after())

    def show(self, before, after):
        return f"view({', '.join(map(str, after.shape))})"


@dataclass(frozen=True)
class ToPartial(Move):
    """The axes become Partial: each element is kept by one rank of the axis, or by all where that changes nothing."""

    reduce_op: str = "sum"
    kind = "to_partial"
    sends = False
    copies = staticmethod(lambda have, want: Copied(0, volume(want[0]), 1))

    def start(self, x, at):
        nothing = _identity(self.reduce_op, at.before.dtype)
        padded = [a for a in self.axes if at.before.on(a).is_shard()]
        if self.reduce_op == "avg" and padded:
            x = x * prod(at.before.mesh.shape[a] for a in padded)
        if self._is_spare(at):
            x = torch.full_like(x, nothing, memory_format=torch.contiguous_format)
        if not padded:
            return x.clone(memory_format=torch.contiguous_format)
        mine = within(at.before.box(at.coordinate), at.after.box(at.coordinate))
        shape = list(at.shape_before())
        for dim, ((start, stop), size) in enumerate(zip(mine, at.shape_after(), strict=True)):
            sides = [(*shape[:dim], n, *shape[dim + 1 :]) for n in (start, size - stop)]
            x = torch.cat([x.new_full(sides[0], nothing), x, x.new_full(sides[1], nothing)], dim)
            shape[dim] = size
        return x

    def _is_spare(self, at: At) -> bool:
        """Whether another rank, with the same block, keeps the elements: adding them twice would change a sum."""
        if self.reduce_op not in ("sum", "product"):
            return False
        return any(at.coordinate[a] for a in self.axes if at.before.on(a).is_replicate())

    def _details(self, before, after):
        return [repr(self.reduce_op)]


@dataclass(frozen=True)
class Scale(Move):
    """Partial sums become partial averages, or the other way, on these axes."""

    kind = "scale"
    sends = False
    copies = staticmethod(lambda have, want: Copied(0, volume(want[0]), 1))

    def start(self, x, at):
        n = prod(at.before.mesh.shape[a] for a in self.axes)
        return x * n if at.after.on(self.axes[0]).is_partial("avg") else x / n

    def _details(self, before, after):
        return [repr(after.on(self.axes[0]).reduce_op)]


# ---- without a reduction ----------------------------------------------------------------------


@dataclass(frozen=True)
class AllGather(Move):
    """Shards of the axes, in any dims, to replicated."""

    kind = "all_gather"

    @staticmethod
    def copies(have, want):
        whole, row = want[0], volume(have[0])
        times = copies_to_join([within(block, whole) for block in have], shape_of(whole), row)
        return Copied(0, volume(whole), times)

    def peak(self, before, after):
        return before.local_nbytes + after.local_nbytes * (1 if in_rows(self.axes, before.dims) else 2)

    def received(self, before, after, coordinate):
        biggest = max(map(volume, members(before, self.axes, coordinate)))
        return (_size(self.axes, before) - 1) * biggest * before.dtype.itemsize

    def price(self, received, topology):
        return cost.all_gather_cost(_with_own(received, self.axes, topology), self.axes, topology)

    def start(self, x, at):
        blocks = members(at.before, self.axes, at.coordinate)
        row = max(map(volume, blocks))
        if not row:
            return x
        flat = _padded(x.reshape(-1), volume(at.before.box(at.coordinate)), row)
        return at.transport.all_gather_into_tensor(to_wire(flat, at.before.dtype), len(blocks), at.group(self.axes))

    def finish(self, y, at):
        blocks = members(at.before, self.axes, at.coordinate)
        row = max(map(volume, blocks))
        if not row:
            return y.new_zeros(at.shape_after())
        whole = at.after.box(at.coordinate)
        y = from_wire(at.transport.wait_tensor(y), at.before.dtype)
        return joined_padded(y, [within(block, whole) for block in blocks], at.shape_after(), row)

    def _details(self, before, after):
        return [_dims(self.axes, before)]


@dataclass(frozen=True)
class Exchange(Move):
    """Any blocks to any blocks: an all-to-all in which each rank gets what it wants from those that have it."""

    kind = "exchange"

    @staticmethod
    def copies(have, want):
        sent = [within(overlap(have[0], box), have[0]) for box in want]
        come = [within(overlap(box, want[0]), want[0]) for box in have]
        packed = sum(map(volume, sent)) * copies_to_cut(sent, shape_of(have[0]))
        return Copied(packed, volume(want[0]), copies_to_join(come, shape_of(want[0])))

    def received(self, before, after, coordinate):
        want = after.box(coordinate)
        return (volume(want) - volume(overlap(want, before.box(coordinate)))) * before.dtype.itemsize

    def peak(self, before, after):
        return 2 * (before.local_nbytes + after.local_nbytes)

    def price(self, received, topology):
        return cost.all_to_all_cost(_with_own(received, self.axes, topology), self.axes, topology)

    def _sent(self, at: At) -> list[Box]:
        """What goes to each rank, as seen in this rank's block."""
        mine = at.before.box(at.coordinate)
        return [within(overlap(mine, want), mine) for want in members(at.after, self.axes, at.coordinate)]

    def _come(self, at: At) -> list[Box]:
        """What comes from each rank, as seen in this rank's block after the move."""
        want = at.after.box(at.coordinate)
        return [within(overlap(have, want), want) for have in members(at.before, self.axes, at.coordinate)]

    def _idle(self, at: At) -> bool:
        return not any(map(volume, members(at.before, self.axes, at.coordinate)))

    def start(self, x, at):
        if self._idle(at):
            return x
        sent, come = self._sent(at), self._come(at)
        flat = to_wire(cut(x, at.shape_before(), sent), at.before.dtype)
        sizes = [[wire_items(at.before.dtype) * volume(box) for box in boxes] for boxes in (come, sent)]
        return at.transport.all_to_all_single(flat, *sizes, at.group(self.axes))

    def finish(self, y, at):
        if self._idle(at):
            return y.new_zeros(at.shape_after())
        return joined(from_wire(at.transport.wait_tensor(y), at.before.dtype), self._come(at), at.shape_after())


@dataclass(frozen=True)
class AllToAll(Exchange):
    """Shards of the axes to shards of the same axes elsewhere: one all-to-all of (n-1)/n of the local bytes."""

    kind = "all_to_all"

    def _details(self, before, after):
        return [_dims(self.axes, before), _dims(self.axes, after)]


@dataclass(frozen=True)
class Permute(Exchange):
    """The same blocks on other ranks: what each rank wants, one rank has."""

    kind = "permute"

    def peak(self, before, after):
        return before.local_nbytes + after.local_nbytes

    def price(self, received, topology):
        return cost.permute_cost(received, self.axes, topology)


# ---- reductions -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reduction(Move):
    """Partial on the axes to no longer so."""

    def op(self, spec: Spec) -> str:
        """The reduction; where averages and sums meet it is a sum."""
        kinds = {kind for a, kind in spec.partial if a in self.axes}
        return kinds.pop() if len(kinds) == 1 else "sum"

    def wire_itemsize(self, spec: Spec) -> int:
        """Bytes that an element takes on the wire."""
        dtype, _ = reduced_as(spec.dtype, self.op(spec))
        return dtype.itemsize * (2 if wire.marks_nan(spec.dtype, self.op(spec)) else 1)

    def _averaged(self, y, at: At):
        n = prod(at.before.mesh.shape[a] for a, kind in at.before.partial if a in self.axes and kind == "avg")
        return y if n == 1 else y / n


@dataclass(frozen=True)
class AllReduce(_Reduction):
    """Partial to replicated."""

    kind = "all_reduce"

    def received(self, before, after, coordinate):
        n, size = _size(self.axes, before), volume(before.box(coordinate))
        return 2 * (n - 1) * size * self.wire_itemsize(before) // n

    def price(self, received, topology):
        return cost.all_reduce_cost(_with_own(received / 2, self.axes, topology), self.axes, topology)

    def start(self, x, at):
        if not prod(at.shape_before()):
            return x
        dtype, op = reduced_as(at.before.dtype, self.op(at.before))
        if wire.marks_nan(at.before.dtype, op):
            x = wire.with_marks(x, at.before.dtype, op)
        return at.transport.all_reduce(_as(x, at.before.dtype, dtype).contiguous(), op, at.group(self.axes))

    def finish(self, y, at):
        if not prod(at.shape_before()):
            return y
        dtype, op = reduced_as(at.before.dtype, self.op(at.before))
        y = _as(at.transport.wait_tensor(y), dtype, at.before.dtype)
        if wire.marks_nan(at.before.dtype, op):
            y = wire.without_marks(y, at.shape_before())
        return self._averaged(y, at)


@dataclass(frozen=True)
class ReduceScatter(_Reduction):
    """Partial to blocks inside what each rank has: of the axes, and of others that replicate."""

    kind = "reduce_scatter"

    @staticmethod
    def copies(have, want):
        pieces, row = [within(box, have[0]) for box in want], volume(want[0])
        padded = any([volume(piece) != row for piece in pieces])
        return Copied(row * len(pieces) * (1 if padded else copies_to_cut(pieces, shape_of(have[0]))))

    def peak(self, before, after):
        packed = 0 if in_rows(self.axes, after.dims) else self.nbytes(before, after)
        return before.local_nbytes + packed + after.local_nbytes

    def nbytes(self, before, after):
        return min(before.local_nbytes, _size(self.axes, before) * after.local_nbytes)

    def received(self, before, after, coordinate):
        biggest = max(map(volume, members(after, self.axes, coordinate)))
        return (_size(self.axes, before) - 1) * biggest * self.wire_itemsize(before)

    def price(self, received, topology):
        return cost.reduce_scatter_cost(_with_own(received, self.axes, topology), self.axes, topology)

    def _pieces(self, at: At) -> list[Box]:
        mine = at.before.box(at.coordinate)
        return [within(box, mine) for box in members(at.after, self.axes, at.coordinate)]

    def start(self, x, at):
        pieces = self._pieces(at)
        row = max(map(volume, pieces))
        if not row:
            return x
        dtype, op = reduced_as(at.before.dtype, self.op(at.before))
        marked = wire.marks_nan(at.before.dtype, op)
        if marked or any(volume(piece) != row for piece in pieces):
            rows = [_padded(cut(x, at.shape_before(), [piece]), volume(piece), row) for piece in pieces]
            flat = torch.cat([wire.with_marks(r, at.before.dtype, op) for r in rows] if marked else rows, 0)
        else:
            flat = cut(x, at.shape_before(), pieces)
        flat = _as(flat, at.before.dtype, dtype).contiguous()
        return at.transport.reduce_scatter_tensor(flat, op, len(pieces), at.group(self.axes))

    def finish(self, y, at):
        row = max(map(volume, self._pieces(at)))
        if not row:
            return y.new_zeros(at.shape_after())
        dtype, op = reduced_as(at.before.dtype, self.op(at.before))
        y = _as(at.transport.wait_tensor(y), dtype, at.before.dtype)
        if wire.marks_nan(at.before.dtype, op):
            y = wire.without_marks(y, (row,))
        own = prod(at.shape_after())
        y = self._averaged(y, at)
        return (y if own == row else y.narrow(0, 0, own).clone()).view(at.shape_after())

    def _details(self, before, after):
        return [_dims(self.axes, after)]


@dataclass(frozen=True)
class ReduceInOrder(_Reduction):
    """As a reduce-scatter, but each rank gets the terms themselves and adds them one by one, in the order of the ranks.

    So the result is the same to the bit whatever the rest of the plan, the backend, and the sizes of the blocks.
    """

    kind = "reduce_in_order"

    @staticmethod
    def copies(have, want):
        pieces, terms = [within(box, have[0]) for box in want], volume(want[0]) * len(want)
        return Copied(sum(map(volume, pieces)) * copies_to_cut(pieces, shape_of(have[0])), terms, 1)

    def nbytes(self, before, after):
        return min(before.local_nbytes, _size(self.axes, before) * after.local_nbytes)

    def peak(self, before, after):
        return before.local_nbytes + 2 * _size(self.axes, before) * after.local_nbytes + after.local_nbytes

    def received(self, before, after, coordinate):
        return (_size(self.axes, before) - 1) * volume(after.box(coordinate)) * before.dtype.itemsize

    def price(self, received, topology):
        return cost.all_to_all_cost(_with_own(received, self.axes, topology), self.axes, topology)

    def start(self, x, at):
        mine, wanted = at.before.box(at.coordinate), members(at.after, self.axes, at.coordinate)
        if not any(map(volume, wanted)):
            return x
        flat = cut(x, at.shape_before(), [within(box, mine) for box in wanted])
        items = wire_items(at.before.dtype)
        sizes = [items * prod(at.shape_after())] * len(wanted), [items * volume(box) for box in wanted]
        return at.transport.all_to_all_single(to_wire(flat, at.before.dtype), *sizes, at.group(self.axes))

    def finish(self, y, at):
        wanted, own = members(at.after, self.axes, at.coordinate), prod(at.shape_after())
        if not any(map(volume, wanted)):
            return y.new_zeros(at.shape_after())
        terms = from_wire(at.transport.wait_tensor(y), at.before.dtype).split([own] * len(wanted), 0)
        add, total = IN_ORDER[self.op(at.before)], terms[0]
        for i in range(1, len(wanted)):
            total = add(total, terms[i])
        return self._averaged(total, at).view(at.shape_after())

    def _details(self, before, after):
        return [_dims(self.axes, after)]


IN_ORDER = {"sum": torch.add, "avg": torch.add, "product": torch.mul, "max": torch.maximum, "min": torch.minimum}


# ---- groups and sizes -------------------------------------------------------------------------


@functools.lru_cache(maxsize=16384)
def members(spec: Spec, axes: tuple[int, ...], coordinate: Coordinate) -> tuple[Box, ...]:
    """The boxes of the ranks of the group along the axes that goes through the coordinate, in their order."""
    every = itertools.product(*(range(n) if a in axes else (coordinate[a],) for a, n in enumerate(spec.mesh.shape)))
    return tuple(spec.box(at) for at in every)


def in_rows(axes: tuple[int, ...], dims: Sequence[tuple[int, ...]]) -> bool:
    """Whether the blocks of a group along the axes are consecutive rows, as they arrive: nothing is to be reordered."""
    return tuple(a for a in dims[0] if a in axes) == axes


def _size(axes: Sequence[int], spec: Spec) -> int:
    return prod(spec.mesh.shape[a] for a in axes)


def _with_own(received: float, axes: Sequence[int], topology: MeshTopoInfo) -> float:
    """The bytes of all ranks of a group together, from those that come from the others."""
    n = prod([topology.sizes[a] for a in axes])
    return received * n / (n - 1)


def _dims(axes: Sequence[int], spec: Spec) -> str:
    """The dims that the axes shard, for people."""
    return "/".join(str(d) for d, sharding in enumerate(spec.dims) if set(sharding) & set(axes))


def _padded(flat, size: int, to: int):
    """A row grown from size to `to`; what is added is never read."""
    return flat if size == to else torch.nn.functional.pad(flat, (0, to - size))


# ---- the wire ---------------------------------------------------------------------------------


def wire_items(dtype: torch.dtype) -> int:
    """How many items of the wire's an element is."""
    return dtype.itemsize if dtype in wire.BYTES_ONLY else 1


def to_wire(flat, dtype: torch.dtype):
    """A row as it is sent where nothing is computed on the way: as bytes, where a backend does not know the dtype."""
    if dtype not in wire.BYTES_ONLY:
        return flat.contiguous()
    # Not `contiguous`, which leaves a single element any stride, as no view of bytes may have.
    return flat.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def from_wire(y, dtype: torch.dtype):
    """The other way."""
    return y.view(dtype) if dtype in wire.BYTES_ONLY else y


def _as(x, has: torch.dtype, wanted: torch.dtype):
    return x if has is wanted else x.to(wanted)


def _identity(op: str, dtype: torch.dtype) -> float | int | bool:
    """What changes nothing where it is reduced with other terms."""
    if op in ("sum", "avg"):
        return 0
    if op == "product":
        return 1
    if dtype is torch.bool:
        return op == "min"
    if not dtype.is_floating_point:
        return torch.iinfo(dtype).min if op == "max" else torch.iinfo(dtype).max
    return float("-inf") if op == "max" else float("inf")
