"""Moving between any two specs leaves the global tensor alone."""

import itertools

import pytest
import torch

from spmd.mesh import DeviceMesh, init_device_mesh
from spmd.sim import run_ranks
from spmd.tensor.redistribute.plan import plan
from spmd.tensor.spec import Spec

MESHES = [(2,), (4,), (2, 2), (2, 3), (2, 2, 2)]
SHAPES = [(8, 12), (5, 7), (1, 3), (3, 0), (13, 2)]


def layouts(mesh: DeviceMesh, partial: bool):
    """Every way to lay a 2-D tensor on the mesh: for each axis a dim, replicated, or partial, in every order."""
    choices = [0, 1, "r", "p"] if partial else [0, 1, "r"]
    for fates in itertools.product(choices, repeat=mesh.ndim):
        kept = [(axis, "sum") for axis, fate in enumerate(fates) if fate == "p"]
        sharding = [[axis for axis, fate in enumerate(fates) if fate == dim] for dim in (0, 1)]
        for orders in itertools.product(*(itertools.permutations(axes) for axes in sharding)):
            yield orders, kept


def local_block(x: torch.Tensor, spec: Spec, coordinate) -> torch.Tensor:
    """What a rank holds of the global x; of a sum, the rank with coordinate 0 holds all but what the others hold."""
    for dim in range(x.ndim):
        x = x.narrow(dim, *spec.block(dim, coordinate))
    for axis, _ in spec.partial:
        n, i = spec.mesh.shape[axis], coordinate[axis]
        x = x * (2 - n) if i == 0 else x.clone()
        x = x if n > 1 else x
    return x.clone()


def specs(mesh, shape, partial):
    return [
        Spec.of(mesh, shape, torch.float64, dims=dims, partial=kept) for dims, kept in layouts(mesh, partial)
    ]


def move_all(rank, mesh_shape, shape, pairs_of):
    mesh = init_device_mesh("cpu", mesh_shape)
    x = torch.arange(1.0, 1.0 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    at, wrong, n = mesh.get_coordinate(), [], 0
    for src, dst in pairs_of(mesh, shape):
        got = plan(src, dst).run(local_block(x, src, at))
        want = x
        for dim in range(x.ndim):
            want = want.narrow(dim, *dst.block(dim, at))
        n += 1
        if got.shape != want.shape or not torch.equal(got, want):
            wrong.append(f"{src} -> {dst}: {plan(src, dst)}")
    return n, wrong


def to_whole_or_shard(mesh, shape):
    return itertools.product(specs(mesh, shape, True), specs(mesh, shape, False))


def sampled(mesh, shape):
    pairs = list(to_whole_or_shard(mesh, shape))
    return pairs[:: max(1, len(pairs) // 600)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_redistribute_keeps_the_tensor(mesh_shape, shape):
    """Between any two layouts, in any order of axes, even, uneven and empty."""
    ranks = torch.Size(mesh_shape).numel()
    pairs = sampled if len(mesh_shape) == 3 else to_whole_or_shard
    for n, wrong in run_ranks(lambda rank: move_all(rank, mesh_shape, shape, pairs), ranks):
        assert n > 10
        assert not wrong, f"{len(wrong)} of {n}: {wrong[0]}"
