"""A small residual convnet that reads digits. Plain PyTorch, for one device.

    python -m examples.train convnet --mesh dp=4

Its batch norms are those of the whole batch, on any mesh. K. He et al., arXiv:1512.03385.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor, nn

from . import glyphs

MESHES = ({"dp": 4}, {"dp": 2, "shard": 2})


class Block(nn.Module):
    """Two convolutions beside a short cut, at half the size if the stride is 2."""

    def __init__(self, ins: int, outs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(ins, outs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outs, outs, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outs), nn.BatchNorm2d(outs)
        self.cut = nn.Conv2d(ins, outs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.cut(x) + self.norm2(self.conv2(y)))


class ConvNet(nn.Module):
    """float[batch, 1, size, size] images -> float[batch, 10] logits of the digits."""

    def __init__(self, widths: tuple[int, ...] = (8, 16, 32)):
        super().__init__()
        self.blocks = nn.ModuleList(
            Block(ins, outs, 1 if ins == 1 else 2) for ins, outs in zip((1, *widths), widths, strict=False)
        )
        self.head = nn.Linear(widths[-1], 10)

    def forward(self, images: Tensor) -> Tensor:
        for block in self.blocks:
            images = block(images)
        return self.head(images.mean((2, 3)))


def make() -> nn.Module:
    return ConvNet()


def batches(batch: int = 16, size: int = 16, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    return glyphs.batches(batch, size, seed)


def loss_of(model: nn.Module, images: Tensor, digits: Tensor) -> Tensor:
    return F.cross_entropy(model(images), digits)
