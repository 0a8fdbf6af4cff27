"""Examples learn on a mesh what they learn on one device; all meshes and 20 steps are in `benchmarks/examples.py`."""

from __future__ import annotations

import copy
import math

import pytest
import torch

from examples import glyphs
from examples.train import EXAMPLES, example, mesh_of, start, train
from spmd import init_device_mesh
from spmd.sim import run_ranks

MESHES = {
    "gpt_small": {"tp": 2}, "llama": {"tp": 2}, "bert": {"dp": 2}, "diffusion": {"dp": 2, "tp": 2},
    "mixtral": {"ep": 2}, "convnet": {"dp": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", EXAMPLES)
def test_two_steps_on_a_small_mesh(name):
    """Losses in float32, with gradients clipped by the norm of all of them."""
    given, axes = example(name), MESHES[name]
    model = start(given)
    want = train(given, copy.deepcopy(model), 2)

    def on_rank(rank):
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        return train(given, copy.deepcopy(model), 2, mesh)

    losses = run_ranks(on_rank, math.prod(axes.values()))[0]
    assert losses == pytest.approx(want, abs=1e-4)


def test_digits_can_be_told_apart():
    """A font of ten different digits; images of the same seed are the same, and have ink in them."""
    font = glyphs.glyphs().flatten(1)
    assert len(font.unique(dim=0)) == 10
    (one, digits), (two, _) = (next(glyphs.batches(8, seed=seed)) for seed in (1, 1))
    assert torch.equal(one, two) and digits.max() < 10 and (one.amax((1, 2, 3)) > 0.5).all()


def test_a_mesh_is_said_in_words():
    assert mesh_of("dp=2,tp=4") == {"dp": 2, "tp": 4}
