"""local_map: functions of blocks give the results and the gradients of one device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import spmd
from spmd import DTensor, LocalTensorMode, distribute_tensor, local_map
from spmd.comm import all_gather_tensor, all_reduce
from spmd.mesh import DeviceMesh
from spmd.sim.threads import ThreadWorld
from tests.tensor.single import AVG, MAX, S0, S1, SUM, R, agree, mesh_of, on_ranks
from tests.ways import run

F64 = torch.float64


def summed(mesh, x, w):
    return all_reduce(x @ w, "sum", (mesh, "tp")).sin()


def gathered(mesh, x):
    whole = all_gather_tensor(x, 0, (mesh, "dp"))
    return whole * whole.sum()


def own_rows(mesh, x):
    n = x.shape[0] // 2
    return x.narrow(0, n * mesh.get_local_rank("dp"), n).exp()


def from_first(mesh, x):
    """Only the ranks at coordinate 0 compute; all ranks have the result."""
    return all_reduce(x.exp() * (mesh.get_local_rank("dp") == 0), "sum", (mesh, "dp"))


class MegatronReduce(torch.autograd.Function):
    """A sum over tp, whose gradient is taken as replicated."""

    @staticmethod
    def forward(ctx, x, mesh):
        return all_reduce(x.detach(), "sum", (mesh, "tp")).clone()

    @staticmethod
    def backward(ctx, g):
        return g, None


# the function on one device, the function on blocks, shapes, placements of the arguments and of the result
CASES = {
    "by itself": (torch.sin, torch.sin, [(4, 6)], [[S0, S1]], [S0, S1]),
    "columns": (torch.matmul, torch.matmul, [(4, 6), (6, 4)], [[S0, R], [R, S1]], [S0, S1]),
    "rows": (torch.matmul, torch.matmul, [(4, 6), (6, 4)], [[S0, S1], [R, S0]], [S0, SUM]),
    "replicated": (torch.matmul, torch.matmul, [(4, 6), (6, 4)], [[R, R], [R, R]], [R, R]),
    "a sum": (lambda x: 3 * x, lambda x: 3 * x, [(4, 6)], [[SUM, S0]], [SUM, S0]),
    "an average": (lambda x: x + 1, lambda x: x + 1, [(4, 6)], [[AVG, R]], [AVG, R]),
    "uneven": (lambda x: (2 * x).sum(1), lambda x: (2 * x).sum(1), [(5, 3)], [[S0, S0]], [S0, S0]),
    "grown": (lambda x: x.repeat(1, 2), lambda x: x.repeat(1, 2), [(3, 4)], [[S0, R]], [S0, R]),
    "two results": (
        lambda x, w: ((x * w).sum(1), w.exp()), lambda x, w: ((x * w).sum(1), w.exp()),
        [(4, 6), (6,)], [[S0, R], [R, R]], ([S0, R], [R, R]),
    ),
}  # fmt: skip

WITH_MESH = {
    "a collective inside": (lambda x, w: (x @ w).sin(), summed, [(4, 6), (6, 4)], [[S0, S1], [R, S0]], [S0, R]),
    "a gather inside": (lambda x: x * x.sum(), gathered, [(4, 6)], [[S0, R]], [R, R]),
    "a rank's own part": (torch.exp, own_rows, [(4, 6)], [[R, R]], [S0, R]),
    "ranks that differ": (torch.exp, from_first, [(4, 6)], [[R, S1]], [R, S1]),
}


def tensors(shapes, *, seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(s, dtype=F64, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_those_of_one_device(name):
    single, blocks, shapes, ins, outs = CASES[name]
    mapped = local_map(blocks, outs, tuple(ins))
    agree(lambda *x: mapped(*x) if isinstance(x[0], DTensor) else single(*x), tensors(shapes), ins)


@pytest.mark.parametrize("name", WITH_MESH)
def test_with_collectives_and_ranks_that_differ(name):
    """The gradients are right without any knowledge of the function."""
    single, blocks, shapes, ins, outs = WITH_MESH[name]
    mapped = local_map(blocks, outs, tuple(ins))  # a mesh is no leaf of the arguments, in torch neither
    agree(
        lambda *x: mapped(x[0].device_mesh, *x) if isinstance(x[0], DTensor) else single(*x), tensors(shapes), ins
    )


def test_gradients_that_the_user_places():
    """As in torch: a function with its own gradients, and the placements of these gradients."""
    mapped = local_map(
        lambda mesh, x, w: MegatronReduce.apply(x @ w, mesh), [S0, R], ([S0, S1], [R, S0]),
        in_grad_placements=([S0, S1], [SUM, S0]),
    )  # fmt: skip
    agree(
        lambda x, w: mapped(x.device_mesh, x, w) if isinstance(x, DTensor) else x @ w,
        tensors([(4, 6), (6, 4)]), [[S0, S1], [R, S0]],
    )  # fmt: skip


def test_arguments_are_moved_if_asked():
    single, blocks, shapes, ins, outs = CASES["columns"]
    mapped = local_map(blocks, outs, tuple(ins), redistribute_inputs=True)
    agree(
        lambda x, w: mapped(x, w) if isinstance(x, DTensor) else single(x, w),
        tensors(shapes), [[S1, S0], [S0, S1]], [[R, R], [S1, S0]],
    )  # fmt: skip


def test_trees_and_plain_values():
    """Flattened, tensors and others; plain tensors are passed on, and a result that is no tensor is not changed."""

    @local_map(out_placements=([S0, R], None, [S0, S1]))
    def tree(given, plain, *, times, more):
        return {"a": given["x"] * times, "b": "text", "c": [more + plain]}

    def rank(mesh):
        x, y = (distribute_tensor(torch.ones(4, 6), mesh, p) for p in ([S0, R], [S0, S1]))
        out = tree({"x": x, "n": 3}, torch.ones(1), times=2.0, more=y)
        whole = tree({"x": torch.ones(2), "n": 3}, torch.ones(1), times=2.0, more=torch.ones(2))
        assert out["b"] == "text" and isinstance(whole["a"], torch.Tensor) and not isinstance(whole["a"], DTensor)
        return str(out["a"]._spec), out["a"].full_tensor().sum().item(), str(out["c"][0]._spec)

    assert set(on_ranks(rank)) == {("f32[4@dp, 6]", 48.0, "f32[4@dp, 6@tp]")}


def test_sizes_are_compared_once_a_kind():
    """The first call with such arguments asks the other ranks, and the next ones do not."""
    world = ThreadWorld(4)
    mapped = [local_map(lambda x, k: x.repeat(k, 1), [S0, R]) for _ in range(4)]

    def rank(number):
        mesh, sent = mesh_of((2, 2)), []
        for rows, k in ((4, 2), (4, 2), (6, 2), (4, 3), (4, 3)):
            x = distribute_tensor(torch.ones(rows, 2), mesh, [S0, R], src_data_rank=None)
            out = mapped[number](x, k)
            assert out.shape == (rows * k, 2)
            sent.append(mapped[number].specs_by_kind.misses)
        return sent

    assert world.run(rank) == [[1, 1, 2, 3, 3]] * 4


def test_a_decorated_function_keeps_its_name():
    mapped = local_map(summed, [R, R])
    assert mapped.__name__ == "summed" and mapped.__wrapped__ is summed
    assert repr(mapped) == "local_map(summed, out_placements=([Replicate(), Replicate()],))"


def test_explicit_mode_lets_it_pass():
    def rank(mesh):
        x = distribute_tensor(torch.ones(4, 6), mesh, [S0, R])
        with spmd.explicit():
            return str(local_map(torch.exp, [S1, R], ([S1, R],), redistribute_inputs=True)(x)._spec)

    assert set(on_ranks(rank)) == {"f32[4, 6@dp]"}


# ---- each way of running ranks ----------------------------------------------------------------


def uneven():
    """Five rows on four ranks, one of them without rows; with a gradient."""
    mesh = mesh_of((2, 2))
    x = distribute_tensor(torch.arange(10.0).reshape(5, 2), mesh, [S0, S0])
    w = distribute_tensor(torch.ones(2, 3), mesh, [R, R]).requires_grad_()
    y = local_map(torch.matmul, [S0, S0])(x, w)
    y.square().sum().backward()
    return y.full_tensor().detach(), w.grad.full_tensor()


@pytest.mark.parametrize("way", ["simulated", "threads", "gloo"])
def test_each_way(way, gloo4):
    x, w = torch.arange(10.0).reshape(5, 2), torch.ones(2, 3, requires_grad=True)
    y = x @ w
    y.square().sum().backward()
    for got in run(way, gloo4, uneven):
        torch.testing.assert_close(got, (y.detach(), w.grad))


def test_a_compiled_step_has_to_know_how_blocks_are_cut():
    mapped = local_map(torch.exp, [S0, R])
    with LocalTensorMode(4):
        step = spmd.compile(lambda x: mapped(x), mesh_of((2, 2)), inputs={"x": {"dp": S0}})
        with pytest.raises(NotImplementedError, match=r"traced on global tensors.* give in_placements"):
            step(torch.ones(4, 6))


# ---- mistakes ---------------------------------------------------------------------------------


def by_rank(x):
    return torch.ones(1 + spmd.mesh.current_rank(), 6)


MISTAKES = {
    "lies otherwise": (dict(in_placements=([S1, R],)), r"argument 0 is f32\[4@dp, 6\], but in_placements say"),
    "too few": (dict(in_placements=()), "0 entries for 1 positional"),
    "none for a DTensor": (dict(in_placements=(None,)), "but no placements are given"),
    "too many results": (dict(out_placements=([S0, R], [S0, R])), "gives 1 results, counted flat, for 2"),
    "none for a tensor": (dict(out_placements=(None,)), "result 0 is a tensor, which needs placements"),
    "placements for a number": (dict(func=lambda x: 3), "result 0 is 3, which takes None"),
    "a DTensor from inside": (dict(func=lambda x: DTensor.from_local(x, mesh_of((2, 2)))), "is a DTensor"),
    "blocks of no tensor": (dict(func=by_rank), r"not those of one tensor .* on rank 1"),
    "shapes that should be equal": (dict(func=by_rank, out_placements=[R, R]), r"not those of one tensor"),
    "dtypes that differ": (dict(func=lambda x: x.to((F64, torch.float32)[spmd.mesh.current_rank() % 2])), "differs"),
    "gradients on some": (
        dict(func=lambda x: x.detach().requires_grad_(spmd.mesh.current_rank() > 1)), "on rank 2 with a gradient",
    ),
    "another mesh": (dict(device_mesh=DeviceMesh("cpu", [0, 1, 2, 3])), "use one mesh"),
    "a placement that does not fit": (dict(out_placements=[S0]), "1 placements .* for a mesh of 2 axes"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(name):
    options, message = MISTAKES[name]

    def rank(mesh):
        x = distribute_tensor(torch.ones(4, 6), mesh, [S0, R])
        with pytest.raises(ValueError, match=message):
            local_map(**(dict(func=torch.exp, out_placements=[S0, R]) | options))(x)
        return True

    assert all(on_ranks(rank))  # and none of them waits for the others


def test_a_gradient_that_nobody_knows():
    def rank(mesh):
        x = DTensor.from_local(torch.ones(4), mesh, [MAX, R])
        mapped = local_map(torch.exp, [MAX, R])
        mapped(x)
        with pytest.raises(NotImplementedError, match="which goes to the rank that has the max"):
            mapped(x.requires_grad_())
        return True

    assert all(on_ranks(rank))


def reduced_in_place():
    """torch's in-place collectives lose the gradient: an error, and not a wrong number."""
    mesh = mesh_of((2, 2))
    x, w = distribute_tensor(torch.ones(4, 6), mesh, [S0, S1]), distribute_tensor(torch.ones(6, 3), mesh, [R, S0])

    def summed(x, w):
        y = x @ w
        dist.all_reduce(y, group=mesh.get_group("tp"))
        return y

    mapped = local_map(summed, [S0, R])
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"in place on a tensor that wants a gradient.*spmd\.comm"):
            mapped(x, w.requires_grad_())
    own = local_map(summed, [S0, R], in_grad_placements=([S0, S1], [SUM, S0]))(x, w)
    own.sum().backward()
    return mapped(x, w.detach()).full_tensor(), w.grad.full_tensor()


