"""Data parallelism as torch has it: replicas whose gradients are averaged, and parameters stored in shards.

    step = replicated(model, lr, mesh)       # DistributedDataParallel
    step = fully_sharded(model, lr, mesh)    # fully_shard: on the embeddings, each block and the root
    loss = step(tokens, targets)             # the whole batch in, the whole batch's mean loss out

The mean loss of a rank's rows is reduced at the end of the step, so that every rank has that of all.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def replicated(model: nn.Module, lr: float, mesh: DeviceMesh) -> Callable[[Tensor, Tensor], float]:
    """A step of replicas, which takes the model over."""
    return _step(DistributedDataParallel(model, process_group=mesh.get_group("dp")), lr, mesh)


def fully_sharded(model: nn.Module, lr: float, mesh: DeviceMesh) -> Callable[[Tensor, Tensor], float]:
    """A step of parameters, gradients and optimiser state in shards (ZeRO-3)."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return _step(model, lr, mesh)


def _step(model: nn.Module, lr: float, mesh: DeviceMesh) -> Callable[[Tensor, Tensor], float]:
    optimizer, dp = torch.optim.AdamW(model.parameters(), lr=lr), mesh.get_group("dp")

    def step(tokens: Tensor, targets: Tensor) -> float:
        tokens, targets = (x.chunk(dp.size())[dp.rank()] for x in (tokens, targets))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        loss = loss.detach() / dp.size()
        dist.all_reduce(loss, group=dp)
        return loss.item()

    return step
