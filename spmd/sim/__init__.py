"""All ranks in one process, without a network.

There are two simulators. `LocalTensorMode`: one thread plays all ranks step by step; tensors that differ between ranks
are LocalTensors. `run_ranks`: one thread for each rank, for code in which ranks take different branches:

>>> import torch
>>> from spmd.comm import transport
>>> from spmd.mesh import init_device_mesh
>>> def total(rank):
...     mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
...     return transport().all_reduce(torch.tensor([rank]), "sum", transport().group(mesh, "dp")).item()
>>> run_ranks(total, 4)
[6, 6, 6, 6]
"""

from __future__ import annotations

from spmd.sim.local_int import BranchOnRank, LocalIntNode, PerRank
from spmd.sim.local_mode import LocalTensorMode, localize, per_rank
from spmd.sim.local_tensor import LocalTensor
from spmd.sim.threads import Call, RankStopped, ThreadTransport, ThreadWorld, run_ranks

__all__ = [
    "BranchOnRank", "Call", "LocalIntNode", "LocalTensor", "LocalTensorMode", "PerRank", "RankStopped",
    "ThreadTransport", "ThreadWorld", "localize", "per_rank", "run_ranks",
]  # fmt: skip
