"""What a step asserts of values in tensors is asserted by its program, on all ranks: torch's distributions do it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli, Beta, Categorical, Normal

import spmd
from spmd import LocalTensorMode, Shard
from tests.expand.places.trained import whole

torch.manual_seed(0)
X = torch.randn(8, 5, dtype=torch.float64)
MODEL = nn.Linear(5, 4, dtype=torch.float64)

OF = {  # what validates by default is a setting of the process
    "categorical": (lambda y: Categorical(logits=y, validate_args=True), torch.arange(8) % 4),
    "probabilities": (lambda y: Categorical(probs=y.softmax(-1)), torch.arange(8) % 4),
    "normal": (lambda y: Normal(y[:, :2], y[:, 2:].exp()), torch.randn(8, 2, dtype=torch.float64)),
    "beta": (lambda y: Beta(y[:, :2].exp(), y[:, 2:].exp()), torch.rand(8, 2, dtype=torch.float64)),
    "bernoulli": (lambda y: Bernoulli(logits=y), torch.ones(8, 4, dtype=torch.float64)),
}
PLANS = {"data": {"inputs": {"*": {"dp": Shard(0)}}}, "shards": {"fully_shard": "dp"}, "program": {"choose": "program"}}


def likelihood(of):
    def step(model, x, value):
        loss = -of(model(x)).log_prob(value).mean()
        loss.backward()
        return loss

    return step


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", OF)
def test_likelihoods_are_those_of_one_device(kind, plan):
    of, value = OF[kind]
    alone, model = copy.deepcopy(MODEL), copy.deepcopy(MODEL)
    expected = likelihood(of)(alone, X, value)
    with LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        got = whole(spmd.compile(likelihood(of), mesh, **PLANS[plan])(model, X, value))
        torch.testing.assert_close(got, expected.detach())
        for mine, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(whole(mine.grad), theirs.grad)


WRONG = {
    "a parameter": (X.index_fill(0, torch.tensor([6]), float("nan")), OF["categorical"][1], r"Categorical\(logits\)"),
    "a value": (X, OF["categorical"][1] + 3, "Categorical allows"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_later_value_that_a_distribution_does_not_allow_is_an_error(what):
    """It is that of one row, which one rank has. What the step would have changed is as before."""
    x, value, said = WRONG[what]
    model = copy.deepcopy(MODEL)
    with LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        step = spmd.compile(likelihood(OF["categorical"][0]), mesh, **PLANS["data"])
        step(model, X, OF["categorical"][1])
        before = whole(model.weight.grad).clone()
        with pytest.raises(RuntimeError, match=said):
            step(model, x, value)
        assert torch.equal(whole(model.weight.grad), before)


@pytest.mark.parametrize("passes", [None, ("overlap",), ("schedule",)], ids=str)
def test_an_assert_of_the_user_stays_in_the_program(passes):
    """Nothing reads it, and it runs before what follows it."""

    def step(x):
        torch._assert_async((x > 0).all())
        torch._assert_async((x < 100).all(), "too large")
        return x.log().sum()

    with LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        compiled = spmd.compile(step, mesh, inputs={"x": {"dp": Shard(0)}}, passes=passes)
        torch.testing.assert_close(whole(compiled(X.abs())), X.abs().log().sum())
        with pytest.raises(RuntimeError):
            compiled(X)
        with pytest.raises(RuntimeError, match="too large"):
            compiled(X.abs() * 1000)


def test_asserts_of_equal_layers_are_all_in_the_program():
    class Layer(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            torch._assert_async((y < 100).all())
            return y.tanh()

    model = nn.Sequential(*[Layer(5, 5, dtype=torch.float64) for _ in range(5)])
    with LocalTensorMode(2):
        step = spmd.compile(lambda model, x: model(x), spmd.init_device_mesh("cpu", (2,)))
        step(model, X)
        with torch.no_grad():
            model[3].bias.fill_(1000)
        with pytest.raises(RuntimeError):
            step(model, X)
