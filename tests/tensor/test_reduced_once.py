"""A value that owes a sum is reduced once for all ops that need the sum, and never read after a write as it was."""

import copy
import pickle

import pytest
import torch

import spmd
from spmd import DTensor, LocalTensorMode, Partial, Replicate, Shard, distribute_tensor
from spmd.sim import run_ranks
from spmd.tensor.redistribute.plan import steps_made

R, S0, S1 = Replicate(), Shard(0), Shard(1)
A, B = torch.randn(4, 8, dtype=torch.float64), torch.randn(8, 6, dtype=torch.float64)


@pytest.fixture
def mesh():
    with LocalTensorMode(4):
        yield spmd.init_device_mesh("cpu", (4,))


def owing(mesh, **kwargs) -> DTensor:
    """A @ B, as terms on the ranks."""
    a, b = (distribute_tensor(t.clone(), mesh, [p]) for t, p in ((A, S1), (B, S0)))
    y = a.requires_grad_(**kwargs) @ b if kwargs else a @ b
    assert y.placements == (Partial(),)
    return y


def sent(fn, *args) -> tuple[list[str], object]:
    with steps_made() as steps:
        out = fn(*args)
    return [step.kind for step in steps if step.sends], out


def whole(x) -> torch.Tensor:
    return x.full_tensor().reconcile()


def test_readers_share_one_reduction_and_the_terms_stay(mesh):
    y, want = owing(mesh), A @ B
    for fn, kinds in ((torch.relu, ["all_reduce"]), (torch.tanh, []), (lambda t: t * t, []), (torch.relu, [])):
        found, out = sent(fn, y)
        assert found == kinds
        torch.testing.assert_close(whole(out), fn(want))
    assert y.placements == (Partial(),)
    torch.testing.assert_close(whole(y * 2), want * 2)
    scattered = y.redistribute(placements=[S0])
    torch.testing.assert_close(whole(scattered), want)


def test_a_backward_reads_what_the_forward_reduced(mesh):
    y = owing(mesh, requires_grad=True)
    kinds, _ = sent(lambda: y.pow(2).sum().backward())
    assert kinds == ["all_reduce"]


@pytest.mark.parametrize(
    ("fn", "kinds"),
    [
        (lambda y: sum([y, y]), []),
        (lambda y: 0.0 + y - 0, []),
        (lambda y: 0 - y, []),
        (lambda y: y + 1e-9, ["all_reduce"]),
        (lambda y: torch.add(y, 0, alpha=3), []),
    ],
)
def test_zero_is_counted_as_often_as_one_likes(mesh, fn, kinds):
    found, out = sent(fn, owing(mesh))
    assert found == kinds
    torch.testing.assert_close(whole(out), fn(A @ B))


WRITES = {
    "in place": lambda y: y.mul_(2),
    "into a view": lambda y: y[1:].mul_(2),
    "into a view made before": lambda y, v: v.mul_(2),
    "into detach()": lambda y: y.detach().mul_(2),
    "into data": lambda y: y.data.mul_(2),
    "of a list": lambda y: torch._foreach_mul_([y], 2.0),
    "out=": lambda y: torch.mul(y, 2, out=y),
    "another tensor as data": lambda y: setattr(y, "data", y.detach() * 2),
}


@pytest.mark.parametrize("name", WRITES)
def test_a_write_ends_it(mesh, name):
    """The next reader sees the write."""
    write, want, y = WRITES[name], A @ B, owing(mesh)
    view = (y.view(24),) if write.__code__.co_argcount == 2 else ()
    torch.relu(y)
    write(y, *view)
    write(want, *[want.view(24) for _ in view])
    torch.testing.assert_close(whole(torch.relu(y)), want.relu())
    torch.testing.assert_close(whole(torch.relu(y)), want.relu())


def test_results_have_memory_of_their_own(mesh):
    """A write into what an op made of the sum does not change what others read."""
    y, want = owing(mesh), (A @ B).relu()
    for fn in (torch.relu, torch.abs, torch.round, torch.nn.functional.gelu, lambda t: t.clamp(min=0)):
        fn(y).mul_(0)
        torch.testing.assert_close(whole(torch.relu(y)), want)


def test_blocks_of_the_user_are_reduced_each_time():
    """A rank may write into its own block, and the others do not know."""
    def body(rank):
        mesh = spmd.init_device_mesh("cpu", (2,))
        mine = torch.ones(2)
        x = DTensor.from_local(mine, mesh, [Partial()])
        first = torch.relu(x).to_local().clone()
        if rank == 1:
            mine += 1
        return [first, torch.relu(x).to_local()]

    for first, second in run_ranks(body, 2):
        assert first.tolist() == [2, 2]
        assert second.tolist() == [3, 3]


def test_a_write_that_one_rank_alone_knows_of_is_an_error(mesh):
    y = owing(mesh)
    torch.relu(y)
    y.to_local().mul_(2)
    with pytest.raises(RuntimeError, match="written through to_local"):
        torch.relu(y)
    assert y.mul_(1) is y
    torch.relu(y)


def test_copies_are_reduced_by_themselves(mesh):
    y = owing(mesh)
    torch.relu(y)
    for other in (copy.deepcopy(y), pickle.loads(pickle.dumps(y)), y.clone()):
        assert other._reduced is None
        kinds, out = sent(torch.relu, other)
        assert kinds == ["all_reduce"]
        torch.testing.assert_close(whole(out), (A @ B).relu())


def test_an_update_reduces_a_gradient_once(mesh):
    """AdamW reads it twice, once in each moment."""
    w = torch.nn.Parameter(distribute_tensor(A @ B, mesh, [R]))
    w.grad = owing(mesh)
    kinds, _ = sent(torch.optim.AdamW([w], lr=0.1).step)
    assert kinds == ["all_reduce"]
    alone = torch.nn.Parameter(A @ B)
    alone.grad = A @ B
    torch.optim.AdamW([alone], lr=0.1).step()
    torch.testing.assert_close(whole(w.detach()), alone.detach())
