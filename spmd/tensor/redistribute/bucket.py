"""A bucket: several moves of one kind over one group, sent as one collective.

    g1: f32[8, 8] +sum@dp, g2: f32[8] +sum@dp      one all-reduce of 72 elements
    w1: f32[8@dp, 8], w2: f32[8@dp]                one all-gather; each rank sends 16 + 2 elements

A model has many parameters, most of them small, and each collective costs its latency. So what the moves send is put
side by side into one buffer, the buffer is sent, and what comes is cut again. Each element gets the same value as if it
was sent alone. All-reduces and reduce-scatters leave views of the buffer, and all-to-alls are put in order. What is
gathered is cut out tensor by tensor, each where it is read first, so that they are not all there twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch

from spmd.comm import Transport, transport, wire
from spmd.mesh import DeviceMesh, MeshTopoInfo, cost
from spmd.tensor.redistribute import tables
from spmd.tensor.redistribute.collective_moves import AllGather, AllReduce, AllToAll, ReduceScatter, wire_items
from spmd.tensor.redistribute.moves import MoveContext, Parts, group_size
from spmd.tensor.redistribute.plan import Step
from spmd.tensor.redistribute.tables import Column, columns_of
from spmd.tensor.spec import Spec


def bucket_key(step: Step) -> Hashable | None:
    """What steps must have in common to be sent in one bucket: move, axes, reduction, dtype. None for those that none
    may join: other moves, reductions whose elements are marked, and blocks of which a rank may have none."""
    spec, move = step.before, step.move
    if type(move) not in _WAYS or not step.sends:
        return None
    if isinstance(move, AllReduce):
        return move, tuple(map(spec.on, step.axes)), spec.dtype
    if isinstance(move, ReduceScatter) and wire.marks_nan(spec.dtype, move.op(spec)):
        return None
    if not min(step.before.local_nbytes, step.after.local_nbytes):
        return None
    return move, tuple([(a, kind) for a, kind in spec.partial if a in step.axes]), spec.dtype


@dataclass(frozen=True)
class Bucket:
    """Moves of equal `bucket_key` in one collective. In a program it stands where a `Step` does."""

    steps: tuple[Step, ...]

    sends: ClassVar[bool] = True
    __name__: ClassVar[str] = "bucket"

    @property
    def kind(self) -> str:
        return self.steps[0].kind

    @property
    def axes(self) -> tuple[int, ...]:
        return self.steps[0].axes

    @property
    def before(self) -> tuple[Spec, ...]:
        return tuple(step.before for step in self.steps)

    @property
    def after(self) -> tuple[Spec, ...]:
        return tuple(step.after for step in self.steps)

    @property
    def nbytes(self) -> int:
        return sum(step.nbytes for step in self.steps)

    @property
    def arriving(self) -> int:
        """Bytes of what comes to a rank, before it is cut: of gathers, rows that are padded to the longest."""
        if isinstance(self.steps[0].move, AllGather):
            return sum([group_size(self.axes, step.before) * step.before.local_nbytes for step in self.steps])
        return sum([spec.local_nbytes for spec in self.after])

    @property
    def copies_out(self) -> bool:
        """Whether its tensors are cut out of what comes one by one, so that each has memory of its own."""
        return isinstance(self.steps[0].move, AllGather)

    @property
    def tensors(self) -> int:
        return len(self.steps)

    @property
    def cost(self) -> float:
        return self.priced(self.before[0].mesh.topology)

    def priced(self, topology: MeshTopoInfo) -> float:
        """Modelled microseconds of the one collective, and of the copies around it."""
        return sum(self.parts_over(topology))

    @property
    def parts(self) -> Parts:
        """Modelled microseconds of its parts."""
        return self.parts_over(self.before[0].mesh.topology)

    @property
    def latency_us(self) -> float:
        """What the collective takes however few bytes are sent."""
        return self.steps[0].latency_us

    def latency_over(self, topology: MeshTopoInfo) -> float:
        """The same over other links than those of its mesh."""
        return self.steps[0].latency_over(topology)

    def parts_over(self, topology: MeshTopoInfo) -> Parts:
        """Modelled microseconds of its parts, over other links than those of its mesh."""
        filled = cost.copy_cost(self.nbytes, topology)
        if self.kind == "all_reduce":
            return Parts(cost.all_reduce_cost(self.nbytes, self.axes, topology), filled)
        known, move = topology is self.before[0].mesh.topology, self.steps[0].move
        alone = [step.parts if known else step.parts_over(topology) for step in self.steps]
        received = sum([int(np.max(step.received_by_all)) for step in self.steps])
        made = sum([spec.local_nbytes for spec in self.after])
        cuts = 0.0 if self.kind == "reduce_scatter" else cost.copy_cost(made, topology)
        packed, joined = sum([p.packed for p in alone]), sum([p.joined for p in alone])
        return Parts(move.collective_us(received, topology), packed + filled, joined + cuts)

    def show(self, mesh: DeviceMesh, operand: object) -> str:
        return f"{self.kind}({operand}, {','.join(map(mesh.axis_name, self.axes))})"

    def start(self, xs, coordinate: tuple[int, ...], transport: Transport):
        """Launch the collective on these blocks, one for each step."""
        return _WAYS[type(self.steps[0].move)].start(self.steps, xs, coordinate, transport)

    def arrived(self, y, coordinate: tuple[int, ...], transport: Transport) -> list:
        """Wait for what was sent, and return the blocks after the moves; if they are copied out, what `cut` cuts."""
        return _WAYS[type(self.steps[0].move)].arrived(self.steps, y, coordinate, transport)

    def cut(self, index: int, piece, coordinate: tuple[int, ...], transport: Transport):
        """The block after one of the moves, of what arrived for it, if they are copied out."""
        step, columns = self.steps[index], self._columns(coordinate, transport)
        ctx = MoveContext(step.before, step.after, coordinate, transport)
        if columns is None:
            return step.move.cut_out(piece, ctx)
        n = group_size(self.axes, step.before)
        return tables.in_graph(tables.block, piece, columns[index], n, ctx.shape_after())

    def _columns(self, coordinate: tuple[int, ...], transport: Transport) -> tuple[Column, ...] | None:
        """Where the tensors of gathers are in the table that comes, asked for each of them."""
        if coordinate not in self._found:
            self._found[coordinate] = _Gathered.columns(self.steps, _contexts(self.steps, coordinate, transport))
        return self._found[coordinate]

    @cached_property
    def _found(self) -> dict[tuple[int, ...], tuple[Column, ...] | None]:
        return {}

    def finish(self, y, coordinate: tuple[int, ...], transport: Transport) -> list:
        """Wait, and cut what came into the blocks after the moves."""
        pieces = self.arrived(y, coordinate, transport)
        if not self.copies_out:
            return pieces
        return [self.cut(i, pieces[i], coordinate, transport) for i in range(len(self.steps))]

    def __call__(self, xs) -> list:
        """Make the moves on this rank's blocks now."""
        return transport().step(self._start_here, self._finish_here, xs)

    def _start_here(self, xs):
        return self.start(xs, self.before[0].mesh.get_coordinate(), transport())

    def _finish_here(self, y) -> list:
        return self.finish(y, self.before[0].mesh.get_coordinate(), transport())


