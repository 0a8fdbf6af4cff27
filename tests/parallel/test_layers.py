"""Layers of `spmd.parallel` are those of one device: some of the cases of `benchmarks/layers.py`, which has all."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
sys.path.insert(0, BENCHMARKS)
try:
    import layers
finally:
    sys.path.remove(BENCHMARKS)
    for name in ("layers", "layer_kinds", "_table"):
        sys.modules.pop(name, None)

CASES = [(name, *layers.cases(short=True, n=n)[0]) for n, name in enumerate(layers.KINDS)]
CASES.append(("unfold", (2, 2), "empty"))


@pytest.mark.parametrize("name, shape, sort", CASES, ids=str)
def test_a_layer_is_that_of_one_device(name, shape, sort):
    """Forward, backward and a step of SGD, in float64 and in bfloat16."""
    row = layers.Row()
    layers.sweep(name, shape, sort, row)
    assert not row.wrong
