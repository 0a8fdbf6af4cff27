"""Products of tensors of several dims in programs: batch, time and heads may each be sharded by an axis."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import spmd
from spmd import Shard
from tests.expand.side_by_side import Case

HEADS = {"[qkv].*": {"tp": Shard(0)}, "out.weight": {"tp": Shard(1)}}
ROWS = {"x": {"dp": Shard(0)}}
SEQUENCE = {"x": {"dp": Shard(0), "tp": Shard(1)}}


class Attention(nn.Module):
    """Attention as papers write it: products of batches of heads."""

    def __init__(self, width: int = 8, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(width, width, bias=bias) for bias in (True, False, True))
        self.out = nn.Linear(width, width)

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = torch.matmul(q, k.mT).softmax(-1)
        return self.out((weights @ v).transpose(1, 2).flatten(2))


class Spelled(Attention):
    """The same attention with einsum."""

    def forward(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)) for f in (self.q, self.k, self.v))
        weights = torch.einsum("bqhd,bkhd->bhqk", q, k).softmax(-1)
        return self.out(torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2))


class Mixer(nn.Module):
    """Linear layers on 3-D tensors, and a product with a matrix that is not a layer."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.mix = nn.Parameter(torch.randn(width, width))

    def forward(self, x):
        return self.down(F.gelu(self.up(x))) @ self.mix


def step(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss


def penalised(model, optimizer, x):
    """The gradient of a gradient."""
    optimizer.zero_grad()
    x = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    loss = grad.square().mean()
    loss.backward()
    optimizer.step()
    return loss


def batches(batch: int, time: int = 6, width: int = 8) -> list[tuple]:
    g = torch.Generator().manual_seed(1)
    return [(torch.randn(batch, time, width, generator=g),) for _ in range(2)]


def case(model=Attention, step=step, params=HEADS, inputs=ROWS, batch=4) -> Case:
    def sgd(parameters):
        return optim.SGD(parameters, lr=0.1)

    return Case(model, sgd, step, batches(batch), params=params, inputs=inputs)


CASES = {
    "heads": (case(), (2, 2)),
    "heads, uneven": (case(batch=3), (2, 2)),
    "heads by einsum": (case(Spelled, batch=3), (2, 2)),
    "heads over all": (case(), (1, 4)),
    "sequence": (case(Mixer, params={}, inputs=SEQUENCE), (2, 2)),
    "sequence, uneven": (case(Mixer, params={}, inputs=SEQUENCE, batch=3), (2, 4)),
    "gradients of gradients": (case(step=penalised), (2, 2)),
    "gradients of gradients of rows": (case(Mixer, penalised, {}, SEQUENCE), (2, 2)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_step_is_that_of_one_device(name):
    training, shape = CASES[name]
    training.check(shape)


@pytest.mark.parametrize(
    "training, wanted",
    [
        # the product with the output's rows, and the gradient of the loss's mean; one bucket of gradients
        (case(), {("all_reduce", "tp"), ("all_reduce", "dp")}),
        (case(Spelled), {("all_reduce", "tp"), ("all_reduce", "dp")}),
        # the gradients of the weights alone, over both axes
        (case(Mixer, params={}, inputs=SEQUENCE), {("all_reduce", "dp,tp")}),
    ],
)
def test_nothing_is_moved_but_what_is_reduced(training, wanted):
    mesh = spmd.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    program = training.compiled(mesh).program_for(*training.begin(), *training.batches[0])
    assert {(c.kind, c.axis) for c in program.collectives} == wanted
    assert not program.gathered


def products(x, weight, bias, vector, batch):
    """Each product that torch keeps as one op in inference mode, with vectors and a bias, too."""
    return [
        *[F.linear(of, weight, bias) for of in (x, vector, batch)], F.linear(x, vector), vector @ weight, x @ vector,
        vector @ vector, batch @ vector, batch @ weight, vector @ batch, torch.einsum("bij,jk->bik", batch, weight),
    ]  # fmt: skip


@pytest.mark.parametrize("dim", [0, 1])
def test_in_inference_mode_products_are_those_of_one_device(dim):
    """Nothing is traced for autograd then, and torch takes no op apart before the trace sees it."""
    given = [torch.randint(-4, 5, shape).double() for shape in ((4, 4), (4, 4), (4,), (4,), (2, 4, 4))]
    with spmd.LocalTensorMode(4), torch.inference_mode():
        mesh = spmd.init_device_mesh("cpu", (4,))
        step = spmd.compile(products, mesh, inputs={"x": [Shard(dim)], "batch": [Shard(dim)]})
        for found, wanted in zip(step(*given), products(*given), strict=True):
            assert torch.equal(found.full_tensor().reconcile(), wanted)


def test_in_inference_mode_programs_of_other_batches_are_found():
    """That the rows have as many columns as the weight is a condition of the capture: it was looked for with others."""
    layer, batches = nn.Linear(4, 4).double(), [torch.rand(rows, 4, dtype=torch.float64) for rows in (2, 6, 6, 5)]
    want = [layer(x).detach() * 2 for x in batches]
    with spmd.LocalTensorMode(4), torch.inference_mode():
        step = spmd.compile(lambda layer, x: layer(x) * 2, spmd.init_device_mesh("cpu", (4,)), inputs={"x": [Shard(0)]})
        found = [step(layer, x).full_tensor().reconcile() for x in batches]
    torch.testing.assert_close(found, want)
