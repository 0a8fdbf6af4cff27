"""The cheapest plan, by Dijkstra over all states and moves. Nothing is left out: slow, and plainly right."""

from __future__ import annotations

# ruff: noqa: B905 - what is zipped has one entry an axis or a dim
import heapq
import itertools
from collections.abc import Iterator
from math import inf

from spmd.tensor.redistribute.states import Space, State
from spmd.tensor.redistribute.strided import split_specs
from spmd.tensor.spec import Spec


def least_ps(src: Spec, dst: Spec) -> int:
    """Picoseconds of the cheapest plan."""
    return min(least_of_boxes(src, dst), least_of_strides(src, dst))


def least_of_strides(src: Spec, dst: Spec) -> float:
    """The cheapest of the plans of two moves on the tensor with split dims. The first move reduces all sums into any
    blocks."""
    found = inf
    for start, _, goal in split_specs(src, dst):
        space = Space(start, goal, src.mesh.topology)
        for to in states(space):
            if not to.pending:
                for a, b in itertools.product(space.edges(space.start, to), space.edges(to, space.goal)):
                    found = min(found, a.ps + b.ps)
    return found


def least_of_boxes(src: Spec, dst: Spec) -> int:
    """The cheapest of the plans whose states are all blocks that are boxes."""
    space, count = Space(src, dst, src.mesh.topology), itertools.count()
    every = list(states(space))
    queue, done = [(0, next(count), space.start)], set()
    while queue:
        ps, _, state = heapq.heappop(queue)
        if space.reaches_goal(state):
            return ps
        if state not in done:
            done.add(state)
            for edge in itertools.chain.from_iterable(space.edges(state, to) for to in every if to not in done):
                heapq.heappush(queue, (ps + edge.ps, next(count), edge.to))
    raise AssertionError(f"no way from {src} to {dst}")


def states(space: Space) -> Iterator[State]:
    """All states. Each axis that moves is in a dim, inside the axes that stay, in any order and unit, or in no dim, or
    still pending."""
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
