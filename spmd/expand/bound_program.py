"""A program bound to a rank: it runs on the rank's blocks, and what it gives goes where the step would have put it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from spmd import _torch
from spmd._torch import pytree
from spmd.comm import transport
from spmd.comm.listen import is_heard, tell_of_program
from spmd.expand.capture import Argument, Captured
from spmd.expand.code import code_for
from spmd.expand.draws import Draws
from spmd.expand.function import as_function
from spmd.expand.given_specs import state_written
from spmd.expand.kept.archive import Entry
from spmd.expand.kept.library import Wanted, entry_or_reason
from spmd.expand.kept.notation import CannotKeep
from spmd.expand.program import Program
from spmd.expand.python_state import put
from spmd.expand.regions import Backend, with_compiled_regions
from spmd.expand.skipped_steps import made_by_skipped
from spmd.expand.state import Slot, State, Tensors
from spmd.tensor.eager.dtensor import DTensor
from spmd.tensor.recipes import stream
from spmd.tensor.spec import Spec

NumbersIn = Callable[[tuple[Slot, ...]], dict[str, float]]
"""Reads the numbers in tensors of the state."""


@dataclass
class BoundProgram:
    """A program bound to this rank, with the sources of its inputs and the homes of its outputs.

    module: what the transport made of this rank's code. code: the same as a function, which is called. dropped: the
    gradients that the program gets and does not read. They are freed before it runs, and so are those that it does not
    get. changed: the state that it writes. wanted: the calls that it serves, by key.
    """

    program: Program
    captured: Captured
    module: Callable[..., Any]
    code: Callable[..., Any]
    dropped: tuple[Slot, ...]
    changed: tuple[Slot, ...]
    wanted: dict[Hashable, Wanted] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, captured: Captured, backend: Backend) -> BoundProgram:
        def code() -> Callable:
            return with_compiled_regions(code_for(program, program.mesh.get_coordinate(), transport()).module, backend)

        run = transport().bound(code)
        placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
        unread = {n for n in placeholders if not n.users}
        dropped = tuple(
            i
            for i, n in zip(captured.inputs, placeholders, strict=True)
            if n in unread and isinstance(i, Slot) and i.kind == "grad"
        )
        function = as_function(run) if isinstance(run, fx.GraphModule) else run
        return cls(program, captured, run, function, dropped, state_written(program.graph, captured.outputs))

    def serves(self, key: Hashable, wanted: Wanted) -> None:
        """Note that the program is right for a call with this key."""
        self.wanted[key] = wanted._replace(modules={})  # it shall keep no model alive

    def entries(self) -> list[Entry | CannotKeep]:
        """What is saved of the program: an entry for each call that it serves, or why there is none."""
        return [entry_or_reason(wanted, self.captured, self.program) for wanted in self.wanted.values()]

    @cached_property
    def read(self) -> frozenset[object]:
        """The inputs that the program reads."""
        return frozenset(self.captured.inputs) - frozenset(self.dropped)

    @cached_property
    def first_state(self) -> dict[Slot, Spec]:
        """The state that optimisers make in their first step, which the program gets as an input."""
        first, specs = frozenset(self.captured.first), (spec for _, spec in self.program.inputs)
        return {i: spec for i, spec in zip(self.captured.inputs, specs, strict=True) if i in first}

    def holds(self, numbers: dict[str, float], numbers_in: NumbersIn) -> bool:
        """Whether the trace took the branches that it would take with these numbers and this state."""
        return self.captured.holds(numbers | numbers_in(self.captured.watched))

    def run(
        self, state: State, tensors: Tensors, leaves: dict[str, Any], numbers: dict[str, float],
        made: frozenset[Slot] = frozenset(),
    ) -> Any:  # fmt: skip
        """Run the program on this rank's blocks, and write the new state back. made: state that was made for this call.

        Returns what the function returns, and the arguments that it changes, by name.
        """
        flat = [self._input_value(i, tensors, leaves, numbers) for i in self.captured.inputs]
        for slot in [s for s in tensors if s.kind == "grad" and s not in self.read]:
            _parameter(tensors, slot).grad = None  # of the previous step; nothing reads it: free it now
        out = self.execute(flat)
        del flat
        results: dict[int, Any] = {}
        new: Tensors = {}
        for where, value, (_, spec) in zip(self.captured.outputs, out, self.program.outputs, strict=True):
            wrapped = value if spec is None else self._as_output(where, value, spec, tensors)
            (new if isinstance(where, Slot) else results)[where] = wrapped
        self._update_state(state, tensors, new, made)
        for name in self.captured.stepped:
            _torch.note_step(state.optimizers[name])
        put(self.captured.changes)
        values = [results.get(i, leaf) for i, leaf in enumerate(self.captured.leaves)]
        return pytree.tree_unflatten(values, self.captured.tree)

    def execute(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """What the rank's code gives for these inputs."""
        if is_heard():
            tell_of_program(self.module, [each.nbytes for each in self.program.collectives])
        with torch.no_grad():
            return self.code(*inputs)

    def _input_value(self, i: Slot | Argument | Draws, tensors: Tensors, leaves, numbers) -> Any:
        if i in self.dropped:
            return None
        if isinstance(i, Draws):
            return stream.reserve_draws(self.program.mesh, i.count)
        if isinstance(i, Slot):
            return tensors[i]._current_block
        return numbers[i.path] if i.path in numbers else leaves[i.path]

    def _as_output(self, where: Slot | int, value: torch.Tensor, spec: Spec, tensors: Tensors) -> DTensor:
        """A result as a DTensor. If it has a home, the result is written into the home."""
        home = tensors.get(where) if isinstance(where, Slot) and where.kind != "grad" else None
        if home is None:
            return DTensor(value, spec)
        if value is not home._local_tensor:
            home._local_tensor.copy_(value)
        home._note_write()
        return home

    def _update_state(self, state: State, before: Tensors, new: Tensors, made: frozenset[Slot]) -> None:
        """Set the gradients, which are new in each step, and install optimiser state that was added or removed."""
        there = before.keys() - made if made else before.keys()
        kept = {s for s in new if s.kind == "optimizer"}
        if not kept <= there and (skipped := made_by_skipped(new)):
            new = {s: t for s, t in new.items() if s.owner not in skipped or s in there}
            kept = {s for s in new if s.kind == "optimizer"}
        if kept != {s for s in before if s.kind == "optimizer"}:
            state.install(new)
        if numbers := {slot.path: x for slot, x in new.items() if slot.kind == "number"}:
            state.set_hyper_parameters(numbers)
        for slot, t in before.items():
            if slot.kind == "parameter":
                t.grad = new.get(Slot("grad", slot.path))


def _parameter(tensors: Tensors, slot: Slot) -> torch.Tensor:
    return tensors[Slot("parameter", slot.path)]
