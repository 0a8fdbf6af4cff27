"""How the program of a capture is written: expanded, then rewritten by the passes, and verified after each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from spmd.expand.capture import Captured
from spmd.expand.choose.program import Expansion, chosen
from spmd.expand.expansion import expansion_of, kind_of
from spmd.expand.explain.reasons import Way, written
from spmd.expand.passes.memory_budget import within
from spmd.expand.passes.passes import with_passes
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

    def program(self, captured: Captured, given: Given) -> Program:
        """The program of a capture whose sizes are known."""
        results = Results(captured, self.settings.outputs)
        program = self._expanded(expansion_of(self.fn, self.mesh, captured, given, given.places, results))
        program = replace(program, kinds=tuple(map(kind_of, captured.inputs)))
        budget, offload = self.settings.memory_budget, self.settings.offload
        if budget is None:
            return self._passed(program, own=True)
        return within(program, budget, self._passed, functools.partial(self._passed, keeps_memory=True), offload)

    def _passed(self, program: Program, keeps_memory: bool = False, own: bool = False) -> Program:
        return with_passes(program, self.settings.passes_on(self.mesh.device_type, keeps_memory), own)

    def _expanded(self, given: Expansion) -> Program:
        for_program = self.settings.choose == "program" and self.mesh.size() > 1
        by_program = functools.partial(chosen, as_run=self._as_run)
        write = ("for the program", by_program) if for_program else ("by op", Expansion.program)
        return written(given, self.settings.pins, Way(*write, self._as_run))

    def _as_run(self, program: Program) -> Program:
        """A program that was chosen, as it is priced: after the passes that are not judged by its time."""
        passes = self.settings.passes_on(self.mesh.device_type)
        return with_passes(program, [each for each in passes if not getattr(each, "judged", False)])
