"""What a further layer costs: of what is equal to the layer before, nothing is decided again."""

import pytest
import torch

import spmd
from examples.gpt import GPT, GPTConfig, train_step
from spmd import Shard
from spmd.comm import transport
from spmd.expand import expand
from spmd.expand.code import code_for
from spmd.expand.recorded import Recording
from tests.expand.side_by_side import GPT_PLAN

MESHES = {
    "2x2": spmd.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp")),
    "2x64, whose ranks have a head or none": spmd.DeviceMesh(
        "cpu", torch.arange(128).reshape(2, 64), mesh_dim_names=("dp", "tp")
    ),
}  # fmt: skip


@pytest.fixture
def asked(monkeypatch):
    """How often an op is lowered, and a kernel or the code of a move recorded."""
    found = {"lowered": 0, "recorded": 0}
    lowered, recorded = expand._Expander._lowered, Recording.of

    def lowers(self, node):
        found["lowered"] += 1
        return lowered(self, node)

    def records(*args):
        found["recorded"] += 1
        return recorded(*args)

    monkeypatch.setattr(expand._Expander, "_lowered", lowers)
    monkeypatch.setattr(Recording, "of", records)
    return found


def program_of(mesh: spmd.DeviceMesh, layers: int) -> spmd.Program:
    torch.manual_seed(0)
    model, words = GPT(GPTConfig(n_layer=layers, n_head=4, n_embd=16, vocab=16, block_size=8)), torch.zeros(4, 8).long()
    inputs = {"tokens": {"dp": Shard(0)}, "targets": {"dp": Shard(0)}}
    step = spmd.compile(train_step, mesh, params=GPT_PLAN, inputs=inputs, bucket_mb=None)
    return step.program_for(model, torch.optim.AdamW(model.parameters()), words, words)


@pytest.mark.parametrize("mesh", MESHES)
def test_nothing_is_lowered_again(asked, mesh):
    found = []
    for layers in (3, 5):
        asked.update(lowered=0, recorded=0)
        program = program_of(MESHES[mesh], layers)
        code_for(program, (0, 0), transport())
        found.append((asked["lowered"], asked["recorded"], len(program.graph.nodes)))
    (lowered, recorded, nodes), (lowered_deep, recorded_deep, nodes_deep) = found
    assert nodes_deep > nodes + 600  # two layers more
    assert lowered_deep == lowered < 250
    assert recorded_deep == recorded < 100  # of each kind of move its start and its end
