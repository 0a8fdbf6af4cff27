"""Fully sharded data parallelism: a group for each block, gradients clipped, accumulated over two micro-batches."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from tests.parallel.scripts.common import batches, loss_of, make_model


def main(folder):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    model = make_model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    assert isinstance(model, FSDPModule) and isinstance(model.output.weight, DTensor)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for tokens in batches():
        optimizer.zero_grad()
        total = 0.0
        own = tokens[mesh.get_local_rank() * 2 :][:2]
        for i, micro in enumerate(own.split(1)):
            model.set_requires_gradient_sync(i == 1)
            loss = loss_of(model(micro[:, :-1]), micro[:, 1:]) / 2
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses
