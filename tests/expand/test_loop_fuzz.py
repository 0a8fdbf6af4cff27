"""Random steps over micro-batches train as on one device, with their rounds as loops where these repeat."""

from __future__ import annotations

import pytest
import ways

from spmd import LocalTensorMode
from tests.expand.random_rounds import Rounds, batches, begun, compiled, found
from tests.expand.test_memory import counted_beside

SEEDS = range(30)

FOUND = {
    "a weight twice in one bucket, then two": Rounds(
        n=6, kinds=("table",), carried=("table",), clear="zeros", optimizer="plain", plan="zero 3", sizes=(12, 12)
    ),
}
"""What was wrong once."""


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_step_trains_as_on_one_device(seed, record_property):
    """What it returns, parameters, buffers, gradients and states, after each of three calls."""
    rounds = Rounds.of(seed)
    seen = found(rounds, saves=seed % 3 == 0)
    assert not seen.differences, f"{seen.differences}\n{rounds}"
    for program in seen.programs:
        assert program.verify() is program and str(program)
        assert program.memory().peak > 0 and program.timeline().us > 0
    record_property("cases", f"a step whose loops run {seen.times} times")


@pytest.mark.parametrize("name", FOUND)
def test_a_step_that_was_wrong_trains_as_on_one_device(name):
    assert not found(FOUND[name]).differences


@pytest.mark.parametrize("seed", [0, 4, 30])
def test_a_random_step_says_what_its_parts_cost(seed):
    rounds = Rounds.of(seed)
    with LocalTensorMode(4):
        program = compiled(rounds).program_for(*begun(rounds), *batches(rounds)[0])
    assert program.explain("model.words").ops


def needed(rounds: Rounds) -> tuple[int, int]:
    step, given = compiled(rounds), (*begun(rounds), *batches(rounds)[0])
    return counted_beside(step, step.mesh, lambda: step(*given))


@pytest.mark.parametrize("seed", [15, 36, 56])
def test_a_rank_needs_what_the_program_says(seed, gloo4):
    for predicted, counted in ways.run("gloo", gloo4, needed, Rounds.of(seed)):
        assert abs(predicted - counted) <= 0.01 * counted, (predicted, counted)
