"""Moves: the closed set of steps, each on one axis, that change how a tensor lies on the mesh.

    AllGather(1, 0)        f32[8@dp, 16@tp] -> ...   dim 0 whole again over axis 1
    AllReduce(1)           +sum@tp -> replicated
    ReduceScatter(1, 0)    +sum@tp -> dim 0 over tp
    AllToAll(1, 0, 1)      dim 0 over tp -> dim 1 over tp
    Slice(1, 0)            replicated -> dim 0 over tp, nothing is sent
    ToPartial(1, "sum")    replicated -> a sum, nothing is sent

A move is a value. `apply` gives the spec after it, `cost` its modelled time, and `start`/`finish` are its code:
plain calls on a tensor, so that a DTensor runs them, simulated ranks run them, and fx writes them down.
Whatever differs between ranks comes from the coordinate; no size is read from the tensor.

Blocks that differ in size (uneven shards) are padded to the largest for gathers and reduce-scatters, and sent as
they are by all-to-all. What the ranks of a group need not send, because it is empty, none of them sends.

Left out: merging several axes into one collective, permutes, exchanges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch

from spmd.comm import Transport, wire
from spmd.comm.chunk import chunk, smallest_unit
from spmd.mesh import MeshTopoInfo, cost
from spmd.tensor.spec import Spec, commute


@dataclass(frozen=True)
class At:
    """Where a move runs: the specs before and after it, this rank's coordinate, and its collectives."""

    before: Spec
    after: Spec
    coordinate: tuple[int, ...]
    transport: Transport

    def size(self, axis: int) -> int:
        return self.before.mesh.shape[axis]

    def group(self, axis: int) -> str:
        return self.transport.group(self.before.mesh, axis)

    def shape_before(self) -> tuple[int, ...]:
        return self.before.local_shape(self.coordinate)

    def shape_after(self) -> tuple[int, ...]:
        return self.after.local_shape(self.coordinate)


class Move:
    """One step on one axis; the base of all moves."""

    axis: int
    kind: ClassVar[str]
    sends: ClassVar[bool] = True

    def apply(self, spec: Spec) -> Spec | None:
        """The spec after the move, or None where the move is not legal."""
        raise NotImplementedError

    def cost(self, before: Spec, after: Spec, topology: MeshTopoInfo) -> float:
        """Modelled microseconds over these links."""
        raise NotImplementedError

    def nbytes(self, before: Spec, after: Spec) -> int:
        """Bytes of the tensor that one rank hands to the collective (the largest rank's)."""
        return before.local_nbytes

    def start(self, x, at: At):
        """Launch the move on this rank's block; the result may be in flight."""
        raise NotImplementedError

    def finish(self, y, at: At):
        """Wait for what `start` launched and give the block after the move."""
        return y

    def show(self, mesh) -> str:
        """The move with its axis by name, for people."""
        rest = [repr(v) for k, v in vars(self).items() if k not in ("axis", "unit")]
        return f"{self.kind}({', '.join([mesh.axis_name(self.axis), *rest])})"


@dataclass(frozen=True)
class AllReduce(Move):
    """Partial to replicated."""

    axis: int
    kind = "all_reduce"

    def apply(self, spec):
        return _without_partial(spec, self.axis)

    def cost(self, before, after, topology):
        return cost.all_reduce_cost(before.local_nbytes, self.axis, topology)

    def start(self, x, at):
        if _empty(at.shape_before()):
            return x
        op = _wire_op(at, self.axis)
        return at.transport.all_reduce(_sent(x, at, op), op, at.group(self.axis))

    def finish(self, y, at):
        return y if _empty(at.shape_before()) else _received(at.transport.wait_tensor(y), at, self.axis)


@dataclass(frozen=True)
class ReduceScatter(Move):
    """Partial to a shard of `dim`, inside the axes that shard it already. Sums and averages only, of wide dtypes."""

    axis: int
    dim: int
    unit: int = 1
    kind = "reduce_scatter"

    def apply(self, spec):
        if not spec.on(self.axis).is_partial() or spec.on(self.axis).reduce_op not in ("sum", "avg"):
            return None
        if spec.dtype in wire.WIDENED:
            return None
        return _with_shard(_without_partial(spec, self.axis), self.axis, self.dim, self.unit)

    def cost(self, before, after, topology):
        return cost.reduce_scatter_cost(before.local_nbytes, self.axis, topology)

    def start(self, x, at):
        sizes = _sizes(at, self.axis, self.dim, at.shape_before())
        if _empty(at.shape_before()):
            return _narrow(x, self.dim, 0, sizes[at.coordinate[self.axis]])
        if len(set(sizes)) > 1 or self.dim:
            pieces = zip(_split(x, sizes, self.dim), sizes, strict=True)
            x = torch.cat([_padded(p, self.dim, size, sizes[0], len(at.before.shape)) for p, size in pieces], 0)
        n, op = at.size(self.axis), _wire_op(at, self.axis)
        return at.transport.reduce_scatter_tensor(x.contiguous(), op, n, at.group(self.axis))

    def finish(self, y, at):
        if _empty(at.shape_before()):
            return y
        y = _averaged(at.transport.wait_tensor(y), at, self.axis)
        sizes = _sizes(at, self.axis, self.dim, at.shape_before())
        own = sizes[at.coordinate[self.axis]]
        # Contiguous like the blocks of other ranks, so that views of it are views on all of them.
        return y if own == sizes[0] else _narrow(y, self.dim, 0, own).contiguous()


