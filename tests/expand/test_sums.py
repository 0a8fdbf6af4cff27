"""Sums of gradients that the engine makes are those that a trace without a quick way has, node by node."""

from unittest import mock

import pytest
import torch
from torch import nn, optim

from spmd.expand.sums import summed
from tests.expand.test_capture import captured


class Model(nn.Module):
    """Of parameters of several layouts, one of them used twice, one frozen, and a bias in bfloat16."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.turned = nn.Parameter(torch.ones(3, 4).T)
        self.small = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.two.weight = self.one.weight

    def forward(self, x):
        x = self.two(torch.tanh(self.one(x))) * self.frozen + self.small
        return x @ self.turned


def twice(model, optimizer, x):
    optimizer.zero_grad()
    for part in (x, x * 2):
        model(part).square().sum().backward()
    optimizer.step()


def keeps_gradients(model, optimizer, x):
    """They are those of the call before, or zeros."""
    optimizer.zero_grad(set_to_none=False)
    twice_without_clearing(model, optimizer, x)


def twice_without_clearing(model, optimizer, x):
    for part in (x, x * 2):
        model(part).square().sum().backward()
    optimizer.step()


def reads_between(model, optimizer, x):
    """A gradient that is held is the object that sums are written into, and a copy is not."""
    optimizer.zero_grad()
    model(x).square().sum().backward()
    held, copy = model.turned.grad, model.turned.grad.clone()
    model(x).square().sum().backward()
    return held, copy, held is model.turned.grad


def views(model, optimizer, x):
    """Gradients that are parts of one buffer."""
    flat = torch.zeros(16)
    model.one.weight.grad = flat.view(4, 4)
    model.turned.grad = torch.zeros(4, 1).expand(4, 3).contiguous()
    for part in (x, x * 2):
        model(part).square().sum().backward()
    return flat.clone(), model.turned.grad


STEPS = [twice, keeps_gradients, twice_without_clearing, reads_between, views]


def trained(steps: int) -> dict:
    model = Model()
    given = {"model": model, "optimizer": optim.SGD(model.parameters(), lr=0.1), "x": torch.ones(6, 4)}
    for _ in range(steps):
        twice(**given)
    return given


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("step", STEPS, ids=lambda x: x.__name__)
def test_sums_are_those_of_the_engine(step, steps):
    """The graphs are equal node by node, with values, phases and origins."""
    with mock.patch("spmd.expand.traced_ops.summed", lambda *given: False):
        want = captured(step, **trained(steps))
    found = captured(step, **trained(steps))
    assert str(found.graph) == str(want.graph)
    assert found.outputs == want.outputs
    for n, m in zip(found.graph.nodes, want.graph.nodes, strict=True):
        assert (str(n.meta.get("val")), n.meta.get("phase")) == (str(m.meta.get("val")), m.meta.get("phase"))
        assert n.meta.get("origin") == m.meta.get("origin")


def test_sums_are_not_dispatched():
    """All of those in the second backward pass: of five parameters, one of them used twice."""
    done = []
    with mock.patch("spmd.expand.traced_ops.summed", lambda *given: done.append(summed(*given)) or done[-1]):
        captured(twice, **trained(0))
    assert done == [True] * 5
