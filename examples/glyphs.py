"""Images of digits, drawn from a font of 5 x 7 dots: shifted, thick or thin, on noisy paper.

images, digits = next(batches(batch=16, size=16, seed=0))      # float[16, 1, 16, 16] from -1 to 1, int64[16]
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

FONT = (
    "01110 10001 10011 10101 11001 10001 01110", "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111", "01110 10001 00001 00110 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010", "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110", "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110", "01110 10001 10001 01111 00001 00010 01100",
)  # fmt: skip


def glyphs() -> Tensor:
    """The digits as float[10, 7, 5] of zeros and ones."""
    return torch.tensor([[[float(dot) for dot in row] for row in rows.split()] for rows in FONT])


def batches(batch: int, size: int = 16, seed: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """An endless iterator over (images, digits). The same arguments give the same batches on any machine.

    >>> images, digits = next(batches(batch=3))
    >>> images.shape, digits.shape
    (torch.Size([3, 1, 16, 16]), torch.Size([3]))
    """
    random, font = torch.Generator().manual_seed(seed), glyphs()
    while True:
        digits = torch.randint(10, (batch,), generator=random)
        yield torch.stack([drawn(font[digit], size, random) for digit in digits]), digits


def drawn(glyph: Tensor, size: int, random: torch.Generator) -> Tensor:
    """One digit, float[1, size, size]: of some height, somewhere, with some noise."""
    high = int(torch.randint(size // 2, size - 1, (1,), generator=random))
    wide = high * 5 // 7
    ink = F.interpolate(glyph[None, None], (high, wide), mode="bilinear", align_corners=False)[0]
    top, left = (int(torch.randint(size - n + 1, (1,), generator=random)) for n in (high, wide))
    paper = F.pad(ink, (left, size - wide - left, top, size - high - top))
    return (2 * paper - 1 + 0.1 * torch.randn(1, size, size, generator=random)).clamp(-1, 1)
