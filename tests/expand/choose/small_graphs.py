"""Random small graphs, the problems that choices for them solve, and the best of all assignments.

    problem, solved = problem_of(3, "2x2")       least(problem) == solved.us

A graph has up to seven ops on matrices: products with parameters, additions, pointwise ops, transpositions, sums over a
dim. It is captured from a function of torch, with placements of inputs drawn at random. "packed" inputs may be shards
of each of two blocks; of "ordered" ones that both axes shard on one dim, either axis may be the outer one.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from math import prod
from unittest import mock

import numpy as np
import torch

import spmd
from spmd import Replicate, Shard
from spmd.expand.choose import program
from spmd.expand.choose.problem import FIXED, Problem, Value
from spmd.expand.choose.solve import Solved, solve

MOST_OPS, MOST_ASSIGNMENTS, SIZE = 7, 400_000, 64
MESHES = {
    "2": ((2,), MOST_OPS), "2x2": ((2, 2), 4), "2, packed": ((2,), MOST_OPS), "2x2, packed": ((2, 2), 4),
    "2x2, ordered": ((2, 2), 4),
}  # fmt: skip
"""Shapes of meshes, and the most ops of a graph there."""


def random_step(rng: random.Random, most: int) -> Callable:
    """A function of three matrices."""
    lines, values = [], ["x", "a", "b"]
    for k in range(rng.randint(2, most)):
        one, two, dim = rng.choice(values[-3:]), rng.choice(values), rng.randint(0, 1)
        ops = [f"{one} @ {two}", f"{one} + {two}", f"{one} * {two}", f"{one}.relu()", f"{one}.t()"]
        lines.append(f"    v{k} = " + rng.choice([*ops, f"{one} + {one}.sum({dim}, True)"]))
        values.append(f"v{k}")
    text = "\n".join(["def step(x, a, b):", *lines, f"    return {values[-1]}"])
    names: dict[str, Callable] = {}
    exec(text, names)
    return names["step"]


def problem_of(seed: int, mesh_name: str) -> tuple[Problem, Solved]:
    """The problem of a random graph as a choice for its program solves it, and what was found."""
    rng = random.Random(seed)
    shape, most = MESHES[mesh_name]
    step = random_step(rng, most)
    places = {name: random_placements(rng, len(shape), "packed" in mesh_name) for name in "xab"}
    found: list[tuple[Problem, Solved]] = []

    def watched(problem: Problem, starts=()) -> Solved:
        found.append((problem, solve(problem, starts)))
        return found[-1][1]

    with mock.patch.object(program, "solve", watched), spmd.LocalTensorMode(prod(shape)):
        mesh = spmd.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)])
        given = [torch.randn(SIZE, SIZE) for _ in "xab"]
        if "ordered" in mesh_name:
            given = [ordered(rng, x, mesh, places[name]) for x, name in zip(given, "xab", strict=True)]
        said = {} if "ordered" in mesh_name else {"inputs": places}
        spmd.compile(step, mesh, choose="program", **said).program_for(*given)
    return found[0]


def random_placements(rng: random.Random, axes: int, packed: bool) -> list:
    """A placement for each axis. A dim that several axes shard has one number of blocks."""
    kinds = [Shard(0), Shard(1), Replicate(), *[Shard(0, blocks=2), Shard(1, blocks=2)] * packed]
    found: list = []
    for _ in range(axes):
        p = rng.choice(kinds)
        same = [q for q in found if isinstance(p, Shard) and isinstance(q, Shard) and p.dim == q.dim]
        found.append(same[0] if same else p)
    return found


def ordered(rng: random.Random, x: torch.Tensor, mesh: spmd.DeviceMesh, placements: list) -> spmd.DTensor:
    """A distributed tensor; if both axes shard one dim, the second axis may be the outer one."""
    x = spmd.distribute_tensor(x, mesh, placements)
    shared = placements[0] == placements[1] and isinstance(placements[0], Shard)
    if not shared or rng.random() < 0.3:
        return x
    return x.redistribute(mesh, placements, order={placements[0].dim: ("tp", "dp")})


def least(problem: Problem) -> float:
    """The cost of the best of all assignments."""
    sizes = [len(work) for work in problem.work]
    every = np.indices(sizes).reshape(len(sizes), -1) if sizes else np.zeros((0, 1), int)
    cost = np.zeros(every.shape[1])
    for work, x in zip(problem.work, every, strict=True):
        cost += work[x]
    for value in problem.values:
        cost += value.weight * _moves(value, every)
    return float(cost.min())


def _moves(value: Value, every: np.ndarray) -> np.ndarray:
    """The cost of a value's moves under all assignments: each layout that is needed is paid once."""
    made, *needs = [
        np.broadcast_to(end.layouts[0] if end.variable == FIXED else end.layouts[every[end.variable]], every.shape[1])
        for end in (value.maker, *value.readers)
    ]
    ways = made[None] if value.held is None else np.arange(len(value.costs))[:, None]  # [held in, assignment]
    cost = np.zeros((len(ways), every.shape[1])) if value.held is None else value.held.T[:, made]
    for k, need in enumerate(needs):
        paid = np.any([need == other for other in needs[:k]], axis=0) if k else False
        cost = cost + np.where(paid, 0.0, value.costs[ways, need])
    return cost.min(0)


def compared(seed: int, mesh_name: str) -> tuple[float, Solved, int] | None:
    """The least cost of all assignments, what was found, and how many there are; None if they are too many."""
    problem, solved = problem_of(seed, mesh_name)
    number = int(np.prod([float(len(work)) for work in problem.work]))
    return None if number > MOST_ASSIGNMENTS else (least(problem), solved, number)
