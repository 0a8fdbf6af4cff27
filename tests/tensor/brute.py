"""The cheapest plan by Dijkstra over every state and way, nothing left out: slow, and plainly right."""

from __future__ import annotations

# ruff: noqa: B905 - what is zipped has one entry an axis or a dim
import heapq
import itertools
from collections.abc import Iterator
from math import inf

from spmd.tensor.redistribute.states import Space, State
from spmd.tensor.redistribute.strided import taken_apart
from spmd.tensor.spec import Spec


def least_ps(src: Spec, dst: Spec) -> int:
    """Picoseconds of the cheapest plan."""
    return min(least_of_boxes(src, dst), least_of_strides(src, dst))


def least_of_strides(src: Spec, dst: Spec) -> float:
    """Of those that scatter sums into blocks of any kind of the tensor taken apart, from which one move leads on."""
    found = inf
    for start, _, goal in taken_apart(src, dst):
        space = Space(start, goal, src.mesh.topology)
        for to in states(space):
            if not to.pending:
                for a, b in itertools.product(space.ways(space.start, to), space.ways(to, space.goal)):
                    found = min(found, a.ps + b.ps)
    return found


def least_of_boxes(src: Spec, dst: Spec) -> int:
    """Of those by way of blocks that are boxes."""
    space, count = Space(src, dst, src.mesh.topology), itertools.count()
    every = list(states(space))
    queue, done = [(0, next(count), space.start)], set()
    while queue:
        ps, _, state = heapq.heappop(queue)
        if space.reaches_goal(state):
            return ps
        if state not in done:
            done.add(state)
            for way in itertools.chain.from_iterable(space.ways(state, to) for to in every if to not in done):
                heapq.heappush(queue, (ps + way.ps, next(count), way.to))
    raise AssertionError(f"no way from {src} to {dst}")


def states(space: Space) -> Iterator[State]:
    """Each axis that moves inside those that stay in some dim, in any order and unit, or in none; or still pending."""
    cutting, dims = space.cutting, range(len(space.sizes))
    for fates in itertools.product([*dims, "whole", "pending"], repeat=len(cutting.movable)):
        pending = tuple(sorted(a for axes, fate in zip(cutting.movable, fates) for a in axes if fate == "pending"))
        if not set(pending) <= set(space.start.pending):
            continue
        groups = [[axes for axes, fate in zip(cutting.movable, fates) if fate == d] for d in dims]
        for orders in itertools.product(*map(itertools.permutations, groups)):
            cuts = [(*p, *itertools.chain(*order)) for p, order in zip(cutting.prefixes, orders)]
            for units in itertools.product(*(us if axes else (1,) for us, axes in zip(cutting.units, cuts))):
                yield State(tuple(cuts), units, pending)
