"""Parameters that are stored in shards, in programs that are chosen as a whole."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

import spmd
from spmd import FullyShard, Shard
from spmd.expand.choose.choice import Choice
from spmd.expand.choose.price import program_cost
from spmd.tensor.spec import parse_spec
from tests.expand.places.trained import check, train_step

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def test_micro_batches_train_as_on_one_device():
    """Four phases, gradients that are sums of two passes, tied, frozen and unused parameters, uneven shards."""
    check({"dp": 2, "tp": 2}, SGD, train_step, 2, choose="program", fully_shard=FullyShard("dp", 2))


def step_of(model, optimizer, x):
    loss = model(x).square().sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def program(words: int, choose: str = "program", **sharding):
    """Of two large layers. Nothing runs."""
    mesh = spmd.DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("dp",))
    model = nn.Sequential(nn.Linear(512, 512, bias=False), nn.ReLU(), nn.Linear(512, 512, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    said = {"fully_shard": FullyShard("dp", **sharding), "inputs": {"x": {"dp": Shard(0)}}}
    step = spmd.compile(step_of, mesh, choose=choose, bucket_mb=None, **said)
    return step.program_for(model, optimizer, torch.randn(words, 512))


def gathers(found) -> int:
    """How many gathers of a whole weight the program makes."""
    weight = 512 * 512 * 4
    return sum(c.kind == "all_gather" and c.nbytes * 4 == weight for c in found.collectives)


def test_weights_are_gathered_in_each_phase_where_there_are_many_words():
    """The first layer is read in the forward alone: its input needs no gradient."""
    assert gathers(program(1 << 16)) == 3
    assert gathers(program(1 << 16, reshard_after_forward=False)) == 2


def test_few_words_are_moved_to_the_weights():
    """No weight is gathered where activations are smaller, and less is sent than by op."""
    few, by_op = program(16), program(16, "op")
    assert gathers(few) == 0 < gathers(by_op)
    assert sum(c.nbytes for c in few.collectives) < sum(c.nbytes for c in by_op.collectives) / 4


def test_what_is_computed_from_a_weight_has_the_order_of_its_axes():
    """Few words come to weights that tp and then dp share out, and the gradients of weights and biases are made where
    they go. The bias that is added to what is owed is a term of it, and so nothing but the result is reduced."""
    mesh = spmd.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 64))
    params = {"model.0.*": {"tp": Shard(0)}, "model.2.weight": {"tp": Shard(1)}}
    said = {"fully_shard": "dp", "params": params, "inputs": {"x": {"dp": Shard(0)}}}
    step = spmd.compile(step_of, mesh, choose="program", bucket_mb=None, **said)
    found = step.program_for(model, torch.optim.SGD(model.parameters(), 0.1), torch.randn(64, 64))
    assert [(c.kind, c.axis) for c in found.collectives] == [("all_gather", "dp"), ("all_reduce", "dp,tp")]
    assert program_cost(found).us == pytest.approx(found.certificate.solved)


def test_values_are_held_as_they_are_chosen():
    """A value that owes sums may be held with a part of them; where less is owed than was foreseen no more is."""
    mesh = spmd.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    node = torch.fx.Graph().placeholder("x")

    def held(made: str, of: str) -> str:
        return str(Choice(held={node: parse_spec(of, mesh)}).spec_of(node, parse_spec(made, mesh)))

    assert held("f32[8, 8] +sum@dp +sum@tp", "f32[8, 8] +sum@tp") == "f32[8, 8] +sum@tp"
    assert held("f32[8, 8] +sum@dp", "f32[8, 8@dp] +sum@tp") == "f32[8, 8@dp]"
    assert held("f32[8@tp,dp, 8]", "f32[8@dp,tp, 8]") == "f32[8@tp,dp, 8]"
    assert held("f32[8, 8] +sum@dp +sum@tp", "f32[8@tp,dp, 8]") == "f32[8@tp,dp, 8]"


def test_what_is_kept_is_priced_once():
    """A certificate has the cost of the program that runs, also where gathers of the backward were left out."""
    kept = program(1 << 16, reshard_after_forward=False)
    assert kept.certificate.us == pytest.approx(program_cost(kept).us)
