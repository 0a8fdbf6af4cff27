"""The first call of a training makes the program of all its calls."""

import pytest
import torch
from torch import nn, optim

import spmd
from spmd import LocalTensorMode, Shard
from spmd.expand import first_state as first_state_module
from spmd.expand.first_state import first_state
from spmd.expand.state import State
from tests.expand.side_by_side import same, tensors
from tests.expand.test_capture import captured


@pytest.mark.parametrize(
    "optimizer_of, made",
    [
        (optim.AdamW, {"step": 0.0, "exp_avg": 0.0, "exp_avg_sq": 0.0}),
        (lambda p: optim.AdamW(p, lr=torch.tensor(0.1), fused=True), {"step": 0.0, "exp_avg": 0.0, "exp_avg_sq": 0.0}),
        (optim.NAdam, {"step": 0.0, "mu_product": 1.0, "exp_avg": 0.0, "exp_avg_sq": 0.0}),
        (lambda p: optim.Rprop(p, lr=0.5), {"step": 0.0, "prev": 0.0, "step_size": 0.5}),
        (lambda p: optim.RMSprop(p, centered=True), {"step": 0.0, "square_avg": 0.0, "grad_avg": 0.0}),
        (lambda p: optim.SGD(p, lr=0.1, momentum=0.9), {}),  # the gradient
        (optim.LBFGS, {}),
    ],
)
def test_an_optimiser_tells_its_first_state(optimizer_of, made):
    """What a real first step makes, with its shapes; nothing where the state is not known, and none is changed."""
    weight = nn.Parameter(torch.ones(2, 3))
    optimizer = optimizer_of([weight])
    state = State.of({"optimizer": optimizer})
    found = first_state(state)
    assert {slot.key: full.value for slot, full in found.items()} == made
    assert not optimizer.state
    if made:
        weight.grad = torch.ones(2, 3)
        optimizer.step()
        real = {slot: t for slot, t in state.tensors().items() if slot.kind == "optimizer"}
        assert list(real) == list(found)
        assert all((t.shape, t.dtype) == (found[slot].shape, found[slot].dtype) for slot, t in real.items())
        assert first_state(state) == {}


SHAPES = ((1,), (3,), (5,), (2, 3), (3, 2), (4, 1), (1, 4), (2, 1, 3))


@pytest.mark.parametrize(
    "optimizer_of",
    [optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adadelta, optim.RMSprop, optim.Rprop],
)
def test_the_first_state_is_that_of_each_shape(optimizer_of):
    """Of kinds that differ in lengths one may be asked for all; each has the state that a real step makes for it."""
    weights = [nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    optimizer = optimizer_of(weights)
    state = State.of({"optimizer": optimizer})
    found = first_state(state)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    optimizer.step()
    real = {slot: t for slot, t in state.tensors().items() if slot.kind == "optimizer"}
    assert {slot: t.shape for slot, t in real.items()} == {slot: full.shape for slot, full in found.items()}


def test_an_optimiser_that_computes_with_elements_is_asked_once_for_all_lengths(monkeypatch):
    """Not one of whose state nothing is known, and not where a shape of one element is no proof."""
    asked, shapes = [], [(1,), (3,), (5,), (2, 3), (4, 5)]
    ask = first_state_module._made_for
    monkeypatch.setattr(first_state_module, "_made_for", lambda *given: (asked.append(given[-1].shape), ask(*given))[1])
    cases = (optim.AdamW, [(1,), (3,), (2, 3)]), (lambda p: optim.SGD(p, 0.1, momentum=0.9), shapes)
    for optimizer_of, wanted in cases:
        asked.clear()
        weights = [nn.Parameter(torch.ones(shape)) for shape in shapes]
        first_state(State.of({"optimizer": optimizer_of(weights)}))
        assert [tuple(shape) for shape in asked] == wanted


def train(model, optimizer, x, update=True):
    optimizer.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    if update:
        optimizer.step()
    return loss


class Two(nn.Module):
    """Two layers, of which one is not used."""

    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x):
        return self.used(x)


def test_state_is_made_when_the_optimiser_steps():
    """Not by a call without an update, nor for a parameter without a gradient; the same numbers as on one device."""
    torch.manual_seed(0)
    alone, x = Two(), torch.randn(4, 4)
    optimizer = optim.Adam(alone.parameters(), lr=0.1)
    model = Two()
    model.load_state_dict(alone.state_dict())
    updates = [False, False, True, True, False]
    want = [train(alone, optimizer, x, update).item() for update in updates]
    with LocalTensorMode(2):
        mesh = spmd.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        mine = optim.Adam(model.parameters(), lr=0.1)
        step = spmd.compile(train, mesh, params={"*.weight": [Shard(1)]}, inputs={"x": [Shard(0)]})
        found, entries = [], []
        for update in updates:
            found.append(step(model, mine, x, update).full_tensor().reconcile().item())
            entries.append(len(mine.state))
        assert entries == [0, 0, 2, 2, 2]
        assert len(step.programs) == 3  # no update without state; update; no update with state
        same(found, want, "losses")
        state = {name: t.reconcile() for name, t in tensors(model, mine).items()}
    same(state, tensors(alone, optimizer), "state")


def accumulate(model, optimizer, x):
    model(x).sum().backward()
    optimizer.step()


def looks(model, optimizer, x):
    first = model.used.weight.grad is None
    train(model, optimizer, x)
    return first


def fills_with_zeros(model, optimizer, x):
    optimizer.zero_grad(set_to_none=False)
    accumulate(model, optimizer, x)


def clears_late(model, optimizer, x):
    model(x).sum().backward()
    train(model, optimizer, x)


def assigns(model, optimizer, x):
    for p in model.parameters():
        p.grad = None
    accumulate(model, optimizer, x)


def clears_the_model(model, optimizer, x):
    model.zero_grad()
    accumulate(model, optimizer, x)


def clears_some(model, optimizer, x):
    model.used.zero_grad()
    accumulate(model, optimizer, x)


@pytest.mark.parametrize(
    "step, ignores",
    [(train, True), (assigns, True), (clears_the_model, True), (accumulate, False), (looks, False),
     (fills_with_zeros, False), (clears_late, False), (clears_some, False)],
)  # fmt: skip
def test_a_step_that_clears_its_gradients_ignores_those_it_is_given(step, ignores):
    """Clearing must come before a backward pass and before Python looks at them, and for all that are trained."""
    model = Two()
    given = {"model": model, "optimizer": optim.SGD(model.parameters(), lr=0.1), "x": torch.ones(2, 4)}
    assert captured(step, **given).ignores_gradients == ignores


def test_a_scheduler_may_be_made_after_the_first_call():
    """It asks whether the optimiser has made a step, which a program does not call."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 2), torch.ones(2, 4)
    with LocalTensorMode(2):
        mesh = spmd.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        optimizer = optim.Adam(model.parameters())
        step = spmd.compile(train, mesh)
        step(model, optimizer, x)
        scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        step(model, optimizer, torch.ones(3, 4))
        scheduler.step()  # warns of a step that was not made, and warnings are errors
        assert len(step.programs) == 2
