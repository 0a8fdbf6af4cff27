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
from spmd.mesh import DeviceMesh


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
        own = have[mesh.get_local_rank(0)]
        flat = index.flatten()
        counts = flat.bincount(minlength=experts)[:experts]
        came = wait(all_to_all_single(counts, [own] * len(have), have, (mesh, 0))).view(len(have), own)
        order = flat.argsort(stable=True)[: int(counts.sum())]
        ids = torch.arange(own, device=index.device).repeat(len(have)).repeat_interleave(came.flatten())
        sends = [int(part.sum()) for part in counts.split(have)]
        return cls(mesh, index, order, sends, came.sum(1).tolist(), ids)

    def out(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x.index_select(0, self.order // self.index.shape[1])
        return wait(all_to_all_single(rows, self.receives, self.sends, (self.mesh, 0))), self.ids

    def back(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rows = wait(all_to_all_single(y, self.sends, self.receives, (self.mesh, 0)))
        return _combined(rows, self.order, weights)


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
    def of(cls, index: torch.Tensor, experts: int, mesh: DeviceMesh, factor: float) -> Capacity:
        """factor: the capacity, in units of what an expert gets of a rank if all get as much."""
        capacity = ceil(factor * index.numel() / experts)
        flat = index.flatten()
        order = flat.argsort(stable=True)
        expert = flat[order]
        starts = flat.bincount(minlength=experts + 1).cumsum(0) - flat.bincount(minlength=experts + 1)
        place = torch.arange(len(flat), device=flat.device) - starts[expert]
        fits = (place < capacity) & (expert < experts)
        return cls(mesh, index, capacity, experts, order[fits], (expert * capacity + place)[fits])

    def out(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = x.index_select(0, self.order // self.index.shape[1])
        slots = x.new_zeros(self.experts * self.capacity, x.shape[1]).index_copy(0, self.slots, rows)
        sends, receives = self._sizes()
        own = receives[0] // self.capacity if self.capacity else 0
        ids = torch.arange(own, device=x.device).repeat_interleave(self.capacity).repeat(self.mesh.size())
        return wait(all_to_all_single(slots, receives, sends, (self.mesh, 0))), ids

    def back(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        sends, receives = self._sizes()
        slots = wait(all_to_all_single(y, sends, receives, (self.mesh, 0)))
        return _combined(slots.index_select(0, self.slots), self.order, weights)

    def _sizes(self) -> tuple[Sequence[int], Sequence[int]]:
        have = owned(self.experts, self.mesh)
        own = have[self.mesh.get_local_rank(0)]
        return [n * self.capacity for n in have], [own * self.capacity] * len(have)


def _combined(rows: torch.Tensor, order: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """For each token the weighted sum of its rows. order: the places of the rows in the flat weights."""
    weighted = rows * weights.flatten().index_select(0, order).unsqueeze(1)
    out = weighted.new_zeros(len(weights), rows.shape[1])
    return out.index_add(0, order // weights.shape[1], weighted).to(rows.dtype)
