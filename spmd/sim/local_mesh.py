"""A mesh that differs between ranks: the result of a slice where one process plays all ranks.

    with LocalTensorMode(4):
        tp = mesh["tp"]             # ranks 0, 1 on ranks 0 and 1; ranks 2, 3 on ranks 2 and 3

Its shape and names are the same on all ranks. Everything that depends on the rank comes from the rank's own mesh.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from spmd.mesh import DeviceMesh, current_rank


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
        put(self, "_hash", hash(self._content))

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.by_rank[current_rank()].ranks

    @property
    def _at(self) -> dict:
        return self.by_rank[current_rank()]._at

    @property
    def _content(self) -> tuple:
        return tuple(mesh._content for mesh in self.by_rank.values())

    def size(self, mesh_dim: int | str | None = None) -> int:
        return prod(self.shape) if mesh_dim is None else super().size(mesh_dim)

    def __reduce__(self) -> tuple:
        return LocalMesh, (self.by_rank,)

    def __repr__(self) -> str:
        return f"LocalMesh({self.by_rank})"
