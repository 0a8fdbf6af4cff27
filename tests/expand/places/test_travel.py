"""Gradients travel together, also where an all-reduce of one of them takes longer than a scatter and an exchange."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

import spmd
from spmd.expand.places.travel import gradient_plans
from spmd.mesh import PRESETS, Measured, as_rank
from spmd.tensor.redistribute.plan import plan
from spmd.tensor.spec import parse_spec
from tests.expand.side_by_side import INPUTS, Net, rows, seeded, train_step

SCATTERED = (("reduce_scatter", 1327.0, 1.36e-3), ("all_to_all", 1077.0, 1.06e-3), ("all_gather", 1779.0, 1.25e-3))
"""Of four ranks on two cores, as calibrated: what it takes to begin, and microseconds a byte."""


def machine(bytes_of_all_reduce: float):
    """Where an all-reduce takes three times as long to begin as a reduce-scatter."""
    curves = (*SCATTERED, ("all_reduce", 3867.0, bytes_of_all_reduce))
    found = [Measured(kind, n, 1, ((us, more),)) for kind, us, more in curves for n in (2, 4)]
    return replace(PRESETS["textbook"], measured=tuple(found))


SLOW_START = machine(2.06e-3)


CASES = [
    ("f32[256, 256] +sum@dp", 2.06e-3, 1), ("f32[3] +sum@dp", 2.06e-3, 1), ("f32[8, 64@tp] +sum@dp", 2.06e-3, 1),
    ("f32[256, 256] +sum@dp", 2e-2, 2), ("f32[3] +sum@dp", 2e-2, 1),
]  # fmt: skip
"""A gradient, microseconds for a byte of an all-reduce, and the moves by which it travels."""


@pytest.mark.parametrize("text, bytes_of_all_reduce, want", CASES)
def test_what_begins_with_others_decides_by_its_bytes(text, bytes_of_all_reduce, want):
    """The cheapest plan by itself has two moves in each case."""
    mesh = spmd.DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    made = parse_spec(text, mesh.with_topology(machine(bytes_of_all_reduce)))
    place = made.with_layout(made.dims, made.units)
    assert len(plan(made, place).steps) == 2
    (moves,) = gradient_plans(made, place)
    assert len(moves.steps) == want and moves.steps[-1].after == place


@pytest.mark.parametrize("shape", [(4, 1), (2, 2)], ids=str)
def test_data_parallel_sends_buckets_of_all_reduces(shape):
    """No gradient is scattered and exchanged by itself."""
    model, batch = seeded(Net), rows(8)[0]
    mesh = spmd.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"), topology=SLOW_START)
    with as_rank(0):
        step = spmd.compile(train_step, mesh, inputs=INPUTS)
        program = step.program_for(model, torch.optim.SGD(model.parameters(), 0.1), *batch)
    over_dp = Counter(each.kind for each in program.collectives if each.axis == "dp")
    assert over_dp.keys() == {"all_reduce"} and over_dp["all_reduce"] <= 3
