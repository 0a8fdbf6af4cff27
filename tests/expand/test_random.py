"""Random numbers in compiled steps are those of one rank on any mesh, new in each step, and reproducible."""

from __future__ import annotations

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from ways import WAYS, on_ranks, run

import spmd
from examples.gpt import train_step
from spmd import Shard, init_device_mesh
from spmd.sim import run_ranks

MESHES = [(4, 1), (1, 4), (2, 2)]
PARAMS = {
    "up.weight": {"tp": Shard(0)}, "up.bias": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)},
    "embed.weight": {"tp": Shard(1)},
}  # fmt: skip
INPUTS = {"tokens": {"dp": Shard(0)}, "targets": {"dp": Shard(0)}}


class Block(nn.Module):
    """A small language model with dropout wherever a GPT has it."""

    def __init__(self, p=0.3):
        super().__init__()
        self.p = p
        self.embed, self.up, self.down = nn.Embedding(13, 8), nn.Linear(8, 16), nn.Linear(16, 8)
        self.channels, self.slope = nn.Dropout1d(0.2), nn.RReLU()

    def forward(self, tokens):
        x = F.dropout(self.embed(tokens), self.p)
        q = x.unflatten(-1, (2, 4)).transpose(1, 2)
        x = x + F.scaled_dot_product_attention(q, q, q, dropout_p=self.p).transpose(1, 2).flatten(2)
        x = x + F.dropout(self.down(self.slope(self.up(x))), self.p)
        return self.channels(x) @ self.embed.weight.t()


def made():
    """A model with fixed weights: threads would disturb each other's random numbers."""
    model = Block().double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.arange(p.numel(), dtype=torch.float64).mul(7.3).sin().view(p.shape) / 2)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05)


def batch():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 13, (2, 6, 5), generator=generator)


def trained(mesh_shape=(2, 2), steps=3, seed=7):
    """The losses of some steps, the weights after them, and the state of the random numbers."""
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp"))
    spmd.manual_seed(seed)
    model, optimizer = made()
    step = spmd.compile(train_step, mesh, params=PARAMS, inputs=INPUTS)
    losses = [step(model, optimizer, *batch()).full_tensor() for _ in range(steps)]
    return [*losses, *(p.detach().full_tensor() for p in model.parameters())], spmd.get_rng_state()


@functools.cache
def on_mesh(mesh_shape, fn=trained):
    """What each rank finds, all simulated in one thread."""
    return on_ranks(lambda: fn(mesh_shape), math.prod(mesh_shape))


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_dropout_trains_alike_on_any_mesh(mesh_shape):
    """As on one rank: embedding, attention, residual and channel dropout, and a random slope."""
    want, state = on_mesh((1, 1))[0]
    assert state["drawn"] == 3 * 5
    for got, here in on_mesh(mesh_shape):
        assert here == state
        assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-11) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_all_ways_train_alike(way, gloo4):
    want = on_mesh((2, 2))
    for (got, state), (there, other) in zip(run(way, gloo4, trained), want, strict=True):
        assert state == other
        assert all(torch.allclose(a, b, rtol=1e-9, atol=1e-11) for a, b in zip(got, there, strict=True))


def test_a_seed_reproduces_and_another_does_not():
    one, again, other = (on_ranks(lambda s=s: trained((2, 1), 2, s), 2)[0][0] for s in (1, 1, 2))
    assert all(map(torch.equal, one, again))
    assert not torch.equal(one[0], other[0])


def noise(x):
    a = torch.rand_like(x)
    return a, x.clone().normal_(), torch.randn(3, 4), torch.randperm(9), torch.randint(0, 5, (4,)), F.dropout(a, 0.5)


def drawn(mesh_shape, calls=2):
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp"))
    spmd.manual_seed(3)
    step = spmd.compile(noise, mesh, inputs={"x": {"dp": Shard(0), "tp": Shard(1)}})
    return [[t.full_tensor() for t in step(torch.zeros(5, 70))] for _ in range(calls)], step


def test_each_step_draws_anew_by_the_same_program():
    """The number of a draw is an input of the program and not part of it. Plain tensors use the same numbers."""
    want = on_mesh((1, 1), drawn)[0][0]
    for mesh_shape in MESHES:
        for (first, second), step in on_mesh(mesh_shape, drawn):
            assert len(step.programs) == 1 and "random numbers, 6 draws" in str(step.program)
            assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))
            assert all(map(torch.equal, first + second, want[0] + want[1]))
            assert sorted(first[3].tolist()) == list(range(9))


def test_a_step_draws_what_eager_ops_draw():
    """Eager and compiled draws from the same state are equal, op by op."""

    def rank(number):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        x = spmd.zeros(5, 70, device_mesh=mesh, placements=[Shard(0), Shard(1)])
        spmd.manual_seed(3)
        eager = [F.dropout(torch.rand_like(x), 0.5), x.clone().exponential_()]
        spmd.manual_seed(3)
        step = spmd.compile(lambda x: [F.dropout(torch.rand_like(x), 0.5), x.clone().exponential_()], mesh)
        return all(torch.equal(a.to_local(), b.to_local()) for a, b in zip(step(x), eager, strict=True))

    assert run_ranks(rank, 4) == [True] * 4


def test_ranks_in_different_states_are_told():
    """Ranks with different seeds raise before anything is drawn, instead of diverging."""

    def rank(number):
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        spmd.manual_seed(0)
        step = spmd.compile(noise, mesh)
        step(torch.zeros(4, 4))
        spmd.manual_seed(number)
        step(torch.zeros(4, 4))

    with pytest.raises(RuntimeError, match=r"(?s)random numbers: \{'seed': 0.*'seed': 1"):
        run_ranks(rank, 2)


DRAWN = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.2, training=True),
    "dropout1d": lambda x: F.dropout1d(x, 0.3),
    "rrelu": lambda x: F.rrelu(x - 0.5, training=True),
}


@pytest.mark.parametrize("kind", DRAWN)
def test_inference_draws_what_is_drawn_without_gradients(kind):
    """In inference mode torch hands over ops whole that autograd takes apart."""
    found = []
    for mode in (torch.no_grad, torch.inference_mode):

        def step(x, mode=mode):
            with mode():
                return DRAWN[kind](x)

        def rank(r, step=step):
            spmd.manual_seed(3)
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
            x = torch.linspace(0.1, 1.0, 96).reshape(8, 4, 3)
            return spmd.compile(step, mesh, inputs={"x": {"dp": Shard(0)}})(x).full_tensor()

        found.append(run_ranks(rank, 2)[0])
    assert torch.equal(*found)
    assert not torch.equal(found[0], torch.linspace(0.1, 1.0, 96).reshape(8, 4, 3))