# ---- how each kind is put into a buffer ---------------------------------------------------------

Steps = Sequence[Step]


def _contexts(steps: Steps, at: tuple[int, ...], by: Transport) -> list[MoveContext]:
    return [MoveContext(step.before, step.after, at, by) for step in steps]


class _AllReduced:
    """One tensor behind the other."""

    @classmethod
    def start(cls, steps: Steps, xs: Any, at: tuple[int, ...], by: Transport) -> Any:
        flat = torch.cat([xs[i].reshape(-1) for i in range(len(steps))], 0)
        return steps[0].move.start(flat, cls._context(steps, at, by))

    @classmethod
    def arrived(cls, steps: Steps, y: Any, at: tuple[int, ...], by: Transport) -> list:
        shapes = [step.after.local_shape(at) for step in steps]
        flat = steps[0].move.finish(y, cls._context(steps, at, by))
        pieces = flat.split([prod(s) for s in shapes], 0)
        return [pieces[i].view(shape) for i, shape in enumerate(shapes)]

    @staticmethod
    def _context(steps: Steps, at: tuple[int, ...], by: Transport) -> MoveContext:
        """The context of the buffer's all-reduce: the buffer is Partial on the axes, as long as this rank's blocks."""
        length = sum(prod(step.before.local_shape(at)) for step in steps)
        first, axes = steps[0].before, steps[0].axes
        partial = [(a, kind) for a, kind in first.partial if a in axes]
        flat = Spec.of(first.mesh, (length,), first.dtype, partial=partial)
        return MoveContext(flat, flat.with_layout(flat.dims, flat.units), at, by)


