"""From one mesh to another: over the same ranks, some of them, or others.

    move_between_meshes(local, src, dst)
        src: f32[8@dp, 8@tp] on [[0, 1], [2, 3]]
        dst: f32[8, 8@tp]    on [4, 5]

Reductions that are owed come first, into shards. Then one all-to-all of all ranks of both meshes gives each rank of the
second mesh its block. It takes the block from one replica of the tensor: from its own replica if it has a part of one,
else the replicas take turns. Axes that are to be Partial become so at the end. All ranks of both meshes make the call;
in a mesh that a rank is not in, its block is empty.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import inf, prod

from spmd.comm import transport
from spmd.mesh import DeviceMesh, current_rank
from spmd.tensor.redistribute.boxes import Box, cut, joined, overlap, relative_to, shape_of, volume
from spmd.tensor.redistribute.collective_moves import from_wire, to_wire, wire_items
from spmd.tensor.redistribute.plan import Step, after_reduction, plan
from spmd.tensor.spec import Spec


def move_between_meshes(local, src: Spec, dst: Spec, in_rank_order: bool = False):
    """This rank's block after a tensor moves from src to dst, which are on two meshes; in_rank_order as in `plan`."""
    shards, bare = after_reduction(src, tuple(a for a, _ in src.partial)), dst.with_layout(dst.dims, dst.units)
    exchange = CrossMeshExchange(shards, bare)
    local = _moved_within_mesh(local, src, shards, in_rank_order)
    local = transport().step(exchange.start, exchange.finish, local)
    return _moved_within_mesh(local, bare, dst)


def _moved_within_mesh(local, src: Spec, dst: Spec, in_rank_order: bool = False):
    """The block after the moves within a mesh. Ranks outside of the mesh keep their empty block."""
    for step in plan(src, dst, inf, in_rank_order).effective.steps:
        local = transport().step(functools.partial(_started, step), functools.partial(_finished, step), local)
    return local


def _started(step: Step, local):
    at = step.before.mesh.get_coordinate()
    return local if at is None else step.start(local, at, transport())


def _finished(step: Step, y):
    at = step.before.mesh.get_coordinate()
    return y if at is None else step.finish(y, at, transport())


@dataclass(frozen=True)
class CrossMeshExchange:
    """The exchange between two meshes. Neither spec has a Partial."""

    src: Spec
    dst: Spec

    def start(self, x):
        """Launch it on this rank's block."""
        if not prod(self.src.shape):
            return x
        me, by = current_rank(), transport()
        mine = self._box_before(me)
        sent = [self._box_sent(me, rank) for rank in self._ranks]
        received = [self._box_sent(rank, me) for rank in self._ranks]
        items = wire_items(self.src.dtype)
        sizes = [[items * volume(box) if box is not None else 0 for box in boxes] for boxes in (received, sent)]
        boxes = [relative_to(box, mine) for box in sent if box is not None]
        shape = () if mine is None else shape_of(mine)
        flat = x.new_empty(0) if mine is None else cut(x, shape, boxes)
        return by.all_to_all_single(to_wire(flat, self.src.dtype), *sizes, by.group(self._all, 0))

    def finish(self, y):
        """Wait for the exchange, and return the block; it is empty if this rank is not in the second mesh."""
        me = current_rank()
        want = self._box_after(me)
        if not prod(self.src.shape):
            return y.new_zeros((0,) if want is None else self.dst.local_shape(self._at(self.dst.mesh, me)))
        y = from_wire(transport().wait_tensor(y), self.src.dtype)
        if want is None:
            return y
        received = [self._box_sent(rank, me) for rank in self._ranks]
        shape = shape_of(want)
        return joined(y, [relative_to(box, want) for box in received if box is not None], shape)

    @property
    def _ranks(self) -> tuple[int, ...]:
        return tuple(sorted({*self.src.mesh.ranks, *self.dst.mesh.ranks}))

    @property
    def _all(self) -> DeviceMesh:
        """The ranks of both meshes."""
        return _flat_mesh(self.src.mesh.device_type, self._ranks)

    def _at(self, mesh: DeviceMesh, rank: int) -> tuple[int, ...] | None:
        return mesh.coordinate_of(rank) if rank in mesh else None

    def _box_before(self, rank: int) -> Box | None:
        at = self._at(self.src.mesh, rank)
        return None if at is None else self.src.box(at)

    def _box_after(self, rank: int) -> Box | None:
        at = self._at(self.dst.mesh, rank)
        return None if at is None else self.dst.box(at)

    def _box_sent(self, sender: int, receiver: int) -> Box | None:
        """The box that one rank sends to another; None if these two send nothing to each other."""
        have, want = self._box_before(sender), self._box_after(receiver)
        if have is None or want is None or self._replica_of(sender) != self._replica_for(receiver):
            return None
        return overlap(have, want)

    @property
    def _replicating(self) -> list[int]:
        """The axes of the first mesh that replicate."""
        used = {a for axes in self.src.dims for a in axes}
        return [a for a in range(self.src.mesh.ndim) if a not in used]

    def _replica_of(self, rank: int) -> tuple[int, ...]:
        """The replica of the tensor that a rank of the first mesh has a part of."""
        at = self.src.mesh.coordinate_of(rank)
        return tuple(at[a] for a in self._replicating)

    def _replica_for(self, rank: int) -> tuple[int, ...]:
        """The replica from which a rank of the second mesh receives its block."""
        if rank in self.src.mesh:
            return self._replica_of(rank)
        turn, found = self.dst.mesh.ranks.index(rank), []
        for a in reversed(self._replicating):
            turn, place = divmod(turn, self.src.mesh.shape[a])
            found.append(place)
        return tuple(reversed(found))


@functools.lru_cache(maxsize=256)
def _flat_mesh(device_type: str, ranks: tuple[int, ...]) -> DeviceMesh:
    return DeviceMesh(device_type, ranks)
