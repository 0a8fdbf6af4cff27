"""A small BERT: it sees a text with holes, and says what was in them. Plain PyTorch, for one device.

    python -m examples.train bert --mesh dp=2,tp=2

J. Devlin et al., arXiv:1810.04805.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import text

MESHES = ({"dp": 4}, {"tp": 4}, {"dp": 2, "tp": 2})
HOLE, HOLES = 256, 0.25
"""The token of a hole, and the part of each window that has one: as many in each, so that all parts weigh alike."""


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.num_heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Norms come behind the sums, as in the first transformers."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention, self.norm1 = Attention(width, heads), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x))
        return self.norm2(x + self.mlp(x))


class BERT(nn.Module):
    """int64[batch, time] bytes and holes -> float[batch, time, 257] logits of what is there."""

    def __init__(self, layers: int = 2, width: int = 32, heads: int = 4, time: int = 16):
        super().__init__()
        self.words, self.places = nn.Embedding(257, width), nn.Embedding(time, width)
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = nn.Linear(width, 257)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.words(tokens) + self.places(torch.arange(tokens.shape[1])))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make() -> nn.Module:
    return BERT()


def batches(batch: int = 8, block: int = 16, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """(tokens with holes, targets): a target is -100 where there is no hole."""
    random = torch.Generator().manual_seed(seed)
    for tokens, _ in text.batches(text.load_text(), batch, block, seed):
        rank = torch.rand(tokens.shape, generator=random).argsort(-1)
        hole = rank < HOLES * block
        yield tokens.masked_fill(hole, HOLE), tokens.masked_fill(~hole, -100)


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
