"""Keep a program within a memory budget: what does not fit is freed, and computed again where it is read.

    spmd.compile(step, mesh, memory_budget=8 << 30)

The budget is for all that a rank holds: parameters, gradients, state, buckets and activations, as `program.memory()`
counts them. Of all that waits for the backward it is decided together what is kept, so that the least time is spent
again (`passes/recompute`). The passes are made behind it, and what comes of them is counted; the program that is
returned does not exceed the budget. No number changes: what is computed again has the operands and the random numbers
that it had.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from spmd.expand.passes.recompute.again import Lookup
from spmd.expand.passes.recompute.improve import better
from spmd.expand.passes.recompute.rewrite import rewritten
from spmd.expand.passes.recompute.solve import Choice, Chosen
from spmd.expand.passes.recompute.spans import Spans
from spmd.expand.passes.recompute.values import Values, folded
from spmd.expand.passes.report import Figures, Freed, Report
from spmd.expand.program import Program

TRIALS = 8
"""How often less is aimed at, where the passes behind need more than was foreseen."""


class BudgetError(ValueError):
    """A memory budget that cannot be kept. smallest: the least bytes that can."""

    def __init__(self, name: str, budget: int, smallest: int, text: str):
        super().__init__(
            f"memory_budget: {name} cannot run in {budget:,} bytes a rank; the smallest possible is {smallest:,}, with "
            f"{text}. Give at least that, share the state out over more ranks (fully_shard=), or take smaller batches"
        )
        self.smallest = smallest


Finish = Callable[[Program], Program]
"""Makes the passes that come behind."""


def within(program: Program, budget: int, plain: Finish, finish: Finish) -> Program:
    """The program after its passes, with no more bytes alive on a rank.

    plain: the passes for a program of which all is kept; finish: for one of which something is computed again.
    BudgetError where there is none.
    """
    kept = plain(program)
    needs = kept.memory().peak
    if needs <= budget:
        return _reported(kept, Report("memory_budget", True, False, f"{needs:,} bytes are within {budget:,}"))
    plan = Plan.of(program)
    aim = budget - (finish(program).memory().peak - plan.peak)
    for _ in range(TRIALS):
        chosen = plan.choice.least_time(aim)
        if chosen is None:
            break
        made = plan.program(chosen)
        done = finish(made.verify())
        excess = done.memory().peak - budget
        if excess <= 0:
            return _reported(done, plan.report(chosen, program, made))
        aim = min(aim, chosen.peak) - excess
    return plan.smallest(program, budget, finish)


def _reported(program: Program, report: Report) -> Program:
    return replace(program, reports=(report, *program.reports))


@dataclass(frozen=True)
class Plan:
    """What may be freed in a program, and what that does."""

    lookup: Lookup
    spans: Spans

    @classmethod
    def of(cls, program: Program) -> Plan:
        """The plan of a program before its passes."""
        spans = Spans.of(Values.of(*folded(program)))
        return cls(spans.lookup, spans)

    @cached_property
    def choice(self) -> Choice:
        """The ways of all spans."""
        alive = np.array(self.lookup.values.alive, dtype=np.int64)
        between = np.minimum(alive, np.concatenate([alive[:1], alive[:-1]]))
        halves = np.stack([between, alive], axis=1).reshape(-1)[1:]
        of_parts = Choice(tuple(self.spans.ways()), halves, self.spans.starts)
        return replace(of_parts, ways=(*of_parts.ways, *better(self.spans, of_parts)))

    @cached_property
    def peak(self) -> int:
        """The modelled bytes of the program as it came."""
        return self.choice.unlimited.peak

    def program(self, chosen: Chosen) -> Program:
        """The program in which these ways are taken."""
        return rewritten(self.lookup, self.freed(chosen))

    def freed(self, chosen: Chosen) -> frozenset[int]:
        """The units that are freed."""
        return self.lookup.values.forced.union(*(way.freed for way in chosen.ways))

    def report(self, chosen: Chosen, before: Program, after: Program) -> Report:
        """What was done, with the cost of each choice."""
        costs, values = self.lookup.costs(self.freed(chosen)), self.lookup.values
        freed = tuple(
            Freed(values.nodes[u].name, sum([r.nbytes for r in values.units[u]]), us, values.work.tasks[u].line)
            for u, us in costs.items()
            if u not in values.forced and u in values.units
        )
        return Report("memory_budget", True, True, "", Figures.of(before), Figures.of(after), freed)

    def smallest(self, program: Program, budget: int, finish: Finish) -> Program:
        """The program with the least memory, if it keeps to the budget after all; else BudgetError."""
        chosen = self.choice.least_peak()
        made = self.program(chosen)
        done = finish(made.verify())
        memory = done.memory()
        if memory.peak <= budget:
            return _reported(done, self.report(chosen, program, made))
        kinds = ", ".join(f"{nbytes:,} of {kind}" for kind, nbytes in list(memory.by_kind.items())[:3])
        raise BudgetError(program.name, budget, memory.peak, kinds)
