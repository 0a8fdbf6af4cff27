"""The moves that send: gathers, exchanges and reductions.

    AllGather, AllToAll, Permute, Exchange          without a reduction
    ReduceScatter, AllReduce, ReduceInOrder         with one

`moves.py` says what a move is. Gathers and reduce-scatters pad blocks of different sizes to the largest; the other
moves send blocks as they are. If all that the ranks of a group would send is empty, none of them calls the collective.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import prod

import torch

from spmd.comm import wire
from spmd.comm.added import added_rows, adds_terms
from spmd.mesh import cost
from spmd.tensor.redistribute.all_ranks import most_in_group, overlaps, sides, volumes
from spmd.tensor.redistribute.boxes import copies_to_cut, copies_to_join, overlap, relative_to, shape_of, volume
from spmd.tensor.redistribute.moves import (
    Copied,
    Move,
    MoveContext,
    dims_text,
    group_bytes,
    group_size,
    in_rows,
)
from spmd.tensor.redistribute.runs import Boxes, group_blocks, padded, received_boxes, sent_boxes
from spmd.tensor.spec import Spec

reduced_as = functools.lru_cache(maxsize=256)(wire.reduced_as)


# ---- without a reduction ----------------------------------------------------------------------


@dataclass(frozen=True)
class AllGather(Move):
    """Shards of the axes, in any dims, to replicated."""

    kind = "all_gather"
    priced = staticmethod(cost.all_gather_cost)

    @staticmethod
    def copies(have, want):
        whole, row = want[0], volume(have[0])
        times = copies_to_join([relative_to(block, whole) for block in have], shape_of(whole), row)
        return Copied(0, volume(whole), times)

    def peak(self, before, after):
        return before.local_nbytes + after.local_nbytes * (1 if in_rows(self.axes, before.dims, before.units) else 2)

    def received(self, before, after):
        biggest = most_in_group(volumes(sides(before)), self.axes)
        return (group_size(self.axes, before) - 1) * biggest * before.dtype.itemsize

    def start(self, x, ctx):
        if not self.row(ctx):
            return x
        n = group_size(self.axes, ctx.before)
        return ctx.transport.all_gather_into_tensor(self.packed(x, ctx), n, ctx.group(self.axes))

    def finish(self, y, ctx):
        if not self.row(ctx):
            return y.new_zeros(ctx.shape_after())
        return self.unpacked(ctx.transport.wait_tensor(y), ctx)

    def row(self, ctx: MoveContext) -> int:
        """How many elements each rank sends: those of the largest block."""
        return group_blocks(ctx.before, self.axes, ctx.coordinate).largest

    def packed(self, x, ctx: MoveContext):
        """What this rank sends."""
        row = self.row_of(x, ctx)
        return row if ctx.before.dtype in wire.BYTES_ONLY else row.contiguous()

    def row_of(self, x, ctx: MoveContext):
        """The items that this rank sends, which need not lie one behind the other."""
        flat = padded(x.reshape(-1), volume(ctx.before.box(ctx.coordinate)), self.row(ctx))
        return to_wire(flat, ctx.before.dtype) if ctx.before.dtype in wire.BYTES_ONLY else flat

    def unpacked(self, y, ctx: MoveContext):
        """The block after the move, from the rows of all ranks."""
        return self.pieces(ctx).joined_rows(from_wire(y, ctx.before.dtype), ctx.shape_after())

    def pieces(self, ctx: MoveContext) -> Boxes:
        """The box that comes from each rank, relative to this rank's block after the move."""
        return received_boxes(ctx.before, ctx.after, self.axes, ctx.coordinate)

    def cut_out(self, table, ctx: MoveContext):
        """The same, copied out of some columns of a table with a row for each rank."""
        if ctx.before.dtype in wire.BYTES_ONLY:
            return self.unpacked(table.clone(memory_format=torch.contiguous_format).reshape(-1), ctx)
        return self.pieces(ctx).joined_table(table, ctx.shape_after())

    def _details(self, before, after):
        return [dims_text(self.axes, before)]


