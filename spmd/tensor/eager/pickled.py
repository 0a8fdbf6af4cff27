"""DTensors as bytes: what is pickled says whose block it is, and that is checked when it is loaded.

    torch.save(x, f"x{rank}.pt")            # this rank's block, with its spec
    torch.load(f"x{rank}.pt")               # the same on the same rank; another rank's block is an error

A block fits where the spec gives this rank the same block; so a replicated tensor that one rank has saved loads on all.
Tensors that share memory do so when they are loaded, as far as torch saves that: `torch.save` of both together.

What any other number of ranks can load is written by torch.distributed.checkpoint.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from spmd.comm import wait
from spmd.mesh import current_rank
from spmd.sim import LocalTensor
from spmd.tensor.eager.fast_path import Memory
from spmd.tensor.eager.view_copies import ViewCopy
from spmd.tensor.spec import Spec

Place = tuple[tuple[int, ...], tuple[int, ...], int]
"""Size, strides and offset of a view."""


class Saved(NamedTuple):
    """What is pickled of a DTensor's memory.

    ranks: those whose blocks it has; several where they are simulated. block: the block; None of a view that shows a
    copy (`view_copies.py`), which for each rank has a place in the copy instead. memory: as in a DTensor.
    """

    ranks: tuple[int, ...]
    block: torch.Tensor | None
    places: tuple[Place, ...] | None
    memory: Memory | None
    copy: ViewCopy | None


def attributes(x, *more: str) -> dict[str, Any]:
    """What a copy of a DTensor has, too, beside its block: what users attached, and all that is not in `more`."""
    return {name: v for name, v in vars(x).items() if name not in ("_local_tensor", "_spec", "_reduced", *more)}


def saved(x) -> Saved:
    """What to pickle of a DTensor. Nothing is sent."""
    local = wait(x._local_tensor)
    ranks = local.ranks if isinstance(local, LocalTensor) else (current_rank(),)
    if x._copy is None:
        return Saved(ranks, local, None, x._memory, None)
    blocks = local.local.values() if isinstance(local, LocalTensor) else (local,)
    places = tuple((tuple(b.size()), tuple(b.stride()), b.storage_offset()) for b in blocks)
    return Saved(ranks, None, places, x._memory, x._copy)


def loaded(data: Saved, spec: Spec) -> torch.Tensor:
    """The block to use on this rank. ValueError if the spec gives it another one."""
    above = data.copy
    while above is not None:
        _check(above.base_block, above.plan.src, data.ranks)
        above = above.base_copy
    local = data.block if data.copy is None else _in_copy(data.copy.memory, data)
    _check(local, spec, data.ranks)
    return local.detach()


def _in_copy(memory: torch.Tensor, data: Saved) -> torch.Tensor:
    """The view of the copy; of each rank's copy where ranks are simulated."""
    place_of = dict(zip(data.ranks, data.places, strict=True))
    if not isinstance(memory, LocalTensor):
        return memory.as_strided(*data.places[0])
    return LocalTensor({rank: x.as_strided(*place_of.get(rank, data.places[0])) for rank, x in memory.local.items()})


def _check(local: torch.Tensor, spec: Spec, ranks: tuple[int, ...]) -> None:
    blocks = local.local if isinstance(local, LocalTensor) else {current_rank(): local}
    for here, block in blocks.items():
        saved_by = here if here in ranks else ranks[0]
        if not _have_one_block(spec, saved_by, here):
            raise ValueError(
                f"loading {spec}: rank {saved_by} has saved {_block_of(spec, saved_by)}, and rank {here}, which loads "
                f"it, has {_block_of(spec, here)}. Load on each rank what it saved itself. For other ranks and meshes "
                "save with torch.distributed.checkpoint, or save x.full_tensor(). To look at this block alone: "
                f"with spmd.mesh.as_rank({saved_by}): torch.load(...)"
            )
        want = spec.local_shape(spec.mesh.coordinate_of(here)) if here in spec.mesh else (0,)
        if tuple(block.shape) != want or block.dtype is not spec.dtype:
            raise ValueError(
                f"loading {spec}: rank {here} has a block {list(want)} of it, but {block.dtype} {list(block.shape)} "
                "was pickled, which contradicts the spec; the file is damaged, or was changed"
            )


def _have_one_block(spec: Spec, one: int, other: int) -> bool:
    """Whether two ranks have the same block, and of a Partial the same term."""
    if one == other or one not in spec.mesh or other not in spec.mesh:
        return one == other or (one not in spec.mesh and other not in spec.mesh)
    a, b = spec.mesh.coordinate_of(one), spec.mesh.coordinate_of(other)
    return spec.box(a) == spec.box(b) and all(a[axis] == b[axis] for axis, _ in spec.partial)


def _block_of(spec: Spec, rank: int) -> str:
    if rank not in spec.mesh:
        return "no block, for it is not in the mesh"
    at = spec.mesh.coordinate_of(rank)
    return f"the block {list(spec.box(at))} at {at}"
