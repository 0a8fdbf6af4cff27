"""Modules and optimisers that a step uses without being given them are state like its arguments."""

from __future__ import annotations

import copy
import functools
import sys
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmd
from spmd import DTensor, LocalTensorMode, Shard
from spmd.expand.closed_over import is_installed
from tests.expand.side_by_side import rows, same, seeded, values
from tests.ways import run

X, Y = rows(8, 1)[0]
MODEL = seeded(lambda: nn.Linear(4, 3))
INPUTS = {"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}}


def pair():
    model = copy.deepcopy(MODEL)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


# ---- steps of (x, y), each with a model and an optimiser of its own ---------------------------


def variables_around():
    model, optimizer = pair()

    def step(x, y):
        return train(model, optimizer, x, y)

    return step


def only_the_optimiser():
    model, optimizer = pair()
    return functools.partial(lambda model, x, y: train(model, optimizer, x, y), model)


def globals_that_a_helper_names():
    global _model, _optimizer
    _model, _optimizer = pair()
    return lambda x, y: by_globals(x, y)


def by_globals(x, y):
    return train(_model, _optimizer, x, y)


def bound_arguments():
    return functools.partial(train, *pair())


class Trainer:
    def __init__(self):
        self.model, optimizer = pair()
        self.optimizers = {"main": [optimizer]}
        self.unused = nn.Linear(2, 2)

    def step(self, x, y):
        return self.train(x, y)

    def train(self, x, y):
        return train(self.model, self.optimizers["main"][0], x, y)

    __call__ = step


class TrainingModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.optimizer = pair()

    def step(self, x, y):
        return train(self.net, self.optimizer, x, y)


def methods_of_an_object():
    return Trainer().step


def objects_that_are_called():
    return Trainer()


def methods_of_a_module():
    return TrainingModule().step


STEPS = [
    variables_around, only_the_optimiser, globals_that_a_helper_names, bound_arguments, methods_of_an_object,
    objects_that_are_called, methods_of_a_module,
]  # fmt: skip


def trained(*steps) -> list:
    """For each step what three calls return on the ranks."""
    mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    params = {"*weight": {"tp": Shard(0)}}
    compiled = [spmd.compile(make(), mesh, params=params, inputs=INPUTS) for make in steps]
    return [[values(step(X, Y)) for _ in range(3)] for step in compiled]


@pytest.mark.parametrize("way, steps", [("simulated", STEPS), ("gloo", STEPS[1:2])], ids=["simulated", "gloo"])
def test_they_are_trained(way, steps, gloo4):
    step = variables_around()
    want = [values(step(X, Y)) for _ in range(3)]
    for ranks in run(way, gloo4, trained, *steps):
        for make, got in zip(steps, ranks, strict=True):
            same(got, want, make.__name__)


def test_a_module_is_a_step_and_variables_may_change():
    """The names are looked up at each call. What the code does not name stays as it is."""
    with LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        net = nn.Linear(4, 3)
        assert str(spmd.compile(net, mesh, inputs={"input": {"dp": Shard(0)}})(X)._spec) == "f32[8@dp, 3]"
        trainer = Trainer()
        step = spmd.compile(lambda x: trainer.model(x), mesh)
        first = step(X)
        trainer.model = nn.Linear(4, 2)
        assert (first.shape, step(X).shape) == ((8, 3), (8, 2))
        assert isinstance(trainer.model.weight, DTensor) and not isinstance(trainer.unused.weight, DTensor)


def with_a_hidden_optimiser(model, optimizer):
    held = types.SimpleNamespace(hidden=optimizer)
    return lambda model, x, y: train(model, vars(held)["".join(["hid", "den"])], x, y)


def with_a_list_of_parameters(model, optimizer):
    params = list(model.parameters())

    def step(model, x, y):
        F.cross_entropy(model(x), y).backward()
        return nn.utils.clip_grad_norm_(params, 1.0)

    return step


@pytest.mark.parametrize(
    "make, kind, message",
    [
        (with_a_hidden_optimiser, RuntimeError, r"the step of an optimiser \(SGD\) that is not among its arguments"),
        (with_a_list_of_parameters, TypeError, r"the step uses params.0, a parameter outside of its module"),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_what_cannot_be_found_or_seen_is_an_error(make, kind, message):
    """Before anything is placed."""
    with LocalTensorMode(4):
        model, optimizer = pair()
        step = spmd.compile(make(model, optimizer), spmd.init_device_mesh("cpu", (4,)))
        with pytest.raises(kind, match=message):
            step(model, X, Y)
        assert type(model.weight) is nn.Parameter


def test_a_package_that_is_imported_later_is_known_as_installed(monkeypatch):
    """It may have been asked for before."""
    monkeypatch.delitem(sys.modules, "pytest")
    assert not is_installed("pytest")
    monkeypatch.setitem(sys.modules, "pytest", pytest)
    assert is_installed("pytest")