@dataclass(frozen=True)
class Exchange(Move):
    """Any blocks to any blocks: an all-to-all in which each rank receives what it lacks from the ranks that have it."""

    kind = "exchange"
    priced = staticmethod(cost.all_to_all_cost)

    @staticmethod
    def copies(have, want):
        sent = [relative_to(overlap(have[0], box), have[0]) for box in want]
        received = [relative_to(overlap(box, want[0]), want[0]) for box in have]
        packed = sum(map(volume, sent)) * copies_to_cut(sent, shape_of(have[0]))
        return Copied(packed, volume(want[0]), copies_to_join(received, shape_of(want[0])))

    def received(self, before, after):
        want = sides(after)
        return (volumes(want) - overlaps(sides(before), want)) * before.dtype.itemsize

    def peak(self, before, after):
        return 2 * (before.local_nbytes + after.local_nbytes)

    def _boxes_to_send(self, ctx: MoveContext) -> Boxes:
        """The box that goes to each rank, relative to this rank's block."""
        return sent_boxes(ctx.before, ctx.after, self.axes, ctx.coordinate)

    def _boxes_to_receive(self, ctx: MoveContext) -> Boxes:
        """The box that comes from each rank, relative to this rank's block after the move."""
        return received_boxes(ctx.before, ctx.after, self.axes, ctx.coordinate)

    def _nothing_to_send(self, ctx: MoveContext) -> bool:
        return not group_blocks(ctx.before, self.axes, ctx.coordinate).largest

    def start(self, x, ctx):
        if self._nothing_to_send(ctx):
            return x
        return ctx.transport.all_to_all_single(self.packed(x, ctx), *self.sizes(ctx), ctx.group(self.axes))

    def finish(self, y, ctx):
        if self._nothing_to_send(ctx):
            return y.new_zeros(ctx.shape_after())
        return self.unpacked(ctx.transport.wait_tensor(y), ctx)

    def sizes(self, ctx: MoveContext) -> list[list[int]]:
        """How many items this rank receives from each rank, and sends to it."""
        boxes, items = (self._boxes_to_receive(ctx), self._boxes_to_send(ctx)), wire_items(ctx.before.dtype)
        return [each.sizes if items == 1 else [items * size for size in each.sizes] for each in boxes]

    def packed(self, x, ctx: MoveContext):
        """What this rank sends, to one rank after the other."""
        return to_wire(self._boxes_to_send(ctx).cut(x, ctx.shape_before()), ctx.before.dtype)

    def unpacked(self, y, ctx: MoveContext):
        """The block after the move, from what came from one rank after the other."""
        return self._boxes_to_receive(ctx).joined(from_wire(y, ctx.before.dtype), ctx.shape_after())


@dataclass(frozen=True)
class AllToAll(Exchange):
    """Shards of the axes to shards of the same axes in other dims: one all-to-all of (n-1)/n of the local bytes."""

    kind = "all_to_all"

    def _details(self, before, after):
        return [dims_text(self.axes, before), dims_text(self.axes, after)]


@dataclass(frozen=True)
class Permute(Exchange):
    """The same blocks on other ranks: one rank has the block that another wants."""

    kind = "permute"

    def peak(self, before, after):
        return before.local_nbytes + after.local_nbytes

    def collective_us(self, received, topology):
        return cost.permute_cost(received, self.axes, topology)


# ---- reductions -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Reduction(Move):
    """The axes are Partial before, and no longer so after."""

    def op(self, spec: Spec) -> str:
        """The reduction that is sent: a sum, if averages and sums meet."""
        kind = ""
        for a, other in spec.partial:
            if a in self.axes:
                kind = other if kind in ("", other) else "sum"
        return kind

    def wire_itemsize(self, spec: Spec) -> int:
        """Bytes of one element on the wire."""
        dtype, _ = reduced_as(spec.dtype, self.op(spec))
        return dtype.itemsize * (2 if wire.marks_nan(spec.dtype, self.op(spec)) else 1)

    def _averaged(self, y, ctx: MoveContext):
        """The sum y, divided by the ranks of the axes that are averages."""
        n = prod(ctx.before.mesh.shape[a] for a, kind in ctx.before.partial if a in self.axes and kind == "avg")
        return y if n == 1 else y / n


