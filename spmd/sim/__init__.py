"""All ranks in one process, without a network: one thread plays one rank.

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

from spmd.sim.threads import Call, RankStopped, ThreadTransport, ThreadWorld, run_ranks

__all__ = ["Call", "RankStopped", "ThreadTransport", "ThreadWorld", "run_ranks"]
