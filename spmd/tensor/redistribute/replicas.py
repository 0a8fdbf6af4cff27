"""Whether what several ranks hold is equal where it must be: replicas of blocks, and plain tensors of all ranks.

    f32[8@dp, 16] on dp=2, tp=2      ranks 0 and 1 hold one block, ranks 2 and 3 another

Each rank makes a digest of each of its tensors, and says which part of the tensor it holds. The ranks exchange these in
one small collective. Ranks that hold the same part must have the same digest. No values are sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch

from spmd.comm import transport, wire
from spmd.comm.check import describe
from spmd.mesh import DeviceMesh, per_rank
from spmd.tensor.spec import Spec

Part = tuple[int, ...]
"""Which part of a tensor a rank holds: its coordinate, with -1 for each axis that replicates."""


ADVICE = "seed the ranks alike, read the same data, or broadcast it (spmd.comm.mesh_broadcast)"


def check_replicas(
    tensors: dict[str, torch.Tensor], mesh: DeviceMesh, what: str, advice: Callable[[str], str] = lambda name: ADVICE
) -> None:
    """RuntimeError on all ranks of the mesh if plain tensors, or replicas of blocks of DTensors, differ between ranks.

    It names the first such tensor in `what`, and the ranks. All ranks of the mesh must call it. advice: what to do
    about a tensor of this name.
    """
    specs = [getattr(x, "_spec", None) for x in tensors.values()]
    blocks = [getattr(x, "_current_block", x).detach() for x in tensors.values()]
    every = transport().gather_objects(_stated(list(tensors), blocks, specs, mesh), mesh)
    for rank, of_rank in zip(mesh.ranks, every, strict=True):
        _check_names(mesh.ranks[0], every[0], rank, of_rank, what)
    for i, (name, *_) in enumerate(every[0]):
        groups = unlike(mesh, [(part, digest) for _, part, digest, _ in (of_rank[i] for of_rank in every)])
        if groups is not None:
            ranks, others = groups
            shown = dict(zip(mesh.ranks, (of_rank[i][3] for of_rank in every), strict=True))
            raise RuntimeError(
                f"{what}: {name} differs between ranks: {ranks_text(ranks)} {_has(ranks)} {shown[ranks[0]]}, but "
                f"{ranks_text(others)} {shown[others[0]]}. It must be equal on all of them: {advice(name)}."
            )


def unlike(mesh: DeviceMesh, stated: Sequence[tuple[Part, str]]) -> tuple[list[int], list[int]] | None:
    """The ranks that hold the first part that differs as its first rank does, and the others; None if none differs."""
    holders: dict[Part, dict[str, list[int]]] = {}
    for rank, (part, digest) in zip(mesh.ranks, stated, strict=True):
        holders.setdefault(tuple(part), {}).setdefault(digest, []).append(rank)
    for by_digest in holders.values():
        if len(by_digest) > 1:
            first, *rest = by_digest.values()
            return first, sorted(rank for ranks in rest for rank in ranks)
    return None


@per_rank
def _stated(names: list[str], blocks: list[torch.Tensor], specs: list[Spec | None], mesh: DeviceMesh) -> list[tuple]:
    """Of each tensor of this rank its name, the part, the digest, and how it prints."""
    return [
        (name, part_of(spec), digest(x).hex(), _shown(x))
        for name, x, spec in zip(names, blocks, specs, strict=True)
    ]  # fmt: skip


def part_of(spec: Spec | None) -> Part:
    """The part of the tensor that this rank holds; a plain tensor has one part."""
    at = () if spec is None else spec.mesh.get_coordinate()
    return tuple(i if not spec.on(axis).is_replicate() else -1 for axis, i in enumerate(at))


def digest(*tensors: torch.Tensor) -> bytes:
    """32 bytes that are equal for tensors of equal shape, dtype and bits."""
    found = hashlib.sha256()
    for x in tensors:
        found.update(f"{tuple(x.shape)} {x.dtype} ".encode())
        if not x.is_meta:
            found.update(wire.as_bytes(x.detach().resolve_neg().cpu()).numpy())
    return found.digest()


def _shown(x: torch.Tensor) -> str:
    return f"{x.item()!r}" if x.numel() == 1 and not x.is_meta else f"{describe(x)} with digest {digest(x).hex()[:8]}"


def _check_names(first: int, names: list[tuple], rank: int, others: list[tuple], what: str) -> None:
    for i in range(max(len(names), len(others))):
        one, other = (of[i][0] if i < len(of) else "no more tensor" for of in (names, others))
        if one != other:
            raise RuntimeError(f"{what}: rank {first} has {one}, but rank {rank} has {other}; give all ranks the same")


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 3` or `ranks 0, 1, 2`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _has(ranks: Sequence[int]) -> str:
    return "have" if len(ranks) > 1 else "has"
