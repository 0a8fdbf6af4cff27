"""spmd: write a PyTorch model and a train step for one device, run them on a mesh of ranks with the same numbers."""

from spmd import debug
from spmd.comm import CommTensor, mesh_broadcast, mesh_scatter, shard_dim_alltoall
from spmd.expand.compile import CompiledStep, compile
from spmd.expand.program import Program
from spmd.mesh import DeviceMesh, MeshTopoInfo, init_device_mesh
from spmd.sim import LocalTensor, LocalTensorMode
from spmd.tensor.dispatch import implicit_replication
from spmd.tensor.dtensor import DTensor, distribute_tensor
from spmd.tensor.placement import Partial, Placement, Replicate, Shard

__version__ = "0.1.0"

__all__ = [
    "CommTensor", "CompiledStep", "DTensor", "DeviceMesh", "LocalTensor", "LocalTensorMode", "MeshTopoInfo",
    "Partial", "Placement", "Program", "Replicate", "Shard", "compile", "debug", "distribute_tensor",
    "implicit_replication", "init_device_mesh", "mesh_broadcast", "mesh_scatter", "shard_dim_alltoall",
]  # fmt: skip
