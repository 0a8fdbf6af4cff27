"""Context parallelism: each rank has a part of each sequence, and gradients of all parts are averaged."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

from tests.parallel.scripts.common import batches, loss_of, make_model


def main(folder):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for tokens in batches():
        optimizer.zero_grad()
        inputs, targets = tokens[:, :-1].clone(), tokens[:, 1:].clone()
        with context_parallel(mesh, buffers=[inputs, targets], buffer_seq_dims=[1, 1]):
            loss = loss_of(model(inputs), targets)
            loss.backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        optimizer.step()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item() / dist.get_world_size())
    return losses
