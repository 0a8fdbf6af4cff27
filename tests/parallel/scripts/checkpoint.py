"""A checkpoint in shards: a fully sharded model saves itself, and another one, of other numbers, goes on from there."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.parallel.scripts.common import batches, loss_of, make_model


def build(mesh):
    model = make_model()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def step(model, optimizer, mesh, tokens):
    optimizer.zero_grad()
    own = tokens.chunk(4)[mesh.get_local_rank()]
    loss = loss_of(model(own[:, :-1]), own[:, 1:])
    loss.backward()
    optimizer.step()
    total = loss.detach()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def main(folder):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    model, optimizer = build(mesh)
    first, *others = batches()
    losses = [step(model, optimizer, mesh, first)]
    state, moments = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": moments}, checkpoint_id=folder)

    model, optimizer = build(mesh)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(3.0)
    state, moments = get_state_dict(model, optimizer)
    dcp.load({"model": state, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=moments)
    return losses + [step(model, optimizer, mesh, tokens) for tokens in others]
