"""Where the parameters of a bucket are: in the flat shard of a rank, in what is gathered, and in the whole parameters.

    whole [before, size, after]  <->  gathered [n, ..., before * rows * after, ...]

`rows` is the length of the largest block, so that all ranks have equally much. Blocks that follow one another and are
equally long, which on even dims are all of them, are copied at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from math import prod

import torch


@dataclass(frozen=True)
class Slot:
    """The place of one parameter in the bucket of a rank.

    shape: of the whole parameter, as this rank computes with it. dim: the one that is sharded. lengths: how many
    indices of it each block has; the first block is the largest. place: which block is that of this rank. offset: where
    the block begins in the flat shard; start: where the parameter begins in the memory of the whole ones. packs: of how
    many equal tensors the dim consists, each of which is shared out by itself, evenly; lengths are of one.
    """

    shape: tuple[int, ...]
    dim: int
    lengths: tuple[int, ...]
    place: int
    offset: int
    start: int
    packs: int = 1

    @property
    def rows(self) -> int:
        """Indices of a padded block."""
        return max(1, self.lengths[0])

    @property
    def numel(self) -> int:
        """Elements of a padded block."""
        return self.before * self.rows * self.after

    @property
    def before(self) -> int:
        """How many times the sharded dim is there."""
        return prod(self.shape[: self.dim]) * self.packs

    @property
    def after(self) -> int:
        """Elements behind one index of it."""
        return prod(self.shape[self.dim + 1 :])

    @property
    def size(self) -> int:
        """Indices of the sharded dim."""
        return self.shape[self.dim] // self.packs

    def block(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's block, without padding: a view of its flat shard."""
        padded = flat.narrow(0, self.offset, self.numel).view(self._with(self.packs * self.rows))
        return padded.narrow(self.dim, 0, self.packs * self.lengths[self.place])

    def block_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's block of the whole parameter."""
        parts = whole.unflatten(self.dim, (self.packs, self.size))
        part = parts.narrow(self.dim + 1, sum(self.lengths[: self.place]), self.lengths[self.place])
        return part.flatten(self.dim, self.dim + 1)

    def whole(self, memory: torch.Tensor) -> torch.Tensor:
        """The whole parameter: a view of the memory of the gathered bucket."""
        return memory.narrow(0, self.start, prod(self.shape)).view(self.shape)

    def copies(self, rows: torch.Tensor, whole: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Views of [n, elements of a shard] and of a tensor like the whole parameter that show the same."""
        blocks, whole = self._blocks(rows), whole.reshape(self.before, self.size, self.after)
        for first, n, length, start in self._runs:
            part = whole.narrow(1, start, n * length).unflatten(1, (n, length))
            yield blocks[first : first + n].narrow(2, 0, length), part.transpose(0, 1)

    @cached_property
    def _runs(self) -> list[tuple[int, int, int, int]]:
        """Blocks that are equally long: the first, how many, how long, and where in the dim they begin."""
        found, first, start = [], 0, 0
        for length, run in groupby(self.lengths):
            n = len(list(run))
            if length:
                found.append((first, n, length, start))
            first, start = first + n, start + n * length
        return found

    def clear(self, rows: torch.Tensor) -> None:
        """Write zeros where `copies` writes gradients, and into the padding."""
        self._blocks(rows).zero_()

    @property
    def is_padded(self) -> bool:
        return self.rows * len(self.lengths) != self.size

    def _blocks(self, rows: torch.Tensor) -> torch.Tensor:
        """[n, before, rows, after]: the padded blocks."""
        return rows.narrow(1, self.offset, self.numel).unflatten(1, (self.before, self.rows, self.after))

    def _with(self, size: int) -> tuple[int, ...]:
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])


def total(slots: Sequence[Slot]) -> int:
    """Elements of a flat shard."""
    return slots[-1].offset + slots[-1].numel if slots else 0


def unpack(rows: torch.Tensor, memory: torch.Tensor, slots: Sequence[Slot], n: int) -> None:
    """Write what was gathered, [n, elements of a shard], into the memory of the whole parameters."""
    found = rows.view(n, -1)
    _copy([(whole, block) for s in slots for block, whole in s.copies(found, s.whole(memory))])


def pack(rows: torch.Tensor, gradients: Sequence[torch.Tensor | None], slots: Sequence[Slot]) -> None:
    """Write gradients of whole parameters into [n, elements of a shard]; what has none is zero."""
    for slot, gradient in zip(slots, gradients, strict=True):
        if gradient is None or slot.is_padded:
            slot.clear(rows)
    given = [(slot, g) for slot, g in zip(slots, gradients, strict=True) if g is not None]
    _copy([pair for slot, gradient in given for pair in slot.copies(rows, gradient)])


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if pairs:
        torch.ops.aten._foreach_copy_.default(*map(list, zip(*pairs, strict=True)))
