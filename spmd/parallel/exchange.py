"""torch's meshes and DTensors as those of spmd, and back: the same blocks, the same process groups, no copy.

    x = from_torch(y)        y a torch.distributed.tensor.DTensor, or a mesh of torch
    y = to_torch(x)          x an spmd.DTensor, or a mesh of spmd

Both are differentiable. Nothing is sent. What torch cannot say - several axes on one dim in another order than the
mesh's, units, packed dims - is an error that says what to do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.distributed import tensor as theirs
from torch.distributed.device_mesh import DeviceMesh as TheirMesh

from spmd.mesh import DeviceMesh
from spmd.tensor.eager.conversions import is_differentiated, to_dtensor
from spmd.tensor.eager.dtensor import DTensor
from spmd.tensor.placement import REPLICATE, Partial, Placement, Shard
from spmd.tensor.spec import spec_of


def from_torch(x: TheirMesh | theirs.DTensor) -> DeviceMesh | DTensor:
    """The mesh, or the DTensor, of spmd that is one of torch: with its process groups, its block and its strides.

    The gradient of the result is handed to torch in the placements of x, where a Partial is replicated. Sharding that
    torch calls strided is an order of axes here. Call it on all ranks of the mesh.

    Raises TypeError for anything else, NotImplementedError for placements that spmd has no word for.
    """
    if isinstance(x, TheirMesh):
        return DeviceMesh.from_group(
            [x.get_group(i) for i in range(x.ndim)], x.device_type, x.mesh, mesh_dim_names=x.mesh_dim_names
        )
    if not isinstance(x, theirs.DTensor):
        raise TypeError(f"from_torch: takes a mesh or a DTensor of torch, and was given a {type(x).__name__}")
    mesh = from_torch(x.device_mesh)
    placements = [_placement(p) for p in x.placements]
    spec = spec_of(mesh, placements, tuple(x.shape), x.dtype, stride=tuple(x.stride()), order=_order(mesh, x))
    block = _own_block(x)
    if tuple(spec.local_shape(mesh.get_coordinate())) != tuple(block.shape):
        raise NotImplementedError(
            f"from_torch: {x.placements} of {list(x.shape)} has a block of {list(block.shape)}, which is none of "
            f"{spec}; redistribute it to plain shards first"
        )
    return to_dtensor(block, spec, DTensor) if is_differentiated(block) else DTensor(block.view_as(block), spec)


def to_torch(x: DeviceMesh | DTensor) -> TheirMesh | theirs.DTensor:
    """The mesh, or the DTensor, of torch that is one of spmd: with its process groups, its block and its strides.

    Raises TypeError for anything else, ValueError for a layout that torch has not.
    """
    if isinstance(x, DeviceMesh):
        names = None if x.mesh_dim_names is None else tuple(x.mesh_dim_names)
        return TheirMesh.from_group(x.get_all_groups(), x.device_type, x.mesh, mesh_dim_names=names)
    if not isinstance(x, DTensor):
        raise TypeError(f"to_torch: takes a mesh or a DTensor of spmd, and was given a {type(x).__name__}")
    spec = x._spec
    if any(u != 1 for u in spec.units) or any(list(axes) != sorted(axes) for axes in spec.dims):
        raise ValueError(
            f"to_torch: {spec} has blocks, units or an order of axes that torch's placements cannot say; give "
            "x.redistribute(placements=[...]) with plain ones"
        )
    return theirs.DTensor.from_local(
        x.to_local(), to_torch(x.device_mesh), [_their_placement(p) for p in x.placements], run_check=False,
        shape=torch.Size(x.shape), stride=x.stride(),
    )  # fmt: skip


def _own_block(x: theirs.DTensor) -> torch.Tensor:
    """The block of this rank; a gradient that comes back to a Partial is replicated."""
    return x.to_local(grad_placements=[theirs.Replicate() if p.is_partial() else p for p in x.placements])


def _placement(p: theirs.Placement) -> Placement:
    if p.is_partial():
        return Partial(p.reduce_op)
    return REPLICATE if p.is_replicate() else Shard(p.dim)


def _their_placement(p: Placement) -> theirs.Placement:
    if p.is_partial():
        return theirs.Partial(p.reduce_op)
    return theirs.Replicate() if p.is_replicate() else theirs.Shard(p.dim)


def _order(mesh: DeviceMesh, x: theirs.DTensor) -> dict[int, Sequence[str]]:
    """The orders of axes that strided shards say: such an axis shards what the later axes have sharded already."""
    found = {}
    for dim in range(x.ndim):
        axes = [a for a, p in enumerate(x.placements) if getattr(p, "dim", None) == dim]
        strided = [a for a in axes if hasattr(x.placements[a], "split_factor")]
        for a in strided:
            later = [b for b in axes if b > a]
            if strided != axes[:1] or x.placements[a].split_factor != math.prod(mesh.shape[b] for b in later):
                raise NotImplementedError(f"from_torch: {x.placements}; redistribute it to plain shards first")
            found[dim] = [mesh.axis_name(b) for b in (*later, a)]
    return found
