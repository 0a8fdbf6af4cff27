"""torch's own functions for its DTensors refuse spmd's meshes and tensors, and say what to use."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import tensor as theirs
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from spmd import LocalTensorMode, Shard, distribute_module, distribute_tensor, init_device_mesh
from spmd.mesh import DeviceMesh


def _net():
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


MESHES = {
    "spmd.parallel.parallelize_module": [lambda mesh: parallelize_module(_net(), mesh, {"0": ColwiseParallel()})],
    "spmd.parallel.fully_shard": [
        lambda mesh: fully_shard(_net(), mesh=mesh),
    ],
    "spmd.distribute_module": [lambda mesh: theirs.distribute_module(_net(), mesh)],
    "spmd.distribute_tensor": [
        lambda mesh: theirs.distribute_tensor(torch.ones(4), mesh, [theirs.Shard(0)], src_data_rank=None)
    ],
    "spmd.DTensor.from_local": [lambda mesh: theirs.DTensor.from_local(torch.ones(4), mesh, [theirs.Shard(0)])],
    "the function of spmd": [lambda mesh: theirs.zeros(4, device_mesh=mesh, placements=[theirs.Shard(0)])],
}


def test_meshes():
    """They ask for the truth of the mesh first. Anybody else who asks gets True."""
    mesh = DeviceMesh("cpu", [0, 1])
    assert bool(mesh)
    for instead, calls in MESHES.items():
        for call in calls:
            with pytest.raises(TypeError, match=f"was given one of spmd, .* use {instead}"):
                call(mesh)


def on_rank(rank):
    mesh, their_mesh = init_device_mesh("cpu", (4,)), theirs.init_device_mesh("cpu", (4,))
    found = {}
    for name, call in {
        "fully_shard": lambda net: fully_shard(net, mesh=their_mesh),
        "parallelize_module": lambda net: parallelize_module(net, their_mesh, {"0": ColwiseParallel()}),
        "DistributedDataParallel": lambda net: nn.parallel.DistributedDataParallel(net),
        "all_reduce": lambda net: dist.all_reduce(net[0].weight.detach()),
    }.items():
        try:
            found[name] = repr(call(distribute_module(_net(), mesh)))
        except (TypeError, RuntimeError) as error:
            found[name] = str(error)
    return found


def test_tensors(gloo4):
    """On real ranks a model of DTensors is an error in all of them, and nothing is sent of its blocks."""
    for found in gloo4.run(on_rank):
        assert all("spmd.distribute_module" in t or "spmd.parallel.fully_shard" in t for t in found.values()), found


def test_a_mesh_as_a_block():
    """`with mesh:` is the mesh of functions that are given none; blocks nest, and end."""
    with LocalTensorMode(4):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        with mesh, mesh["tp"] as inner:
            assert distribute_tensor(torch.ones(4), placements=[Shard(0)]).device_mesh == inner
        with mesh:
            assert distribute_module(_net())[0].weight.device_mesh == mesh
        with pytest.raises(TypeError, match="inside of `with mesh:`"):
            distribute_tensor(torch.ones(4), placements=[Shard(0)])
        joined = mesh["dp_tp"]
        assert joined == mesh.flatten() and mesh["tp_dp"].ranks == (0, 2, 1, 3)
    cube = DeviceMesh("cpu", torch.arange(8).reshape(2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    with LocalTensorMode(8):
        assert cube["dp_cp", "tp"] == cube.flatten(axes=("dp", "cp"))
    with pytest.raises(ValueError, match="no axis 'dp_x'"):
        cube["dp_x"]
