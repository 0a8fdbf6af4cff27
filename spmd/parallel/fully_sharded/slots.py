"""Where the parameters of a bucket are: in the flat shard of a rank, in what is gathered, and in the whole parameters.

    whole [before, n * rows, after]  <->  gathered [n, ..., before * rows * after, ...]

`rows` is the length of the largest block, so that all ranks have equally much: the blocks of `torch.chunk` are full up
to the last one that is not empty, and behind it there is only padding. So the whole parameter is the first indices of
the padded one, on any dim, even or not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True)
class Slot:
    """The place of one parameter in the bucket of a rank.

    shape: of the whole parameter, as this rank computes with it. dim: the one that is sharded. rows: indices of it in
    the largest block. length: in the block of this rank. offset: where the block begins in the flat shard. packs: of
    how many equal tensors the dim consists, each of which is shared out by itself, evenly; rows and lengths are of one.
    """

    shape: tuple[int, ...]
    dim: int
    rows: int
    length: int
    offset: int
    packs: int = 1

    @property
    def numel(self) -> int:
        """Elements of a padded block."""
        return self.before * self.rows * prod(self.shape[self.dim + 1 :])

    @property
    def before(self) -> int:
        """How many times the sharded dim is there."""
        return prod(self.shape[: self.dim]) * self.packs

    @property
    def size(self) -> int:
        """Indices of the sharded dim."""
        return self.shape[self.dim] // self.packs

    def block(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's block, without padding: a view of its flat shard."""
        padded = flat.narrow(0, self.offset, self.numel).view(self._with(self.packs * self.rows))
        return padded.narrow(self.dim, 0, self.packs * self.length)

    def whole(self, memory: torch.Tensor, n: int) -> torch.Tensor:
        """The whole parameter: a view of the memory of the gathered bucket, whose dim 0 is of n ranks' elements."""
        padded = memory.narrow(0, n * self.offset, n * self.numel).view(self._with(n * self.packs * self.rows))
        return padded.narrow(self.dim, 0, self.shape[self.dim])

    def blocks_of(self, memory: torch.Tensor, n: int) -> torch.Tensor:
        """[n, before, rows, after]: the padded blocks of all ranks, in the memory of the gathered bucket."""
        padded = memory.narrow(0, n * self.offset, n * self.numel)
        return padded.view(self.before, n, self.rows, prod(self.shape[self.dim + 1 :])).transpose(0, 1)

    def sent(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, before, rows, after]: the same in a tensor that is sent, with a row of all parameters for each rank."""
        found = rows.narrow(1, self.offset, self.numel)
        return found.unflatten(1, (self.before, self.rows, prod(self.shape[self.dim + 1 :])))

    def copies(self, rows: torch.Tensor, whole: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What has to be copied, and from where, to put a tensor like the whole parameter into `rows`."""
        into = self.sent(rows)
        full, rest = divmod(self.size, self.rows)
        flat = whole.reshape(self.before, self.size, prod(self.shape[self.dim + 1 :]))
        if full:
            even = flat if not rest else flat.narrow(1, 0, full * self.rows)
            yield into[:full], even.unflatten(1, (full, self.rows)).transpose(0, 1)
        if rest:
            yield into[full].narrow(1, 0, rest), flat.narrow(1, full * self.rows, rest)

    def _with(self, size: int) -> tuple[int, ...]:
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])


def total(slots: Sequence[Slot]) -> int:
    """Elements of a flat shard."""
    return slots[-1].offset + slots[-1].numel if slots else 0


def unpack(rows: torch.Tensor, memory: torch.Tensor, slots: Sequence[Slot], n: int) -> None:
    """Write what was gathered, [n, elements of a shard], into the memory of the whole parameters."""
    found = rows.view(n, -1)
    torch.ops.aten._foreach_copy_.default([s.blocks_of(memory, n) for s in slots], [s.sent(found) for s in slots])


def pack(rows: torch.Tensor, gradients: Sequence[torch.Tensor | None], slots: Sequence[Slot]) -> None:
    """Write gradients of whole parameters into [n, elements of a shard]; what has none is zero."""
    into, of = [], []
    for slot, gradient in zip(slots, gradients, strict=True):
        if gradient is None or slot.rows * len(rows) != slot.size:
            slot.sent(rows).zero_()
        if gradient is not None:
            pairs = list(slot.copies(rows, gradient))
            into += [a for a, _ in pairs]
            of += [b for _, b in pairs]
    if into:
        torch.ops.aten._foreach_copy_.default(into, of)
