"""Steps of one function share what is captured of it: a capture is of one device, whatever the mesh and the places."""

from __future__ import annotations

import gc
import types
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmd
from spmd import LocalTensorMode, MixedPrecision, Shard, local_map
from spmd.expand.compile import CompiledStep

SCALE = 2.0


def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.mse_loss(model(x).float() * SCALE, y)
    loss.backward()
    optimizer.step()
    return loss


def plain(model, x):
    return model(x)


def of_blocks(model, x):
    return local_map(torch.relu, [spmd.Replicate()], ([spmd.Replicate()],))(model(x))


def pair(bias: bool = True):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6, bias=bias), nn.Tanh(), nn.Linear(6, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def fresh(fn):
    """The same function once more: what other tests have captured of it is not of this one."""
    return types.FunctionType(fn.__code__, globals(), fn.__name__)


@pytest.fixture
def captures():
    """How often something is captured."""
    real, made = CompiledStep._capture, []

    def counted(self, call, changed):
        made.append(call.common_key)
        return real(self, call, changed)

    with mock.patch.object(CompiledStep, "_capture", counted):
        yield made


BATCH = torch.arange(32.0).view(8, 4) / 16, torch.arange(24.0).view(8, 3) / 16
ROWS = {"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}}
MEGATRON = {"0.*": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}}


def on_mesh(*shape):
    return spmd.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))


def losses(step, *given):
    with LocalTensorMode(4):
        return [step(*given, *BATCH).full_tensor().reconcile().item() for _ in range(2)]


def test_meshes_and_plans_share_a_capture(captures):
    """Each of them trains as one device does."""
    model, optimizer = pair()
    wanted = [train_step(model, optimizer, *BATCH).item() for _ in range(2)]
    fn = fresh(train_step)
    with LocalTensorMode(4):
        kept = [
            spmd.compile(fn, on_mesh(2, 2), params=MEGATRON, inputs=ROWS),
            spmd.compile(fn, on_mesh(4, 1), inputs=ROWS),
            spmd.compile(fn, on_mesh(2, 2), inputs=ROWS, fully_shard="dp"),
            spmd.compile(fn, on_mesh(1, 4), params=MEGATRON, choose="program"),
        ]
    for step in kept:
        torch.testing.assert_close(losses(step, *pair()), wanted)
    assert len(captures) == 1
    assert len({str(step.program) for step in kept}) == 4


@pytest.mark.parametrize("what", ["a global", "the precision", "the state", "the optimiser's options"])
def test_what_a_capture_depends_on_is_captured_anew(what, captures, monkeypatch):
    def wanted(**options):
        model, optimizer = pair(**options)
        optimizer.param_groups[0].update(changed)
        return [train_step(model, optimizer, *BATCH).item() for _ in range(2)]

    changed, options, settings, fn = {}, {}, {}, fresh(train_step)
    with LocalTensorMode(4):
        first = spmd.compile(fn, on_mesh(2, 2), inputs=ROWS)
    torch.testing.assert_close(losses(first, *pair()), wanted())
    if what == "a global":
        monkeypatch.setattr(f"{__name__}.SCALE", 3.0)
    elif what == "the precision":
        settings["mixed_precision"] = MixedPrecision(torch.bfloat16)
    elif what == "the state":
        options["bias"] = False
    else:
        changed["amsgrad"] = True
    with LocalTensorMode(4):
        second = spmd.compile(fn, on_mesh(4, 1), inputs=ROWS, **settings)
    given = pair(**options)
    given[1].param_groups[0].update(changed)
    close = {"rtol": 0.05, "atol": 0.05} if settings else {}
    torch.testing.assert_close(losses(second, *given), wanted(**options), **close)
    assert len(captures) == 2


@pytest.mark.parametrize("fn, times", [(plain, 1), (of_blocks, 2)])
def test_functions_of_blocks_belong_to_their_mesh(fn, times, captures):
    again = fresh(fn)
    with LocalTensorMode(4):
        kept = [spmd.compile(again, spmd.init_device_mesh("cpu", (4,), mesh_dim_names=(axis,))) for axis in "ab"]
        model, _ = pair()
        want = fn(model, BATCH[0]) if fn is plain else model(BATCH[0]).relu()
        for step in kept:
            torch.testing.assert_close(step(pair()[0], BATCH[0]).full_tensor().reconcile(), want)
    assert len(captures) == times


def test_a_capture_is_forgotten_with_its_steps(captures):
    def local(model, x):
        return model(x)

    with LocalTensorMode(4):
        for _ in range(2):
            step = spmd.compile(local, on_mesh(2, 2))
            step(pair()[0], BATCH[0])
            del step
            gc.collect()
    assert len(captures) == 2


@pytest.mark.parametrize("cleared", [(), (0,), (0, 1, 2, 3)], ids=["none", "one", "all"])
def test_a_capture_that_ignores_gradients_serves_another_size_without_them(cleared):
    """The traced call has gradients of an earlier backward; the next batch is shorter, and some of them are gone."""

    def run(step, model, optimizer, batch):
        F.mse_loss(model(batch[0]), batch[1]).backward()
        found = [step(model, optimizer, *batch)]
        for i in cleared:
            list(model.parameters())[i].grad = None
        return [*found, step(model, optimizer, *[t[:4] for t in batch])]

    alone = run(fresh(train_step), *pair(), BATCH)
    with LocalTensorMode(4), spmd.implicit_replication():
        step = spmd.compile(fresh(train_step), on_mesh(4, 1), inputs=ROWS)
        model, optimizer = pair()
        found = run(step, model, optimizer, BATCH)
    for got, want in zip(found, alone, strict=True):
        torch.testing.assert_close(got.full_tensor().reconcile(), want)
