"""Keep a program within a memory budget: what does not fit is freed and computed again where it is read, or waits in
host memory.

    spmd.compile(step, mesh, memory_budget=8 << 30, offload=True)

The budget is for all that a rank holds: parameters, gradients, state, buckets and activations, as `program.memory()`
counts them. Of all that waits for the backward it is decided together what is kept, computed again, or with `offload`
sent to host memory, so that the least time is lost (`passes/recompute`). The passes are made behind it, and what comes
of them is counted; the program that is returned does not exceed the budget. No number changes: what is computed again
has the operands and the random numbers that it had, and what is fetched is what was sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from spmd.expand.passes.offload import NO_ENGINE
from spmd.expand.passes.recompute.again import Lookup
from spmd.expand.passes.recompute.copies import Copy
from spmd.expand.passes.recompute.improve import better
from spmd.expand.passes.recompute.rewrite import rewritten
from spmd.expand.passes.recompute.solve import Choice, Chosen, Either
from spmd.expand.passes.recompute.spans import Spans
from spmd.expand.passes.recompute.values import Values, folded
from spmd.expand.passes.report import Figures, Freed, Report
from spmd.expand.program import Program

TRIALS = 8
"""How often less is aimed at, where the passes behind need more than was foreseen."""


class BudgetError(ValueError):
    """A memory budget that cannot be kept. smallest: the least bytes that can."""

    def __init__(self, name: str, budget: int, smallest: int, text: str):
        self.name, self.budget, self.smallest, self.text = name, budget, smallest, text
        super().__init__(
            f"memory_budget: {name} cannot run in {budget:,} bytes a rank; the smallest possible is {smallest:,}, with "
            f"{text}. Give at least that, share the state out over more ranks (fully_shard=), or take smaller batches"
        )


Finish = Callable[[Program], Program]
"""Makes the passes that come behind."""


def within(program: Program, budget: int, plain: Finish, finish: Finish, offload: bool = False) -> Program:
    """The program after its passes, with no more bytes alive on a rank.

    plain: the passes for a program of which all is kept; finish: for one of which something is computed again. offload:
    whether values may wait in host memory. BudgetError where there is none.
    """
    kept = plain(program)
    needs = kept.memory().peak
    if needs <= budget:
        return _reported(kept, Report("memory_budget", True, False, f"{needs:,} bytes are within {budget:,}"))
    return freed(program, Plan.of(program, offload), budget, finish)


def freed(program: Program, plan: Plan, budget: int, finish: Finish) -> Program:
    """The program with as much freed as the budget asks for. plan: what may be. finish: as in `within`."""
    aim = budget - (finish(program).memory().peak - plan.peak)
    best: _Made | None = None
    for choice in plan.choices:
        first = choice.least_time(aim)
        if first is not None and (best is None or first.us < best.chosen.us):  # less memory never takes less time
            best = _quicker(best, _kept_to(plan, choice, aim, budget, finish))
    best = best or _smallest(plan, program, budget, finish)
    return _reported(best.done, plan.report(best.chosen, program, best.made))


@dataclass(frozen=True)
class _Made:
    """What was chosen, the program in which that is done, and what its passes made of it."""

    chosen: Chosen
    made: Program
    done: Program

    @classmethod
    def of(cls, plan: Plan, chosen: Chosen, finish: Finish) -> _Made:
        made = plan.program(chosen)
        return cls(chosen, made, finish(made.verify()))


def _quicker(one: _Made | None, other: _Made | None) -> _Made | None:
    return other if one is None or (other is not None and other.chosen.us < one.chosen.us) else one


def _kept_to(plan: Plan, choice: Choice, aim: int, budget: int, finish: Finish) -> _Made | None:
    """What is chosen of these ways and keeps to the budget. None where nothing is found that does."""
    for _ in range(TRIALS):
        chosen = choice.least_time(aim)
        if chosen is None:
            break
        found = _Made.of(plan, chosen, finish)
        excess = found.done.memory().peak - budget
        if excess <= 0:
            return found
        aim = min(aim, chosen.peak) - excess
    return None


def _smallest(plan: Plan, program: Program, budget: int, finish: Finish) -> _Made:
    """The program with the least memory, if it keeps to the budget after all; else BudgetError."""
    found = [_Made.of(plan, choice.least_peak(), finish) for choice in plan.choices]
    least = min(found, key=lambda each: each.done.memory().peak)
    memory = least.done.memory()
    if memory.peak <= budget:
        return least
    kinds = ", ".join(f"{nbytes:,} of {kind}" for kind, nbytes in list(memory.by_kind.items())[:3])
    raise BudgetError(program.name, budget, memory.peak, kinds)


def _reported(program: Program, report: Report) -> Program:
    return replace(program, reports=(report, *program.reports))


@dataclass(frozen=True)
class Plan:
    """What may be freed in a program, and what that does. left: what is not done, and why."""

    lookup: Lookup
    spans: Spans
    left: tuple[str, ...] = ()

    @classmethod
    def of(cls, program: Program, offload: bool = False) -> Plan:
        """The plan of a program before its passes. offload: whether values may wait in host memory, if there is any."""
        machine = program.mesh.topology.machine
        spans = Spans.of(Values.of(*folded(program)), offload and machine.host is not None)
        left = (NO_ENGINE.format(name=machine.name),) if offload and not spans.with_host else ()
        return cls(spans.lookup, spans, left)

    @cached_property
    def choices(self) -> tuple[Choice, ...]:
        """The ways of all spans; where values may wait in host memory, those without it, too. Both searches leave out
        much, so with host memory alone the least budget may be larger than without."""
        without = replace(self.spans, with_host=False)
        return tuple(map(self._choice, [self.spans, without] if self.spans.with_host else [self.spans]))

    def _choice(self, spans: Spans) -> Choice:
        alive = np.array(self.lookup.values.alive, dtype=np.int64)
        between = np.minimum(alive, np.concatenate([alive[:1], alive[:-1]]))
        halves = np.stack([between, alive], axis=1).reshape(-1)[1:]
        of_parts = Choice(tuple(spans.ways()), halves, spans.starts, spans.groups)
        return replace(of_parts, ways=(*of_parts.ways, *better(spans, of_parts)))

    @cached_property
    def choice(self) -> Choice | Either:
        """What there is to choose from: for each budget the better of all `choices`."""
        return Either(self.choices) if len(self.choices) > 1 else self.choices[0]

    @cached_property
    def peak(self) -> int:
        """The modelled bytes of the program as it came."""
        return self.choice.peak_with([self.lookup.effect(self.lookup.values.forced)])

    def program(self, chosen: Chosen) -> Program:
        """The program in which these ways are taken."""
        return rewritten(self.lookup, self.freed(chosen), self.copies(chosen))

    def freed(self, chosen: Chosen) -> frozenset[int]:
        """The units that are freed."""
        return self.lookup.values.forced.union(*(way.freed for way in chosen.ways))

    def copies(self, chosen: Chosen) -> tuple[Copy, ...]:
        """What is sent to host memory, and when."""
        return tuple([copy for way in chosen.ways for copy in way.effect.copies])

    def report(self, chosen: Chosen, before: Program, after: Program) -> Report:
        """What was done, with the cost of each choice."""
        sent, values = {copy.unit: copy.us for copy in self.copies(chosen)}, self.lookup.values
        again = self.lookup.costs(self.freed(chosen), sent)
        shown = [u for u in again if u in values.units and u not in values.forced and u not in sent]
        freed = [self._freed(u, again[u]) for u in shown]
        freed += [self._freed(u, sent[u] + again.get(u, 0.0), to_host=True) for u in sorted(sent)]
        figures = Figures.of(before), Figures.of(after)
        return Report("memory_budget", True, True, "", *figures, tuple(freed), left=self.left)

    def _freed(self, unit: int, us: float, to_host: bool = False) -> Freed:
        values = self.lookup.values
        nbytes = sum([r.nbytes for r in values.units[unit]])
        return Freed(values.nodes[unit].name, nbytes, us, values.work.tasks[unit].line, to_host)
