"""Ranks, the links between them, and the cost of collectives over those links: plain data.

    >>> from spmd.mesh import init_device_mesh
    >>> mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    >>> mesh.ranks_along("tp", (1, 0))
    (4, 5, 6, 7)

A mesh is a value. It needs no process group to exist, to be compared, planned on or printed. Groups are made when
`get_group` first asks for one.
"""

from __future__ import annotations

from spmd.mesh.cost import (
    all_gather_cost,
    all_reduce_cost,
    all_to_all_cost,
    broadcast_cost,
    copy_cost,
    exchange_cost,
    permute_cost,
    reduce_scatter_cost,
    scatter_cost,
    ways_cost,
)
from spmd.mesh.current import current_mesh, or_current
from spmd.mesh.device_mesh import DeviceMesh, init_device_mesh
from spmd.mesh.layout import HostGrid
from spmd.mesh.machine import Compute, Link, Machine, Measured, Way
from spmd.mesh.presets import PRESETS
from spmd.mesh.rank import as_rank, current_rank, per_rank, world_size
from spmd.mesh.topology import AxisLink, MeshTopoInfo

__all__ = [
    "PRESETS",
    "AxisLink",
    "Compute",
    "DeviceMesh",
    "HostGrid",
    "Link",
    "Machine",
    "Measured",
    "MeshTopoInfo",
    "Way",
    "all_gather_cost",
    "all_reduce_cost",
    "all_to_all_cost",
    "as_rank",
    "broadcast_cost",
    "copy_cost",
    "current_mesh",
    "current_rank",
    "exchange_cost",
    "init_device_mesh",
    "or_current",
    "per_rank",
    "permute_cost",
    "reduce_scatter_cost",
    "scatter_cost",
    "ways_cost",
    "world_size",
]
