"""Collectives, and the seam to the network below them.

    y = all_reduce(x, "sum", (mesh, "tp"))          # functional, differentiable, asynchronous, traceable

A transport carries the collectives: torch.distributed (the default) or a simulator (`spmd.sim`). Code above that seam
cannot tell which transport it runs on.
"""

from __future__ import annotations

from spmd.comm.agree import RanksDiffer, agree
from spmd.comm.async_tensor import AsyncTensor, unless_written, wait
from spmd.comm.check import check_metadata, checked
from spmd.comm.comm_tensor import CommTensor, comm_tensors
from spmd.comm.functional import (
    all_gather_into_tensor_coalesced,
    all_gather_tensor,
    all_reduce,
    all_reduce_coalesced,
    all_to_all_single,
    broadcast,
    permute_tensor,
    reduce_scatter_tensor,
    reduce_scatter_tensor_coalesced,
    scatter,
)
from spmd.comm.group import Group, Members, members, use_groups
from spmd.comm.mesh_collectives import mesh_broadcast, mesh_scatter, shard_dim_alltoall
from spmd.comm.padding import fill_empty_tensor_to_shards, pad_tensor, unpad_tensor
from spmd.comm.transport import C10dTransport, Transport, transport, use_transport
from spmd.mesh.groups import OwnGroups

__all__ = [
    "AsyncTensor", "C10dTransport", "CommTensor", "Group", "Members", "OwnGroups", "RanksDiffer", "Transport",
    "agree", "all_gather_into_tensor_coalesced", "all_gather_tensor", "all_reduce", "all_reduce_coalesced",
    "all_to_all_single", "broadcast", "check_metadata", "checked", "comm_tensors", "fill_empty_tensor_to_shards",
    "members", "mesh_broadcast", "mesh_scatter", "pad_tensor", "permute_tensor", "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced", "scatter", "shard_dim_alltoall", "transport", "unless_written", "unpad_tensor",
    "use_groups", "use_transport", "wait",
]  # fmt: skip
