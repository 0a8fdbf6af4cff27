"""torch's two planners, and torch's cost model for their plans and for spmd's.

    with torch_mesh((2, 4), ranks_per_host=4) as mesh:
        steps(src, dst, min_cost=True)                      # [Move("all_gather", (1,), local bytes, ...), ...]
        us(mesh, "all_gather", (1,), 3 * bytes)             # microseconds, by torch's constants
        topology(mesh, there)                               # the same as a topology that spmd plans over

Their plans go one axis at a time and are read off as lists of placements. Where the same kind follows on several axes
torch may merge them if the user has flattened the mesh, which is not counted here.

torch's model (`torch.distributed.tensor._collective_utils`) knows rings over one axis, and prices a move between shards
as a gather of the local tensor, and 1 us. What it does not know is priced as nearly so as can be:

- a group of several axes as the axis that torch would make of them by flattening: all its ranks in one ring, at the
  lowest bandwidth and the highest latency among the axes - never as the levels that it really crosses;
- an exchange as a move between shards in which every rank gets what the busiest one gets;
- a permute as one hop, that of a ring over the group, and the 1 us of a move between shards;
- slices, pads and scaling as nothing, which is what they are to torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, combinations
from math import prod
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor import _collective_utils as model
from torch.distributed.tensor import _redistribute as planners
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.testing._internal.distributed.fake_pg import FakeStore

import spmd.mesh as ours
from spmd.mesh.layout import group_shape

Lies = tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]  # for each dim its axes, and the partial axes


class Move(NamedTuple):
    """One move of torch's."""

    kind: str
    axes: tuple[int, ...]
    local: float  # bytes of the local tensor before the move
    before: Lies
    after: Lies


@contextmanager
def torch_mesh(shape: tuple[int, ...], ranks_per_host: int) -> Iterator[DeviceMesh]:
    """A mesh of torch's over a process group that sends nothing, on hosts of so many devices as torch sees them."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=prod(shape))
    try:
        with patch.object(model._mesh_resources, "num_devices_per_host", lambda device_type: ranks_per_host):
            model.MeshTopoInfo.build_from_mesh.cache_clear()
            forget()
            yield init_device_mesh("cpu", shape)
    finally:
        model.MeshTopoInfo.build_from_mesh.cache_clear()
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
    """The moves of a plan."""
    found = planners._gen_transform_infos_non_cached(src, dst, min_cost)
    sharded = [a for a, p in enumerate(src.placements) if p.is_shard()]
    local = prod(src.tensor_meta.shape) * 4 / prod(map(src.mesh.size, sharded))
    placements = list(src.placements)
    order = planners.DTensorRedistributePlanner._ShardOrder_to_dict(src.shard_order)
    moves: list[Move] = []
    for move in found:
        (a, b), n = move.src_dst_placements, src.mesh.size(move.mesh_dim)
        before = _lies(placements, order, len(src.tensor_meta.shape))
        planners._update_shard_order_and_placements(move, placements, order)
        after = _lies(placements, order, len(src.tensor_meta.shape))
        moves.append(Move(_KINDS[_letter(a), _letter(b)], (move.mesh_dim,), local, before, after))
        local *= (n if a.is_shard() else 1) / (n if b.is_shard() else 1)
    return moves


def _letter(placement: Placement) -> str:
    return "S" if placement.is_shard() else "P" if placement.is_partial() else "R"


_KINDS = {
    ("S", "R"): "all_gather", ("S", "S"): "all_to_all", ("P", "R"): "all_reduce", ("P", "S"): "reduce_scatter",
    ("R", "S"): "slice",
}  # fmt: skip


def _lies(placements: list[Placement], order: dict[int, list[int]], ndim: int) -> Lies:
    return tuple(tuple(order.get(d, ())) for d in range(ndim)), tuple(
        a for a, placement in enumerate(placements) if placement.is_partial()
    )


def received(mesh: DeviceMesh, move: Move) -> float:
    """Bytes that a rank gets from others."""
    n = prod(map(mesh.size, move.axes))
    share = {"all_gather": n, "all_reduce": 2, "reduce_scatter": 1, "all_to_all": 1, "slice": 0}
    return share[move.kind] * (n - 1) / n * move.local


def forget() -> None:
    """Plan anew."""
    planners.clear_redistribute_planner_cache()
    planners._gen_transform_infos.cache_clear()


# ---- torch's cost model -----------------------------------------------------------------------


def us(mesh: DeviceMesh, kind: str, axes: tuple[int, ...], get: float) -> float:
    """Microseconds, by torch's model, of a move over these axes in which the busiest rank gets so many bytes."""
    if kind not in _FORMULAS:
        return 0.0
    ring, n = _flattened(model.MeshTopoInfo.build_from_mesh(mesh), axes)
    return _FORMULAS[kind](get / 2**30, ring, n)


