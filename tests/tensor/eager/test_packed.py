"""Packed tensors are made, read, copied and compared like any other DTensor."""

import copy
import io
import pickle

import pytest
import torch

import spmd
from spmd import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from spmd.debug import check
from spmd.sim import run_ranks
from spmd.tensor.spec import parse_spec, spec_of

R, B3 = Replicate(), Shard(0, blocks=3)
LAYOUTS = [((4,), [B3]), ((2, 2), [B3, B3]), ((2, 2), [R, Shard(0, unit=2, blocks=3)]), ((2, 3), [Shard(1), B3])]


def mesh_of(shape):
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[-len(shape) :])


TEXTS = ["f32[3x256@tp, 64]", "f32[3x15@tp/5, 4@dp]", "i64[2x5@dp,tp] +sum@pp", "f32[2, 6x4@tp]"]


@pytest.mark.parametrize("text", TEXTS)
def test_a_spec_reads_as_it_prints(text):
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "tp", "pp"))
    spec = parse_spec(text, mesh)
    assert str(spec) == text and pickle.loads(pickle.dumps(spec)) is spec
    assert spec_of(mesh, spec.placements, spec.shape, spec.dtype) is spec


@pytest.mark.parametrize("text, canonical", [
    ("f32[3x256]", "f32[768]"), ("f32[3x8@tp/4]", "f32[3x8@tp]"), ("f32[3x1@tp]", "f32[3@tp/3]"),
    ("f32[3x4@tp/4]", "f32[12@tp/12]"), ("f32[1x8@tp]", "f32[8@tp]"), ("f32[3x0@tp]", "f32[0@tp]"),
])  # fmt: skip
def test_equal_layouts_are_one_spec(text, canonical):
    """No axis, one block, units that make no difference, and one rank that has all of each block."""
    mesh = mesh_of((2,))
    assert parse_spec(text, mesh) is parse_spec(canonical, mesh)


WRONG = [
    (lambda mesh: Shard(0, blocks=0), "blocks is 0; it must be a positive int"),
    (lambda mesh: spec_of(mesh, [R, B3], (8,)), "a dim of 8 does not divide into 3 blocks"),
    (lambda mesh: spec_of(mesh, [R, Shard(0, unit=3, blocks=2)], (8,)), "a block of 4 does not divide into units of 3"),
    (lambda mesh: spec_of(mesh, [Shard(0), B3], (12,)), "two axes shard dim 0 in 1 and in 3 blocks"),
]


@pytest.mark.parametrize("make, message", WRONG, ids=[message for _, message in WRONG])
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make(mesh_of((2, 2)))


def made(shape, placements, x):
    """Each way to make, copy and read a packed tensor."""
    mesh = mesh_of(shape)
    placed = distribute_tensor(x, mesh, placements)
    local = placed.to_local()
    again = DTensor.from_local(local, mesh, placements, shape=x.shape)
    buffer = io.BytesIO()
    torch.save(placed, buffer)
    loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
    spmd.manual_seed(3)
    drawn = spmd.randn(*x.shape, device_mesh=mesh, placements=placements)
    kept = torch.nn.functional.dropout(placed, 0.5)
    every = [placed, again, loaded, copy.deepcopy(placed), placed.redistribute(placements=[R] * mesh.ndim)]
    zeros = spmd.zeros(*x.shape, device_mesh=mesh, placements=placements)
    assert local.shape == placed._spec.local_shape_here() == zeros.to_local().shape
    return [t.full_tensor() for t in every], drawn.full_tensor(), kept.full_tensor(), zeros.full_tensor()


@pytest.mark.parametrize("rows", [24, 18, 6])
def test_tensors_are_made_copied_and_read(rows):
    """On ranks that are threads. Random numbers are those of one rank."""
    x = torch.randn(rows, 6, generator=torch.Generator().manual_seed(0))
    (_, drawn, kept, _), *_ = run_ranks(lambda rank: made((1,), [R], x), 1)
    for shape, placements in LAYOUTS:
        ranks = run_ranks(lambda rank, s=shape, p=placements: made(s, p, x), torch.Size(shape).numel())
        for found, numbers, dropped, zeros in ranks:
            assert all(torch.equal(t, x) for t in found) and not zeros.any()
            assert torch.equal(numbers, drawn) and torch.equal(dropped, kept)


def test_large_random_blocks_are_those_of_one_rank():
    """Of many tiles, which the intervals cut through."""
    def drawn(shape, placements):
        def rank(_):
            spmd.manual_seed(3)
            return spmd.rand(3 * 130, 200, device_mesh=mesh_of(shape), placements=placements).full_tensor()

        return run_ranks(rank, torch.Size(shape).numel())

    (want,) = drawn((1,), [R])
    for found in drawn((4,), [B3]) + drawn((2, 2), [Shard(1), B3]):
        assert torch.equal(found, want)


def test_from_local_takes_blocks_as_equal():
    def rank(r):
        x = DTensor.from_local(torch.full((6, 2), float(r)), mesh_of((2,)), [B3])
        return str(x._spec), x.full_tensor()[:, 0].tolist()

    want = [0.0, 0.0, 1.0, 1.0] * 3
    assert run_ranks(rank, 2) == [("f32[3x4@tp, 2]", want)] * 2


def test_a_module_is_placed_by_patterns():
    def rank(r):
        layer = torch.nn.Linear(4, 12)
        placed = spmd.distribute_module(layer, mesh_of((2,)), params={"weight": {"tp": B3}, "bias": [B3]})
        return [str(p._spec) for p in placed.parameters()]

    assert run_ranks(rank, 2) == [["f32[3x4@tp, 4]", "f32[3x4@tp]"]] * 2


def test_a_function_is_checked_with_packed_operands():
    """`spmd.debug.check` puts the global value together from all intervals."""
    def fn(w, x):
        q, k, v = (x @ w.t()).chunk(3, -1)
        return (q * k).softmax(0) + v

    x = torch.randn(5, 4, dtype=torch.float64)
    w = torch.randn(18, 4, dtype=torch.float64)
    found = check(fn, w, x, mesh=mesh_of((4,)), placements={"w": [B3]}, backward=True)
    assert found.ok, found
