"""A small Llama: rotary positions, grouped heads, RMS norms and a gated MLP. Plain PyTorch, for one device.

python -m examples.train llama --mesh dp=2,tp=2
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import text

MESHES = ({"dp": 4}, {"tp": 2}, {"dp": 2, "tp": 2})


class Attention(nn.Module):
    """Causal attention: `heads` heads of queries, which share `kv_heads` heads of keys and values."""

    def __init__(self, width: int, heads: int, kv_heads: int):
        super().__init__()
        self.head_dim, self.num_heads, self.num_kv_heads = width // heads, heads, kv_heads
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = (
            f(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for f in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)  # [batch, head, time, head_dim]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair of features turned by an angle that grows with the position. J. Su et al., arXiv:2104.09864."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def angles(time: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each float[time, head_dim / 2]."""
    speeds = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    turned = torch.outer(torch.arange(time), speeds)
    return turned.cos(), turned.sin()


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, mlp: nn.Module):
        super().__init__()
        self.norm1, self.attn = nn.RMSNorm(width), Attention(width, heads, kv_heads)
        self.norm2, self.mlp = nn.RMSNorm(width), mlp

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """int64[batch, time] bytes -> float[batch, time, 256] logits of the next byte."""

    def __init__(self, layers: int = 2, width: int = 32, heads: int = 4, kv_heads: int = 2, mlp=lambda: MLP(32, 80)):
        super().__init__()
        self.words, self.head_dim = nn.Embedding(256, width), width // heads
        self.layers = nn.ModuleList(Block(width, heads, kv_heads, mlp()) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x, (cos, sin) = self.words(tokens), angles(tokens.shape[1], self.head_dim)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def make() -> nn.Module:
    return Llama()


def batches(batch: int = 8, block: int = 16, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    return text.batches(text.load_text(), batch, block, seed)


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