@pytest.mark.parametrize("way", ["simulated", "gloo"])
def test_collectives_without_a_gradient(way, gloo4):
    for value, grad in run(way, gloo4, reduced_in_place):
        assert torch.equal(value, torch.full((4, 3), 6.0)) and torch.equal(grad, torch.full((6, 3), 4.0))


def test_sizes_that_depend_on_values():
    mapped = local_map(lambda x: x[x > 0], [R])
    x = distribute_tensor(torch.ones(4), DeviceMesh("cpu", [0]), [R])
    assert mapped(x).shape == (4,)
    with pytest.raises(ValueError, match="a size that depends on values must be an argument"):
        mapped(x * torch.tensor([0.0]).item())
    with pytest.raises(TypeError, match="not callable"):
        local_map(3, [R])


def test_entries_for_meshes():
    """A mesh among the arguments may have the entry None, as in torch, or none at all."""
    with LocalTensorMode(4):
        mesh = mesh_of((2, 2))
        x = distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [S0, R])
        for ins in ((None, [S0, R]), ([S0, R],)):
            total = local_map(lambda mesh, x: all_reduce(x.sum(0), reduceOp="sum", group=(mesh, 0)), [R, R], ins)
            assert torch.equal(total(mesh, x).to_local().reconcile(), torch.tensor([18.0, 22.0, 26.0]))
        with pytest.raises(ValueError, match="argument 0 is a mesh, but placements"):
            local_map(lambda mesh, x: x, [S0, R], ([S0, R], [S0, R]))(mesh, x)
