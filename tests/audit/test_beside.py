"""Calls of compiled steps are compared with those of one device in a copy of the process, which sees nothing of it."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from torch import nn

import spmd
from spmd import CompiledStep, LocalTensorMode, Shard
from tests.audit import beside
from tests.audit.beside import audited

pytestmark = pytest.mark.not_audited("they are audited themselves")


class Counts(nn.Linear):
    """A layer that counts its calls, every second of which is twice as much."""

    def __init__(self):
        super().__init__(4, 4, dtype=torch.float64)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return super().forward(x) * (1 + self.calls % 2)


def train(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return {"loss": loss.detach(), "weight": model.weight, "sizes": [x.shape[0]]}


def run(audit_calls: int, after=lambda model, n: None, sharded="dp"):
    """Train for five calls. after: what is done in each call behind the compiled step."""
    real = beside.REAL

    def call(step, model, *args):
        result = real(step, model, *args)
        after(model, model.calls)
        return result

    with mock.patch.object(beside, "REAL", call), LocalTensorMode(4) as mode, audited(audit_calls) as audit:
        mesh = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        torch.manual_seed(0)
        model = Counts()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        step = spmd.compile(train, mesh, inputs={"x": {"dp": Shard(0)}}, fully_shard=sharded)
        for i in range(5):
            step(model, optimizer, torch.linspace(-1, 1 + i, 32, dtype=torch.float64).reshape(8, 4))
        sent = len(mode.sent)
        return audit, audit.found(), sent


@pytest.mark.parametrize("sharded", [None, "dp"])
def test_a_step_that_is_right_is_found_right(sharded):
    audit, found, _ = run(4, sharded=sharded)
    assert found == [] and (audit.checked, audit.compared, dict(audit.alone)) == (5, 4, {})


def adds(model, n):
    model.calls += n == 3


def moves(model, n):
    if n == 2:
        with torch.no_grad():
            model.weight.mul_(1.01)


def keeps(model, n):
    if n == 2:
        model.seen = [n]


def leaves(model, n):
    if n == 5:
        model.seen = [torch.SymInt.__new__(torch.SymInt)]


FAULTS = {
    adds: "train, call 2: argument 0.calls: 3 on one device, and compiled 4",
    moves: "train, call 1: argument 0.weight: ",
    keeps: "train, call 1: argument 0 attributes: compiled it has ['seen'], too",
    leaves: "train, call 4: argument 0.seen[0]: a SymInt was left there, which stood for a value in a capture",
}
"""What is done to a model behind its step, and what the audit of four calls says first."""


@pytest.mark.parametrize("fault", FAULTS)
def test_the_first_call_that_differs_is_told(fault):
    _, found, _ = run(4, fault)
    assert len(found) == 1 and found[0].startswith(FAULTS[fault])


def test_the_process_sees_nothing_of_it():
    """No rank sends more, and every call finds what it would find."""
    assert run(0)[2] == run(4)[2]


def test_a_call_that_is_refused_is_not_compared():
    def step(x):
        raise ValueError("no")

    with audited(3) as audit, pytest.raises(ValueError, match="no"):
        spmd.compile(step, spmd.DeviceMesh("cpu", [0], mesh_dim_names=("dp",)))(torch.ones(2))
    assert audit.found() == [] and audit.checked == 0


def draws(x):
    return x + torch.rand(2)


def test_what_cannot_be_compared_is_counted():
    with audited(3) as audit:
        spmd.compile(draws, spmd.DeviceMesh("cpu", [0], mesh_dim_names=("dp",)))(torch.ones(2))
        assert audit.found() == []
    assert audit.compared == 0 and "its random numbers are of another generator" in next(iter(audit.alone))
    assert CompiledStep.__call__ is beside.REAL
