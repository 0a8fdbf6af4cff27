"""Assignments of a problem that cost little: read from a bound, then improved by changing variables together.

`settle` changes one variable at a time as long as that helps. `repair` tries what one variable cannot do alone: it
changes one, lets its neighbours follow, and theirs, and keeps the change if all together cost less.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from spmd.expand.choose.bound import Bound, Slot
from spmd.expand.choose.moves import NEVER
from spmd.expand.choose.problem import Problem

LESS = 1e-9
"""Microseconds by which an assignment has to be better, so that rounding decides nothing."""


def settle(problem: Problem, x: list[int], start: Iterable[int] | None = None, most: int = 1 << 30) -> list[int]:
    """Change variables one by one, at most so often, as long as each change costs less.

    start: those that may be changed first; all others follow when a neighbour changes.
    """
    queue = deque(range(len(x)) if start is None else start)
    waiting = set(queue)
    while queue and most:
        i = queue.popleft()
        waiting.discard(i)
        costs = problem.costs_of(i, x)
        best = int(costs.argmin())
        if costs[best] < costs[x[i]] - LESS:
            x[i], most = best, most - 1
            new = [j for j in problem.neighbours(i) if j not in waiting]
            queue.extend(new)
            waiting.update(new)
    return x


def decode(bound: Bound, order: Iterable[int] | None = None) -> list[int]:
    """An assignment by the potentials of a bound: each variable takes what is cheapest beside those before it, in this
    order; that of the graph if none is given."""
    x = [0] * len(bound.cost)
    ends = {part: list(part.ends) for part in bound.parts}
    taken: set[Slot] = set()
    for i in bound.order if order is None else order:
        cost = bound.now(i)
        for port in bound.ports[i]:
            slot = port.slot
            known = ends[slot.part]
            cost += port.share * (slot.part.moves.least_at(known, slot.at) + known[slot.at])[port.at]
        best = int(cost.argmin())
        x[i] = int(bound.allowed[i][best])
        for port in bound.ports[i]:
            slot, layout = port.slot, port.at[best]
            before = ends[slot.part][slot.at] if slot in taken else np.full(len(slot.end), NEVER)
            before[layout] = slot.part.ends[slot.at][layout]
            ends[slot.part][slot.at] = before
            taken.add(slot)
    return x


def surest_first(bound: Bound) -> list[int]:
    """The variables, those first whose best option a bound finds clearly cheaper than their next."""
    found = []
    for i in range(len(bound.cost)):
        least = np.sort(bound.collected(i))[:2]
        found.append(np.inf if len(least) < 2 else round(float(least[1] - least[0]), 6))
    return np.argsort(-np.array(found), kind="stable").tolist()


def repair(problem: Problem, x: list[int], trials: Iterable[tuple[int, int]]) -> list[int]:
    """Give variables these options in turn, and let the others follow."""
    least = problem.cost(x)
    for i, option in trials:
        if option == x[i]:
            continue
        trial = list(x)
        trial[i] = option
        settle(problem, trial, [j for j in problem.neighbours(i) if j != i], most=24)
        found = problem.cost(trial)
        if found < least - LESS:
            x, least = trial, found
    return x


def by_slack(bound: Bound, most: int) -> list[tuple[int, int]]:
    """Variables with their options, so many: those first that a bound finds hardly dearer than the variable's best."""
    slack = [cost - cost.min() for cost in map(bound.collected, range(len(bound.cost)))]
    every = [(i, int(option)) for i, allowed in enumerate(bound.allowed) for option in allowed]
    order = np.argsort(np.concatenate([np.zeros(0), *slack]).round(6), kind="stable")
    return [every[k] for k in order[:most].tolist()]
