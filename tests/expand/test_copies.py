"""Steps that copy a model and train the copy, with an optimiser that they make for it: meta-learning, unrolled GANs."""

import copy

import pytest
import torch
from torch import nn

import spmd
from spmd import LocalTensorMode, Shard
from tests.expand.test_sizes import captures


class Tied(nn.Module):
    """Two layers that share a weight, and a buffer that counts."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 4, dtype=torch.float64)
        self.two.weight = self.one.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        self.seen += x.shape[0]
        return self.two(torch.tanh(self.one(x)))


def adapted(model, optimizer, x):
    """Reptile: the model moves towards where its copy has got to."""
    fast = copy.deepcopy(model)
    inner = torch.optim.SGD(fast.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        loss = fast(x).square().mean()
        inner.zero_grad()
        loss.backward()
        inner.step()
    optimizer.zero_grad()
    for p, q in zip(model.parameters(), fast.parameters(), strict=True):
        p.grad = (p - q).detach()
    optimizer.step()
    return loss.detach(), fast.seen, model.seen, fast.two.weight - fast.one.weight


def trained(prepare):
    torch.manual_seed(0)
    model = Tied()
    optimizer, step = torch.optim.SGD(model.parameters(), lr=0.5), prepare(adapted)
    found = []
    for n in (8, 8, 5, 8):
        x = torch.linspace(-1, 1, n * 4, dtype=torch.float64).reshape(n, 4)
        given = [*step(model, optimizer, x), *model.parameters()]
        given = [x.detach().full_tensor() if isinstance(x, spmd.DTensor) else x.detach() for x in given]
        found.append([x.reconcile().clone() if isinstance(x, spmd.LocalTensor) else x.clone() for x in given])
    return found


@pytest.mark.parametrize("stored", [None, "dp"])
def test_a_copy_is_trained_as_on_one_device(stored):
    """Also where parameters are kept in shards; the copy has memory, gradients and ties of its own."""
    with LocalTensorMode(4), captures() as made:
        mesh = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        got = trained(lambda fn: spmd.compile(fn, mesh, inputs={"x": {"dp": Shard(0)}}, fully_shard=stored))
    torch.testing.assert_close(got, trained(lambda fn: fn), rtol=1e-10, atol=1e-10)
    assert len(made) <= 2


