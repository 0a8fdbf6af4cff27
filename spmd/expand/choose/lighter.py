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

import numpy as np

from spmd.expand.choose.alive import Moment, Prices
from spmd.expand.choose.choice import Choice
from spmd.expand.choose.front import Front
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

MOST_WRITTEN = 256
"""Of a small problem so many of the cheapest assignments are written, at most: ten milliseconds each."""

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


@dataclass(frozen=True)
class Walk:
    """Programs one after the other. us: what the k-th costs in the model, once those before are written, in rising
    order; None behind the last. program: it."""

    us: Callable[[int], float | None]
    program: Callable[[int], Lighter]


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
        return self._lighter(turn.solved.x, choice, functools.partial(_again, prices=turn.prices))

    def _lighter(self, x: tuple[int, ...], choice: Choice, again: Callable[..., Program]) -> Lighter:
        """The program of an assignment; as it is known, if it was written before."""
        key = x, tuple(choice.held.values())
        if key not in self._written:
            again = functools.partial(again, as_run=self.start.candidate.as_run)
            self._written[key] = Lighter(self.start.with_choice(choice), again, x)
            self.known.append(self._written[key])
        return self._written[key]

    def _bound(self, turn: Turn) -> float:
        """What no assignment is below at the prices of a turn, where there is no budget.

        What is alive is alive in one program, and an assignment far from that may be thought to need more than it does.
        So the bytes are taken for less by as much as they are too many for any program that was written.
        """
        fixed = sum([share * self.model.rest(moment) for moment, share in turn.prices.shares])
        known = [each for each in self.known if each.x is not None]
        excess = [fixed + turn.nbytes(each.x) - each.candidate.memory.peak for each in known]
        return turn.solved.at_least + turn.prices.us * (fixed - max([0.0, *excess]))

    @property
    def walks(self) -> tuple[Walk, ...]:
        """All there is beside what is unpriced: the programs of prices, and those of a small problem."""
        return Walk(self._turn_us, self.program), *(self._few.walks if self._few else ())

    def _turn_us(self, k: int) -> float | None:
        turn = self.turn(k)
        return None if turn is None else turn.us

    @cached_property
    def _few(self) -> Few | None:
        front = Front.of(self.model)
        return None if front is None else Few(self, front)

    def assigned(self, x: tuple[int, ...], moments: tuple[Moment, ...], limit: float) -> Lighter:
        """The program of an assignment of the model, which is the cheapest within a limit at some moments."""
        return self._lighter(x, self.model.choice(x), functools.partial(_again_within, moments=moments, limit=limit))


class Few:
    """The programs of a small problem, of which all assignments are known: those that seem lighter than all that cost
    less, and the cheapest, one after the other. Neither depends on a budget, or on how far the other was walked."""

    def __init__(self, path: Path, front: Front) -> None:
        self.path, self.front = path, front
        self.front.note(path.known[0].moment)
        self._lights: list[tuple[int, Lighter | None]] = []
        self.walks = Walk(self._light_us, self._light), Walk(self._cheap_us, self._program)

    def _light_us(self, k: int) -> float | None:
        if k == len(self._lights):
            after = self._lights[-1][0] + 1 if self._lights else 0
            n = self.front.next(after, self._limits)
            if n is None:
                return None
            self._lights.append((n, None))
        return float(self.front.us[self._lights[k][0]])

    def _light(self, k: int) -> Lighter:
        n, found = self._lights[k]
        if found is None:
            found = self._program(n)
            self.front.note(found.moment, n)
            self._lights[k] = n, found
        return found

    def _cheap_us(self, k: int) -> float | None:
        return float(self.front.us[k]) if k < min(MOST_WRITTEN, len(self.front.us)) else None

    def _program(self, n: int) -> Lighter:
        """The program of an assignment, by its number."""
        return self.path.assigned(self.front.x(n), tuple(self.front.moments), float(self.front.needs[n]))

    def _limits(self, us: np.ndarray) -> np.ndarray:
        """The bytes that assignments have to be below, by their costs, so that their programs are lighter than all
        that come before them: those that are dearer than by op come behind all others."""
        by_op, first = self.path.first.by_op, self.path.first.end
        found, most = [first, *[each.candidate for _, each in self._lights if each]], by_op.cost.us * (1 + ROUNDING)
        ahead = [c.memory.peak for c in found if c.cost.us <= most and c.is_no_longer_than(by_op)]
        every = [by_op.memory.peak, *[c.memory.peak for c in found]]
        return np.where(us <= most, min(ahead, default=np.inf), min(every))


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


def _again_within(given: Expansion, as_run: AsRun, moments: tuple[Moment, ...], limit: float) -> Program:
    """The cheapest program of which no more is needed at these moments; the lightest where all need more."""
    start = ByOp.of(given, as_run)
    front = Front.of(start.model())
    if front is None:
        return Chosen.of(given, as_run).program
    for moment in moments:
        front.note(moment)
    fits = np.flatnonzero(front.needs <= limit)
    n = int(fits[0]) if len(fits) else int(front.needs.argmin())
    return start.with_choice(front.model.choice(front.x(n))).program


def _again(given: Expansion, as_run: AsRun, prices: Prices) -> Program:
    start = ByOp.of(given, as_run)
    turn = Turn.of(start.model(), prices)
    return start.with_choice(turn.model.choice(turn.solved.x)).program
