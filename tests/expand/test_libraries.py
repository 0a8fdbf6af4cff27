"""Numbers and values in objects of installed packages and of Python's library: what a step keeps there changes."""


import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import spmd
from spmd import LocalTensorMode, Shard

CALLS = 6
X = [torch.linspace(-1.0, 2.0 + i, 32, dtype=torch.float64).reshape(8, 4) for i in range(CALLS)]

SCHEDULES = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.9**n + 0.1),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda n: 0.9),
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 4], 0.5),
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.2, 1.0, 4),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
}


class Wrapped:
    """A schedule as a trainer's library wraps it."""

    def __init__(self, schedule):
        self.schedule, self.steps_taken = schedule, 0

    def step(self):
        self.steps_taken += 1
        self.schedule.step()


Wrapped.__module__ = "transformers.trainer_utils"


def train(model, optimizer, schedule, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    schedule.step()
    return loss.detach()


def net():
    torch.manual_seed(0)
    return nn.Linear(4, 4, dtype=torch.float64)


def whole(x):
    return x.full_tensor() if isinstance(x, spmd.DTensor) else x


def training(make, is_wrapped, is_given, compiled, **options):
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = inner = make(optimizer)
    if is_wrapped:
        schedule = Wrapped(schedule)
    if is_given:
        step = train
    else:
        def step(model, optimizer, x):
            return train(model, optimizer, schedule, x)
    run = compiled(step) if compiled else step
    rows = []
    for x in X:
        given = (model, optimizer, schedule, x) if is_given else (model, optimizer, x)
        loss = run(*given)
        rates = optimizer.param_groups[0]["lr"], *inner.get_last_lr()
        rows.append((whole(loss).item(), *rates, inner.last_epoch, getattr(schedule, "steps_taken", 0)))
    return rows, [whole(p.detach()) for p in model.parameters()]


@pytest.mark.parametrize("is_given", [True, False], ids=["given", "around"])
@pytest.mark.parametrize("is_wrapped", [True, False], ids=["wrapped", "plain"])
@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("shard", [None, "dp"], ids=["dp", "fully sharded"])
def test_a_schedule_in_a_step_is_that_of_one_device(name, is_wrapped, is_given, shard):
    want, parameters = training(SCHEDULES[name], is_wrapped, is_given, None)
    with LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))

        def compiled(step):
            return spmd.compile(step, mesh, inputs={"x": {"dp": Shard(0)}}, fully_shard=shard)

        got, mine = training(SCHEDULES[name], is_wrapped, is_given, compiled)
        for row, expected in zip(got, want, strict=True):
            assert row == pytest.approx(expected, rel=1e-12)
        for p, expected in zip(mine, parameters, strict=True):
            torch.testing.assert_close(p.reconcile(), expected)
