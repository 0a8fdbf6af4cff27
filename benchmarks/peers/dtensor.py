"""The same training step on torch's own DTensor, run eagerly. Two ways, as its users have two.

`everywhere`: all parameters are DTensors on the 2-D mesh, the batch is one too, and the model's code stays as it
is, but for attention: torch's DTensor has no rule for the CPU's `scaled_dot_product_attention`, so it is written out.

`parallelized`: `parallelize_module` over tp, so only the insides of the Linears are DTensors, and attention runs on
plain tensors, each rank its heads; `parallelize_module` takes a 1-D mesh, so the gradients are summed over dp by hand.

    step = everywhere(model, lr, mesh)
    loss = step(tokens, targets)             # the whole batch in, the whole batch's mean loss out
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from peers.c10d import total_flat

COLUMNS, ROWS = ("q", "k", "v", "up"), ("out", "down")


def everywhere(model: nn.Module, lr: float, mesh: DeviceMesh) -> Callable[[Tensor, Tensor], float]:
    """A step in which every tensor is a DTensor."""
    tied = model.head.weight is model.tok_emb.weight
    distribute_module(model, mesh, on_mesh)
    if tied:
        model.head.weight = model.tok_emb.weight  # distribute_module has cut the tie
    for block in model.blocks:
        block.attn = WrittenOut(block.attn)
        for branch in (block.attn.out, block.mlp.down):
            branch.register_forward_hook(summed)
        for branch in (block.attn, block.mlp):
            branch.register_forward_pre_hook(whole_gradient)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=lr)
    batch = [Shard(0), Replicate()]

    def step(tokens: Tensor, targets: Tensor) -> float:
        tokens, targets = (distribute_tensor(x, mesh, batch, src_data_rank=None) for x in (tokens, targets))
        optimizer.zero_grad()
        with implicit_replication():  # the positions and the mask are plain tensors
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            # Else the optimizer sums them, each as often as it reads it.
            for p in parameters:
                p.grad = p.grad.redistribute(placements=p.placements, async_op=True)
            optimizer.step()
        return loss.full_tensor().item()

    return step


def on_mesh(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    """Puts the parameters of a Linear on the mesh (distribute_module replicates what is left)."""
    leaf = name.rsplit(".")[-1]
    if leaf in COLUMNS + ROWS:
        for key, parameter in module.named_parameters():
            split = Shard(0) if leaf in COLUMNS else Shard(1) if key == "weight" else Replicate()
            local = distribute_tensor(parameter.detach(), mesh, [Replicate(), split])
            module.register_parameter(key, nn.Parameter(local))


def summed(module: nn.Module, args: tuple, y: DTensor) -> DTensor:
    return y.redistribute(placements=[Shard(0), Replicate()])


def whole_gradient(module: nn.Module, args: tuple) -> DTensor:
    """Leaves the input alone, and has its gradient summed over tp here, once for q, k and v."""
    return args[0].redistribute(placements=[Shard(0), Replicate()])


class WrittenOut(nn.Module):
    """Causal self-attention as matmul, mask, softmax, matmul."""

    def __init__(self, attn: nn.Module):
        super().__init__()
        self.n_head, self.q, self.k, self.v, self.out = attn.n_head, attn.q, attn.k, attn.v, attn.out

    def forward(self, x: DTensor) -> DTensor:
        batch, time, width = x.shape

        def heads(y: DTensor) -> DTensor:
            return y.view(batch, time, self.n_head, -1).transpose(1, 2)  # [batch, head, time, width / head]

        q, k, v = heads(self.q(x)), heads(self.k(x)), heads(self.v(x))
        future = torch.ones(time, time, dtype=torch.bool).triu(1)
        scores = (q @ k.transpose(-2, -1) * (width // self.n_head) ** -0.5).masked_fill(future, float("-inf"))
        y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, time, width))


def parallelized(model: nn.Module, lr: float, mesh: DeviceMesh) -> Callable[[Tensor, Tensor], float]:
    """A step of a model that parallelize_module divides over tp (of more than one rank), and over dp by hand."""
    dp, tp = mesh.get_group("dp"), mesh["tp"]
    for block in model.blocks:
        block.attn = Local(block.attn, tp.size())
    columns = {f"blocks.*.{leaf}": ColwiseParallel() for leaf in ("attn.q", "attn.k", "attn.v", "mlp.up")}
    rows = {f"blocks.*.{leaf}": RowwiseParallel() for leaf in ("attn.out", "mlp.down")}
    parallelize_module(model, tp, columns | rows)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=lr)

    def step(tokens: Tensor, targets: Tensor) -> float:
        tokens, targets = (x.chunk(dp.size())[dp.rank()] for x in (tokens, targets))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()) / dp.size()
        loss.backward()
        loss = loss.detach()
        with torch.no_grad():  # where to_local gives the DTensor's own tensor
            total_flat([loss, *(plain(p.grad) for p in parameters)], dp)
        optimizer.step()
        return loss.item()

    return step


def plain(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


class Local(nn.Module):
    """Causal self-attention over this rank's heads, on plain tensors between the Linears."""

    def __init__(self, attn: nn.Module, ranks: int):
        super().__init__()
        self.heads = attn.n_head // ranks
        self.q, self.k, self.v, self.out = attn.q, attn.k, attn.v, attn.out

    def forward(self, x: Tensor) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [batch, head, time, width / head]

        y = F.scaled_dot_product_attention(split(self.q(x)), split(self.k(x)), split(self.v(x)), is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))
