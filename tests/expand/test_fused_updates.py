"""A fused update is the chain of ops that it stands for, in one op, in place where the chain was."""

import copy

import pytest
import torch
from torch import nn, optim

import spmd
from spmd import LocalTensorMode, Shard
from spmd.expand.passes.passes import FusedUpdates
from tests.steps import train_step

ADAM, ADAMW = (lambda ps: optim.Adam(ps, weight_decay=0.1)), optim.AdamW
FOREACH = lambda ps: optim.AdamW(ps, foreach=True)  # noqa: E731
FUSED, FUSED_ADAM = (
    (lambda ps: optim.AdamW(ps, fused=True)), (lambda ps: optim.Adam(ps, weight_decay=0.1, maximize=True, fused=True)),
)  # fmt: skip


def two_steps(model, optimizer, x):
    return train_step(model, optimizer, x), train_step(model, optimizer, x)


def averaged_step(model, optimizer, x):
    """Reads the old parameters after the update."""
    old = [p.detach().clone() * 1 for p in model.parameters()]
    before = [p.detach() for p in model.parameters()]
    loss = train_step(model, optimizer, x)
    return loss, sum((p.detach() - q).abs().sum() for p, q in zip(model.parameters(), old, strict=True)), len(before)


def trained(step, make, dtype, shape, said, passes):
    """The losses, parameters and state of three steps on simulated ranks; and how many updates were fused."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 3)).to(dtype)
    optimizer, given = make(model.parameters()), torch.randn(8, 6, dtype=dtype)
    with LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        compiled = spmd.compile(step, mesh, inputs={"x": {"dp": Shard(0)}}, passes=passes, **said)
        losses = [compiled(model, optimizer, given) for _ in range(3)]
        state = [x for p in model.parameters() for x in (p, *map(optimizer.state[p].get, ("exp_avg", "exp_avg_sq")))]
        found = [x.full_tensor().reconcile().detach().clone() for x in state]
        fused = sum(getattr(n.target, "__name__", "") == "adamw" for n in compiled.program.graph.nodes)
    first = [x[0] if isinstance(x, tuple) else x for x in losses]
    return [x.full_tensor().reconcile() for x in first], found, fused


SHARDED = {"fully_shard": "dp"}
SPLIT = {"params": {"0.weight": {"tp": Shard(0)}, "0.bias": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}}}


@pytest.mark.parametrize(
    "step, make, dtype, shape, said",
    [
        (train_step, ADAMW, torch.float64, (2, 2), SPLIT),
        (train_step, ADAM, torch.float32, (4, 1), SHARDED),  # rows that 4 ranks do not divide
        (train_step, FOREACH, torch.float64, (4, 1), {}),
        (averaged_step, ADAMW, torch.float64, (4, 1), {}),
        (two_steps, ADAMW, torch.float64, (4, 1), {}),
        (train_step, FUSED, torch.float64, (2, 2), SPLIT),
        (averaged_step, FUSED_ADAM, torch.float32, (4, 1), SHARDED),
    ],
    ids=["AdamW", "Adam in shards", "foreach", "old values read", "twice", "fused", "fused, in shards"],
)
def test_fused_updates_train_as_chains_do(step, make, dtype, shape, said):
    losses, state, fused = trained(step, make, dtype, shape, said, [FusedUpdates()])
    want_losses, want, none = trained(step, make, dtype, shape, said, [])
    assert fused == (8 if step is two_steps else 4) and none == 0
    near = {torch.float64: 1e-14, torch.float32: 1e-6}[dtype]
    torch.testing.assert_close(losses, want_losses, rtol=near, atol=near)
    torch.testing.assert_close(state, want, rtol=near, atol=near)


def test_deterministic_mode_keeps_the_chains():
    with spmd.deterministic():
        *_, fused = trained(train_step, ADAMW, torch.float32, (4, 1), {}, [FusedUpdates()])
    assert fused == 0


def test_an_optimiser_that_is_fused_stays_so():
    """By default, and as on one device, to the last bit, also where the learning rate changes."""
    torch.manual_seed(0)
    given, start = torch.randn(8, 6), nn.Linear(6, 10)

    def step(model, optimizer, x):
        optimizer.zero_grad()
        (model.weight * x[:1].sum() + model.bias.sum()).sum().backward()
        optimizer.step()

    def trained_by(run, model):
        optimizer = optim.AdamW(model.parameters(), 0.1, fused=True)
        for lr in (0.1, 0.1, 0.07, 0.05):
            optimizer.param_groups[0]["lr"] = lr
            run(model, optimizer, given)
        return [x for p in model.parameters() for x in (p, *map(optimizer.state[p].get, ("step", "exp_avg_sq")))]

    with LocalTensorMode(2):
        compiled = spmd.compile(step, spmd.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
        found = [x.full_tensor().reconcile().detach() for x in trained_by(compiled, copy.deepcopy(start))]
    assert sum(getattr(n.target, "__name__", "") == "adamw" for n in compiled.program.graph.nodes) == 2
    assert all(map(torch.equal, found, trained_by(step, start)))


@pytest.mark.parametrize(
    "make",
    [
        lambda ps: optim.AdamW(ps, 0.1, amsgrad=True, fused=True),
        lambda ps: optim.Adam(ps, 0.1, weight_decay=0.01, fused=True),
        lambda ps: optim.SGD(ps, 0.1, momentum=0.9, weight_decay=0.01, fused=True),
        lambda ps: optim.Adagrad(ps, 0.1, lr_decay=0.01, fused=True),
    ],
    ids=["AdamW", "Adam", "SGD", "Adagrad"],
)
def test_a_learning_rate_of_a_fused_optimiser_is_a_number_of_the_program(make):
    torch.manual_seed(0)
    model, x, programs = nn.Linear(6, 10).double(), torch.randn(8, 6, dtype=torch.float64), []
    compiled = spmd.compile(train_step, spmd.DeviceMesh("cpu", [0], mesh_dim_names=("dp",)))
    for run, trained in ((train_step, model), (compiled, copy.deepcopy(model))):
        optimizer = make(trained.parameters())
        scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
        for _ in range(4):
            run(trained, optimizer, x)
            scheduler.step()
            programs += [compiled.program] if run is compiled else []
    assert all(each is programs[1] for each in programs[1:])  # SGD's momentum begins as the gradient
    found = [p.full_tensor().detach() for p in trained.parameters()]
    torch.testing.assert_close(found, [p.detach() for p in model.parameters()], rtol=1e-12, atol=1e-12)
