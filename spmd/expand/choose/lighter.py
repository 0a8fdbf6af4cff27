"""Programs that need less and less memory, each the cheapest that was found for its bytes.

    118,231,068 bytes, 600 us  ->  101,258,268, 615  ->  90,118,400, 702  ->  ...

How many bytes are alive at the peak is a property of the written program: gradients are views, updates need room, what
is moved for one reader stays for the next. No model of it was a bound. So the programs are asked: each is written, and
what is alive where it needs the most gets a price a byte (`alive.py`). With these prices the choice is solved again,
and its program tells where *it* needs the most. All moments that were ever found are priced, those more that were the
highest lately: a price on one of them alone moves the peak to another one, and makes it larger. (As in fictitious play:
one player chooses placements, the other one the moment that counts. G. W. Brown, "Iterative solution of games by
fictitious play", 1951.)

The price of the peak rises from one that hardly counts to one for which time hardly does. Which programs there are, and
in which order, depends on no budget; how far they are asked for does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from spmd.expand.choose.alive import Moment, Prices
from spmd.expand.choose.model import Model
from spmd.expand.choose.program import ROUNDING, AsRun, ByOp, Candidate, Chosen, Expansion, chosen
from spmd.expand.choose.solve import Solved, solve
from spmd.expand.collector import collector_off
from spmd.expand.passes.memory_budget import Plan
from spmd.expand.program import Program

RATES = tuple([3.0**k for k in range(-3, 5)])
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
    _plans: dict[bool, Plan] = field(default_factory=dict, compare=False, repr=False)

    def plan(self, offload: bool) -> Plan:
        """What may be freed in it. offload: whether values may wait in host memory."""
        if offload not in self._plans:
            self._plans[offload] = Plan.of(self.candidate.program, offload)
        return self._plans[offload]

    @cached_property
    def moment(self) -> Moment:
        """What is alive where it needs the most."""
        return Moment.of(self.candidate.run, self.candidate.memory, self.candidate.values)


class Path:
    """Programs for less and less memory, found one after the other as they are asked for.

    first: the choice without a budget. known: each program once: that of the first choice, that by op, and those with
    prices, behind the first that are `unpriced`. turns: what was solved, with rising prices. found: their programs.
    """

    def __init__(self, first: Chosen) -> None:
        self.first, self.start, self.model = first, first.start, first.start.model()
        self.turns: list[Turn] = []
        self.found: list[Lighter] = []
        self.known = [Lighter(first.end, functools.partial(chosen, as_run=first.end.as_run))]
        if first.by_op is not first.end:
            self.known.append(Lighter(first.by_op, Expansion.program, tuple(self.model.by_itself())))
        self.unpriced = len(self.known)
        self._unit = first.end.cost.us / first.end.memory.peak
        self._shares = {self.known[0].moment: 1.0}
        self._rates = [rate for rate in RATES for _ in range(TURNS)]
        self._written: dict[tuple, Lighter] = {}

    def turn(self, k: int) -> Turn | None:
        """What is solved in a turn, once the programs of those before are written; None behind the last."""
        if k == len(self.turns) and self._rates:
            prices = Prices(self._rates.pop(0) * self._unit, tuple(self._shares.items()))
            self.turns.append(Turn.of(self.model, prices))
        return self.turns[k] if k < len(self.turns) else None

    def program(self, k: int) -> Lighter:
        """The program of a turn that was solved."""
        if k == len(self.found):
            found, last = self._program(self.turns[k]), (self.known[:1] + self.found)[-1]
            self._shares = {m: share * (1 - FRESH) for m, share in self._shares.items()}
            self._shares[found.moment] = self._shares.get(found.moment, 0.0) + FRESH
            if found is last:  # the same price gives it again
                price = self.turns[k].prices.us / self._unit
                self._rates = [rate for rate in self._rates if rate > price * (1 + ROUNDING)]
            self.found.append(found)
        return self.found[k]

    def at_least(self, budget: int) -> float:
        """What no assignment of the model is below that keeps to a budget at the moments that were found."""
        bounds = [(turn.prices.us, self._bound(turn)) for turn in self.turns]
        return max([us - rate * budget for rate, us in bounds], default=0.0)

    def _program(self, turn: Turn) -> Lighter:
        """The program of what was solved. One that was written before is not written again."""
        choice = turn.model.choice(turn.solved.x)
        key = turn.solved.x, tuple(choice.held.values())
        if key not in self._written:
            again = functools.partial(_again, as_run=self.start.candidate.as_run, prices=turn.prices)
            self._written[key] = Lighter(self.start.with_choice(choice), again, turn.solved.x)
            self.known.append(self._written[key])
        return self._written[key]

    def _bound(self, turn: Turn) -> float:
        """What no assignment is below at the prices of a turn, where there is no budget.

        What is alive is alive in one program, and an assignment far from that may be thought to need more than it does.
        So the bytes are taken for less by as much as they are too many for any program that was written.
        """
        fixed = sum([share * self._rest(moment) for moment, share in turn.prices.shares])
        known = [each for each in self.known if each.x is not None]
        excess = [fixed + turn.nbytes(each.x) - each.candidate.memory.peak for each in known]
        return turn.solved.at_least + turn.prices.us * (fixed - max([0.0, *excess]))

    def _rest(self, moment: Moment) -> int:
        """The bytes of a moment that no assignment changes."""
        held = [h.nbytes for h in moment.held if h.readers is not None or h.value in self.model.made]
        return moment.peak - sum(held)


@dataclass(frozen=True)
class Turn:
    """A choice that was solved with prices. free: the model without them. model: with them."""

    prices: Prices
    free: Model
    model: Model
    solved: Solved

    @classmethod
    def of(cls, model: Model, prices: Prices) -> Turn:
        """Solve a model at these prices."""
        with collector_off():
            priced = model.priced(prices)
            return cls(prices, model, priced, solve(priced.problem, [priced.by_itself()]))

    @cached_property
    def us(self) -> float:
        """What the assignment costs without prices, in the model."""
        return self.free.problem.cost(self.solved.x)

    def nbytes(self, x: tuple[int, ...]) -> float:
        """The bytes of an assignment at the moments that have a price, in the mean."""
        return (self.model.problem.cost(x) - self.free.problem.cost(x)) / self.prices.us


def _again(given: Expansion, as_run: AsRun, prices: Prices) -> Program:
    start = ByOp.of(given, as_run)
    turn = Turn.of(start.model(), prices)
    return start.with_choice(turn.model.choice(turn.solved.x)).program
