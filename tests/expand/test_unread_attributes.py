"""Attributes of modules that only code outside of the step uses may change without another capture."""

import copy
import types

import pytest
import torch
from torch import nn

import spmd
from tests.expand.test_sizes import captures

X = torch.linspace(-2.0, 3.0, 12).reshape(4, 3)
CALLS = 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls = nn.Linear(3, 3), 0

    def forward(self, x):
        return self.linear(x).tanh()


class Noted(nn.Module):
    """Notes what happens, and has a rate."""

    def __init__(self, read=None):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.losses, self.epoch, self.best = [], 0, None
        self.seen, self.state = {"rows": 0}, types.SimpleNamespace(step=0)
        self.read = read

    @property
    def epochs(self):
        return self.epoch

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.sum() * (1.0 if self.read is None else self.read(self))


def lines():
    return spmd.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))


def whole(x):
    return x.full_tensor() if isinstance(x, spmd.DTensor) else x


CHANGES = {
    "a list": lambda m: m.losses.append(0.5),
    "a count": lambda m: setattr(m, "epoch", m.epoch + 1),
    "a dict": lambda m: m.seen.update(rows=m.seen["rows"] + 1),
    "an object": lambda m: setattr(m.state, "step", m.state.step + 1),
    "a new attribute": lambda m: setattr(m, f"note_{m.epoch}", object()) or setattr(m, "epoch", m.epoch + 1),
    "None": lambda m: setattr(m, "best", None if m.best else object()),
    "of a block": lambda m: setattr(m.blocks[2], "calls", m.blocks[2].calls + 1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_no_code_of_the_step_reads_asks_for_one_more_capture(change):
    """For each name: that of the change is told apart from what is read by a capture that watches."""
    model = Noted()
    alone = copy.deepcopy(model)
    step = spmd.compile(lambda model, x: model(x), lines())
    with captures() as made:
        for _ in range(CALLS):
            torch.testing.assert_close(whole(step(model, X)), alone(X))
            CHANGES[change](model)
    assert len(made) == (CALLS if change == "a new attribute" else 2)


def _in_a_helper(model):
    return 1.0 + model.epoch


READS = {
    "an attribute": lambda m: 1.0 + m.epoch,
    "getattr": lambda m: 1.0 + getattr(m, "epo" + "ch"),
    "vars": lambda m: 1.0 + vars(m)["epoch"],
    "all of vars": lambda m: 1.0 + dict(vars(m).items())["epoch"],
    "a copy": lambda m: 1.0 + copy.copy(m).epoch,
    "a property": lambda m: 1.0 + m.epochs,
    "a helper": _in_a_helper,
    "hasattr": lambda m: 1.0 if hasattr(m, "epoch_9") else 1.0 + m.__dict__.get("epoch", 0),
    "of a block": lambda m: 1.0 + m.blocks[2].calls,
}


@pytest.mark.parametrize("read", READS)
def test_what_code_reads_stays_a_guard(read):
    model = Noted(READS[read])
    alone = copy.deepcopy(model)
    step = spmd.compile(lambda model, x: model(x), lines())
    found = []
    for _ in range(CALLS):
        found.append(whole(step(model, X)))
        torch.testing.assert_close(found[-1], alone(X))
        for m in (model, alone):
            CHANGES["a count"](m)
            CHANGES["of a block"](m)
            CHANGES["a list"](m)
    assert not torch.equal(found[0], found[-1])


def test_hooks_and_backward_passes_read_too():
    """The gradient hook of a module runs in the backward pass."""
    model = Noted()
    model.blocks[1].register_full_backward_hook(lambda m, into, out: tuple(g * (1 + model.epoch) for g in into))
    model.blocks[0].register_forward_hook(lambda m, args, out: out * (1 + m.calls))
    alone = copy.deepcopy(Noted())
    alone.load_state_dict(model.state_dict())
    alone.blocks[1].register_full_backward_hook(lambda m, into, out: tuple(g * (1 + alone.epoch) for g in into))
    alone.blocks[0].register_forward_hook(lambda m, args, out: out * (1 + m.calls))

    def step(model, x):
        loss = model(x)
        loss.backward()
        return loss, [p.grad for p in model.parameters()]

    ours = spmd.compile(step, lines())
    for _ in range(4):
        expected, got = step(alone, X), ours(model, X)
        for mine, theirs in zip([got[0], *got[1]], [expected[0], *expected[1]], strict=True):
            torch.testing.assert_close(whole(mine), theirs.detach())
        for m in (model, alone):
            m.zero_grad()
            CHANGES["a count"](m)
            m.blocks[0].calls += 1


def test_a_capture_of_another_size_may_read_what_the_first_did_not():
    """From then on it is a guard for all."""
    model = Noted(lambda m: 1.0 + (m.epoch if m.rows == 3 else 0.0))
    alone = copy.deepcopy(model)

    def step(model, x):
        model.rows = 3 if x.shape[0] == 3 else 0
        found = model(x)
        del model.rows
        return found

    ours = spmd.compile(step, lines())
    for i in range(10):
        x = X[:3] if i in (4, 7) else X
        torch.testing.assert_close(whole(ours(model, x)), step(alone, x))
        for m in (model, alone):
            CHANGES["a count"](m)
