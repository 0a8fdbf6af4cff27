"""A small diffusion transformer: it sees a noisy digit, and says what the noise is. Plain PyTorch, for one device.

    python -m examples.train diffusion --mesh dp=2,tp=2

W. Peebles and S. Xie, DiT, arXiv:2212.09748; J. Ho et al., arXiv:2006.11239, for the noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import glyphs

MESHES = ({"dp": 4}, {"tp": 4}, {"dp": 2, "tp": 2})


class Attention(nn.Module):
    """Attention of all patches to all, with queries, keys and values in one layer."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.num_heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A transformer's block whose norms are scaled and shifted, and whose branches are weighed, by the condition."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.attn = Attention(width, heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """x: [batch, patches, width]. condition: [batch, width]."""
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(F.silu(condition))[:, None].chunk(6, -1)
        x = x + gate1 * self.attn(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)


class DiT(nn.Module):
    """float[batch, 1, size, size] images, float[batch] times, int64[batch] digits -> the noise in the images."""

    def __init__(self, layers: int = 2, width: int = 32, heads: int = 4, size: int = 16, patch: int = 4):
        super().__init__()
        self.width, self.patch = width, patch
        self.patches = nn.Conv2d(1, width, patch, stride=patch)
        self.places = nn.Parameter(0.02 * torch.randn((size // patch) ** 2, width))
        self.times = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.digits = nn.Embedding(10, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.noise = nn.LayerNorm(width), nn.Linear(width, patch * patch)

    def forward(self, images: Tensor, times: Tensor, digits: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.places  # [batch, patches, width]
        condition = self.times(waves(times, self.width)) + self.digits(digits)
        for layer in self.layers:
            x = layer(x, condition)
        return F.fold(self.noise(self.norm(x)).transpose(1, 2), images.shape[-2:], self.patch, stride=self.patch)


def waves(times: Tensor, width: int) -> Tensor:
    """Times from 0 to 1 as float[batch, width]: waves of many lengths."""
    turned = 1000.0 * times[:, None] * torch.exp(-math.log(1e4) * torch.arange(width // 2) * 2 / width)
    return torch.cat([turned.cos(), turned.sin()], -1)


def make() -> nn.Module:
    return DiT()


def batches(batch: int = 8, size: int = 16, seed: int = 0) -> Iterator[tuple[Tensor, ...]]:
    """(noisy images, times, digits, noise): the later, the more noise."""
    random = torch.Generator().manual_seed(seed)
    for images, digits in glyphs.batches(batch, size, seed):
        times, noise = torch.rand(batch, generator=random), torch.randn(images.shape, generator=random)
        angle = (math.pi / 2 * times)[:, None, None, None]
        yield images * angle.cos() + noise * angle.sin(), times, digits, noise


def loss_of(model: nn.Module, images: Tensor, times: Tensor, digits: Tensor, noise: Tensor) -> Tensor:
    return F.mse_loss(model(images, times, digits), noise)
