"""Dims of several blocks, each sharded by itself, move like any other: values, bytes and gradients of every pair."""

import itertools
from collections import Counter

import pytest
import torch

from spmd import DTensor, Shard
from spmd.mesh import MeshTopoInfo, init_device_mesh
from spmd.tensor.placement import Partial, Replicate
from spmd.tensor.redistribute.all_ranks import of_rank, overlaps, sides, volumes
from spmd.tensor.redistribute.boxes import overlap, volume
from spmd.tensor.redistribute.plan import plan
from spmd.tensor.spec import parse_spec, spec_of
from tests.tensor.brute import least_ps
from tests.tensor.planned import carried_out, cut_up, wrong_blocks
from tests.tensor.single import agree_at_once

R, S0, S1 = Replicate(), Shard(0), Shard(1)
B2, B3 = Shard(0, blocks=2), Shard(0, blocks=3)
U3 = Shard(0, unit=2, blocks=3)

ONE_AXIS = [[R], [S0], [S1], [Shard(0, unit=3)], [B2], [B3], [U3], [Shard(1, blocks=2)], [Partial()]]
TWO_AXES = [[R, R], [S0, R], [S0, S0], [S0, S1], [B3, R], [R, B3], [B3, B3], [B2, B2], [S1, B3], [B2, S1],
            [Shard(1, blocks=2), B3], [Partial(), B3], [B3, Partial()], [U3, U3]]  # fmt: skip


def laid_out(mesh, shape):
    return [spec_of(mesh, p, shape, torch.float64) for p in (ONE_AXIS if mesh.ndim == 1 else TWO_AXES)]


@pytest.mark.parametrize("shape", [(24, 4), (18, 4), (12, 2), (6, 2), (0, 4)], ids=str)
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2), (2, 3)], ids=str)
def test_every_pair_keeps_the_tensor_and_counts_its_bytes(mesh_shape, shape):
    """Between any two layouts: the values, the bytes at the transport, which are those of the plan, and the bound."""
    mesh = init_device_mesh("cpu", mesh_shape)
    x = torch.arange(1.0, 1 + shape[0] * shape[1], dtype=torch.float64).reshape(shape)
    for src, dst in itertools.product(laid_out(mesh, shape), repeat=2):
        p, received = plan(src, dst), Counter()
        assert not wrong_blocks(carried_out(p, cut_up(x, src), received), x, dst), p
        assert {at: received[at] for at in mesh.coordinates()} == {at: p.received(at) for at in mesh.coordinates()}
        assert p.lower_bound_bytes <= p.bytes_per_rank, p


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2), (2, 3)], ids=str)
def test_bytes_of_large_tensors_are_at_the_bound(mesh_shape):
    """Without a reduction nothing is sent that is not lacking; blocks that only are cut finer are not sent at all."""
    mesh = init_device_mesh("cpu", mesh_shape)
    pairs = itertools.product([s for s in laid_out(mesh, (3 * 4096, 4096)) if not s.partial], repeat=2)
    plans = list(itertools.starmap(plan, pairs))
    assert [str(p) for p in plans if p.bytes_per_rank != p.lower_bound_bytes] == []


@pytest.mark.parametrize("mesh_shape", [(2, 2), (2, 3)], ids=str)
def test_arrays_over_ranks_are_the_boxes_of_each(mesh_shape):
    mesh = init_device_mesh("cpu", mesh_shape)
    for src, dst in itertools.product(laid_out(mesh, (24, 4)) + laid_out(mesh, (30, 2))[:12], repeat=2):
        if src.shape == dst.shape:
            for at in mesh.coordinates():
                have, want = src.box(at), dst.box(at)
                assert of_rank(volumes(sides(src)), at) == volume(have)
                assert of_rank(overlaps(sides(src), sides(dst)), at) == volume(overlap(have, want))


@pytest.mark.parametrize("machine", ["textbook", "hopper"])
def test_plans_are_as_cheap_as_brute_force(machine):
    """On two hosts; with the second machine copies have a price, which the planner and the moves find alike."""
    mesh = init_device_mesh("cpu", (2, 2))
    mesh = mesh.with_topology(MeshTopoInfo.from_mesh(mesh, ranks_per_host=2, machine=machine))
    for shape in [(3 * 1024, 1024), (18, 4)]:
        targets = [s for s in laid_out(mesh, shape) if not s.partial]
        for src, dst in list(itertools.product(laid_out(mesh, shape), targets))[::2]:
            p = plan(src, dst)
            assert abs(sum(int(step.cost * 1e6) for step in p.steps) - least_ps(src, dst)) <= len(p.steps), p


def test_gradients_go_the_way_back():
    """`redistribute` is the identity, and so is its gradient; even, uneven and empty blocks."""
    for rows in (12, 6):
        x = torch.randn(rows, 4, dtype=torch.float64, requires_grad=True)
        for dst in ([B3], [R], [S0], [S1]):
            agree_at_once(lambda x, dst=dst: x.redistribute(placements=dst) * 1 if isinstance(x, DTensor) else x * 1,
                          [x], [[B3]], [[S0]], [[R]], [[B2]], mesh_shape=(3,))  # fmt: skip


BESIDE = [
    ("f64[8, 8@z, 30@w/6] +sum@x", "f64[8@z,x, 8, 30@w/6]"), ("f64[8, 8@z, 3x8@w] +sum@x", "f64[8@z,x, 8, 3x8@w]"),
    ("f64[8, 8@z, 24] +sum@x", "f64[8@z,x, 8, 3x8@w]"), ("f64[8, 8@z, 3x8@w] +sum@x", "f64[8@z,x, 8, 24@w]"),
    ("f64[8, 8@z, 24@w] +sum@x", "f64[8@z,x, 8, 24@w/4]"),
]  # fmt: skip


@pytest.mark.parametrize("src, dst", BESIDE, ids=map(" to ".join, BESIDE))
def test_strided_blocks_leave_the_other_dims_as_they_are(src, dst):
    """A sum that is scattered into strided blocks of one dim, beside a dim that is packed or has a unit."""
    mesh = init_device_mesh("cpu", (2, 4, 2), mesh_dim_names=("x", "z", "w"))
    src, dst = parse_spec(src, mesh), parse_spec(dst, mesh)
    x = torch.arange(1.0, 1 + src.nbytes // 8, dtype=torch.float64).reshape(src.shape)
    p, received = plan(src, dst), Counter()
    assert not wrong_blocks(carried_out(p, cut_up(x, src), received), x, dst), p
    assert {at: received[at] for at in mesh.coordinates()} == {at: p.received(at) for at in mesh.coordinates()}
