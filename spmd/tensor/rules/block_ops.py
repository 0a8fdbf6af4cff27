"""Two ops that make the blocks of a dim a dim of their own, and undo it.

    to_blocks(f32[5], 0, [2, 2, 1, 0], 0.0)     ->  f32[4, 2]     the blocks, filled up with zeros to equal lengths
    from_blocks(f32[4, 2], 0, [2, 2, 1, 0])     ->  f32[5]

On one device they copy. On a tensor whose dim is sharded into blocks of these lengths, each rank fills up its own
block, and nothing is sent (`spmd.tensor.recipes.blocks`). So decompositions can say what is done to each block, and
what to the totals of the blocks, however uneven the blocks are. Where all blocks have one length, a reshape does the
same.
"""

from __future__ import annotations

import torch

aten = torch.ops.aten

_library = torch.library.Library("spmd", "FRAGMENT")
_library.define("to_blocks(Tensor x, int dim, int[] lengths, Scalar fill) -> Tensor")
_library.define("from_blocks(Tensor x, int dim, int[] lengths) -> Tensor")

to_blocks = torch.ops.spmd.to_blocks.default
from_blocks = torch.ops.spmd.from_blocks.default


def filled_up(x: torch.Tensor, ndim: int, dim: int, more: int, fill: float) -> torch.Tensor:
    """x, of so many dims, with so many entries of `fill` behind it along one of them."""
    return aten.constant_pad_nd.default(x, [*[0, 0] * (ndim - 1 - dim), 0, more], fill) if more else x


@torch.library.impl(_library, "to_blocks", "CompositeExplicitAutograd")
def _to_blocks(x: torch.Tensor, dim: int, lengths: list[int], fill: float) -> torch.Tensor:
    parts = zip(x.split(lengths, dim), lengths, strict=True)
    return torch.stack([filled_up(part, x.ndim, dim, max(lengths) - n, fill) for part, n in parts], dim)


@torch.library.impl(_library, "from_blocks", "CompositeExplicitAutograd")
def _from_blocks(x: torch.Tensor, dim: int, lengths: list[int]) -> torch.Tensor:
    return torch.cat([part.narrow(dim, 0, n) for part, n in zip(x.unbind(dim), lengths, strict=True)], dim)
