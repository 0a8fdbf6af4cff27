"""Placements and what is freed, within one budget: the cheapest program that keeps to it.

    budget 80 MB     first choice 101 MB, 600 us     with 30 MB computed again: 741 us
                     lighter      78 MB, 655 us      nothing to free: 655 us, taken

A program that does not fit may lie elsewhere (`lighter.py`), or compute again what it has freed, or send it to the host
(`passes/memory_budget.py`); mostly some of both is best. So what may be freed is weighed for each program of the path,
until the next one costs more than the best that fits. Each is judged as it runs: by the count of its bytes, and by the
time of all that it sends and computes, with what it then loses to what was freed.

A program that costs more than by op, or whose step is longer, comes behind those of which neither is so: that order
depends on no budget. As the path does not either, a larger budget never gives a program that comes later.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from spmd.expand.choose.lighter import Lighter, Path
from spmd.expand.choose.program import ROUNDING, Chosen, Expansion, chosen
from spmd.expand.passes.memory_budget import BudgetError, Finish, freed, within
from spmd.expand.program import Program
from spmd.expand.timeline.replay import step_us

Rank = tuple[bool, float, float]
"""Of a program: whether it costs more or takes longer than by op, its microseconds in all, those of a step."""

DEARER = 0.02
"""The part by which a program may cost less than the model says: what is moved for one reader stays for the next."""

NEVER: Rank = True, float("inf"), float("inf")
"""That of no program."""


@dataclass(frozen=True)
class Budget:
    """Bytes that may be alive on a rank. plain, finish, offload: as in `within`."""

    nbytes: int
    plain: Finish
    finish: Finish
    offload: bool = False

    def kept_by(self, program: Program) -> Program:
        """The program, with as much freed as it takes. BudgetError where that is not enough."""
        return within(program, self.nbytes, self.plain, self.finish, self.offload)


@dataclass(frozen=True)
class Taken:
    """The program that is taken. write: makes such a program of an expansion, before anything is freed."""

    program: Program
    write: Callable[[Expansion], Program]


def chosen_within(first: Chosen, budget: Budget) -> Taken:
    """The cheapest program that keeps to a budget. first: the choice where nothing is said of memory; where it fits it
    is taken as it is. BudgetError where none was found."""
    if first.end.memory.peak <= budget.nbytes:
        return Taken(budget.kept_by(first.program), functools.partial(chosen, as_run=first.end.as_run))
    return cheapest(Path(first), budget)


def cheapest(path: Path, budget: Budget) -> Taken:
    """The cheapest program that some program of a path becomes within a budget. BudgetError where there is none.

    Each walk of the path ends where what comes next costs clearly more than the best program so far, for costs rise.
    """
    trials = _Trials(path.first, budget)
    for each in path.known[: path.unpriced]:
        trials.weigh(each)
    for walk in path.walks:
        k = 0
        while (us := walk.us(k)) is not None and trials.may_be_better(us):
            trials.weigh(walk.program(k))
            k += 1
    return trials.taken(path)


class _Trials:
    """Programs that were tried for a budget. best: of those that fit. errors: of all others, why not."""

    def __init__(self, first: Chosen, budget: Budget) -> None:
        self.first, self.budget = first, budget
        self.best: Weighed | None = None
        self.errors: dict[int, tuple[int, float, BudgetError]] = {}

    def weigh(self, lighter: Lighter) -> None:
        """Try a program, unless it is foreseen that it cannot be the best."""
        found, best = Weighed(lighter, self.first, self.budget), self.best
        if id(lighter) in self.errors or (best is not None and found.cannot_beat(best.rank)):
            return
        try:
            if found.rank < (NEVER if best is None else best.rank):
                self.best = found
        except BudgetError as error:
            self.errors[id(lighter)] = error.smallest, lighter.candidate.cost.us, error

    def may_be_better(self, us: float) -> bool:
        """Whether a program that the model thinks to cost so much may be better than the best, if its step is short."""
        least = us * (1 - DEARER)
        return self.best is None or (least > self.first.by_op.cost.us, least, 0.0) < self.best.rank

    def taken(self, path: Path) -> Taken:
        """The best program, with its certificate."""
        best = self.best
        if best is None:
            raise self._none_fits()
        certificate = replace(
            self.first.certificate, us=best.rank[1], taken=best.lighter.candidate is not self.first.by_op,
            budget=self.budget.nbytes, within=path.at_least(self.budget.nbytes),
        )  # fmt: skip
        return Taken(replace(best.program, certificate=certificate), best.lighter.again)

    def _none_fits(self) -> BudgetError:
        _, us, least = min(self.errors.values(), key=lambda each: each[:2])
        tried = f"{len(self.errors)} choices of placements"
        text = f"{least.text}: the least of {tried}, of {us:,.1f} us before anything is freed"
        return BudgetError(least.name, least.budget, least.smallest, text)


@dataclass(frozen=True)
class Weighed:
    """A program of the path under a budget."""

    lighter: Lighter
    first: Chosen
    budget: Budget

    @cached_property
    def _fits(self) -> bool:
        return self.lighter.candidate.memory.peak <= self.budget.nbytes

    def cannot_beat(self, rank: Rank) -> bool:
        """Whether it has no better rank, as it comes or by what is foreseen: to foresee it takes a plan."""
        candidate = self.lighter.candidate
        return rank <= self._rank(candidate.cost.us, candidate.step) or rank <= self.foreseen

    @cached_property
    def foreseen(self) -> Rank:
        """The rank that it has at best, by what is foreseen of what has to be freed."""
        candidate = self.lighter.candidate
        if self._fits:
            return self._rank(candidate.cost.us, candidate.step)
        plan = self.lighter.plan(self.budget.offload)
        least = plan.choice.least_time(self.budget.nbytes - (candidate.memory.peak - plan.peak))
        lost = float("inf") if least is None else least.us - plan.choice.unlimited.us
        return self._rank(candidate.cost.us + lost, candidate.step + lost)

    @cached_property
    def program(self) -> Program:
        """The program as it is written. BudgetError where it does not fit."""
        candidate, budget = self.lighter.candidate, self.budget
        if self._fits:
            return self._reported(budget.kept_by(candidate.program))
        return self._reported(freed(candidate.program, self.lighter.plan(budget.offload), budget.nbytes, budget.finish))

    @cached_property
    def rank(self) -> Rank:
        """Its rank as it is written."""
        candidate, step = self.lighter.candidate, step_us(self.program.work)
        return self._rank(candidate.cost.us + max(0.0, step - candidate.step), step)

    def _rank(self, us: float, step: float) -> Rank:
        by_op, most = self.first.by_op, 1 + ROUNDING
        return us > by_op.cost.us * most or step > by_op.step * most, us, step

    def _reported(self, program: Program) -> Program:
        """The program, which says how it was placed."""
        report, *rest = program.reports
        placed = (f"placed for {self.lighter.candidate.memory.peak:,} bytes, by the first choice "
                  f"{self.first.end.memory.peak:,}")  # fmt: skip
        return replace(program, reports=(replace(report, did=(placed, *report.did)), *rest))
