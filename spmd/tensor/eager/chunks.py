"""What torch.distributed.checkpoint asks of a DTensor: which chunk of the tensor this rank has, and its memory.

    dcp.save({"x": x}, checkpoint_id=path)     # each rank writes its block; of replicas one is written
    dcp.load({"x": y}, checkpoint_id=path)     # y may have another layout and another mesh; each rank reads its block

torch takes any tensor for a shard that has the methods `__create_write_items__`, `__create_chunk_list__` and
`__get_tensor_shard__`. The chunk of a rank is its box (`Spec.box`), whatever axes shard the tensor, in any order and
any units; of packed dims a rank has a chunk for each interval. The files are those that torch's own DTensor writes and
reads.

An empty block is no chunk: torch names chunks by where they start, and an empty one may start where another does.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.distributed as dist

from spmd import _torch
from spmd.comm import wait
from spmd.mesh.rank import rank_simulator
from spmd.tensor.eager.view_copies import block, note_write
from spmd.tensor.redistribute.boxes import narrowed, relative_to, shape_of, simple, volume
from spmd.tensor.spec import Spec


def write_items(name: str, x) -> list[Any]:
    """What this rank has of x to be written: an item for each chunk. All ranks of the mesh must ask."""
    from torch.distributed.checkpoint import planner
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties

    _check_all_blocks_are_saved(name, x._spec)
    block(x)  # A view that had to be copied is brought up to date by all ranks; only some are asked for their memory.
    return [
        planner.WriteItem(
            index=MetadataIndex(name, chunk.offsets),
            type=planner.WriteItemType.SHARD,
            tensor_data=planner.TensorWriteData(
                chunk, TensorProperties(x.dtype, requires_grad=x.requires_grad), torch.Size(x._spec.shape)
            ),
        )
        for chunk in (ChunkStorageMetadata(*at) for at in _chunks(x._spec))
    ]


def chunk_list(x) -> list[Any]:
    """The chunks of x that this rank reads from a checkpoint into its block."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    spec = x._spec
    if x._copy is not None:
        raise TypeError(
            f"checkpoint: {spec} is a view of a tensor that is sharded in the way, and shows a copy of it; load into "
            "the tensor that it is a view of"
        )
    found = [ChunkStorageMetadata(*at) for at in _chunks(spec)]
    note_write(x)  # other views show what is read into the block
    return found


def memory_of_chunk(x, index) -> torch.Tensor:
    """This rank's block, to be written or to be read into. index: torch's name of the chunk."""
    local, spec = wait(x._local_tensor).detach(), x._spec
    chunks = _chunks(spec)
    found = [i for i, (start, _) in enumerate(chunks) if index.offset in (None, start)]
    if not found or (index.offset is None and len(chunks) > 1):
        raise ValueError(f"checkpoint: this rank has no chunk of {spec} at {index.offset}")
    if len(chunks) == 1:
        return local if local.numel() else local.new_empty(chunks[0][1])
    box = spec.box(spec.mesh.get_coordinate())
    part = list(simple(box))[found[0]]
    return narrowed(local, relative_to(part, box), local.shape)


def _chunks(spec: Spec) -> list[tuple[torch.Size, torch.Size]]:
    """Where each chunk of this rank's block starts, and its sizes.

    There is none where the block is empty, or the rank is not in the mesh.
    A tensor without elements is one empty chunk on every rank, for a checkpoint has to know its shape.
    """
    if spec.partial:
        raise TypeError(
            f"checkpoint: {spec} is still to be reduced, and a checkpoint has values only; save or load "
            "x.redistribute(placements=...) with Shard or Replicate in the place of Partial"
        )
    if rank_simulator() is not None:
        raise RuntimeError(
            f"checkpoint: {spec} is on ranks that one process simulates, and torch.distributed.checkpoint has one rank "
            "a process; use torch.save and torch.load, or run real ranks"
        )
    coordinate = spec.mesh.get_coordinate()
    if coordinate is None:
        return []
    if not prod(spec.shape):
        return [(torch.Size([0] * spec.ndim), torch.Size(spec.shape))]
    every = [part for part in simple(spec.box(coordinate)) if volume(part)]
    return [(torch.Size([start for start, _ in part]), torch.Size(shape_of(part))) for part in every]


def _check_all_blocks_are_saved(name: str, spec: Spec) -> None:
    """RuntimeError where torch takes some ranks for all, and the file would not have the blocks of the others."""
    if not any(spec.dims) or rank_simulator() is not None:
        return
    if not dist.is_initialized():
        raise RuntimeError(
            f"checkpoint: {name} is {spec}, and torch.distributed is not initialised, so that only this rank's block "
            "would be saved; call torch.distributed.init_process_group first, or save its full_tensor()"
        )
    savers = _torch.ranks_that_save()
    missing = set() if savers is None else set(spec.mesh.ranks) - set(savers)
    if not missing:
        return
    box = {rank: spec.box(spec.mesh.coordinate_of(rank)) for rank in spec.mesh.ranks}
    saved = {box[rank] for rank in box.keys() - missing}
    lost = sorted(rank for rank in missing if box[rank] not in saved and volume(box[rank]))
    if lost:
        raise RuntimeError(
            f"checkpoint: {name} is {spec}, and the blocks of ranks {lost[:8]} would not be saved, because only ranks "
            f"{sorted(savers)[:8]} save (no_dist=True, or process_group=); let all ranks of the mesh save together, or "
            "save its full_tensor()"
        )
