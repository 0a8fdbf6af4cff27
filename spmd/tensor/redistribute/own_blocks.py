"""Blocks of the ranks' own, of any sizes, become those of a spec.

    ranks have rows 0:8, 8:9, 9:17, 17:20       blocks as they were given, one behind the other
    f32[20@dp] has  0:5, 5:10, 10:15, 15:20     those that the spec has, as `torch.chunk` cuts

Blocks that are those of the spec stay where they are, as equal ones are without more. Of others each rank sends to each
other what that is to have of its block, in one all-to-all along the axes: no element is sent twice.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from spmd.comm import transport
from spmd.mesh import DeviceMesh
from spmd.tensor.placement import Placement
from spmd.tensor.redistribute.boxes import Box, cut, joined, overlap, relative_to, shape_of, volume
from spmd.tensor.redistribute.collective_moves import from_wire, to_wire, wire_items
from spmd.tensor.spec import Spec, check_placements, spec_of

Shape = tuple[int, ...]
Coordinate = tuple[int, ...]


@dataclass(frozen=True)
class OwnBlocks:
    """What the ranks hold. spec: of the tensor that their blocks make. edges: for each dim where the blocks along it
    begin, and where the last one ends."""

    spec: Spec
    edges: tuple[tuple[int, ...], ...]

    def box(self, at: Coordinate) -> Box:
        """Which part of the tensor the rank at a coordinate has given."""
        places = [_place(self.spec.mesh, axes, at) for axes in self.spec.dims]
        return tuple([(edges[i], edges[i + 1]) for edges, i in zip(self.edges, places, strict=True)])

    @functools.cached_property
    def axes(self) -> tuple[int, ...]:
        """The axes along which blocks differ."""
        return tuple(sorted({axis for axes in self.spec.dims for axis in axes}))

    @functools.cached_property
    def are_of_spec(self) -> bool:
        """Whether each rank's block is the one that the spec gives it."""
        return all(_same(self.box(at), self.spec.box(at)) for at in self.spec.mesh.coordinates())

    def block(self, x: torch.Tensor) -> torch.Tensor:
        """This rank's block of the spec, where it has given x."""
        x = x.detach().contiguous()
        return x if self.are_of_spec else transport().step(self._start, self._finish, x)

    def _start(self, x: torch.Tensor) -> torch.Tensor:
        sent, received = self._boxes_sent(), self._boxes_received()
        items, by, dtype = wire_items(self.spec.dtype), transport(), self.spec.dtype
        sizes = [[items * volume(box) for box in boxes] for boxes in (received, sent)]
        mine = self.box(self.spec.mesh.get_coordinate())
        flat = cut(x, shape_of(mine), [relative_to(box, mine) for box in sent])
        return by.all_to_all_single(to_wire(flat, dtype), *sizes, by.group(self.spec.mesh, self.axes))

    def _finish(self, y: torch.Tensor) -> torch.Tensor:
        y = from_wire(transport().wait_tensor(y), self.spec.dtype)
        want = self.spec.box(self.spec.mesh.get_coordinate())
        return joined(y, [relative_to(box, want) for box in self._boxes_received()], shape_of(want))

    def _boxes_sent(self) -> list[Box]:
        """What this rank sends to each rank along the axes."""
        mine = self.box(self.spec.mesh.get_coordinate())
        return [overlap(mine, self.spec.box(other)) for other in self._others()]

    def _boxes_received(self) -> list[Box]:
        mine = self.spec.box(self.spec.mesh.get_coordinate())
        return [overlap(self.box(other), mine) for other in self._others()]

    def _others(self) -> list[Coordinate]:
        mesh = self.spec.mesh
        return [mesh.coordinate_of(rank) for rank in mesh.ranks_along(self.axes, mesh.get_coordinate())]


def _same(one: Box, other: Box) -> bool:
    return shape_of(one) == shape_of(other) and (one == other or not volume(one))


def _place(mesh: DeviceMesh, axes: Sequence[int], at: Coordinate) -> int:
    """The place of a coordinate among those along some axes, the first outermost."""
    return functools.reduce(lambda found, axis: found * mesh.shape[axis] + at[axis], axes, 0)


@functools.lru_cache(maxsize=1024)
def own_blocks(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shapes: tuple[Shape, ...], dtype: torch.dtype
) -> OwnBlocks:  # fmt: skip
    """What ranks hold whose blocks have these shapes, in the order of the mesh. One shape is that of all.

    ValueError for blocks that make no tensor, and where an axis that is not sharded has ranks of several shapes.

    >>> from spmd import DeviceMesh, Shard
    >>> mesh = DeviceMesh("cpu", [0, 1, 2], mesh_dim_names=("dp",))
    >>> found = own_blocks(mesh, (Shard(0),), ((4, 2), (1, 2), (4, 2)), torch.float32)
    >>> print(found.spec, found.edges)
    f32[9@dp, 2] ((0, 4, 5, 9), (0, 2))
    """
    for rank, shape in zip(mesh.ranks, shapes, strict=False):
        if len(shape) != len(shapes[0]):
            first = f"rank {mesh.ranks[0]} gives a block of {list(shapes[0])}"
            raise ValueError(f"{first}, but rank {rank} one of {list(shape)}; give blocks of as many dims")
    placements = check_placements(mesh, placements, len(shapes[0]))
    lengths = [_lengths(mesh, _axes(mesh, placements, dim), dim, shapes) for dim in range(len(shapes[0]))]
    edges = tuple([tuple(itertools.accumulate(along, initial=0)) for along in lengths])
    return OwnBlocks(spec_of(mesh, placements, [each[-1] for each in edges], dtype), edges)


def _axes(mesh: DeviceMesh, placements: Sequence[Placement], dim: int) -> tuple[int, ...]:
    """The axes that shard a dim, as a spec names them."""
    return tuple([axis for axis, p in enumerate(placements) if p.is_shard(dim) and mesh.shape[axis] > 1])


def _lengths(mesh: DeviceMesh, axes: Sequence[int], dim: int, shapes: tuple[Shape, ...]) -> list[int]:
    """The lengths of the blocks along a dim."""
    if len(shapes) == 1:
        return [shapes[0][dim]] * prod(mesh.shape[axis] for axis in axes)
    found: dict[int, tuple[int, Shape]] = {}
    for rank, at, shape in zip(mesh.ranks, mesh.coordinates(), shapes, strict=True):
        other, first = found.setdefault(_place(mesh, axes, at), (rank, shape))
        if shape[dim] != first[dim]:
            over = f"over {' and '.join(map(mesh.axis_name, axes))} alone" if axes else "over no axis"
            raise ValueError(
                f"rank {other} gives a block of {list(first)}, but rank {rank} one of {list(shape)}: their dim {dim} "
                f"is sharded {over}, so that these two must have as much of it"
            )
    return [found[i][1][dim] for i in range(len(found))]
