"""Memory is reused where nobody can tell, and what outlives a call has memory of its own."""

import copy
from unittest import mock

import pytest
import torch
from expecttest import assert_expected_inline
from torch import fx, nn

import spmd
import spmd.expand.compile as compile_module
from spmd import Replicate, Shard
from spmd.expand.passes.in_place import reuse_memory
from spmd.expand.passes.separate import separate_outputs
from spmd.sim import run_ranks
from spmd.tensor.spec import spec_of
from tests.expand.side_by_side import same, values

aten = torch.ops.aten


# ---- steps that write -------------------------------------------------------------------------


class Kept(nn.Module):
    """Two matrices, a vector and a count, to be written into."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.arange(16.0).view(4, 4) / 8, requires_grad=False)
        self.b = nn.Parameter(1 - torch.arange(16.0).view(4, 4) / 4, requires_grad=False)
        self.register_buffer("c", torch.arange(4.0) - 1)
        self.register_buffer("n", torch.tensor(3))
        self.p = nn.Parameter(torch.ones(4, 4))
        self.q = nn.Parameter(torch.full((4, 4), 2.0))


PLAN = {"a": {"tp": Shard(0), "dp": Shard(1)}, "b": {"tp": Shard(0)}, "p": {"dp": Shard(1)}, "q": {"dp": Shard(1)}}


def with_its_transpose(m, x):
    m.a.copy_(m.a + m.a.t())


def added_to_its_transpose(m, x):
    m.b.add_(m.b.t())


def twice_itself(m, x):
    m.a.add_(m.a)
    m.b.addcmul_(m.b, m.b)
    m.c.mul_(m.c)


def read_after_the_write(m, x):
    y = m.a * 2
    m.a.add_(1)
    return y + m.a


def view_read_after_the_write(m, x):
    row = m.a[1]
    flat = m.b.view(-1)
    m.a.mul_(0.5)
    m.b.sub_(1)
    return row, flat, m.a[1:3]


def view_of_the_old_value(m, x):
    old = (m.a + 0).t()
    m.a.add_(old)
    return old


def written_through_views(m, x):
    m.a[1:3].mul_(2)
    m.b[:, ::2] = 0.5
    m.b.diagonal().add_(1)
    m.c[0] += x.sum()


def summed_then_written(m, x):
    total, rows = m.a.sum(), m.b.sum(0)
    m.a.div_(2)
    m.b.add_(1)
    return total, rows


def chained(m, x):
    m.a.mul_(2).add_(x).clamp_(max=3.0)
    m.n.add_(1).mul_(2)
    return m.n


def swapped(m, x):
    m.a, m.b = m.b, m.a


def swapped_by_copies(m, x):
    old = m.a.clone()
    m.a.copy_(m.b)
    m.b.copy_(old)


def shifted(m, x):
    """c is the newest; what it was is given."""
    old = m.c
    m.c = m.c * 2 + x[0]
    return old


def shifted_pair(m, x):
    m.b = m.a
    m.a = nn.Parameter(m.a + 1, requires_grad=False)


def turned(m, x):
    m.b = nn.Parameter(m.b.t(), requires_grad=False)


def new_value_returned(m, x):
    m.c = m.c + 1
    return m.c


def state_returned(m, x):
    return m.a, m.c


def replaced_by_constants(m, x):
    m.c = torch.tensor([1.0, 2.0, 3.0, 4.0])
    m.n = torch.ones((), dtype=torch.int64)
    return m.c


def constants_written(m, x):
    m.c = torch.tensor([1.0, 2.0, 3.0, 4.0])
    m.c.add_(x[0])
    return torch.tensor([7.0]), torch.zeros(2)


def input_kept(m, x):
    """What the caller passed lives on in the state, and is written into by the next call."""
    m.a.add_(1)
    m.c.mul_(2)
    before = m.c
    m.c = x[1]
    return x, before


def stretched(m, x):
    m.b = nn.Parameter(m.c.expand(4, 4), requires_grad=False)
    m.c.add_(1)


def one_gradient_for_two(m, x):
    ((m.p + m.q) * x).square().sum().backward()
    return m.p.grad, m.q.grad


def one_value_twice(m, x):
    y = m.a @ x
    return [y, y], {"t": y.t()}


def read_by_a_product(m, x):
    y = m.a @ m.b
    m.a.add_(1)
    m.b.mul_(y)
    return m.a @ m.b


STEPS = [
    with_its_transpose, added_to_its_transpose, twice_itself, read_after_the_write, view_read_after_the_write,
    view_of_the_old_value, written_through_views, summed_then_written, chained, swapped, swapped_by_copies, shifted,
    shifted_pair, turned, new_value_returned, state_returned, replaced_by_constants, constants_written, input_kept,
    stretched, one_gradient_for_two, one_value_twice, read_by_a_product,
]  # fmt: skip


def run(step, model, inputs) -> list:
    """What each call returned, looked at once then and once after the last call; and the state at the end."""
    returned = [step(model, x) for x in inputs]
    return returned


@pytest.mark.parametrize("reuse", [True, False], ids=["reused", "not reused"])
@pytest.mark.parametrize("step", STEPS, ids=lambda f: f.__name__)
def test_writes_are_those_of_one_device(step, reuse):
    """Three calls; each result is the same when it is returned and after the last call, the caller's tensors stay."""
    inputs = [torch.arange(16.0).view(4, 4) + i for i in range(3)]
    alone = Kept()
    want = [values(step(alone, x.clone())) for x in inputs]
    state = values({**dict(alone.named_parameters()), **dict(alone.named_buffers())})
    grads = [values(p.grad) for p in alone.parameters()]

    def rank(r):
        mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model, mine = Kept(), copy.deepcopy(inputs)
        compiled = spmd.compile(step, mesh, params=PLAN)
        returned, then = [], []
        for x in mine:
            returned.append(compiled(model, x))
            then.append(values(returned[-1]))
        same(then, want, "returned")
        if step is not state_returned:
            same(values(returned), want, "returned, later")
        same(values({**dict(model.named_parameters()), **dict(model.named_buffers())}), state, "state")
        same([values(p.grad) for p in model.parameters()], grads, "gradients")
        same(mine, inputs, "inputs")
        if step is one_gradient_for_two:
            model.p.grad.to_local().zero_()
            same(values(model.q.grad), grads[-1], "the other gradient")

    keep = mock.patch.object(compile_module, "reuse_memory", lambda graph, owned: 0)
    with keep if not reuse else mock.patch.object(compile_module, "reuse_memory", reuse_memory):
        run_ranks(rank, 4)
