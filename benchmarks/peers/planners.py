"""torch's two planners: what moves their plans make, as bytes and times of the same cost model.

    with torch_mesh((2, 4)) as mesh:
        steps(mesh, shape, dims, partial, to_dims, min_cost=True)     # [("all_gather", axis, bytes before the move),
        ...]

Their plans go one axis at a time and are read off as lists of placements. Where the same kind follows on several axes
torch may merge them if the user has flattened the mesh, which is not counted here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor import _redistribute as planners
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

Move = tuple[str, int, float]  # kind, axis, bytes of the local tensor before the move


@contextmanager
def torch_mesh(shape: tuple[int, ...]) -> Iterator[DeviceMesh]:
    """A mesh of torch's over a process group that sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=prod(shape))
    try:
        yield init_device_mesh("cpu", shape)
    finally:
        dist.destroy_process_group()


def spec(mesh: DeviceMesh, shape, dims, partial) -> DTensorSpec:
    """torch's spec of this layout."""
    placements = [Replicate()] * mesh.ndim
    for dim, axes in enumerate(dims):
        for axis in axes:
            placements[axis] = Shard(dim)
    for axis, kind in partial:
        placements[axis] = Partial(kind)
    order = tuple(ShardOrderEntry(tensor_dim=d, mesh_dims=tuple(axes)) for d, axes in enumerate(dims) if axes)
    meta = TensorMeta(torch.Size(shape), torch.empty(shape, device="meta").stride(), torch.float32)
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta, shard_order=order)


def steps(src: DTensorSpec, dst: DTensorSpec, min_cost: bool) -> list[Move]:
    """The moves of a plan that send something."""
    found = planners._gen_transform_infos_non_cached(src, dst, min_cost)
    sharded = [a for a, p in enumerate(src.placements) if p.is_shard()]
    local = prod(src.tensor_meta.shape) * 4 / prod(map(src.mesh.size, sharded))
    moves: list[Move] = []
    for move in found:
        (a, b), n = move.src_dst_placements, src.mesh.size(move.mesh_dim)
        if a.is_partial():
            moves.append(("reduce_scatter" if b.is_shard() else "all_reduce", move.mesh_dim, local))
        elif a.is_shard():
            moves.append(("all_to_all" if b.is_shard() else "all_gather", move.mesh_dim, local))
        local *= (n if a.is_shard() else 1) / (n if b.is_shard() else 1)
    return moves


def received(move: Move, n: int) -> float:
    """Bytes that a rank gets from others."""
    kind, _, local = move
    share = {"all_gather": n, "all_reduce": 2, "reduce_scatter": 1, "all_to_all": 1}
    return share[kind] * (n - 1) / n * local


def forget() -> None:
    """Plan anew."""
    planners.clear_redistribute_planner_cache()
    planners._gen_transform_infos.cache_clear()
