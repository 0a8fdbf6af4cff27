"""A program bound to a rank: it runs on the rank's blocks, and what it gives goes where the step would have put it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from spmd import _torch
from spmd.comm import transport
from spmd.comm.listen import is_heard, tell_of_program
from spmd.expand.captured import Argument, Captured
from spmd.expand.code import code_for
from spmd.expand.draws import Draws
from spmd.expand.function import Function, as_function
from spmd.expand.given_specs import inputs_given_back, unread_inputs
from spmd.expand.kept.archive import Entry, Kept
from spmd.expand.kept.library import Wanted, entry_or_reason
from spmd.expand.kept.notation import CannotKeep
from spmd.expand.kept.rank_code import Named, RankCode
from spmd.expand.program import Program
from spmd.expand.python_state import put_changes
from spmd.expand.regions import Backend, with_compiled_regions
from spmd.expand.skipped_steps import made_by_skipped
from spmd.expand.sources.redo import redo
from spmd.expand.state import Slot, State, Tensors
from spmd.mesh import DeviceMesh
from spmd.tensor.eager.dtensor import DTensor
from spmd.tensor.recipes import stream
from spmd.tensor.spec import Spec

NumbersIn = Callable[[tuple[Slot, ...]], dict[str, float]]
"""Reads the numbers in tensors of the state."""


@dataclass
class BoundProgram:
    """A program bound to this rank, with the sources of its inputs and the homes of its outputs.

    source: the program, or where it was read. code: what this rank runs, as a function. inputs, outputs: as those of
    the program. dropped: the gradients that the program gets and does not read. They are freed before it runs, and so
    are those that it does not get. changed: the state that it writes. arguments: the paths of those that it reads, or
    that are placed on the mesh, and of such tensors in attributes. wanted: the calls that it serves, by key.
    """

    source: Program | Kept
    captured: Captured
    backend: Backend
    mesh: DeviceMesh
    code: Callable[..., Any]
    inputs: Named
    outputs: Named
    dropped: tuple[Slot, ...]
    changed: tuple[Slot, ...]
    arguments: frozenset[str]
    wanted: dict[Hashable, Wanted] = field(default_factory=dict)

    @classmethod
    def of(cls, source: Program | Kept, captured: Captured, mesh: DeviceMesh, backend: Backend) -> BoundProgram:
        """A program on this rank: bound now, unless it was kept with the code of this rank."""
        kept = source.code if isinstance(source, Kept) else None
        if kept is not None:
            function, run = kept.function.made("kept code"), None
            inputs, outputs, unread, same = kept.inputs, kept.outputs, kept.unread, kept.kept
        else:
            program = source.program if isinstance(source, Kept) else source
            run = _module(program, backend)
            function = as_function(run) if isinstance(run, fx.GraphModule) else run
            inputs, outputs = program.inputs, program.outputs
            unread, same = unread_inputs(program.graph), inputs_given_back(program.graph)
        dropped = tuple([
            x for i, x in enumerate(captured.inputs) if i in unread and isinstance(x, Slot) and x.kind == "grad"
        ])
        changed = tuple([x for i, x in enumerate(captured.outputs) if i not in same and isinstance(x, Slot)])
        read = [x.path for i, x in enumerate(captured.inputs) if i not in unread and isinstance(x, Argument)]
        arguments = captured.placed.union(read)
        bound = cls(source, captured, backend, mesh, function, inputs, outputs, dropped, changed, arguments)
        if run is not None:
            bound.module = run
        return bound

    @property
    def program(self) -> Program:
        """The program, which is read now if it was kept with the code of this rank."""
        return self.source.program if isinstance(self.source, Kept) else self.source

    @property
    def fingerprint(self) -> str:
        """That of the program."""
        return self.source.fingerprint

    @cached_property
    def module(self) -> Callable[..., Any]:
        """What the transport makes of this rank's code; where the code was kept, bound when it is asked for."""
        return _module(self.program, self.backend)

    def serves(self, key: Hashable, wanted: Wanted) -> None:
        """Note that the program is right for a call with this key."""
        self.wanted[key] = wanted._replace(modules={})  # it shall keep no model alive

    def entries(self) -> list[Entry | CannotKeep]:
        """What is saved of the program: an entry for each call that it serves, or why there is none."""
        return [entry_or_reason(wanted, self.entry) for wanted in self.wanted.values()]

    def entry(self, wanted: Wanted) -> Entry:
        """What is kept of the program for a call that it serves."""
        if isinstance(self.source, Kept) and self.source.code is not None and not self.captured.is_for_one_call:
            return replace(self.source.entry, key=wanted.known_key())
        return wanted.entry(self.captured, self.program, self._code_text(wanted.at))

    def _code_text(self, at: str | None) -> str:
        """The code of this rank as text; empty where it is not kept."""
        if at is None or not isinstance(self.module, fx.GraphModule):
            return ""
        try:
            return RankCode.of(at, self.program, Function.of(self.module)).text
        except CannotKeep:  # it is bound anew
            return ""

    @cached_property
    def read(self) -> frozenset[object]:
        """The inputs that the program reads."""
        return frozenset(self.captured.inputs) - frozenset(self.dropped)

    @cached_property
    def first_state(self) -> dict[Slot, Spec]:
        """The state that optimisers make in their first step, which the program gets as an input."""
        first, specs = frozenset(self.captured.first), (spec for _, spec in self.inputs)
        return {i: spec for i, spec in zip(self.captured.inputs, specs, strict=True) if i in first}

    def holds(self, numbers: dict[str, float], numbers_in: NumbersIn) -> bool:
        """Whether the trace took the branches that it would take with these numbers and this state."""
        return self.captured.holds(numbers | numbers_in(self.captured.watched))

    def run(
        self, state: State, tensors: Tensors, leaves: dict[str, Any], given: Mapping[str, Any],
        numbers: dict[str, float], made: frozenset[Slot] = frozenset(),
    ) -> list[Any]:  # fmt: skip
        """Run the program on this rank's blocks, and write the new state back. leaves: these blocks of what is in
        arguments and attributes. given: what is there itself. made: state that was made for this call.

        Returns the leaves of what the function gives.
        """
        flat = [self._input_value(i, tensors, leaves, numbers) for i in self.captured.inputs]
        for slot in [s for s in tensors if s.kind == "grad" and s not in self.read]:
            _parameter(tensors, slot).grad = None  # of the previous step; nothing reads it: free it now
        out = self.execute(flat)
        del flat
        homes = {**tensors, **{i: given[i.path] for i in self.captured.written}}
        results: dict[Any, Any] = {}
        for where, value, (_, spec) in zip(self.captured.outputs, out, self.outputs, strict=True):
            results[where] = value if spec is None else _as_output(where, value, spec, homes)
        new = {where: x for where, x in results.items() if isinstance(where, Slot)}
        self._update_state(state, tensors, new, made)
        state.set_kept_by_optimizers(self.captured.first_kept)
        state.add_options(self.captured.new_options, new)
        for name in self.captured.stepped:
            _torch.note_step(state.optimizers[name])
        put_changes(self.captured.changes)
        redo(self.captured.writes)
        values = [results.get(i, leaf) for i, leaf in enumerate(self.captured.leaves)]

        def there(where: Slot | Argument) -> Any:
            return given[where.path] if isinstance(where, Argument) else new.get(where, tensors.get(where))

        for i, where in self.captured.given.items():
            if values[i] is None or isinstance(there(where), DTensor):
                values[i] = there(where).detach() if i in self.captured.detached else there(where)
        for i, view in self.captured.views.items():
            base = values[view.of] if type(view.of) is int else there(view.of)
            if values[i] is None or isinstance(base, DTensor):
                values[i] = view.shown(base)
        for i, first in self.captured.same.items():
            values[i] = values[first].detach() if i in self.captured.detached else values[first]
        return values

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
            return stream.reserve_draws(self.mesh, i.count)
        if isinstance(i, Slot):
            return tensors[i]._current_block
        return numbers[i.path] if i.path in numbers else leaves[i.path]

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


def _as_output(where: Slot | Argument | int, value: torch.Tensor, spec: Spec, homes: Mapping[Any, Any]) -> DTensor:
    """A result as a DTensor. If it has a home, the result is written into the home."""
    home = None if isinstance(where, Slot) and where.kind == "grad" else homes.get(where)
    if home is None:
        return DTensor(value, spec)
    write_into(home, value)
    return home


def write_into(home: DTensor, block: torch.Tensor) -> None:
    """Give a tensor of the caller's the block that a program has made for it."""
    if block is not home._local_tensor:
        home._local_tensor.copy_(block)
    home._note_write()


def _module(program: Program, backend: Backend) -> Callable[..., Any]:
    """What the transport makes of this rank's code."""

    def code() -> Callable:
        return with_compiled_regions(code_for(program, program.mesh.get_coordinate(), transport()).module, backend)

    return transport().bound(code)


def _parameter(tensors: Tensors, slot: Slot) -> torch.Tensor:
    return tensors[Slot("parameter", slot.path)]
