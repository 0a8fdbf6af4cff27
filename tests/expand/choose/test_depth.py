"""Equal blocks of deep models choose alike, and the certificate holds for all choices, also where blocks differ."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import spmd
from spmd import Shard
from spmd.expand.choose import classes


def certificate(layers: int, sizes: tuple[int, int], limit: int, monkeypatch):
    """What is known of a forward and backward of equal layers, if graphs of more cells are shared."""
    monkeypatch.setattr(classes, "MOST_CELLS", limit)
    width, hidden = sizes
    blocks = [(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width)) for _ in range(layers)]
    model = nn.Sequential(*[module for block in blocks for module in block])

    def step(model, x):
        loss = model(x).square().sum()
        loss.backward()
        return loss

    mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    compiled = spmd.compile(step, mesh, choose="program", inputs={"x": {"dp": Shard(0)}})
    return compiled.program_for(model, torch.randn(32, width)).certificate


@pytest.mark.parametrize("most", (1000, 0))
def test_the_bound_of_a_shared_problem_holds_where_layers_differ(most, monkeypatch):
    """It is not above the best choice for the graph in which each layer chooses for itself, whether the layers are
    found or not."""
    monkeypatch.setattr(classes, "MOST_CLASSES", most)
    whole = certificate(7, (16, 64), 1000, monkeypatch)
    shared = certificate(7, (16, 64), 0, monkeypatch)
    assert whole.gap < 1e-3
    assert shared.at_least <= whole.solved + 1e-6
    assert shared.solved >= whole.at_least - 1e-6
    assert shared.at_least > 0.8 * whole.solved
