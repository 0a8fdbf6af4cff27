"""The truth is one device: runs a function on DTensors on simulated ranks, and compares it with plain tensors.

    agree(lambda x, w: x @ w, [x, w], [[Shard(0), R], [R, Shard(1)]])

runs it on a 2 x 2 mesh and compares on every rank: values, shapes, dtypes, and the gradients of a weighted sum.
Tensors are split before the ranks start, because simulated ranks share torch's random generator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmd import _torch
from spmd.mesh import DeviceMesh, init_device_mesh
from spmd.sim import LocalTensor, LocalTensorMode, run_ranks
from spmd.tensor.eager.dtensor import DTensor
from spmd.tensor.placement import Partial, Placement, Replicate, Shard
from spmd.tensor.spec import spec_of
from tests.tensor.oracle import close, split

R, S0, S1, S2 = Replicate(), Shard(0), Shard(1), Shard(2)
SUM, AVG, MAX, MIN, PRODUCT = (Partial(kind) for kind in ("sum", "avg", "max", "min", "product"))
NAMES = ("dp", "tp", "pp")

Placing = Sequence[Placement]


def mesh_of(shape: Sequence[int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(shape), mesh_dim_names=NAMES[: len(shape)])


def cut(x: torch.Tensor, placements: Placing, mesh_shape: Sequence[int]) -> dict[tuple, torch.Tensor]:
    """The block of x at every coordinate. The terms of a sum, of a maximum and so on are random."""
    return split(x.detach(), list(placements), tuple(mesh_shape))


def leaf(parts: dict[tuple, torch.Tensor], placements: Placing, like: torch.Tensor, mesh: DeviceMesh) -> DTensor:
    """This rank's DTensor of a tensor that was split. It is a leaf, and requires a gradient if `like` does."""
    spec = spec_of(mesh, placements, like.shape, like.dtype)
    return DTensor(parts[mesh.get_coordinate()].clone(), spec, requires_grad=like.requires_grad)


def along(placements: Placing, tensors: Sequence[torch.Tensor]) -> list[list[Placement]]:
    """The placements for each tensor that has such dims; other tensors are replicated."""
    return [[p if not p.is_shard() or p.dim < x.ndim else R for p in placements] for x in tensors]


def whole(x: Any) -> Any:
    return x.full_tensor() if isinstance(x, DTensor) else x


def weights(x: torch.Tensor) -> torch.Tensor:
    """Numbers for a weighted sum, all different."""
    return (torch.arange(1.0, x.numel() + 1, dtype=torch.float64).reshape(x.shape) / math.pi).sin().to(x.dtype)


def outcome(fn: Callable, tensors: Sequence[torch.Tensor], place_weights: Callable = lambda w: w) -> list:
    """The results of fn, then the gradients of a weighted sum of the differentiable ones."""
    out = fn(*tensors)
    results = list(out) if isinstance(out, (tuple, list)) else [out]
    smooth = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    if smooth:
        sum((r * place_weights(weights(r))).sum() for r in smooth).backward()
    grads = [t.grad for t in tensors if t.requires_grad]
    return [x.detach() if isinstance(x, torch.Tensor) else x for x in results + grads]


def same(got: Any, want: Any, tolerance: float = 1e-9) -> bool:
    if not isinstance(want, torch.Tensor):
        return type(got) is type(want) and got == want
    return got.dtype == want.dtype and got.shape == want.shape and close(got, want, tolerance)


def on_ranks(fn: Callable[[DeviceMesh], Any], mesh_shape: Sequence[int] = (2, 2)) -> list:
    """`fn(mesh)` on every rank of a mesh of this shape."""
    return run_ranks(lambda rank: fn(mesh_of(mesh_shape)), math.prod(mesh_shape))


def agree(fn: Callable, tensors: Sequence[torch.Tensor], *placings: Sequence[Placing], mesh_shape=(2, 2)) -> None:
    """Check that fn on DTensors gives the results of fn on tensors, for each choice of placements, on every rank."""
    plain = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
    want = outcome(fn, plain)
    pieces = [[cut(t, p, mesh_shape) for t, p in zip(tensors, placing, strict=True)] for placing in placings]

    def rank(mesh: DeviceMesh) -> list[list]:
        def replicated(w):
            return DTensor(w, spec_of(mesh, [R] * mesh.ndim, w.shape, w.dtype))

        found = []
        for placing, parts in zip(placings, pieces, strict=True):
            given = [leaf(x, p, t, mesh) for x, p, t in zip(parts, placing, tensors, strict=True)]
            found.append([whole(r) for r in outcome(fn, given, replicated)])
        return found

    for number, found in enumerate(on_ranks(rank, mesh_shape)):
        for placing, got in zip(placings, found, strict=True):
            assert len(got) == len(want), f"{placing} on rank {number}: {len(got)} results, not {len(want)}"
            for i, (a, b) in enumerate(zip(got, want, strict=True)):
                assert same(a, b), f"{placing} on rank {number}: result {i} is\n{a}, not\n{b}"


# ---- in one thread ----------------------------------------------------------------------------
# Some state of torch is one for the process: levels of forward-mode AD, modules whose parameters are swapped for a
# while. Threads of several ranks would overwrite it. So here one thread runs all ranks, step by step. That is faster.


def placed(x: torch.Tensor, placements: Placing, mesh: DeviceMesh) -> DTensor:
    """In a LocalTensorMode: the DTensor of a tensor that is the same on all ranks. A leaf, like x."""
    one = x.detach().reconcile() if isinstance(x, LocalTensor) else x
    with _torch.no_modes():
        parts = cut(one, placements, mesh.shape)
        local = {mesh.rank_at(at): part.clone() for at, part in parts.items()}
    return DTensor(LocalTensor(local), spec_of(mesh, placements, one.shape, one.dtype), requires_grad=x.requires_grad)


def every_rank(x: Any) -> list:
    """In a LocalTensorMode: the value on each rank; of a DTensor the global value."""
    x = whole(x.detach()) if isinstance(x, torch.Tensor) else x
    return list(x.local.values()) if isinstance(x, LocalTensor) else [x]


def agree_at_once(fn: Callable, tensors: Sequence[torch.Tensor], *placings: Sequence[Placing], mesh_shape=(2, 2)):
    """As `agree`, with all ranks run by this thread."""
    want = outcome(fn, [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors])
    mesh = mesh_of(mesh_shape)
    for placing in placings:
        with LocalTensorMode(math.prod(mesh_shape)):
            given = [placed(t, p, mesh) for t, p in zip(tensors, placing, strict=True)]
            got = outcome(fn, given, lambda w: placed(w, [R] * mesh.ndim, mesh))
            ranks = [every_rank(x) for x in got]
        assert len(got) == len(want), f"{placing}: {len(got)} results, not {len(want)}"
        for i, (a, b) in enumerate(zip(ranks, want, strict=True)):
            for x in a:
                assert same(x, b), f"{placing}: result {i} is\n{x}, not\n{b}"
