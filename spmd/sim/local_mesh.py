"""A mesh that differs between ranks: the result of a slice where one process plays all ranks.

    with LocalTensorMode(4):
        tp = mesh["tp"]             # ranks 0, 1 on ranks 0 and 1; ranks 2, 3 on ranks 2 and 3

Its shape and names are the same on all ranks. Everything that depends on the rank comes from the rank's own mesh.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from math import prod

from spmd.mesh import DeviceMesh, current_rank, per_rank
from spmd.mesh.device_mesh import Content
from spmd.sim.local_int import local_int, values_of


class LocalMesh(DeviceMesh):
    """The meshes of all ranks as one; all have one shape, one set of names and one topology."""

    __slots__ = ("by_rank",)
    differs_by_rank = True

    def __init__(self, by_rank: Mapping[int, DeviceMesh]) -> None:
        first = next(iter(by_rank.values()))
        alike = ("device_type", "shape", "mesh_dim_names", "_topology")
        for rank, mesh in by_rank.items():
            unlike = next((name for name in alike if getattr(mesh, name) != getattr(first, name)), None)
            if unlike is not None:
                one = next(iter(by_rank))
                raise RuntimeError(f"the meshes of ranks {one} and {rank} also differ in their {unlike}")
        put = object.__setattr__
        for name in (*alike, "ndim"):
            put(self, name, getattr(first, name))
        put(self, "by_rank", dict(by_rank))
        put(self, "_content", Content.of(*[mesh._content for mesh in by_rank.values()]))
        put(self, "_hash", hash(tuple(by_rank.values())))

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those of the current rank's mesh: ints that differ between ranks where all are played at once."""
        if values_of(current_rank()) is None:
            return self.by_rank[current_rank()].ranks
        columns = zip(*(mesh.ranks for mesh in self.by_rank.values()), strict=True)
        return tuple(local_int(dict(zip(self.by_rank, column, strict=True))) for column in columns)

    @property
    def ranks_key(self) -> Hashable:
        return tuple(mesh.ranks for mesh in self.by_rank.values())

    @property
    def _at(self) -> dict:
        return self.by_rank[current_rank()]._at

    flatten = per_rank(DeviceMesh.flatten)
    groups_along = per_rank(DeviceMesh.groups_along)
    slices = per_rank(DeviceMesh.slices)
    with_topology = per_rank(DeviceMesh.with_topology)

    def size(self, mesh_dim: int | str | None = None) -> int:
        return prod(self.shape) if mesh_dim is None else super().size(mesh_dim)

    def __reduce__(self) -> tuple:
        return LocalMesh, (self.by_rank,)

    def __repr__(self) -> str:
        return f"LocalMesh({self.by_rank})"
