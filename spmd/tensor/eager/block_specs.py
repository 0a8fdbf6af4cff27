"""The spec of the tensor that `from_local` makes of the ranks' blocks.

    block f32[2, 16], mesh dp=4, [Shard(0)]           ->  f32[8@dp, 16]
    block f32[1, 16] and shape (7, 16) on dp=4        ->  f32[7@dp, 16], if this rank's block has one row

Without a global shape every axis that shards a dim multiplies it: all blocks are taken as equal. Without global strides
the dims are in memory in the order that they have in the blocks, as far as the blocks of all ranks tell: a block of one
row, or of none, does not say whether it is stored by rows. So ranks with blocks of one layout find one spec. With
`run_check` the ranks compare the specs that they found.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch

from spmd.comm import transport
from spmd.comm.chunk import lengths
from spmd.mesh import DeviceMesh, current_rank, per_rank
from spmd.mesh.rank import rank_simulator
from spmd.sim.local_int import values_of
from spmd.tensor.placement import REPLICATE, Placement
from spmd.tensor.redistribute.replicas import digest, part_of, ranks_text, unlike
from spmd.tensor.spec import Spec, check_placements, contiguous, dense_strides, spec_of


def spec_from_block(local, mesh, placements, shape, stride) -> Spec:
    """The spec of the tensor of which this rank has the block `local`. ValueError if that tensor has another block."""
    if shape is None and stride is None and rank_simulator() is None:
        placed = None if placements is None else tuple(placements)
        return _spec_of_equal_blocks(mesh, placed, tuple(local.shape), local.stride(), local.dtype, current_rank())
    return _checked_spec(local, mesh, placements, shape, stride)


@functools.lru_cache(maxsize=4096)
def _spec_of_equal_blocks(mesh, placements, local_shape, local_stride, dtype, rank: int) -> Spec:
    """The spec of blocks like this one on this rank. It is checked once, and stays right for all such blocks."""
    local = torch.empty_strided(local_shape, local_stride, dtype=dtype, device="meta")
    return _checked_spec(local, mesh, placements, None, None)


def _checked_spec(local, mesh, placements, shape, stride) -> Spec:
    check_member("from_local", mesh)
    placements = or_replicated(placements, mesh)
    if shape is None:
        if any(values_of(n) is not None for n in local.shape):  # only simulated ranks know of each other
            raise ValueError(
                f"from_local: the ranks have blocks of several shapes, {list(local.shape)}, and each would take its "
                "own for that of all; pass the global shape with shape="
            )
        shape = list(local.shape)
        for axis, p in enumerate(check_placements(mesh, placements, local.ndim)):
            if p.is_shard():
                shape[p.dim] *= mesh.shape[axis]
    spec = spec_of(mesh, placements, shape, local.dtype, stride=stride)
    if stride is None and spec.ndim == local.ndim:
        spec = spec.with_tensor(spec.shape, stride=dense_strides(spec.shape, local.stride(), _thin_dims(spec)))
    want = spec.local_shape_here()
    if tuple(local.shape) != want:
        raise ValueError(
            f"from_local: this rank's block of {spec} has shape {list(want)}, but a tensor of {list(local.shape)} was "
            "given; pass the global shape with shape="
        )
    return spec


@functools.lru_cache(maxsize=4096)
def _thin_dims(spec: Spec) -> frozenset[int]:
    """The dims of which some rank has at most one index. There the strides of its block say nothing."""
    ranks = [tuple(spec.mesh.shape[a] for a in axes) for axes in spec.dims]
    dims = enumerate(zip(spec.shape, spec.units, ranks, strict=True))
    return frozenset(d for d, (n, unit, ns) in dims if min(lengths(n, unit, ns)) < 2)


def agreed_spec(run_check: bool, mesh: DeviceMesh, make: Callable[[], Spec], local: torch.Tensor) -> Spec:
    """The spec that `make` returns for the block `local`. With `run_check` the ranks compare specs and blocks.

    All ranks raise ValueError if `make` raises on one, if the specs differ, if only some blocks require a gradient, or
    if replicas of a block differ.
    """
    if not run_check:
        return make()
    try:
        spec, mine = make(), None
    except (ValueError, TypeError) as error:
        spec, mine = None, error
    stated = None if spec is None else _stated(spec, local)
    every = transport().gather_objects((spec and _described(spec), mine and str(mine), stated), mesh)
    if mine is not None:
        raise mine
    for rank, (text, error, _) in zip(mesh.ranks, every, strict=True):
        if error is not None:
            raise ValueError(f"on rank {rank}: {error}")
        if text != every[0][0]:
            raise ValueError(
                f"from_local: rank {mesh.ranks[0]} has a block of {every[0][0]}, but rank {rank} one of {text}; check "
                "the local tensors, or pass the global shape with shape="
            )
    _check_blocks(spec, [found for _, _, found in every])
    return spec


@per_rank
def _stated(spec: Spec, local: torch.Tensor) -> tuple:
    """What a rank says of its block: whether autograd follows it, the part of the tensor that it is, and its digest."""
    return local.requires_grad and torch.is_grad_enabled(), part_of(spec), digest(local).hex()


def _check_blocks(spec: Spec, stated: list[tuple]) -> None:
    ranks = spec.mesh.ranks
    with_gradient = [rank for rank, (wants, _, _) in zip(ranks, stated, strict=True) if wants]
    if with_gradient and len(with_gradient) < len(ranks):
        without = sorted(set(ranks) - set(with_gradient))
        raise ValueError(
            f"from_local: the block of {ranks_text(with_gradient)} requires a gradient, that of {ranks_text(without)} "
            "does not, and the others would wait for it in the backward; use requires_grad_() on all ranks"
        )
    groups = unlike(spec.mesh, [(part, found) for _, part, found in stated])
    if groups is not None:
        raise ValueError(
            f"from_local: {ranks_text(groups[0])} and {ranks_text(groups[1])} hold replicas of one block of {spec}, "
            "but with other values; broadcast the right one first (spmd.comm.mesh_broadcast), or use distribute_tensor"
        )


def _described(spec: Spec) -> str:
    """The spec, with its strides where they are not those of a contiguous tensor."""
    return str(spec) if spec.stride == contiguous(spec.shape) else f"{spec} with strides {spec.stride}"


def or_replicated(placements: Sequence[Placement] | None, mesh: DeviceMesh) -> Sequence[Placement]:
    """The placements, or those of a replicated tensor where there are none."""
    return [REPLICATE] * mesh.ndim if placements is None else placements


@per_rank
def check_member(function: str, mesh: DeviceMesh) -> None:
    """RuntimeError on a rank that is not in the mesh."""
    if mesh.get_coordinate() is None:
        raise RuntimeError(
            f"{function}: rank {mesh.get_rank()} is not in {mesh!r}; call it on the ranks of the mesh only"
        )
