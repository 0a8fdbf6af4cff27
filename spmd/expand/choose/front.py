"""All assignments of a small problem in the order of their costs, and which of them are worth to be written.

    cost    14.3   15.1   15.1   16.0   19.2        needs 96 KB    128    80    88    64 at the moments that are known
    written   *             *             *         what needs less than all that costs less

Prices of bytes find corners of a hull only, and of a small graph that are few. So where there are few assignments all
are priced at once, with the bytes that they need where programs were found to need the most. What needs less than every
program before it is written. If its program needs more, at another moment, that moment counts from then on (as cutting
planes do). What a moment asks for is lowered by as much as it is too much for any program that was written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod

import numpy as np

from spmd.expand.choose.alive import Moment, Prices
from spmd.expand.choose.model import Model

MOST_ASSIGNMENTS = 20_000
"""Assignments of a problem of which all are priced: ten milliseconds."""

SMALL = 1e-6
"""The part of the cheapest assignment that all bytes of a moment cost, where they are counted: too little to matter."""


@dataclass
class Front:
    """All assignments of a model. every: [variable, assignment], in the order of their costs. us: these."""

    model: Model
    every: np.ndarray
    us: np.ndarray
    moments: dict[Moment, np.ndarray] = field(default_factory=dict)
    written: dict[int, int] = field(default_factory=dict)

    @classmethod
    def of(cls, model: Model) -> Front | None:
        """The assignments of a model; None if they are too many."""
        sizes = [len(work) for work in model.problem.work]
        if prod(sizes) > MOST_ASSIGNMENTS:
            return None
        every = np.indices(sizes).reshape(len(sizes), -1) if sizes else np.zeros((0, 1), int)
        us = model.problem.costs(every)
        order = np.argsort(us.round(6), kind="stable")
        return cls(model, every[:, order], us[order])

    def x(self, n: int) -> tuple[int, ...]:
        """Assignment n."""
        return tuple(self.every[:, n].tolist())

    def note(self, moment: Moment, n: int | None = None) -> None:
        """Count what all assignments need at a moment. n: the assignment whose program needs the most there."""
        if moment not in self.moments:
            rate = SMALL * max(1.0, float(self.us[0])) / moment.peak
            priced = self.model.priced(Prices(rate, ((moment, 1.0),)))
            self.moments[moment] = self.model.rest(moment) + (priced.problem.costs(self.every) - self.us) / rate
        if n is not None:
            self.written[n] = moment.peak

    @property
    def needs(self) -> np.ndarray:
        """The bytes that each assignment needs at the moments that are known."""
        at, peaks = np.array([*self.written], int), np.array([*self.written.values()])
        most = np.zeros(len(self.us))
        for nbytes in self.moments.values():
            most = np.maximum(most, nbytes - (nbytes[at] - peaks).max(initial=0.0))
        return most.round()

    def next(self, n: int, limit: Callable[[np.ndarray], np.ndarray]) -> int | None:
        """The first assignment from n on that needs less than its limit, by its cost. limit: of costs the limits."""
        fits = np.flatnonzero(self.needs[n:] < limit(self.us[n:]))
        return n + int(fits[0]) if len(fits) else None
