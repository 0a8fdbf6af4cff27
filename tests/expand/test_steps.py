"""Steps of every kind train as on one device: a sample of the table; all of it is in `benchmarks/steps.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def steps():
    """The benchmark as a module, which imports its helpers from its own folder."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import steps

        yield steps
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in ("steps", "step_kinds", "_table"):
            sys.modules.pop(name, None)


SAMPLE = [
    ("ASGD, for-loop", "dp 4"),
    ("RAdam, foreach", "zero 3"),
    ("Adafactor, for-loop", "zero 3 tp"),
    ("Muon", "2x2"),
    ("AveragedModel", "tp 4"),
    ("checkpoint with dropout", "2x2"),
    ("checkpoint with dropout, reentrant", "zero 3"),
    ("gradient hooks", "zero 3 tp"),
    ("norms in gradient hooks", "zero 3 tp"),
    ("post-accumulate hooks", "2x2"),
    ("update in backward", "zero 3 tp"),
    ("GRU of two layers", "zero 3"),
    ("GradScaler, first overflow", "zero 3 tp"),
    ("schedule in the step", "2x2"),
    ("schedule of a tensor, fused", "zero 3"),
    *[("BatchNorm, average of all", plan) for plan in ("dp 4", "2x2", "zero 3")],
]


def test_a_layer_that_has_a_kernel_of_its_own(steps):
    """In float32 torch computes an LSTM in one kernel of the machine."""
    found, wanted = steps.on_ranks("LSTM", "dp 4", torch.float32), steps.on_one_device("LSTM", torch.float32)
    assert steps.apart(found, wanted) <= steps.BARS[torch.float32]


@pytest.mark.parametrize("name, plan", SAMPLE)
def test_a_kind_of_step_trains_as_on_one_device(steps, name, plan):
    """What five steps return, and all state after them; uneven blocks, and one that is empty."""
    found, wanted = steps.on_ranks(name, plan, torch.float64), steps.on_one_device(name, torch.float64)
    assert steps.apart(found, wanted) <= max(steps.BARS[torch.float64], steps.KINDS[name].precision)
