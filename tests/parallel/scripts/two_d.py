"""Two axes: tensor parallelism within, fully sharded data parallelism between."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.parallel.scripts.common import batches, loss_of, make_model


def main(folder):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp_mesh, dp_mesh = mesh["tp"], mesh["dp"]
    model = make_model()
    plan = {
        "attention.wq": ColwiseParallel(), "attention.wk": ColwiseParallel(), "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(), "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(), "feed_forward.w3": ColwiseParallel(),
    }  # fmt: skip
    policy = MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float64)
    for layer in model.layers:
        parallelize_module(layer, tp_mesh, plan)
        fully_shard(layer, mesh=dp_mesh, mp_policy=policy)
    fully_shard(model, mesh=dp_mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = []
    for tokens in batches():
        optimizer.zero_grad()
        own = tokens.chunk(2)[dp_mesh.get_local_rank()]
        loss = loss_of(model(own[:, :-1]), own[:, 1:])
        loss.backward()
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses
