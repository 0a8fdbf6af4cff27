"""Attributes that users set on parameters and buffers are read in a step, and are guards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import spmd
from spmd.sim import LocalTensorMode
from tests.expand.side_by_side import seeded, tensors
from tests.tensor.single import every_rank

LINE = spmd.DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
X = torch.arange(8.0).reshape(2, 4) / 7


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4))
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) * getattr(layer[0].weight, "gain", 1.0)
        return x * getattr(self.scale, "gain", 1.0)


def pair(prepare):
    model = seeded(Net)
    prepare(model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def step_with_rates(model, optimizer, x):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():
        p.grad.mul_(getattr(p, "rate", 1.0))
        for other in getattr(p, "like", []):
            p.grad.add_(other.mean())
    optimizer.step()
    return loss.detach()


def nothing(model):
    pass


def rates(model):
    for i, p in enumerate(model.parameters()):
        p.rate = 0.5**i


def one_gain(model):
    model.layers[2][0].weight.gain = 3.0


def equal_gains(model):
    for layer in model.layers:
        layer[0].weight.gain = 0.5


def of_buffer(model):
    model.scale.gain = 2.0


def another_parameter(model):
    """The one that is trained, and not the values that it had."""
    model.layers[0][0].weight.like = [model.layers[1][0].weight]


def in_private(model):
    model.layers[0][0].weight._gain = 2.0  # nobody reads it


@pytest.mark.parametrize(
    "prepare, later",
    [
        (rates, nothing), (one_gain, of_buffer), (equal_gains, one_gain), (of_buffer, rates), (nothing, one_gain),
        (another_parameter, nothing), (in_private, nothing),
    ],
)  # fmt: skip
def test_a_step_reads_attributes_of_parameters(prepare, later):
    """As they are at each call, also of one of several equal blocks, and where they are set after calls."""
    alone, ours = pair(prepare), pair(prepare)
    with LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        step = spmd.compile(step_with_rates, mesh, fully_shard="dp")
        for i in range(6):
            if i == 3:
                later(alone[0]), later(ours[0])
            want, mine = step_with_rates(*alone, X), step(*ours, X)
            torch.testing.assert_close(every_rank(mine)[0], want)
        want, mine = tensors(*alone), tensors(*ours)
        for name, x in want.items():
            torch.testing.assert_close(every_rank(mine[name])[0], x, msg=lambda text, name=name: f"{name}: {text}")


def counts(model, optimizer, x):
    p = model.layers[0][0].weight
    p.count += 1
    return model(x) * p.count


def deletes(model, optimizer, x):
    del model.layers[0][0].weight.count
    return model(x)


def counts_in_private(model, optimizer, x):
    p = model.layers[0][0].weight
    p._seen = getattr(p, "_seen", 0) + 1
    return model(x) * p._seen


def appends(model, optimizer, x):
    model.layers[0][0].weight.history.append(1)
    return model(x)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        self.inner.weight.calls = getattr(self.inner.weight, "calls", 0) + 1
        return self.inner(x) * self.inner.weight.calls


WRONG = {
    counts: "sets the attribute count of the parameter model.layers.0.0.weight",
    deletes: "sets the attribute count of the parameter model.layers.0.0.weight",
    counts_in_private: "sets the attribute _seen of the parameter model.layers.0.0.weight",
    appends: "changes a Python value in attribute model.layers.0.0.weight.history",
}


@pytest.mark.parametrize("step", WRONG)
def test_what_a_step_changes_in_attributes_is_refused(step):
    """And they are as they were."""
    model, optimizer = pair(nothing)
    p = model.layers[0][0].weight
    p.count, p.history = 1, []
    with pytest.raises(RuntimeError, match=WRONG[step]):
        spmd.compile(step, LINE)(model, optimizer, X)
    assert (p.count, p.history) == (1, []) and not hasattr(p, "_seen")


def test_equal_blocks_that_set_attributes_are_refused_as_others_are():
    model = nn.Sequential(*(Counting() for _ in range(4)))
    with pytest.raises(RuntimeError, match="sets the attribute calls of the parameter model"):
        spmd.compile(lambda model, x: model(x), LINE)(model, X)


def test_a_tensor_as_an_attribute_is_no_state():
    model, optimizer = pair(nothing)
    model.layers[0][0].weight.mask = torch.ones(4, 4)

    def masked(model, optimizer, x):
        return x @ (model.layers[0][0].weight * model.layers[0][0].weight.mask)

    with pytest.raises(RuntimeError, match="not among its arguments"):
        spmd.compile(masked, LINE)(model, optimizer, X)
