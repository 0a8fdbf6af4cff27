"""Backends compile what a rank runs between its collectives; these and their order stay."""

from __future__ import annotations

import shutil
from collections import Counter

import pytest
import torch
from torch import nn, optim

import spmd
from spmd import LocalTensorMode
from spmd.comm import C10dTransport
from spmd.expand.code import code_for
from spmd.expand.regions import Region, with_compiled_regions
from spmd.mesh import as_rank
from tests.expand.side_by_side import GPT_PLAN, INPUTS, NET, Net, gpt, rows, tokens, train_step
from tests.tensor.single import every_rank

MESH = spmd.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))

def identity(region, **options):
    return region


def split(layers: int, monkeypatch):
    """A rank's code of a GPT step, before and after it is split. Nothing is compiled."""
    monkeypatch.setattr(torch, "compile", identity)
    model = gpt(n_layer=layers)
    step = spmd.compile(train_step, MESH, params=GPT_PLAN, inputs=INPUTS)
    program = step.program_for(model, optim.AdamW(model.parameters()), *tokens(4, 1)[0])
    with as_rank(0):
        code = code_for(program, (0, 0), C10dTransport()).module
    return code, with_compiled_regions(code, "aot_eager")


def sent(module) -> list[str]:
    namespaces = ((n, getattr(n.target, "namespace", "")) for n in module.graph.nodes)
    return [f"{n.name} {n.args[1:]}" for n, namespace in namespaces if namespace == "_c10d_functional"]


def test_collectives_stay_and_layers_share_their_regions(monkeypatch):
    """Three layers have not one region more than two, forward, backward or update; every op is in one of them."""
    distinct = []
    for layers in (2, 3):
        code, whole = split(layers, monkeypatch)
        assert sent(code) == sent(whole)
        regions = [n.target for n in whole.graph.nodes if isinstance(n.target, Region)]
        distinct.append(len(set(regions)))
        assert len(regions) > 2 * len(set(regions))
        left = Counter(str(n.target) for n in whole.graph.nodes if n.op == "call_function")
        assert not [name for name in left if name.startswith("aten.") and "_local_scalar_dense" not in name], left
    assert distinct[0] == distinct[1]


@pytest.mark.parametrize("make", [lambda p: optim.AdamW(p, 0.01), lambda p: optim.SGD(p, 0.1, momentum=0.9)])
def test_numbers_are_those_of_the_ops_one_by_one(make, monkeypatch):
    """Regions write into parameters that others read, and get learning rates that change."""
    monkeypatch.setattr(torch, "compile", identity)
    found = []
    for backend in ("eager", "aot_eager"):
        with LocalTensorMode(4):
            torch.manual_seed(0)
            model = Net().double()
            optimizer = make(model.parameters())
            step = spmd.compile(train_step, MESH, params=NET, inputs=INPUTS, backend=backend)
            for i, (x, y) in enumerate(rows(6)):
                optimizer.param_groups[0]["lr"] = 0.01 / (i + 1)
                step(model, optimizer, x.double(), y)
            found.append([every_rank(p.detach()) for p in model.parameters()])
    for ours, theirs in zip(*found, strict=True):
        for x, y in zip(ours, theirs, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)


def test_a_new_learning_rate_compiles_nothing():
    """torch.compile makes each region once: the numbers of a step are tensors there."""
    compiled = []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    mesh = spmd.DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
    model = nn.Linear(4, 3)
    optimizer = optim.SGD(model.parameters(), 0.1, momentum=0.9)
    step = spmd.compile(train_step, mesh, backend=backend)
    x, y = torch.ones(2, 4), torch.zeros(2, dtype=torch.long)
    counts = []
    for i in range(5):
        optimizer.param_groups[0]["lr"] = 0.1 / (i + 1)
        step(model, optimizer, x, y)
        counts.append(len(compiled))
    assert counts[0] == 1 and counts[1:] == [2] * 4, counts  # the first call makes the momentum


def test_what_is_missing_is_said_at_once(monkeypatch):
    with pytest.raises(ValueError, match=r"backend is 'induct'; give \"eager\", .*'inductor'"):
        spmd.compile(train_step, MESH, backend="induct")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"no C\+\+ compiler on this machine: install g\+\+, name one in \$CXX"):
        spmd.compile(train_step, MESH, backend="inductor")