@dataclass(frozen=True)
class AllReduce(_Reduction):
    """Partial to replicated."""

    kind = "all_reduce"

    def received(self, before, after):
        n = group_size(self.axes, before)
        return 2 * (n - 1) * volumes(sides(before)) * self.wire_itemsize(before) // n

    def collective_us(self, received, topology):
        return cost.all_reduce_cost(group_bytes(received / 2, self.axes, topology), self.axes, topology)

    def start(self, x, ctx):
        if not prod(ctx.shape_before()):
            return x
        dtype, op = reduced_as(ctx.before.dtype, self.op(ctx.before))
        if wire.marks_nan(ctx.before.dtype, op):
            x = wire.with_marks(x, ctx.before.dtype, op)
        return ctx.transport.all_reduce(_cast(x, ctx.before.dtype, dtype).contiguous(), op, ctx.group(self.axes))

    def finish(self, y, ctx):
        if not prod(ctx.shape_before()):
            return y
        dtype, op = reduced_as(ctx.before.dtype, self.op(ctx.before))
        y = _cast(ctx.transport.wait_tensor(y), dtype, ctx.before.dtype)
        if wire.marks_nan(ctx.before.dtype, op):
            y = wire.without_marks(y, ctx.shape_before())
        return self._averaged(y, ctx)


@dataclass(frozen=True)
class _Scattering(_Reduction):
    """Partial to blocks inside the block of each rank: sharded by these axes, and by others that replicate."""

    def nbytes(self, before, after):
        return min(before.local_nbytes, group_size(self.axes, before) * after.local_nbytes)

    def pieces(self, ctx: MoveContext) -> Boxes:
        """The box of each rank after the move, relative to this rank's block."""
        return sent_boxes(ctx.before, ctx.after, self.axes, ctx.coordinate)

    def _details(self, before, after):
        return [dims_text(self.axes, after)]


@dataclass(frozen=True)
class ReduceScatter(_Scattering):
    """Partial to blocks inside those of each rank: each rank gets the sum of its piece."""

    kind = "reduce_scatter"
    priced = staticmethod(cost.reduce_scatter_cost)

    @staticmethod
    def copies(have, want):
        pieces, row = [relative_to(box, have[0]) for box in want], volume(want[0])
        padded = any([volume(piece) != row for piece in pieces])
        return Copied(row * len(pieces) * (1 if padded else copies_to_cut(pieces, shape_of(have[0]))))

    def peak(self, before, after):
        packed = 0 if in_rows(self.axes, after.dims, after.units) else self.nbytes(before, after)
        return before.local_nbytes + packed + after.local_nbytes

    def received(self, before, after):
        biggest = most_in_group(volumes(sides(after)), self.axes)
        return (group_size(self.axes, before) - 1) * biggest * self.wire_itemsize(before)

    def start(self, x, ctx):
        if not self.row(ctx):
            return x
        return self.sent(self.packed(x, ctx), self.row_sent(ctx), ctx)

    def finish(self, y, ctx):
        if not (row := self.row(ctx)):
            return y.new_zeros(ctx.shape_after())
        y = self.unpacked(self.arrived(y, self.row_sent(ctx), ctx), ctx)
        own = prod(ctx.shape_after())
        return (y if own == row else y.narrow(0, 0, own).clone()).view(ctx.shape_after())

    def row(self, ctx: MoveContext) -> int:
        """How many elements each rank gets: those of the largest piece."""
        return self.pieces(ctx).largest

    def row_sent(self, ctx: MoveContext) -> int:
        """How many items that are on the wire."""
        return self.row(ctx) * (2 if self._is_marked(ctx) else 1)

    def packed(self, x, ctx: MoveContext):
        """What this rank sends: a row for each rank."""
        return self.rows_of(x, ctx).contiguous()

    def rows_of(self, x, ctx: MoveContext):
        """The items that this rank sends, which need not lie one behind the other."""
        pieces = self.pieces(ctx)
        dtype, op = reduced_as(ctx.before.dtype, self.op(ctx.before))
        flat = pieces.cut_rows(x, ctx.shape_before())
        if wire.marks_nan(ctx.before.dtype, op):
            rows = flat.split([pieces.largest] * len(pieces.sizes), 0)
            flat = torch.cat([wire.with_marks(rows[i], ctx.before.dtype, op) for i in range(len(pieces.sizes))], 0)
        return _cast(flat, ctx.before.dtype, dtype)

    def dtype_sent(self, ctx: MoveContext) -> torch.dtype:
        """The dtype of what is on the wire, where it is not marked."""
        return reduced_as(ctx.before.dtype, self.op(ctx.before))[0]

    def sent(self, flat, row: int, ctx: MoveContext):
        """Launch the reduction of rows of this length, one for each rank."""
        n, op = group_size(self.axes, ctx.before), self._op_sent(ctx)
        if self._adds_terms(ctx):
            return ctx.transport.all_to_all_single(flat, [row] * n, [row] * n, ctx.group(self.axes))
        return ctx.transport.reduce_scatter_tensor(flat, op, n, ctx.group(self.axes))

    def arrived(self, y, row: int, ctx: MoveContext):
        """Wait for what was launched, and return this rank's row, reduced."""
        n, y = group_size(self.axes, ctx.before), ctx.transport.wait_tensor(y)
        return added_rows(y, self._op_sent(ctx), n, row) if self._adds_terms(ctx) else y

    def unpacked(self, y, ctx: MoveContext):
        """This rank's row as elements of the tensor."""
        y = _cast(y, reduced_as(ctx.before.dtype, self.op(ctx.before))[0], ctx.before.dtype)
        return self._averaged(wire.without_marks(y, (self.row(ctx),)) if self._is_marked(ctx) else y, ctx)

    def _op_sent(self, ctx: MoveContext) -> str:
        return reduced_as(ctx.before.dtype, self.op(ctx.before))[1]

    def _adds_terms(self, ctx: MoveContext) -> bool:
        dtype, op = reduced_as(ctx.before.dtype, self.op(ctx.before))
        return adds_terms(ctx.transport, ctx.before.mesh.device_type, dtype, op)

    def _is_marked(self, ctx: MoveContext) -> bool:
        return wire.marks_nan(ctx.before.dtype, self._op_sent(ctx))