@dataclass(frozen=True)
class AllGather(Move):
    """Shard of `dim` to replicated; the axis must be the innermost that shards the dim."""

    axis: int
    dim: int
    kind = "all_gather"

    def apply(self, spec):
        return _without_shard(spec, self.axis, self.dim)

    def cost(self, before, after, topology):
        return cost.all_gather_cost(after.local_nbytes, self.axis, topology)

    def start(self, x, at):
        if _empty(at.shape_after()):
            return x.new_zeros(at.shape_after())
        sizes = _sizes(at, self.axis, self.dim, at.shape_after())
        x = _padded(x, self.dim, sizes[at.coordinate[self.axis]], sizes[0], len(at.before.shape))
        n = at.size(self.axis)
        return at.transport.all_gather_into_tensor(_widened(x, at).contiguous(), n, at.group(self.axis))

    def finish(self, y, at):
        if _empty(at.shape_after()):
            return y
        sizes = _sizes(at, self.axis, self.dim, at.shape_after())
        y = _narrowed(at.transport.wait_tensor(y), at)
        if self.dim == 0 and len(set(sizes)) == 1:
            return y
        rows = sizes[0] if self.dim == 0 else at.shape_before()[0]
        pieces = _split(y, [rows] * len(sizes), 0)
        whole = [p if s == sizes[0] else _narrow(p, self.dim, 0, s) for p, s in zip(pieces, sizes, strict=True)]
        return torch.cat(whole, self.dim)


@dataclass(frozen=True)
class AllToAll(Move):
    """Shard of `gather_dim` to a shard of `shard_dim`: one all-to-all of (n-1)/n of the local bytes."""

    axis: int
    gather_dim: int
    shard_dim: int
    unit: int = 1
    kind = "all_to_all"

    def apply(self, spec):
        bare = _without_shard(spec, self.axis, self.gather_dim)
        return bare and _with_shard(bare, self.axis, self.shard_dim, self.unit)

    def cost(self, before, after, topology):
        return cost.all_to_all_cost(before.local_nbytes, self.axis, topology)

    def _pieces(self, at: At) -> tuple[list[int], list[tuple[int, ...]]]:
        """Sizes along shard_dim of what goes to each rank; shapes of what comes from each."""
        out = _sizes(at, self.axis, self.shard_dim, at.shape_before())
        gathered = _sizes(at, self.axis, self.gather_dim, at.shape_after(), at.before)
        shapes = [_resized(at.shape_after(), self.gather_dim, s) for s in gathered]
        return out, shapes

    def _idle(self, at: At) -> bool:
        return _empty(_resized(at.shape_after(), self.shard_dim, at.shape_before()[self.shard_dim]))

    def start(self, x, at):
        if self._idle(at):
            return x.new_zeros(at.shape_after())
        sizes, shapes = self._pieces(at)
        flat = torch.cat([p.reshape(-1) for p in _split(x, sizes, self.shard_dim)], 0)
        each = 2 if at.before.dtype.is_complex else 1  # numbers an element
        sent = [each * prod(_resized(at.shape_before(), self.shard_dim, s)) for s in sizes]
        received = [each * prod(shape) for shape in shapes]
        flat = wire.as_reals(_widened(flat, at), at.before.dtype)
        return at.transport.all_to_all_single(flat, received, sent, at.group(self.axis))

    def finish(self, y, at):
        if self._idle(at):
            return y
        _, shapes = self._pieces(at)
        y = wire.from_reals(_narrowed(at.transport.wait_tensor(y), at), at.before.dtype)
        pieces = _split(y, [prod(shape) for shape in shapes], 0)
        return torch.cat([p.view(shape) for p, shape in zip(pieces, shapes, strict=True)], self.gather_dim)


