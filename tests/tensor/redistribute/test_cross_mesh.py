"""From one mesh to another: the same global tensor, on the ranks of the second mesh and on no others."""

import itertools

import pytest
import torch
from torch.autograd import forward_ad

from spmd import DTensor, LocalTensorMode, Shard, compile, distribute_tensor
from spmd.mesh import DeviceMesh
from spmd.sim import ThreadWorld, run_ranks
from spmd.tensor.spec import spec_of
from tests.tensor.single import AVG, MAX, S0, S1, SUM, R, cut

SQUARE = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
OTHERS = {
    "a line": DeviceMesh("cpu", [3, 1, 2, 0]),
    "turned": SQUARE["tp", "dp"],
    "fewer": DeviceMesh("cpu", [1, 2]),
    "others": DeviceMesh("cpu", [4, 5, 6]),
    "some others": DeviceMesh("cpu", [[2, 3], [4, 5], [0, 6]]),
}


def sent(x, parts, src, mesh, dst, rank):
    """On a rank of the second mesh the global tensor after the move, on others the size of their block."""
    at = SQUARE.get_coordinate()
    if at is None and rank not in mesh:
        return 0
    if at is None:
        given = DTensor.elsewhere(SQUARE, src, x.shape, x.dtype)
    else:
        given = DTensor(parts[at].clone(), spec_of(SQUARE, src, x.shape, x.dtype))
    moved = given.redistribute(mesh, dst)
    assert moved.device_mesh == mesh
    return moved.full_tensor() if rank in mesh else moved.to_local().numel()


@pytest.mark.parametrize("where", OTHERS)
@pytest.mark.parametrize("shape", [(8, 6), (5, 3), (1, 2)], ids=str)
def test_the_tensor_arrives(shape, where):
    """Shards, replicated tensors and sums; even, uneven and empty. A rank outside of the second mesh has nothing."""
    mesh, x = OTHERS[where], torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    sources = [(S0, S1), (S0, S0), (R, S1), (R, R), (SUM, S0), (AVG, SUM), (MAX, R)]
    targets = [(S0, R), (S1, S0), (R, R), (SUM, S1)]
    for src, dst in list(itertools.product(sources, targets))[:: 1 if where == "some others" else 3]:
        parts = cut(x, src, (2, 2))
        found = run_ranks(lambda rank: sent(x, parts, src, mesh, dst[: mesh.ndim], rank), 7)  # noqa: B023
        for rank, got in enumerate(found):
            want = x if rank in mesh else 0
            assert got == want if isinstance(got, int) else torch.allclose(got, want, rtol=1e-12), (src, dst, rank)


def test_packed_tensors_arrive():
    """Of each block of a dim the part that a rank has, from and to meshes where that is another."""
    x, mesh = torch.arange(72.0, dtype=torch.float64).reshape(12, 6), OTHERS["some others"]
    packed, pairs = Shard(0, blocks=3), Shard(0, blocks=2)
    sources, targets = [(packed, packed), (S1, packed), (SUM, packed)], [(packed, R), (S1, pairs), (S0, S1)]
    for src, dst in zip([*sources, (S0, R)], [*targets, (pairs, S1)], strict=True):
        parts = cut(x, src, (2, 2))
        found = run_ranks(lambda rank: sent(x, parts, src, mesh, dst, rank), 7)  # noqa: B023
        for rank, got in enumerate(found):
            want = x if rank in mesh else 0
            assert got == want if isinstance(got, int) else torch.allclose(got, want, rtol=1e-12), (src, dst, rank)


def test_it_is_one_exchange_of_what_ranks_lack():
    """A rank that has its block already receives nothing."""
    world, x = ThreadWorld(4), torch.arange(16.0).reshape(8, 2)

    def rank(rank):
        given = distribute_tensor(x, SQUARE, [S0, S0], src_data_rank=None)
        return given.redistribute(DeviceMesh("cpu", [0, 1, 2, 3]), [S0]).to_local()

    blocks = world.run(rank)
    assert torch.equal(torch.cat(blocks), x)
    assert [[call.kind for call in calls] for calls in world.calls] == [["all_to_all_single"]] * 4