@dataclass(frozen=True)
class ReduceInOrder(_Scattering):
    """As a reduce-scatter, but each rank receives the terms and adds them one by one, in the order of the ranks.

    So the result is the same to the bit, whatever the rest of the plan, the backend and the sizes of the blocks are.
    """

    kind = "reduce_in_order"
    priced = staticmethod(cost.all_to_all_cost)

    @staticmethod
    def copies(have, want):
        pieces, terms = [relative_to(box, have[0]) for box in want], volume(want[0]) * len(want)
        return Copied(sum(map(volume, pieces)) * copies_to_cut(pieces, shape_of(have[0])), terms, 1)

    def peak(self, before, after):
        return before.local_nbytes + 2 * group_size(self.axes, before) * after.local_nbytes + after.local_nbytes

    def received(self, before, after):
        return (group_size(self.axes, before) - 1) * volumes(sides(after)) * before.dtype.itemsize

    def start(self, x, ctx):
        wanted = self.pieces(ctx)
        if not wanted.largest:
            return x
        flat, items = wanted.cut(x, ctx.shape_before()), wire_items(ctx.before.dtype)
        sizes = [items * prod(ctx.shape_after())] * len(wanted.sizes), [items * size for size in wanted.sizes]
        return ctx.transport.all_to_all_single(to_wire(flat, ctx.before.dtype), *sizes, ctx.group(self.axes))

    def finish(self, y, ctx):
        wanted = self.pieces(ctx)
        if not wanted.largest:
            return y.new_zeros(ctx.shape_after())
        y, shape = from_wire(ctx.transport.wait_tensor(y), ctx.before.dtype), ctx.shape_after()
        return self._averaged(added_rows(y, self.op(ctx.before), len(wanted.sizes), prod(shape)), ctx).view(shape)


# ---- the wire ---------------------------------------------------------------------------------


def wire_items(dtype: torch.dtype) -> int:
    """How many items on the wire make one element."""
    return dtype.itemsize if dtype in wire.BYTES_ONLY else 1


def to_wire(flat, dtype: torch.dtype):
    """A row as it is sent if nothing is computed on the way: as bytes, if a backend does not know the dtype."""
    if dtype not in wire.BYTES_ONLY:
        return flat.contiguous()
    # Not `contiguous`: it leaves a single element any stride, and a view of bytes may not have that.
    return flat.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def from_wire(y, dtype: torch.dtype):
    """The row of this dtype that `to_wire` sent."""
    return y.view(dtype) if dtype in wire.BYTES_ONLY else y


def _cast(x, has: torch.dtype, wanted: torch.dtype):
    return x if has is wanted else x.to(wanted)
