"""Programs that need less and less memory, each the cheapest that was found for its bytes.

    118,231,068 bytes, 600 us  ->  101,258,268, 615  ->  90,118,400, 702  ->  ...

How many bytes are alive at the peak is a property of the written program: gradients are views, updates need room, what
is moved for one reader stays for the next. No model of it was a bound. So the programs are asked: each is written, and
what is alive where it needs the most gets a price a byte (`alive.py`). With these prices the choice is solved again,
and its program tells where *it* needs the most. All moments that were ever found are priced, those more that were the
highest lately: a price on one of them alone moves the peak to another one, and makes it larger. (As in fictitious play:
one player chooses placements, the other one the moment that counts. G. W. Brown, "Iterative solution of games by
fictitious play", 1951.)

The price of the peak rises from one that hardly counts to one for which time hardly does. Which programs are tried
depends on no limit: so more memory never gives a program that is worse.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from spmd.expand.choose.alive import Moment, Prices
from spmd.expand.choose.model import Model
from spmd.expand.choose.program import AsRun, ByOp, Candidate, Chosen, Expansion, chosen
from spmd.expand.choose.solve import Solved, solve
from spmd.expand.collector import collector_off
from spmd.expand.program import Program

RATES = tuple([2.0**k for k in range(-4, 7)])
"""Prices of the peak: for 1.0 the whole peak of the first choice costs as much as its program."""

TURNS = 2
"""How often the choice is solved for each price, at most."""

FRESH = 0.5
"""The share of the price that the last moment gets, of what all before it had."""


@dataclass(frozen=True)
class Lighter:
    """A program of the path. again: makes such a program of an expansion. x: its assignment."""

    candidate: Candidate
    again: Callable[[Expansion], Program]
    x: tuple[int, ...] | None = None

    @cached_property
    def moment(self) -> Moment:
        """What is alive where it needs the most."""
        return Moment.of(self.candidate.run, self.candidate.memory, self.candidate.values)


@dataclass(frozen=True)
class Path:
    """Programs for less and less memory. first: the choice without a budget. every: each program once: that of the
    first choice, that by op, and those with prices.

    turns: how often the choice was solved. bounds: of each price what a byte of the budget is worth, and what no
    assignment is below where there is none.
    """

    first: Chosen
    every: tuple[Lighter, ...]
    turns: int
    bounds: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, first: Chosen) -> Path:
        """The path of a choice."""
        walk = _Walk(first)
        turns = list(walk.turns())
        return cls(first, tuple(walk.known), len(turns), tuple([walk.bound(each) for each in turns]))

    def at_least(self, budget: int) -> float:
        """What no assignment of the model is below that keeps to a budget at the moments that were found."""
        return max([us - rate * budget for rate, us in self.bounds], default=0.0)


class _Walk:
    """Finds the programs of a path. shares: of each moment that was found. known: all programs."""

    def __init__(self, first: Chosen) -> None:
        self.start, as_run = first.start, first.end.as_run
        self.model = self.start.model()
        self.shares: dict[Moment, float] = {}
        self.known = [Lighter(first.end, functools.partial(chosen, as_run=as_run))]
        if first.by_op is not first.end:
            self.known.append(Lighter(first.by_op, Expansion.program))
        self._written: dict[tuple, Lighter] = {}

    def turns(self) -> Iterator[_Turn]:
        """What was solved, in order."""
        first = self.known[0]
        self.shares[first.moment] = 1.0
        unit = first.candidate.cost.us / first.candidate.memory.peak
        last = first
        for rate in RATES:
            for _ in range(TURNS):
                turn = _Turn.of(self.model, Prices(rate * unit, tuple(self.shares.items())))
                yield turn
                found = self._program(turn)
                self._note(found.moment)
                if found is last:
                    break
                last = found

    def _note(self, moment: Moment) -> None:
        """Let this be the highest moment for now."""
        self.shares = {m: share * (1 - FRESH) for m, share in self.shares.items()}
        self.shares[moment] = self.shares.get(moment, 0.0) + FRESH

    def _program(self, turn: _Turn) -> Lighter:
        """The program of what was solved. One that was written before is not written again."""
        choice = turn.model.choice(turn.solved.x)
        key = turn.solved.x, tuple(choice.held.values())
        if key not in self._written:
            again = functools.partial(_again, as_run=self.start.candidate.as_run, prices=turn.prices)
            self._written[key] = Lighter(self.start.with_choice(choice), again, turn.solved.x)
            self.known.append(self._written[key])
        return self._written[key]

    def bound(self, turn: _Turn) -> tuple[float, float]:
        """What a byte of the budget is worth at the prices of a turn, and what no assignment is below without one.

        What is alive is alive in one program, and an assignment far from that may be thought to need more than it does.
        So the bytes are taken for less by as much as they are too many for any program that was written.
        """
        fixed = sum([share * self._rest(moment) for moment, share in turn.prices.shares])
        known = [each for each in self.known if each.x is not None]
        excess = [fixed + turn.nbytes(self.model, each.x) - each.candidate.memory.peak for each in known]
        return turn.prices.us, turn.solved.at_least + turn.prices.us * (fixed - max([0.0, *excess]))

    def _rest(self, moment: Moment) -> int:
        """The bytes of a moment that no assignment changes."""
        held = [h.nbytes for h in moment.held if h.readers is not None or h.value in self.model.made]
        return moment.peak - sum(held)


@dataclass(frozen=True)
class _Turn:
    """A choice that was solved with prices. model: with these."""

    prices: Prices
    model: Model
    solved: Solved

    @classmethod
    def of(cls, model: Model, prices: Prices) -> _Turn:
        """Solve a model at these prices."""
        with collector_off():
            model = model.priced(prices)
            return cls(prices, model, solve(model.problem, [model.by_itself()]))

    def nbytes(self, free: Model, x: tuple[int, ...]) -> float:
        """The bytes of an assignment at the moments that have a price, in the mean. free: the model without prices."""
        return (self.model.problem.cost(x) - free.problem.cost(x)) / self.prices.us


def _again(given: Expansion, as_run: AsRun, prices: Prices) -> Program:
    start = ByOp.of(given, as_run)
    turn = _Turn.of(start.model(), prices)
    return start.with_choice(turn.model.choice(turn.solved.x)).program
