"""Folding: what is left of a problem has the same least cost, and its assignments unfold to ones that cost the same."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from spmd.expand.choose.fold import folded
from spmd.expand.choose.problem import End, Problem, Value
from spmd.expand.choose.solve import solve
from tests.expand.choose.test_problem import least, random_problem


def held_problem(seed: int) -> Problem:
    """A random problem in which some values are moved once for all of their readers."""
    rng = np.random.default_rng(seed)
    problem = random_problem(seed)
    while np.prod([len(w) for w in problem.work]) > 150:  # keeps the comparison cheap
        problem = random_problem(seed := seed + 1000)
    values = [replace(value, weight=1.0) for value in problem.values]
    tables = [rng.integers(0, 20, value.costs.shape).astype(float) for value in values]
    values = [replace(v, held=table) if rng.random() < 0.3 else v for v, table in zip(values, tables, strict=True)]
    return Problem(problem.work, values)


@pytest.mark.parametrize("seed", range(30))
def test_what_is_left_has_the_same_least_cost(seed):
    """And the best of what is left is the best of all, when it is unfolded."""
    problem = held_problem(seed)
    found, best = folded(problem), least(problem)
    every = itertools.product(*[range(len(w)) for w in found.problem.work])
    left = min(every, key=found.problem.cost)
    assert found.problem.cost(left) == pytest.approx(best)
    assert problem.cost(found.unfold(left)) == pytest.approx(best)
    assert solve(problem).us == pytest.approx(best) and solve(problem).gap < 1e-6


@pytest.mark.parametrize("seed", range(10))
def test_costs_of_a_variable_are_the_differences_of_the_objective(seed):
    """Also where values are held: `costs_of` says for each option what changes."""
    problem, rng = held_problem(seed), np.random.default_rng(seed)
    x = [int(rng.integers(len(w))) for w in problem.work]
    for i, work in enumerate(problem.work):
        every = [problem.cost([*x[:i], k, *x[i + 1 :]]) for k in range(len(work))]
        assert np.allclose(np.diff(problem.costs_of(i, x)), np.diff(every))


def test_a_chain_is_folded_and_a_seam_is_not():
    """Nothing is left of a chain of cells, also of equal ones; what several classes meet alike stays."""
    ends = [End(i, np.arange(2)) for i in range(4)]
    values = [Value(3.0, np.eye(2), a, (b,)) for a, b in itertools.pairwise(ends)]
    work = [np.array([0.0, 3.0 * i]) for i in range(4)]
    assert folded(Problem(work, values, [3] * 4)).kept == []
    seam = [replace(value, kind="seam") for value in values[:2]]
    assert folded(Problem(work, [*seam, values[2]], [3] * 4)).kept == [0, 1, 2]
