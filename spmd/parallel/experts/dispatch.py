"""Tokens go to the ranks that have their experts, and back: an all-to-all each way.

    sent = Dropless.of(index, experts, mesh)      which tokens go where: counts are exchanged first, E numbers a rank
    tokens, ids = sent.out(x)                     [tokens that came, d], and the expert of each, counted on this rank
    y = sent.back(experts(tokens, ids), weights)  [own tokens, d]: for each the weighted sum over its experts

`Capacity` has the same methods. There each expert takes at most so many tokens of each rank, what is beyond is dropped,
and what is missing is padded; so sizes do not depend on data, and no counts are sent.

D. Lepikhin et al., GShard, arXiv:2006.16668, whose groups of tokens are the ranks here; T. Gale et al., MegaBlocks,
arXiv:2211.15841, for dropless.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Protocol

import torch

from spmd.comm import all_to_all_single, wait
from spmd.comm.chunk import lengths
from spmd.mesh import DeviceMesh, per_rank


class Dispatch(Protocol):
    """Where the tokens of one call go."""

    def out(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[own tokens, d] -> [tokens that came, d] and [tokens that came], the places of their experts here."""

    def back(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[tokens that came, d], [own tokens, k] -> [own tokens, d]."""


def owned(experts: int, mesh: DeviceMesh) -> list[int]:
    """How many experts each rank has.

    >>> owned(5, DeviceMesh("cpu", [0, 1]))
    [3, 2]
    """
    return lengths(experts, 1, (mesh.size(),))


@dataclass(frozen=True)
class Dropless:
    """All tokens go to all of their experts.

    order: the places in the flat index of what is sent, by expert. sends, receives: how many rows, by rank. ids: the
    experts of what comes.
    """

    mesh: DeviceMesh
    index: torch.Tensor
    order: torch.Tensor
    sends: list[int]
    receives: list[int]
    ids: torch.Tensor

    @classmethod
    def of(cls, index: torch.Tensor, experts: int, mesh: DeviceMesh) -> Dropless:
        """index: [own tokens, k], the experts of each token; `experts` for none."""
        have = owned(experts, mesh)
        counts = _counts(index, experts)
        came = wait(all_to_all_single(counts, [_own(have, mesh)] * len(have), have, (mesh, 0)))
        return cls(mesh, index, *_exchange(index, counts, came, have))

    def out(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x.index_select(0, self.order // self.index.shape[1])
        return wait(all_to_all_single(rows, self.receives, self.sends, (self.mesh, 0))), self.ids

    def back(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = wait(all_to_all_single(y, self.sends, self.receives, (self.mesh, 0)))
        return combined(rows, self.order, weights)


@dataclass(frozen=True)
class Capacity:
    """Each expert takes at most `capacity` tokens of each rank: the first ones. Others have no result of it.

    order: the places in the flat index of what is sent, by expert. slots: their places among the experts' slots.
    """

    mesh: DeviceMesh
    index: torch.Tensor
    capacity: int
    experts: int
    order: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def of(
        cls, index: torch.Tensor, experts: int, mesh: DeviceMesh, factor: float, most: int | None = None
    ) -> Capacity:
        """factor: the capacity, in units of what an expert gets of a rank if all get as much. most: the tokens of the
        rank that has most of them; by default all have as many."""
        capacity = ceil(factor * (index.shape[0] if most is None else most) * index.shape[1] / experts)
        return cls(mesh, index, capacity, experts, *_slots(index, experts, capacity))

    def out(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x.index_select(0, self.order // self.index.shape[1])
        slots = x.new_zeros(self.experts * self.capacity, x.shape[1]).index_copy(0, self.slots, rows)
        sends, receives = self._sizes()
        ids = _ids_of_slots(owned(self.experts, self.mesh), self.capacity, self.mesh, x.device)
        return wait(all_to_all_single(slots, receives, sends, (self.mesh, 0))), ids

    def back(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        sends, receives = self._sizes()
        slots = wait(all_to_all_single(y, sends, receives, (self.mesh, 0)))
        return combined(slots.index_select(0, self.slots), self.order, weights)

    def _sizes(self) -> tuple[Sequence[int], Sequence[int]]:
        have = owned(self.experts, self.mesh)
        return [n * self.capacity for n in have], [_own(have, self.mesh) * self.capacity] * len(have)


# ---- of a rank --------------------------------------------------------------------------------


@per_rank
def _own(have: Sequence[int], mesh: DeviceMesh) -> int:
    """How many experts this rank has."""
    return have[mesh.get_local_rank(0)]


@per_rank
def _counts(index: torch.Tensor, experts: int) -> torch.Tensor:
    """How often each expert is asked for."""
    return index.flatten().bincount(minlength=experts)[:experts]


@per_rank
def _exchange(index: torch.Tensor, counts: torch.Tensor, came: torch.Tensor, have: Sequence[int]) -> tuple:
    """The places of what is sent, how many rows go to each rank and come from it, and the experts of what comes.

    counts: of the experts here. came: of each rank's tokens, of the experts that this rank has.
    """
    came = came.view(len(have), -1)
    order = index.flatten().argsort(stable=True)[: int(counts.sum())]
    ids = torch.arange(came.shape[1], device=index.device).repeat(len(have)).repeat_interleave(came.flatten())
    return order, [int(part.sum()) for part in counts.split(list(have))], came.sum(1).tolist(), ids


@per_rank
def _slots(index: torch.Tensor, experts: int, capacity: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The places in the flat index of what an expert has room for, and their slots."""
    flat = index.flatten()
    order = flat.argsort(stable=True)
    expert = flat[order]
    starts = flat.bincount(minlength=experts + 1).cumsum(0) - flat.bincount(minlength=experts + 1)
    place = torch.arange(len(flat), device=flat.device) - starts[expert]
    fits = (place < capacity) & (expert < experts)
    return order[fits], (expert * capacity + place)[fits]


@per_rank
def _ids_of_slots(have: Sequence[int], capacity: int, mesh: DeviceMesh, device: torch.device) -> torch.Tensor:
    """The experts of the slots that come from all ranks."""
    own = have[mesh.get_local_rank(0)]
    return torch.arange(own, device=device).repeat_interleave(capacity).repeat(len(have))


def combined(rows: torch.Tensor, order: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """For each token the weighted sum of its rows. order: the places of the rows in the flat weights."""
    weighted = rows * weights.flatten().index_select(0, order).unsqueeze(1)
    out = weighted.new_zeros(weights.shape[0], rows.shape[1])
    return out.index_add(0, order // weights.shape[1], weighted).to(rows.dtype)