class _Gathered:
    """What a rank sends, one block behind the other; what comes is a row of all blocks for each rank.

    Of very many ranks, the row that is sent and each block are made by one call (`tables`).
    """

    @classmethod
    def start(cls, steps: Steps, xs: Any, at: tuple[int, ...], by: Transport) -> Any:
        move, ctxs = steps[0].move, _contexts(steps, at, by)
        if cls.columns(steps, ctxs) is None:
            flat = torch.cat([move.row_of(xs[i], ctx) for i, ctx in enumerate(ctxs)], 0)
        else:
            flat = tables.in_graph(tables.in_row, xs, tuple([move.row(ctx) for ctx in ctxs]))
        return by.all_gather_into_tensor(flat, group_size(move.axes, steps[0].before), ctxs[0].group(move.axes))

    @classmethod
    def arrived(cls, steps: Steps, y: Any, at: tuple[int, ...], by: Transport) -> list:
        """For each move what its block is cut out of."""
        move, ctxs = steps[0].move, _contexts(steps, at, by)
        if cls.columns(steps, ctxs) is not None:
            return [by.wait_tensor(y)] * len(steps)
        rows = [wire_items(steps[0].before.dtype) * move.row(ctx) for ctx in ctxs]
        table = by.wait_tensor(y).view(group_size(move.axes, steps[0].before), sum(rows))
        pieces = table.split(rows, 1)
        return [pieces[i] for i in range(len(steps))]

    @staticmethod
    def columns(steps: Steps, ctxs: Sequence[MoveContext]) -> tuple[Column, ...] | None:
        """Where the tensors are in the table that comes; None where they are cut out box by box."""
        move, is_sent_as_bytes = steps[0].move, steps[0].before.dtype in wire.BYTES_ONLY
        return None if is_sent_as_bytes else _columns(ctxs, move.pieces, move.row)


class _Scattered:
    """A row for each rank, with its pieces of all tensors one behind the other.

    Of very many ranks, all rows are filled by one call, and the row that comes is cut by one (`tables`).
    """

    @staticmethod
    def start(steps: Steps, xs: Any, at: tuple[int, ...], by: Transport) -> Any:
        move, ctxs = steps[0].move, _contexts(steps, at, by)
        n, rows = group_size(move.axes, steps[0].before), [move.row_sent(ctx) for ctx in ctxs]
        columns = _columns(ctxs, move.pieces, move.row_sent)
        if columns is None:
            flat = torch.cat([move.rows_of(xs[i], ctx).view(n, rows[i]) for i, ctx in enumerate(ctxs)], 1).view(-1)
        else:
            flat = tables.in_graph(tables.filled, xs, columns, n, move.dtype_sent(ctxs[0]))
        return move.sent(flat, sum(rows), ctxs[0])

    @staticmethod
    def arrived(steps: Steps, y: Any, at: tuple[int, ...], by: Transport) -> list:
        move, ctxs = steps[0].move, _contexts(steps, at, by)
        rows, shapes = [move.row_sent(ctx) for ctx in ctxs], [ctx.shape_after() for ctx in ctxs]
        row = move.arrived(y, sum(rows), ctxs[0])
        if _columns(ctxs, move.pieces, move.row_sent) is not None:
            found = tables.in_graph(tables.pieces, row, tuple(rows), tuple(shapes))
            return [move.unpacked(found[i], ctx) for i, ctx in enumerate(ctxs)]
        pieces = row.split(rows, 0)
        found = [move.unpacked(pieces[i], ctx) for i, ctx in enumerate(ctxs)]
        own = [x if prod(s) == n else x.narrow(0, 0, prod(s)) for x, s, n in zip(found, shapes, rows, strict=True)]
        return [x.view(shape) for x, shape in zip(own, shapes, strict=True)]


