"""How the program of a capture is written: expanded, then rewritten by the passes, and verified after each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from spmd.expand.captured import Captured
from spmd.expand.choose.budget import Budget, chosen_within
from spmd.expand.choose.program import Chosen, Expansion
from spmd.expand.expansion import expansion_of
from spmd.expand.explain.explanation import Explanation
from spmd.expand.explain.reasons import Way, to_write, with_reasons, written
from spmd.expand.loops.bodies import has_loops, with_bodies
from spmd.expand.loops.roll import rolled
from spmd.expand.loops.room import with_room
from spmd.expand.loops.write import CannotLoop
from spmd.expand.nodes import SOURCE
from spmd.expand.passes.passes import NAMED, with_passes
from spmd.expand.program import Program
from spmd.expand.results import Results
from spmd.expand.settings import Settings
from spmd.expand.sizes.forms import Given
from spmd.mesh import DeviceMesh


@dataclass(frozen=True)
class Writer:
    """Writes the programs of a step."""

    fn: Callable
    mesh: DeviceMesh
    settings: Settings

    def program(self, captured: Captured, given: Given, like: Program | None = None) -> Program:
        """The program of a capture for sizes that it knows. like: one of the same capture at sizes not far from these;
        what was chosen for it is followed."""
        expansion = self._expansion(captured.sized(loops=self._rolls), given)
        if self._rolls and (program := self._with_loops(expansion)) is not None:
            return replace(program, reasons=_ReasonsOfRounds(self, captured, given))
        if self._rolls and captured.looped is not None:
            expansion = self._expansion(captured.sized(), given)
        if self.settings.memory_budget is None:
            return self._passed(self._expanded(expansion, like), own=True)
        if self._for_program:
            return self._chosen_within(expansion)
        return self._budget.kept_by(self._expanded(expansion))

    def _expansion(self, sized: Captured, given: Given) -> Expansion:
        return expansion_of(self.fn, self.mesh, sized, given, given.places, Results(sized, self.settings.outputs))

    # ---- loops ----------------------------------------------------------------------------------
    @property
    def _rolls(self) -> bool:
        """Whether equal rounds become a loop. Choices for the whole program, budgets, pins and passes of the user see
        all of their ops."""
        settings = self.settings
        plain = settings.memory_budget is not None or settings.pins or self._for_program
        return not plain and all(isinstance(each, NAMED) for each in settings.passes or ())

    def _with_loops(self, given: Expansion) -> Program | None:
        """The program with equal rounds as a loop; None where there are none."""
        looped = given if has_loops(given.graph) else replace(given, graph=rolled(given.graph))
        if not has_loops(looped.graph):
            return None
        for node in looped.graph.nodes:
            node.meta[SOURCE] = node.name
        try:
            return self._passed(looped.program(), own=True)
        except CannotLoop:
            return None

    @property
    def _budget(self) -> Budget:
        keeping = functools.partial(self._passed, keeps_memory=True)
        return Budget(self.settings.memory_budget, self._passed, keeping, self.settings.offload)

    def _passed(self, program: Program, keeps_memory: bool = False, own: bool = False) -> Program:
        passes = self.settings.passes_on(self.mesh.device_type, keeps_memory)
        if own:
            program = with_bodies(with_room(program), lambda body: with_passes(body, passes, own))
        return with_passes(program, passes, own)

    @property
    def _for_program(self) -> bool:
        return self.settings.choose == "program" and self.mesh.size() > 1

    def _expanded(self, given: Expansion, like: Program | None = None) -> Program:
        pins = self.settings.pins
        if not self._for_program:
            return written(given, pins, Way("by op", Expansion.program, self._as_run))
        choose = functools.partial(Chosen.of, as_run=self._as_run)
        if like is not None and like.reasons.way.kept is not None:
            choose = functools.partial(Chosen.like, like.reasons.way.kept, as_run=self._as_run)
        found = choose(to_write(given, pins))
        way = Way("for the program", lambda other: choose(other).program, self._as_run, found.kept)
        return with_reasons(found.program, given, pins, way)

    def _chosen_within(self, given: Expansion) -> Program:
        pins = self.settings.pins
        first = Chosen.of(to_write(given, pins), self._as_run)
        taken = chosen_within(first, self._budget)
        return with_reasons(taken.program, given, pins, Way("for the program", taken.write, self._as_run))

    def _as_run(self, program: Program) -> Program:
        """A program that was chosen, as it is priced: after the passes that are not judged by its time."""
        passes = self.settings.passes_on(self.mesh.device_type)
        return with_passes(program, [each for each in passes if not getattr(each, "judged", False)])


@dataclass(frozen=True, eq=False)
class _ReasonsOfRounds:
    """The reasons of a program with loops: those of the same rounds one behind the other, which is written when they
    are asked for."""

    writer: Writer
    captured: Captured
    given: Given

    def explain(self, of: str) -> Explanation:
        """As `Program.explain`."""
        writer = self.writer
        return writer._expanded(writer._expansion(self.captured.sized(), self.given)).explain(of)
