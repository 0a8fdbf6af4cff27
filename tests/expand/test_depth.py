"""What a further layer costs: of what is equal to the layer before, nothing is decided again."""

import pytest
import torch

import spmd
from examples.gpt import GPT, GPTConfig, train_step
from spmd import Shard
from spmd.comm import transport
from spmd.expand import bind, expand
from spmd.expand.code import code_for
from tests.expand.side_by_side import GPT_PLAN

MESH = spmd.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))


@pytest.fixture
def asked(monkeypatch):
    """How often an op is lowered, and a kernel recorded."""
    found = {"lowered": 0, "recorded": 0}
    lowered, recorded = expand._Expander._lowered, bind._Kernel.of

    def lowers(self, node):
        found["lowered"] += 1
        return lowered(self, node)

    def records(node):
        found["recorded"] += 1
        return recorded(node)

    monkeypatch.setattr(expand._Expander, "_lowered", lowers)
    monkeypatch.setattr(bind._Kernel, "of", records)
    return found


def program_of(layers: int) -> spmd.Program:
    torch.manual_seed(0)
    model, words = GPT(GPTConfig(n_layer=layers, n_head=4, n_embd=16, vocab=16, block_size=8)), torch.zeros(4, 8).long()
    inputs = {"tokens": {"dp": Shard(0)}, "targets": {"dp": Shard(0)}}
    step = spmd.compile(train_step, MESH, params=GPT_PLAN, inputs=inputs)
    return step.program_for(model, torch.optim.AdamW(model.parameters()), words, words)


def test_nothing_is_lowered_again(asked):
    found = []
    for layers in (3, 5):
        asked.update(lowered=0, recorded=0)
        program = program_of(layers)
        code_for(program, (0, 0), transport())
        found.append((asked["lowered"], asked["recorded"], len(program.graph.nodes)))
    (lowered, recorded, nodes), (lowered_deep, recorded_deep, nodes_deep) = found
    assert nodes_deep > nodes + 600  # two layers more
    assert lowered_deep == lowered < 250
    assert recorded_deep == recorded < 10
