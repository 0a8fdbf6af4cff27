"""What is expanded: a capture with the specs of what it is given, and of what it has to give."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from spmd.expand.captured import Argument, Captured
from spmd.expand.choose.program import Expansion
from spmd.expand.draws import Draws
from spmd.expand.given_specs import AllPlaces, own_place
from spmd.expand.passes.keep_gathered import keep_gathered
from spmd.expand.passes.place_reductions import place_reductions
from spmd.expand.results import Results
from spmd.expand.state import Slot
from spmd.mesh import DeviceMesh
from spmd.tensor.spec import Spec, reduced_spec


def expansion_of(
    fn: Callable, mesh: DeviceMesh, captured: Captured, call: Any, places: AllPlaces, results: Results
) -> Expansion:
    """What is expanded for a call: the capture, with the specs of its inputs and those that its outputs must have."""
    def spec_of_input(i: Slot | Argument | Draws) -> Spec | None:
        if isinstance(i, Draws):
            return None
        return call.specs[i] if isinstance(i, Slot) else call.leaf_specs.get(i.path)

    inputs = [(str(i), spec_of_input(i)) for i in captured.inputs]
    names = [f"result {o}" if isinstance(o, int) else str(o) for o in captured.outputs]

    def output_spec(i: int, spec: Spec) -> Spec:
        slot = captured.outputs[i]
        if slot in results.asked:
            return results.spec(slot, spec, mesh)
        home = call.specs.get(slot) if isinstance(slot, Slot) and slot.kind != "grad" else None
        if isinstance(slot, Argument):
            home = call.leaf_specs[slot.path]
        elif (path := results.attributes.get(slot)) is not None:
            before = call.leaf_specs.get(path) or call.specs.get(Slot("buffer", path))
            if before is not None and before.shape == spec.shape:
                home = before  # the next call has it as an input
        if home is None and isinstance(slot, Slot):
            home = own_place(slot, spec.shape, places)
        return reduced_spec(spec) if home is None else spec.with_layout(home.dims, home.units)

    name = getattr(fn, "__name__", "step")
    return Expansion(
        name if name.isidentifier() else "step", mesh, captured.graph, captured.constants, inputs, names, output_spec,
        (captured.inputs, captured.outputs), places, results.owed,
        (functools.partial(place_reductions, own=True), keep_gathered), tuple(map(kind_of, captured.inputs)),
    )  # fmt: skip


def kind_of(i: Slot | Argument | Draws) -> str:
    """The kind of an input, as `Program.kinds` has it."""
    return i.kind if isinstance(i, Slot) else "draws" if isinstance(i, Draws) else "argument"
