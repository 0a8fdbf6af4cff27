"""Random small graphs under budgets, and the cheapest of all programs that fit: each assignment is written and counted.

    for least, found in small_budgets(3): ...      the cheapest of all, and what was found, of the same budget
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from unittest import mock

import torch

import spmd
from spmd.expand.choose.budget import Budget, Taken, chosen_within
from spmd.expand.choose.program import AsRun, Chosen, Expansion
from spmd.expand.passes.memory_budget import BudgetError
from tests.expand.choose.small_graphs import random_placements, random_step

MOST_ASSIGNMENTS, MOST_OPS, SIZE = 300, 4, 256
LIMITS = 4
Written = list[tuple[int, float]]
"""Bytes at the peak and microseconds of each program."""


def small_budgets(seed: int, shape: tuple[int, ...] = (2,)) -> Iterator[tuple[float, Taken | BudgetError]]:
    """For budgets between the least bytes of all programs and those of the choice without one: the least cost of all
    programs that fit, and what was found. Nothing for a graph of too many assignments, or of one peak."""
    first = first_choice(seed, shape)
    every = all_written(first)
    high = first.end.memory.peak
    low = min([peak for peak, _ in every], default=high)
    for k in range(LIMITS if low < high else 0):
        limit = low + (high - low) * k // LIMITS
        least = min(us for peak, us in every if peak <= limit)
        try:
            yield least, chosen_within(first, Budget(limit, _same, _same))
        except BudgetError as error:
            yield least, error


@contextmanager
def choices() -> Iterator[list[Chosen]]:
    """Inside, what is chosen for a program is noted, in a list."""
    found, choose = [], Chosen.of

    def watched(given: Expansion, as_run: AsRun) -> Chosen:
        found.append(choose(given, as_run))
        return found[-1]

    with mock.patch.object(Chosen, "of", watched):
        yield found


def _same(program):
    return program


def first_choice(seed: int, shape: tuple[int, ...]) -> Chosen:
    """The choice for a random graph where nothing is said of memory."""
    rng = random.Random(seed)
    step = random_step(rng, MOST_OPS)
    places = {name: random_placements(rng, len(shape), False) for name in "xab"}
    with choices() as found, spmd.LocalTensorMode(prod(shape)):
        mesh = spmd.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
        given = [torch.randn(SIZE, SIZE) for _ in "xab"]
        spmd.compile(step, mesh, choose="program", inputs=places).program_for(*given)
    return found[0]


def all_written(first: Chosen) -> Written:
    """The programs of all assignments and of the choice by op; nothing if they are too many."""
    model = first.start.model()
    sizes = [len(work) for work in model.problem.work]
    if prod(sizes) > MOST_ASSIGNMENTS:
        return []
    every = [first.start.with_choice(model.choice(x)) for x in itertools.product(*map(range, sizes))]
    return [(c.memory.peak, c.cost.us) for c in [*every, first.by_op, first.end]]
