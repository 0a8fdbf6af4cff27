"""A parameter that anybody holds is the one that is trained, whoever placed it and whenever."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import spmd
from spmd import LocalTensorMode, Replicate, Shard, distribute_module, distribute_tensor
from spmd.sim import localize
from tests.expand.side_by_side import INPUTS, NET, Net, rows, same, seeded, values
from tests.ways import run

X, Y = rows(8, 1)[0]
MODEL = seeded(Net)


def mesh():
    return spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def evaluate(model, x, y):
    return F.cross_entropy(model(x), y)


def forward_backward(model, x, y):
    loss = evaluate(model, x, y)
    loss.backward()
    return loss


# ---- ways to place a model whose optimiser exists already -------------------------------------
# Each gives the function that computes the loss and the gradients.


def on_one_device(model):
    return lambda: forward_backward(model, X, Y)


def by_a_compiled_step(model):
    step = spmd.compile(forward_backward, mesh(), params=NET, inputs=INPUTS)
    return lambda: step(model, X, Y)


def by_a_compiled_evaluation(model):
    step = spmd.compile(evaluate, mesh(), params=NET)
    with torch.no_grad():
        step(model, X, Y)
    return lambda: forward_backward(model, *(distribute_tensor(t, mesh(), src_data_rank=None) for t in (X, Y)))


def by_patterns(model):
    distribute_module(model, mesh(), params=NET)
    assert model.up.weight.placements == (Replicate(), Shard(0)) and model.norm.weight.placements == (Replicate(),) * 2
    return lambda: forward_backward(model, *(distribute_tensor(t, mesh(), src_data_rank=None) for t in (X, Y)))


def rows_of_up(name, module, mesh):
    if name == "up":
        for key, p in list(module.named_parameters()):
            setattr(module, key, nn.Parameter(distribute_tensor(p.detach(), mesh, [Replicate(), Shard(0)])))


def by_a_function(model):
    distribute_module(model, mesh(), rows_of_up)
    assert model.up.bias.placements == (Replicate(), Shard(0))
    return lambda: forward_backward(model, *(distribute_tensor(t, mesh(), src_data_rank=None) for t in (X, Y)))


def with_one_copy_a_rank(model):
    localize(model)
    return lambda: forward_backward(model, X, Y)


PLACED = [by_a_compiled_step, by_a_compiled_evaluation, by_patterns, by_a_function]


# ---- what is trained --------------------------------------------------------------------------


def trained(has_momentum: bool, *ways: Callable) -> list:
    """For each way the losses of three steps of an optimiser that was made first, and then the parameters that a list
    held from the beginning."""
    return [_trained(has_momentum, place) for place in ways]


def _trained(has_momentum: bool, place: Callable) -> list:
    model = copy.deepcopy(MODEL)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    held, weak = list(model.parameters()), weakref.ref(model.up.weight)
    model.tied, model.up.weight.note = [model.up.weight], "kept"
    if has_momentum:
        forward_backward(model, X, Y)
        optimizer.step()
    output = model(X)  # a graph that is alive saves parameters, and views of them
    step, losses = place(model), []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(values(step()))
        optimizer.step()
    del output
    assert all(p is q for p, q in zip(model.parameters(), held, strict=True))
    assert weak() is model.up.weight is model.tied[0] and weak().note == "kept" and isinstance(weak(), nn.Parameter)
    return [*losses, *map(values, held)]


@pytest.mark.parametrize("way", ["simulated", "gloo"])
def test_an_optimiser_made_before_trains_the_model(way, gloo4):
    """Also with momentum from steps before; on simulated ranks that would be a plain tensor that all of them write."""
    has_momentum = way == "gloo"
    want = _trained(has_momentum, on_one_device)
    extra = [] if has_momentum else [with_one_copy_a_rank]
    for ranks in run(way, gloo4, trained, has_momentum, *PLACED, *extra):
        for place, got in zip([*PLACED, with_one_copy_a_rank], ranks, strict=False):
            same(got, want, place.__name__)


def test_hooks_go_on_and_old_graphs_are_refused():
    """Hooks of a parameter see its new gradients. A pass through an older graph would lose them."""
    with LocalTensorMode(4):
        model, seen = copy.deepcopy(MODEL), []
        handle = model.up.weight.register_hook(lambda g: seen.append(g.shape))
        model.up.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p is model.up.weight))
        before = evaluate(model, X, Y)
        step = by_patterns(model)
        step()
        handle.remove()
        step()
        with pytest.raises(RuntimeError, match=r"a graph that was recorded before a parameter of shape"):
            before.backward()
    assert seen == [(8, 4), True, True]


class Slotted(nn.Parameter):
    __slots__ = ("extra",)


def with_a_view(model):
    return model.up.weight[0]


def with_another_layout(model):
    model.up.weight = Slotted(model.up.weight.detach())


STUCK = {with_a_view: "has a view that is alive", with_another_layout: "is of the class Slotted, whose objects have"}


@pytest.mark.parametrize("held", STUCK, ids=lambda fn: fn.__name__)
def test_what_cannot_stay_the_object_that_it_is_changes_nothing(held):
    with LocalTensorMode(4):
        for place in (lambda model: by_a_compiled_step(model)(), by_patterns, with_one_copy_a_rank):
            model = copy.deepcopy(MODEL)
            kept = held(model)
            before = dict(model.named_parameters())
            with pytest.raises(RuntimeError, match=rf"up.weight {STUCK[held]}"):
                place(model)
            assert all(p is before[name] and type(p) in (nn.Parameter, Slotted) for name, p in model.named_parameters())
            del kept
