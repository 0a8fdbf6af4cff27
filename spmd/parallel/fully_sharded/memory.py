"""The memory of a bucket, on one rank: made, filled, freed and looked at. None of it communicates.

Where one thread plays several ranks, each function runs for each of them, with that rank's tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

import torch

from spmd.comm.chunk import split_unit
from spmd.mesh import DeviceMesh, current_rank, per_rank
from spmd.parallel.fully_sharded.slots import Slot, pack, total, unpack
from spmd.tensor.spec import Spec


class Layout:
    """Where parameters are in a bucket, on every rank.

    stored: the specs of their shards. computed: of what ranks compute with, on the axes of tensor parallelism; None for
    a plain tensor. dims: which of each the bucket shards. axes: of the stored specs, over which it is shared out, the
    outermost first. n: how many ranks these are.
    """

    def __init__(self, stored: Sequence[Spec], computed: Sequence[Spec | None], dims: Sequence[int], axes, n: int):
        self.stored, self.computed, self.dims, self.axes, self.n = stored, computed, dims, axes, n
        self._here: dict[int, tuple[Slot, ...]] = {}

    def here(self) -> tuple[Slot, ...]:
        """The slots of the current rank."""
        rank = current_rank()
        found = self._here.get(rank)
        if found is None:
            found = self._here[rank] = tuple(self._slots())
        return found

    def _slots(self) -> Iterator[Slot]:
        offset = start = 0
        for stored, computed, dim in zip(self.stored, self.computed, self.dims, strict=True):
            shape = stored.shape if computed is None else computed.local_shape(computed.mesh.get_coordinate())
            packs = split_unit(stored.units[dim])[0]
            places = _places(stored.mesh, self.axes)
            lengths = tuple(stored.length(dim, at) // packs for at in places)
            here = places.index(stored.mesh.get_coordinate())
            slot = Slot(tuple(shape), dim, lengths, here, offset, start, packs)
            yield slot
            offset, start = offset + slot.numel, start + prod(shape)


def _places(mesh: DeviceMesh, axes: Sequence[int]) -> list[tuple[int, ...]]:
    """The coordinates of the ranks that are apart from this one on these axes only, the outermost slowest."""
    here = mesh.get_coordinate()
    along = [range(mesh.shape[a]) for a in axes]
    return [tuple(dict(zip(axes, at, strict=True)).get(a, x) for a, x in enumerate(here)) for at in product(*along)]


@per_rank
def flattened(layout: Layout, blocks: Sequence[torch.Tensor], device: str, pinned: bool) -> list[torch.Tensor]:
    """The flat shard with copies of these blocks, and then a view of it for each."""
    slots = layout.here()
    flat = torch.zeros(total(slots), dtype=blocks[0].dtype, device=device, pin_memory=pinned)
    views = [slot.block(flat) for slot in slots]
    for view, block in zip(views, blocks, strict=True):
        view.copy_(block)
    return [flat, *views]


@per_rank
def own_blocks(layout: Layout, wholes: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's blocks of whole parameters."""
    return [slot.block_of(whole) for slot, whole in zip(layout.here(), wholes, strict=True)]


@per_rank
def are_as_stored(layout: Layout, wholes: Sequence[torch.Tensor], shards: Sequence[torch.Tensor]) -> bool:
    """Whether whole parameters have the numbers of this rank's shards."""
    return all(_is_same(a, b.to(a.device, a.dtype)) for a, b in zip(own_blocks(layout, wholes), shards, strict=True))


def _is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a, b) or torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)


@per_rank
def version(flat: torch.Tensor) -> int:
    """How often the memory of the shards was written into."""
    return flat._version


@per_rank
def memory(layout: Layout, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Memory for the gathered parameters, which is free until it is filled."""
    made = torch.empty(sum(prod(slot.shape) for slot in layout.here()), dtype=dtype, device=device)
    made.untyped_storage().resize_(0)
    return made


@per_rank
def fill(layout: Layout, into: torch.Tensor, gathered: torch.Tensor) -> None:
    """Write what was gathered into the memory. What autograd has saved of it stays valid: the numbers are the same."""
    into = into.data  # which has a version of its own
    into.untyped_storage().resize_(into.numel() * into.itemsize)
    unpack(gathered, into, layout.here(), layout.n)


@per_rank
def free(x: torch.Tensor) -> None:
    """Give the memory back. Tensors that show it stay, and must not be read until it is filled again."""
    x.untyped_storage().resize_(0)


@per_rank
def wholes(layout: Layout, memory: torch.Tensor) -> list[torch.Tensor]:
    """The whole parameters, as views of the memory."""
    return [slot.whole(memory) for slot in layout.here()]


@per_rank
def packed(layout: Layout, gradients: Sequence[torch.Tensor | None], dtype: torch.dtype, like: torch.Tensor):
    """[n, elements of a shard + parameters]: gradients as they are sent, and behind them which there are."""
    slots = layout.here()
    size = total(slots)
    rows = torch.empty(layout.n, size + len(slots), dtype=dtype, device=like.device)
    pack(rows, gradients, slots)
    rows[:, size:] = torch.tensor([float(g is not None) for g in gradients], dtype=dtype, device=like.device)
    return rows


@per_rank
def unpacked(layout: Layout, reduced: torch.Tensor, scale: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """How many ranks had a gradient of each parameter, and then this rank's blocks of their sums."""
    slots = layout.here()
    size = total(slots)
    summed = reduced.narrow(0, 0, size)
    summed = summed.to(dtype) if summed.dtype != dtype else summed
    if scale != 1.0:
        summed.mul_(scale)
    return [reduced.narrow(0, size, len(slots)), *(slot.block(summed) for slot in slots)]


@per_rank
def part(gathered: torch.Tensor, place: int, parts: int) -> torch.Tensor:
    """A copy of one of so many equal parts of what was gathered."""
    return gathered.view(parts, -1)[place].clone()
