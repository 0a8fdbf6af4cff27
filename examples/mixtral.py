"""A small Mixtral: the Llama of `llama.py` whose MLPs are experts, of which each byte visits two.

    python -m examples.train mixtral --mesh dp=2,ep=2

A. Jiang et al., Mixtral of Experts, arXiv:2401.04088.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .llama import Llama, batches, loss_of

__all__ = ["MESHES", "batches", "loss_of", "make"]

MESHES = ({"dp": 4}, {"ep": 4}, {"dp": 2, "ep": 2}, {"ep": 2, "tp": 2})


class Experts(nn.Module):
    """All experts of a layer, each a gated MLP, in one tensor for each kind of weight."""

    def __init__(self, experts: int, width: int, hidden: int):
        super().__init__()
        self.num_experts = experts
        self.gate_up_proj = nn.Parameter(0.1 * torch.randn(experts, 2 * hidden, width))
        self.down_proj = nn.Parameter(0.1 * torch.randn(experts, width, hidden))

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """x: [tokens, width]. index, weights: [tokens, k], the experts of each token, and how much each counts."""
        out = torch.zeros_like(x)
        for expert in range(len(self.down_proj)):
            token, place = torch.where(index == expert)
            gate, up = F.linear(x[token], self.gate_up_proj[expert]).chunk(2, -1)
            y = F.linear(F.silu(gate) * up, self.down_proj[expert])
            out = out.index_add(0, token, y * weights[token, place, None])
        return out


class Mixture(nn.Module):
    """A router, and the experts that it chooses among."""

    def __init__(self, experts: int = 4, k: int = 2, width: int = 32, hidden: int = 40):
        super().__init__()
        self.k, self.router = k, nn.Linear(width, experts, bias=False)
        self.experts = Experts(experts, width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, index = self.router(tokens).softmax(-1).topk(self.k, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        return self.experts(tokens, index, weights).view_as(x)


def make() -> nn.Module:
    return Llama(mlp=Mixture)
