"""Solve a problem: an assignment, and how far from the best it can be at most.

    Solved(x, 2674.6 us, at least 2651.2 us)      gap 0.9 %

Sweeps of the bound and assignments read from it take turns. Options that cannot be part of anything better than the
best assignment so far are dropped, so the sweeps become faster and the bound tighter. Small problems are split where
the bound leaves a doubt, until none is left. Everything is counted in sweeps and options and nothing in seconds, so all
ranks find the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from spmd.expand.choose.bound import Bound
from spmd.expand.choose.fold import folded
from spmd.expand.choose.problem import Problem
from spmd.expand.choose.search import LESS, by_slack, decode, repair, settle, surest_first

ROUNDS = 16
SWEEPS, FIRST_SWEEPS = 4, 8
"""Sweeps of a round, and of the first one where a variable stands for many cells."""

ENOUGH = 1e-3
"""The gap at which no more sweeps are made."""

FAIR_SHARED = 5e-3
"""The gap at which no options are tried, where a variable stands for many cells: there each sweep moves less."""

PATIENT, QUIET = (0.0, 0.01), (2e-3, 0.05)
"""The gap at which a round of sweeps is the last if it finds nothing better, and the part of a gap that a round has to
close, or else it is the last. `QUIET` where a variable stands for many cells."""

CLOSED = 1e-9
"""The gap at which nothing is left to find: it is one of rounding."""

SMALL = 400
"""Options of a problem that is solved to the end, by splitting."""

MOST_TRIALS = 500
"""Options of a problem that are tried, with the others following, where sweeps leave a larger gap: 2 ms each."""

MOST_SPLIT = 10_000
"""Options of all parts that a problem is split into, after which the bound stays as it was. A part of 50 options takes
some 10 ms, so what splitting takes is bounded for problems that it does not close, too."""


@dataclass(frozen=True)
class Solved:
    """An assignment, its cost, and a cost that no assignment of the problem is below, in microseconds."""

    x: tuple[int, ...]
    us: float
    at_least: float

    @property
    def gap(self) -> float:
        """How much dearer than the best the assignment may be at most, as a part of the best."""
        return max(0.0, self.us - self.at_least) / self.at_least if self.at_least > 0 else 0.0


def solve(problem: Problem, starts: Sequence[Sequence[int]] = ()) -> Solved:
    """A cheap assignment of a problem with a bound. starts: assignments to begin with."""
    left = folded(problem)
    solved = _solved(left.problem, [left.fold(start) for start in starts])
    return replace(solved, x=tuple(left.unfold(solved.x)))


def settled(problem: Problem, x: Sequence[int]) -> tuple[int, ...]:
    """An assignment near this one, of which no single variable of what is left is better changed."""
    left = folded(problem)
    return tuple(left.unfold(settle(left.problem, left.fold(x))))


def _solved(problem: Problem, starts: Sequence[Sequence[int]]) -> Solved:
    best = _Best(problem)
    for start in starts:
        best.take(settle(problem, list(start)))
    bound = Bound(problem, [np.arange(len(w)) for w in problem.work])
    shared = max(problem.cells, default=1) > 1
    at_least = _improve(bound, best, ROUNDS, ENOUGH, shared)
    if best.us - at_least > (FAIR_SHARED if shared else ENOUGH) * best.us:
        best.take(repair(problem, best.x, by_slack(bound, MOST_TRIALS)))
        bound.prune(best.us)
        at_least = _improve(bound, best, ROUNDS, ENOUGH, shared)
    if not shared and sum(map(len, bound.cost)) <= SMALL:
        at_least = _improve(bound, best, ROUNDS, CLOSED)
        if not best.is_reached(at_least):
            at_least = _split(problem, bound, best)
    return Solved(tuple(best.x), best.us, min(at_least, best.us))


class _Best:
    """The best assignment so far."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.x, self.us = problem, [0] * len(problem.work), np.inf
        self.take(self.x)

    def take(self, x: list[int]) -> None:
        found = self.problem.cost(x)
        if found < self.us - LESS:
            self.x, self.us = list(x), found

    def is_reached(self, at_least: float) -> bool:
        """Whether nothing that costs at least so much is better."""
        return at_least >= self.us * (1 - CLOSED) - 1e-6


def _improve(bound: Bound, best: _Best, rounds: int, enough: float, shared: bool = False) -> float:
    """Sweep, read assignments and drop options, until the gap is small or nothing moves. shared: whether a variable
    stands for many cells. There the order of the surest is asked only where nothing else moves."""
    problem, before, options = bound.problem, -np.inf, sum(map(len, bound.cost))
    fair, least_part = QUIET if shared else PATIENT
    for number in range(rounds):
        at_least, known = bound.improve(SWEEPS if number or not shared else FIRST_SWEEPS), best.us
        best.take(settle(problem, decode(bound)))
        if not shared and best.us == known and best.us - at_least > max(enough, fair) * best.us:
            best.take(settle(problem, decode(bound, surest_first(bound))))
        gap = best.us - at_least
        if gap <= LESS + enough * best.us or (best.us == known and gap <= fair * best.us):
            break
        left = bound.prune(best.us)
        if at_least - before < least_part * gap and (gap <= FAIR_SHARED * best.us or left == options):
            if shared:
                best.take(settle(problem, decode(bound, surest_first(bound))))
            if not shared or best.us == known:
                break
        before, options = at_least, left
    return bound.least


def _split(problem: Problem, bound: Bound, best: _Best) -> float:
    """Fix the most doubtful variable to each of its options in turn, and so on, until no part can be better."""
    best.take(repair(problem, best.x, by_slack(bound, MOST_SPLIT)))
    waiting, seen = [bound.allowed], 0
    while waiting and seen < MOST_SPLIT:
        part = Bound(problem, waiting.pop())
        seen += sum(map(len, part.cost))
        if best.is_reached(_improve(part, best, 4, CLOSED)):
            continue
        allowed = part.allowed
        open_ = [i for i, each in enumerate(allowed) if len(each) > 1]
        if not open_:
            best.take([int(each[0]) for each in allowed])
            continue
        doubtful = min(open_, key=lambda i: (len(allowed[i]), i))
        for option in allowed[doubtful]:
            waiting.append([np.array([option]) if i == doubtful else each for i, each in enumerate(allowed)])
    return bound.least if waiting else best.us