def _flattened(known: model.MeshTopoInfo, axes: tuple[int, ...]) -> tuple[model.MeshTopoInfo, int]:
    """What torch knows of a mesh, for one axis made of several, and how many ranks that has."""
    n = prod(known.mesh_dim_devices[a] for a in axes)
    slowest = min(known.mesh_dim_bandwidth[a] for a in axes), max(known.mesh_dim_latency[a] for a in axes)
    return model.MeshTopoInfo(known.mesh, [n], *([each] for each in slowest)), n


BETWEEN_SHARDS_US = 1.0  # what torch adds


def _permute(gb: float, ring: model.MeshTopoInfo, n: int) -> float:
    """One hop of a gather of two."""
    return model.allgather_cost(2 * gb, _pair(ring), 0) + BETWEEN_SHARDS_US


def _pair(ring: model.MeshTopoInfo) -> model.MeshTopoInfo:
    return model.MeshTopoInfo(ring.mesh, [2], ring.mesh_dim_bandwidth, ring.mesh_dim_latency)


def _between_shards(gb: float, ring: model.MeshTopoInfo, n: int) -> float:
    return model.allgather_cost(gb * n / (n - 1), ring, 0) + BETWEEN_SHARDS_US


_FORMULAS: dict[str, Callable[[float, model.MeshTopoInfo, int], float]] = {
    "all_gather": lambda gb, ring, n: model.allgather_cost(gb * n / (n - 1), ring, 0),
    "reduce_scatter": lambda gb, ring, n: model.reduce_scatter_cost(gb * n / (n - 1), ring, 0),
    "all_reduce": lambda gb, ring, n: model.allreduce_cost(gb / 2 * n / (n - 1), ring, 0),
    "all_to_all": _between_shards,
    "exchange": _between_shards,
    "permute": _permute,
}


def topology(mesh: ours.DeviceMesh, there: DeviceMesh) -> ours.MeshTopoInfo:
    """torch's model of the same mesh as a topology of spmd's: a line for each collective and kind of group."""
    curves: dict[tuple, ours.Measured] = {}
    for axes in chain.from_iterable(combinations(range(mesh.ndim), k) for k in range(1, mesh.ndim + 1)):
        on = group_shape(mesh.topology.crossings(axes)[0])
        for kind, handed in _HANDED.items():
            none, many = (us(there, kind, axes, handed(x, prod(mesh.shape[a] for a in axes))) for x in (0, 2**30))
            ranks, hosts, sharing = on
            curve = ours.Measured(kind, ranks, hosts, ((none, (many - none) / 2**30),), sharing)
            if curves.setdefault(curve.group, curve) != curve:
                raise ValueError(f"torch prices {curve.group} in two ways, by the axis; choose another mesh")
    machine = mesh.topology.machine
    return ours.MeshTopoInfo(mesh.topology.layout, ours.Machine("torch", machine.ways, measured=tuple(curves.values())))


# What the busiest rank gets, where spmd's cost functions are handed so many bytes (`spmd/mesh/cost.py`).
_HANDED: dict[str, Callable[[float, int], float]] = {
    "all_gather": lambda x, n: x * (n - 1) / n,
    "reduce_scatter": lambda x, n: x * (n - 1) / n,
    "all_reduce": lambda x, n: 2 * x * (n - 1) / n,
    "all_to_all": lambda x, n: x * (n - 1) / n,
    "permute": lambda x, n: x,
}
