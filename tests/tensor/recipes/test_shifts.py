"""Slices that cut through the blocks of a sharded dim, and their gradients: as on one device, by halos."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import spmd
from spmd import Shard
from tests.expand.side_by_side import agree as in_programs
from tests.tensor.recipes.test_convolutions import halos_always, t
from tests.tensor.single import S0, S1, SUM, agree_at_once

__all__ = ["halos_always"]

CASES = {
    "behind the first": (lambda x: x[1:], (9, 4)),
    "before the last": (lambda x: x[:-1] * x[1:], (8, 4)),
    "of the last dim": (lambda x: x[:, 3:7], (4, 9)),
    "from the end": (lambda x: x[-5:-1], (9, 4)),
    "longer than blocks": (lambda x: x[6:10], (16, 4)),
    "every second": (lambda x: x[1::2], (11, 4)),
    "every third, cut": (lambda x: x[2:14:3], (15, 4)),
    "differences": (partial(torch.diff, dim=0), (10, 4)),
    "narrow": (lambda x: x.narrow(0, 2, 5), (8, 4)),
    "short": (lambda x: x[3:5], (8, 4)),
    "nothing": (lambda x: x[3:3], (8, 4)),
    "two dims": (lambda x: x[1:6, 2:7], (8, 8)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("halos_always")
def test_programs_slice_as_one_device(name):
    """Forward, backward, on one axis and on two."""
    fn, shape = CASES[name]
    x = t(*shape)
    in_programs(fn, [x], [[S0]], [[S1]], mesh_shape=(4,))
    in_programs(fn, [x], [[S0, S1]], [[S0, S0]], [[SUM, S0]])


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("halos_always")
def test_gradients_of_slices(name):
    fn, shape = CASES[name]
    agree_at_once(fn, [t(*shape)], [[S0, S1]], [[S0, S0]])


def tokens_and_targets(x):
    return (x[:, :-1] * x[:, 1:]).sum(0)


def test_the_tokens_behind_the_first_are_one_row_of_a_neighbour():
    mesh = spmd.DeviceMesh("cpu", range(8), mesh_dim_names=("sp",))
    step = spmd.compile(tokens_and_targets, mesh, inputs={"x": {"sp": Shard(1)}})
    program = step.program_for(torch.ones(4, 64, 16, dtype=torch.float64))
    assert [c.kind for c in program.collectives] == ["halo"]
    assert max(c.nbytes for c in program.collectives) <= 8 * 4 * 16 * 8
