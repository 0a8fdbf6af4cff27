"""The tensor- and data-parallel training step as one writes it by hand on torch.distributed.

    step = train_step(model, lr, mesh, flat=False)
    loss = step(tokens, targets)             # the whole batch in, the whole batch's mean loss out

Megatron-LM's division (Shoeybi et al. 2019, section 3): q, k, v and up keep a share of their columns, out and down
the matching share of their rows. So a block has two all-reduces over tp in the forward (`Sum`) and two in the
backward (`Fork`). The gradients are summed over dp after the backward: each by itself, all under way at once, or
all in one buffer (`flat`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup


class Fork(torch.autograd.Function):
    """Megatron's f: one input feeds the columns of all ranks, so its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x: Tensor, tp: ProcessGroup) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor):
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.tp)  # in place: grad comes fresh from a matmul, nobody else reads it
        return grad, None


class Sum(torch.autograd.Function):
    """Megatron's g: the products of all ranks' rows add up to the output."""

    @staticmethod
    def forward(ctx, x: Tensor, tp: ProcessGroup) -> Tensor:
        dist.all_reduce(x, group=tp)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad, None


class Columns(nn.Module):
    """This rank's share of a Linear's outputs."""

    def __init__(self, whole: nn.Linear, tp: ProcessGroup):
        super().__init__()
        self.weight = share(whole.weight, 0, tp)
        self.bias = None if whole.bias is None else share(whole.bias, 0, tp)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Rows(nn.Module):
    """This rank's share of a Linear's inputs; the bias is added once, to the sum."""

    def __init__(self, whole: nn.Linear, tp: ProcessGroup):
        super().__init__()
        self.weight, self.bias, self.tp = share(whole.weight, 1, tp), whole.bias, tp

    def forward(self, x: Tensor) -> Tensor:
        y = Sum.apply(F.linear(x, self.weight), self.tp)
        return y if self.bias is None else y + self.bias


class Attention(nn.Module):
    """Causal self-attention over this rank's heads."""

    def __init__(self, whole: nn.Module, tp: ProcessGroup):
        super().__init__()
        self.heads, self.tp = whole.n_head // tp.size(), tp
        self.q, self.k, self.v = (Columns(linear, tp) for linear in (whole.q, whole.k, whole.v))
        self.out = Rows(whole.out, tp)

    def forward(self, x: Tensor) -> Tensor:
        x = Fork.apply(x, self.tp)

        def split(y: Tensor) -> Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # [batch, head, time, width / head]

        y = F.scaled_dot_product_attention(split(self.q(x)), split(self.k(x)), split(self.v(x)), is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, whole: nn.Module, tp: ProcessGroup):
        super().__init__()
        self.up, self.down, self.tp = Columns(whole.up, tp), Rows(whole.down, tp), tp

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(Fork.apply(x, self.tp))))


def share(whole: Tensor, dim: int, group: ProcessGroup) -> nn.Parameter:
    """This rank's share of a parameter."""
    return nn.Parameter(whole.detach().chunk(group.size(), dim)[group.rank()].clone())


def train_step(model: nn.Module, lr: float, mesh: DeviceMesh, flat: bool) -> Callable[[Tensor, Tensor], float]:
    """A step that trains this rank's share of the model, which it takes over."""
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
    if tp.size() > 1:
        for block in model.blocks:
            block.attn, block.mlp = Attention(block.attn, tp), MLP(block.mlp, tp)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=lr)
    total = total_flat if flat else total_each

    def step(tokens: Tensor, targets: Tensor) -> float:
        tokens, targets = (x.chunk(dp.size())[dp.rank()] for x in (tokens, targets))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()) / dp.size()
        loss.backward()
        loss = loss.detach()
        total([loss, *(p.grad for p in parameters)], dp)
        optimizer.step()
        return loss.item()

    return step


def total_each(shares: list[Tensor], group: ProcessGroup) -> None:
    """Sums each tensor over the group, in place, by itself; all are under way at once."""
    if group.size() > 1:
        under_way = [dist.all_reduce(x, group=group, async_op=True) for x in shares]
        for work in under_way:
            work.wait()


def total_flat(shares: list[Tensor], group: ProcessGroup) -> None:
    """Sums the tensors over the group in one buffer, of which they become views."""
    if group.size() > 1:
        flat = torch.cat([x.flatten() for x in shares])
        dist.all_reduce(flat, group=group)
        for x, total in zip(shares, flat.split([x.numel() for x in shares]), strict=True):
            x.data = total.view_as(x)