def _columns(ctxs: Sequence[MoveContext], pieces: Callable, width: Callable) -> tuple[Column, ...] | None:
    """Where tensors stand side by side in a table with a row for each rank; None where a rank is a box.

    pieces: gives the boxes of a tensor. width: how many columns it has.
    """
    parts = [pieces(ctx).parts for ctx in ctxs]
    return None if None in parts else columns_of([width(ctx) for ctx in ctxs], parts)


class _Exchanged:
    """For each rank that gets something, its pieces of all tensors one behind the other.

    Neighbouring ranks that get as much of each tensor are cut and joined together: as the rows of a table.
    """

    @staticmethod
    def start(steps: Steps, xs: Any, at: tuple[int, ...], by: Transport) -> Any:
        move, ctxs = steps[0].move, _contexts(steps, at, by)
        received, sent = zip(*[move.sizes(ctx) for ctx in ctxs], strict=True)
        flats, tables = [move.packed(xs[i], ctx) for i, ctx in enumerate(ctxs)], _Table.of(sent)
        parts = [_pieces(flats[i], [t.count * t.sizes[i] for t in tables]) for i in range(len(steps))]
        joined = [table.joined([parts[i][k] for i in range(len(steps))]) for k, table in enumerate(tables)]
        flat = torch.cat(joined, 0) if len(joined) > 1 else joined[0] if joined else flats[0]
        totals = [list(map(sum, zip(*each, strict=True))) for each in (received, sent)]
        return by.all_to_all_single(flat, *totals, ctxs[0].group(move.axes))

    @staticmethod
    def arrived(steps: Steps, y: Any, at: tuple[int, ...], by: Transport) -> list:
        move, ctxs = steps[0].move, _contexts(steps, at, by)
        y, tables = by.wait_tensor(y), _Table.of([move.sizes(ctx)[0] for ctx in ctxs])
        parts = _pieces(y, [table.count * sum(table.sizes) for table in tables])
        cut = [table.cut(parts[k]) for k, table in enumerate(tables)]
        found = []
        for i, ctx in enumerate(ctxs):
            mine = [columns[i] for table, columns in zip(tables, cut, strict=True) if table.sizes[i]]
            own = torch.cat(mine, 0) if len(mine) > 1 else mine[0] if mine else y.narrow(0, 0, 0)
            found.append(move.unpacked(own, ctx))
        return found


class _Table(NamedTuple):
    """So many neighbouring ranks, each of which gets as many items of each tensor: a row for each rank."""

    count: int
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, sizes: Sequence[Sequence[int]]) -> list[_Table]:
        """The tables of what each rank gets of each tensor, without ranks that get nothing.

        >>> _Table.of([[3, 3, 1, 0], [2, 2, 2, 0]])
        [_Table(count=2, sizes=(3, 2)), _Table(count=1, sizes=(1, 2))]
        """
        groups = itertools.groupby(zip(*sizes, strict=True))
        return [cls(len(list(group)), of_rank) for of_rank, group in groups if any(of_rank)]

    def joined(self, columns: Sequence[Any]) -> Any:
        """The rows, one behind the other, of columns that are rows by themselves."""
        filled = [x.view(self.count, n) for x, n in zip(columns, self.sizes, strict=True) if n]
        return (torch.cat(filled, 1) if len(filled) > 1 else filled[0]).view(-1)

    def cut(self, rows: Any) -> list:
        """The columns again; of those that have no items, nothing that is read."""
        pieces = rows.view(self.count, sum(self.sizes)).split(list(self.sizes), 1)
        return [pieces[i].reshape(-1) if n else None for i, n in enumerate(self.sizes)]


def _pieces(flat: Any, sizes: Sequence[int]) -> Sequence[Any]:
    """A row in pieces of these sizes."""
    return flat.split(list(sizes), 0) if len(sizes) > 1 else [flat]


_WAYS = {AllReduce: _AllReduced, AllGather: _Gathered, ReduceScatter: _Scattered, AllToAll: _Exchanged}