def test_gradients_come_back():
    """Gradients, if both meshes have the same ranks."""
    x = torch.arange(10.0, dtype=torch.float64).reshape(5, 2)

    def rank(rank):
        given = distribute_tensor(x, SQUARE, [S0, S1], src_data_rank=None).requires_grad_()
        moved = given.redistribute(OTHERS["a line"], [S0])
        (moved**3).sum().full_tensor().backward()
        return given.grad.placements, given.grad.full_tensor()

    for placements, grad in run_ranks(rank, 4):
        assert placements == (S0, S1) and torch.allclose(grad, 3 * x**2)


def test_it_may_be_sent_in_another_dtype():
    """Forward and backward each send bytes of their dtype; the gradient has the dtype of the tensor."""
    world, x = ThreadWorld(4), torch.arange(16.0, dtype=torch.float64).reshape(8, 2)

    def rank(rank):
        given = distribute_tensor(x, SQUARE, [S0, R], src_data_rank=None).requires_grad_()
        moved = given.redistribute(
            OTHERS["a line"], [S0], forward_dtype=torch.float32, backward_dtype=torch.bfloat16
        )
        moved.backward(DTensor.from_local(torch.ones(2, 2), OTHERS["a line"], [S0]))
        grad = given.grad
        return moved.dtype, moved.detach().full_tensor().tolist(), grad.dtype, grad.full_tensor().unique().tolist()

    assert world.run(rank) == [(torch.float32, x.tolist(), torch.float64, [1.0])] * 4
    sent = [[call.nbytes for call in calls if call.kind == "all_to_all_single"] for calls in world.calls]
    assert [sum(each) for each in zip(*sent, strict=True)] == [16 * 4, 2 * 16 * 2]


@pytest.mark.parametrize("where", ["a line", "turned", "fewer"])
def test_arguments_of_a_compiled_step_may_come_from_another_mesh(where):
    """A mesh of the step's ranks. The arguments move to the step's mesh, with the placements asked for there."""
    x, w = torch.arange(12.0).reshape(4, 3), torch.arange(6.0).reshape(3, 2)

    def rank(rank):
        mesh = OTHERS[where]
        lie = [S0] * mesh.ndim
        if rank in mesh:
            given = distribute_tensor(x, mesh, lie, src_data_rank=None)
        else:
            given = DTensor.elsewhere(mesh, lie, x.shape, x.dtype)
        step = compile(lambda x, w: x @ w, SQUARE, inputs={"x": [S0, R], "w": [R, S1]})
        return [step(given, w).full_tensor() for _ in range(2)]

    for found in run_ranks(rank, 4):
        assert all(torch.equal(each, x @ w) for each in found)


def test_a_compiled_step_says_that_its_tensors_are_global():
    def rank(rank):
        line = OTHERS["a line"]
        with pytest.raises(AttributeError, match=r"in a compiled step are plain global tensors.*no redistribute"):
            compile(lambda x: x.redistribute(line, [S0]) * 2, SQUARE)(torch.ones(4))
        with pytest.raises(ValueError, match="use one mesh for both"):
            compile(lambda x: x * 2, SQUARE)(DTensor.elsewhere(OTHERS["others"], [S0], (4,), torch.float32))

    run_ranks(rank, 4)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
def test_tangents_cross():
    x = torch.arange(10.0, dtype=torch.float64).reshape(5, 2)
    with LocalTensorMode(4), forward_ad.dual_level():
        given, tangent = (distribute_tensor(y, SQUARE, [S0, S1], src_data_rank=None) for y in (x, x + 1))
        moved = forward_ad.make_dual(given, tangent).redistribute(DeviceMesh("cpu", [3, 2, 1, 0]), [S0])
        assert torch.equal(forward_ad.unpack_dual(moved).tangent.full_tensor().reconcile(), x + 1)


def test_it_is_the_same_with_all_ranks_in_one_thread():
    x = torch.arange(12.0).reshape(4, 3)
    with LocalTensorMode(4):
        given = distribute_tensor(x, SQUARE, [S0, S1], src_data_rank=None)
        moved = given.redistribute(DeviceMesh("cpu", [3, 2, 1, 0]), [S0])
        assert torch.equal(moved.full_tensor().reconcile(), x)


def test_what_cannot_be_sent_is_said():
    def rank(rank):
        owed = DTensor.from_local(torch.ones(4), SQUARE, [SUM, R])
        with pytest.raises(TypeError, match="still to be reduced"):
            owed.redistribute(OTHERS["a line"], [S0], forward_dtype=torch.int64)
        with pytest.raises(ValueError, match="with a block; use from_local"):
            DTensor.elsewhere(SQUARE, [S0, R], (4,), torch.float32)

    run_ranks(rank, 4)