@dataclass(frozen=True)
class Slice(Move):
    """Replicated to a shard of `dim`: each rank keeps its block. A copy, so that writes stay apart."""

    axis: int
    dim: int
    unit: int = 1
    kind = "slice"
    sends = False

    def apply(self, spec):
        return _with_shard(spec, self.axis, self.dim, self.unit) if spec.on(self.axis).is_replicate() else None

    def cost(self, before, after, topology):
        return 0.0

    def start(self, x, at):
        sizes = _sizes(at, self.axis, self.dim, at.shape_before())
        i = at.coordinate[self.axis]
        return _narrow(x, self.dim, sum(sizes[:i]), sizes[i]).clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class ToPartial(Move):
    """Replicated to Partial: for sums and products the first rank keeps the tensor, the others hold the identity."""

    axis: int
    reduce_op: str = "sum"
    kind = "to_partial"
    sends = False

    def apply(self, spec):
        if not spec.on(self.axis).is_replicate() or not commute([self.reduce_op, *(kind for _, kind in spec.partial)]):
            return None
        return spec.with_layout(spec.dims, spec.units, (*spec.partial, (self.axis, self.reduce_op)))

    def cost(self, before, after, topology):
        return 0.0

    def start(self, x, at):
        if at.coordinate[self.axis] == 0 or self.reduce_op not in _IDENTITY:
            return x.clone(memory_format=torch.contiguous_format)
        return torch.full_like(x, _IDENTITY[self.reduce_op], memory_format=torch.contiguous_format)


_IDENTITY = {"sum": 0, "product": 1}


# ---- specs ------------------------------------------------------------------------------------


def _without_partial(spec: Spec, axis: int) -> Spec | None:
    if not spec.on(axis).is_partial():
        return None
    return spec.with_layout(spec.dims, spec.units, [(a, k) for a, k in spec.partial if a != axis])


def _without_shard(spec: Spec, axis: int, dim: int) -> Spec | None:
    if spec.dims[dim][-1:] != (axis,):
        return None
    dims = (*spec.dims[:dim], spec.dims[dim][:-1], *spec.dims[dim + 1 :])
    return spec.with_layout(dims, spec.units, spec.partial)


def _with_shard(spec: Spec, axis: int, dim: int, unit: int) -> Spec | None:
    """The axis inside those that shard the dim already, if these cut it as the unit would."""
    ns = tuple(spec.mesh.shape[a] for a in spec.dims[dim])
    if ns and smallest_unit(spec.shape[dim], unit, ns) != spec.units[dim]:
        return None
    dims = (*spec.dims[:dim], (*spec.dims[dim], axis), *spec.dims[dim + 1 :])
    units = (*spec.units[:dim], unit, *spec.units[dim + 1 :])
    return spec.with_layout(dims, units, spec.partial)


# ---- sizes and pieces -------------------------------------------------------------------------


def _sizes(at: At, axis: int, dim: int, shape: Sequence[int], sharded: Spec | None = None) -> list[int]:
    """Along dim, the lengths of the blocks that the ranks of the axis hold of `shape`; the first is the largest."""
    spec = sharded or (at.after if axis in at.after.dims[dim] else at.before)
    unit, n = spec.units[dim], at.size(axis)
    return [chunk(shape[dim] // unit, n, i)[1] * unit for i in range(n)]


def _empty(shape: Sequence[int]) -> bool:
    return prod(shape) == 0


def _resized(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _narrow(x, dim: int, start: int, length: int):
    return x.narrow(dim, start, length)


def _split(x, sizes: Sequence[int], dim: int) -> list:
    pieces = x.split(list(sizes), dim)
    return [pieces[i] for i in range(len(sizes))]


def _padded(x, dim: int, size: int, to: int, ndim: int):
    """x grown along dim from size to `to`; what is added is never read."""
    return x if size == to else torch.nn.functional.pad(x, (0, 0) * (ndim - dim - 1) + (0, to - size))


# ---- reductions -------------------------------------------------------------------------------


def _wire_op(at: At, axis: int) -> str:
    """The reduction that is sent: gloo has no average, so it is a sum and a division."""
    op = at.before.on(axis).reduce_op
    return "sum" if op == "avg" else op


def _averaged(y, at: At, axis: int):
    return y / at.size(axis) if at.before.on(axis).reduce_op == "avg" else y


def _widened(x, at: At):
    dtype = at.before.dtype
    return x.to(wire.WIDENED[dtype]) if dtype in wire.WIDENED else x


def _narrowed(y, at: At):
    return y.to(at.before.dtype) if at.before.dtype in wire.WIDENED else y


def _sent(x, at: At, op: str):
    """What goes on the wire for an all-reduce."""
    dtype = at.before.dtype
    return wire.with_marks(x, dtype, op) if wire.marks_nan(dtype, op) else _widened(x, at).contiguous()


def _received(y, at: At, axis: int):
    """The reduced block, from what came back of what `_sent` sent."""
    y = _narrowed(y, at)
    if wire.marks_nan(at.before.dtype, _wire_op(at, axis)):
        y = wire.without_marks(y, at.shape_before())
    return _averaged(y, at, axis)
