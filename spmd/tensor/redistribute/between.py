"""From one mesh to another: over the same ranks, some of them, or others.

    between(local, src, dst)        [[0, 1], [2, 3]], f32[8@dp, 8@tp]  ->  [4, 5], f32[8, 8@tp]

What is still to be reduced is reduced first, into shards. Then each rank of the second mesh gets what it wants from one
copy of the tensor, in one all-to-all of all ranks of both: from its own copy where it has a part of one, else from one
of them in turn. What is to be Partial there becomes so at the end. All ranks of both meshes make the call; in the mesh
that a rank is not in, its block is empty.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import inf, prod

from spmd.comm import transport
from spmd.mesh import DeviceMesh, current_rank
from spmd.tensor.redistribute.boxes import Box, cut, joined, overlap, volume, within
from spmd.tensor.redistribute.moves import from_wire, to_wire, wire_items
from spmd.tensor.redistribute.plan import Step, plan, reduced
from spmd.tensor.spec import Spec


def between(local, src: Spec, dst: Spec, in_rank_order: bool = False):
    """This rank's block of a tensor that goes from src, on one mesh, to dst, on another; in_rank_order as in `plan`."""
    shards, bare = reduced(src, tuple(a for a, _ in src.partial)), dst.with_layout(dst.dims, dst.units)
    crossing = Crossing(shards, bare)
    local = _at_home(local, src, shards, in_rank_order)
    local = transport().step(crossing.start, crossing.finish, local)
    return _at_home(local, bare, dst)


def _at_home(local, src: Spec, dst: Spec, in_rank_order: bool = False):
    """The moves within a mesh, made by its ranks; what others hold is empty, and stays as it is."""
    for step in plan(src, dst, inf, in_rank_order).as_made.steps:
        local = transport().step(functools.partial(_started, step), functools.partial(_finished, step), local)
    return local


def _started(step: Step, local):
    at = step.before.mesh.get_coordinate()
    return local if at is None else step.start(local, at, transport())


def _finished(step: Step, y):
    at = step.before.mesh.get_coordinate()
    return y if at is None else step.finish(y, at, transport())


@dataclass(frozen=True)
class Crossing:
    """The exchange between two meshes; in neither anything is left to be reduced."""

    src: Spec
    dst: Spec

    def start(self, x):
        """Launch it on this rank's block."""
        if not prod(self.src.shape):
            return x
        me, by = current_rank(), transport()
        mine = self._has(me)
        sent = [self._passes(me, rank) for rank in self._ranks]
        come = [self._passes(rank, me) for rank in self._ranks]
        items = wire_items(self.src.dtype)
        sizes = [[items * volume(box) if box is not None else 0 for box in boxes] for boxes in (come, sent)]
        boxes = [within(box, mine) for box in sent if box is not None]
        shape = () if mine is None else [stop - start for start, stop in mine]
        flat = x.new_empty(0) if mine is None else cut(x, shape, boxes)
        return by.all_to_all_single(to_wire(flat, self.src.dtype), *sizes, by.group(self._all, 0))

    def finish(self, y):
        """Wait for what came, and give the block; an empty one where this rank is not in the second mesh."""
        me = current_rank()
        want = self._wants(me)
        if not prod(self.src.shape):
            return y.new_zeros((0,) if want is None else self.dst.local_shape(self._at(self.dst.mesh, me)))
        y = from_wire(transport().wait_tensor(y), self.src.dtype)
        if want is None:
            return y
        come = [self._passes(rank, me) for rank in self._ranks]
        shape = [stop - start for start, stop in want]
        return joined(y, [within(box, want) for box in come if box is not None], shape)

    @property
    def _ranks(self) -> tuple[int, ...]:
        return tuple(sorted({*self.src.mesh.ranks, *self.dst.mesh.ranks}))

    @property
    def _all(self) -> DeviceMesh:
        """The ranks of both meshes."""
        return _line(self.src.mesh.device_type, self._ranks)

    def _at(self, mesh: DeviceMesh, rank: int) -> tuple[int, ...] | None:
        return mesh.coordinate_of(rank) if rank in mesh else None

    def _has(self, rank: int) -> Box | None:
        at = self._at(self.src.mesh, rank)
        return None if at is None else self.src.box(at)

    def _wants(self, rank: int) -> Box | None:
        at = self._at(self.dst.mesh, rank)
        return None if at is None else self.dst.box(at)

    def _passes(self, sender: int, receiver: int) -> Box | None:
        """What one rank sends to another; None where the two have no part in it."""
        have, want = self._has(sender), self._wants(receiver)
        if have is None or want is None or self._copy(sender) != self._copy_for(receiver):
            return None
        return overlap(have, want)

    @property
    def _replicating(self) -> list[int]:
        used = {a for axes in self.src.dims for a in axes}
        return [a for a in range(self.src.mesh.ndim) if a not in used]

    def _copy(self, rank: int) -> tuple[int, ...]:
        """Which copy of the tensor a rank of the first mesh has a part of."""
        at = self.src.mesh.coordinate_of(rank)
        return tuple(at[a] for a in self._replicating)

    def _copy_for(self, rank: int) -> tuple[int, ...]:
        """Which copy a rank of the second mesh gets its block from."""
        if rank in self.src.mesh:
            return self._copy(rank)
        turn, found = self.dst.mesh.ranks.index(rank), []
        for a in reversed(self._replicating):
            turn, place = divmod(turn, self.src.mesh.shape[a])
            found.append(place)
        return tuple(reversed(found))


@functools.lru_cache(maxsize=256)
def _line(device_type: str, ranks: tuple[int, ...]) -> DeviceMesh:
    return DeviceMesh(device_type, ranks)
