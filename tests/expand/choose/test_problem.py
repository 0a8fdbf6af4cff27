"""Problems of a choice: solved to the end where they are small, and never below their bound."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from spmd.expand.choose.bound import Bound
from spmd.expand.choose.problem import FIXED, End, Problem, Value
from spmd.expand.choose.search import decode, settle
from spmd.expand.choose.solve import solve


def random_problem(seed: int) -> Problem:
    """Up to seven variables with up to four options, and values with up to three readers, some of them fixed."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 8))
    work = [rng.integers(0, 20, int(rng.integers(1, 5))).astype(float) for _ in range(n)]
    values = []
    for _ in range(int(rng.integers(n, 2 * n))):
        size = int(rng.integers(2, 5))
        costs = rng.integers(0, 20, (size, size)).astype(float)
        np.fill_diagonal(costs, 0)
        ends = [int(i) for i in rng.permutation(n)[: rng.integers(2, 5)]]
        ends = [FIXED if rng.random() < 0.15 else i for i in ends]
        maker, *readers = [End(i, rng.integers(0, size, 1 if i == FIXED else len(work[i]))) for i in ends]
        values.append(Value(float(rng.integers(1, 4)), costs, maker, tuple(readers)))
    return Problem(work, values)


def least(problem: Problem) -> float:
    """The cost of the best of all assignments."""
    return min(problem.cost(x) for x in itertools.product(*[range(len(w)) for w in problem.work]))


@pytest.mark.parametrize("seed", range(40))
def test_small_problems_are_solved_to_the_end(seed):
    """The cost is that of the best of all assignments, and the certificate says so."""
    problem = random_problem(seed)
    while np.prod([len(w) for w in problem.work]) > 150:  # keeps the comparison cheap
        problem = random_problem(seed := seed + 1000)
    solved, best = solve(problem), least(problem)
    assert solved.us == pytest.approx(best) and problem.cost(solved.x) == pytest.approx(best)
    assert solved.at_least <= best + 1e-6 and solved.gap < 1e-6


@pytest.mark.parametrize("is_held", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_many_assignments_cost_what_each_of_them_does(seed, is_held):
    """Also where values are held elsewhere than they are made, and where ends are fixed."""
    problem, rng = random_problem(seed), np.random.default_rng(seed)
    if is_held:
        values = [replace(v, held=rng.integers(0, 20, v.costs.shape).astype(float)) for v in problem.values]
        problem = Problem(problem.work, values, constant=3.0)
    every = np.array([[rng.integers(len(w)) for w in problem.work] for _ in range(50)]).T
    assert problem.costs(every) == pytest.approx([problem.cost(x) for x in every.T.tolist()])


@pytest.mark.parametrize("seed", range(5))
def test_the_bound_is_never_above_the_best(seed):
    """After any number of sweeps, and after options were dropped."""
    problem = random_problem(seed)
    best = least(problem)
    bound = Bound(problem, [np.arange(len(w)) for w in problem.work])
    for _ in range(4):
        assert bound.improve(1) <= best + 1e-6
        bound.prune(problem.cost(settle(problem, decode(bound))))
        assert bound.value_now() <= best + 1e-6


def test_a_move_is_paid_once_for_readers_that_need_it_alike():
    """Two readers of one layout pay for one move, readers of two layouts for two."""
    costs = np.array([[0.0, 5, 7], [5, 0, 1], [7, 1, 0]])
    value = Value(2.0, costs, End(FIXED, np.array([0])), (End(0, np.array([1, 2])), End(1, np.array([1, 2]))))
    problem = Problem([np.zeros(2), np.zeros(2)], [value])
    assert [problem.cost(x) for x in [(0, 0), (0, 1), (1, 1)]] == [10, 24, 14]


@pytest.mark.parametrize("seed", range(5))
def test_costs_of_a_variable_are_the_differences_of_the_objective(seed):
    """`costs_of` says for each option what changes, and nothing else does."""
    problem = random_problem(seed)
    x = [0] * len(problem.work)
    for i, work in enumerate(problem.work):
        found = problem.costs_of(i, x)
        every = [problem.cost([*x[:i], k, *x[i + 1 :]]) for k in range(len(work))]
        assert np.allclose(np.diff(found), np.diff(every))
