"""Steps as people write them are those of one device: some scripts of `benchmarks/wild.py`, under one plan each."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
sys.path.insert(0, BENCHMARKS)
try:
    import wild
finally:
    sys.path.remove(BENCHMARKS)
    for name in ("wild", "wild_scripts", "wild_papers", "wild_more", "wild_own", "_table"):
        sys.modules.pop(name, None)

CASES = {
    "dp-sgd by vmap": "dp", "graph": "dp", "mamba": "dp", "moco": "zero+tp", "nerf": "dp", "segmentation": "zero",
    "swa": "zero+tp", "triplet": "dp",
}  # fmt: skip


@pytest.fixture(autouse=True)
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name, way", CASES.items())
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_step_is_that_of_one_device(name, way):
    """Six calls with a short batch, and states that are saved and loaded between two of them."""
    script = wild.SCRIPTS[name]
    found = wild.outcome(script, way, wild.on_one_device(script))
    assert wild.is_equal(found), found


def test_a_difference_is_seen():
    """Of numbers, of shapes, and of what only one side has."""
    want = wild.on_one_device(wild.SCRIPTS["graph"])[-1]
    name = next(iter(want))
    assert wild.difference(want, want) == 0
    assert 0.9e-9 < wild.difference(want | {name: want[name] + 1e-9}, want) < 1.1e-9
    for other in ({name: want[name][None]}, {name: want[name].float()}, {"more": want[name]}):
        with pytest.raises(AssertionError):
            wild.difference(want | other, want)
