"""`spmd.compile`: turns a single-device train step into a callable that runs it on a mesh.

    step = spmd.compile(train_step, mesh,
                        params={"*.attn.[qkv].weight": {"tp": Shard(0)}},
                        inputs={"tokens": {"dp": Shard(0)}, "targets": {"dp": Shard(0)}})
    loss = step(model, optimizer, tokens, targets)

A call finds the state in its arguments and places it on the mesh if it is not there yet. It looks up the program for
these arguments, or captures, expands and binds one. It runs the program on this rank's blocks and stores the results.
"""

from __future__ import annotations

import functools
import os
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from spmd.comm import RanksDiffer, agree
from spmd.comm.user_line import caller
from spmd.expand.again.repeat import Ready, Repeat, repeat_of
from spmd.expand.agreed import Made, agreed
from spmd.expand.bound_program import BoundProgram
from spmd.expand.call import Call
from spmd.expand.capture import capture
from spmd.expand.captured import Argument, Captured
from spmd.expand.closed_over import find_closed_over, only_optimizers
from spmd.expand.collector import collector_off
from spmd.expand.counters import CountersFound, Names, all_names, names_of
from spmd.expand.given_specs import check_arguments, check_can_be_placed, places_of
from spmd.expand.kept import archive
from spmd.expand.kept.key import key_of_call
from spmd.expand.kept.library import NOWHERE, Library, Wanted, entry_or_reason, library_at
from spmd.expand.kept.notation import CannotKeep
from spmd.expand.kept.rank_code import place_of_code
from spmd.expand.kept.settings import settings_text
from spmd.expand.local_map import tracing_lock
from spmd.expand.outside import unchanged
from spmd.expand.own_arguments import NOTHING_OWN, as_equal_blocks, check_not_written, exchanged, own_of_call
from spmd.expand.own_arguments import Given as Own
from spmd.expand.own_arguments import Own as OwnBlock
from spmd.expand.passes.passes import Pass
from spmd.expand.places.table import Sharding
from spmd.expand.precision import MixedPrecision, computed_in
from spmd.expand.program import Program
from spmd.expand.reads import Reads
from spmd.expand.recent import Recent
from spmd.expand.regions import EAGER, Backend, check_backend
from spmd.expand.results import Results
from spmd.expand.same_call import (
    FIRST_CALLS,
    TO_BE_MADE,
    SomeMakeIt,
    agree_on_call,
    calls_between_checks,
    check_equal,
    check_given,
    one_element,
)
from spmd.expand.saying import check_explicit, random_state
from spmd.expand.settings import Settings
from spmd.expand.signature import signature_of
from spmd.expand.sizes.captures import MOST_CAPTURES, Captures
from spmd.expand.sizes.forms import Forms, Given
from spmd.expand.stamp.unread import held_in
from spmd.expand.state import IS_COUNTER, State, Tensors, named_leaves
from spmd.expand.trace_errors import of_dtensor
from spmd.expand.unread_attributes import UnreadAttributes, watched
from spmd.expand.write import Writer
from spmd.mesh import DeviceMesh
from spmd.tensor.annotations.patterns import Patterns
from spmd.tensor.eager.dtensor import DTensor
from spmd.tensor.eager.identity import check_can_become
from spmd.tensor.eager.meta_models import Init, check_initialisers
from spmd.tensor.spec import Spec


def compile(
    fn: Callable, mesh: DeviceMesh, *, params: Patterns | None = None, inputs: Patterns | None = None,
    stored: Patterns | None = None, fully_shard: Sharding = None, mixed_precision: MixedPrecision | None = None,
    bucket_mb: float | None = 25.0, choose: str = "op", outputs: Patterns | None = None,
    placements: Patterns | None = None, passes: Sequence[Pass | str] | None = None, memory_budget: int | None = None,
    offload: bool = False,
    cache: str | os.PathLike | None = None, init: Init = True, backend: Backend = EAGER, stamp_blocks: bool = True,
) -> CompiledStep:  # fmt: skip
    """Make a single-device function run on a mesh, with the same numbers as on one device.

    fn: a function of modules, optimisers, tensors and plain values, such as a train step: forward, `loss.backward()`,
    `optimizer.step()`. It is traced on global shapes; its Python code runs at the first call only. Modules and
    optimisers that its code names as variables around it, globals or attributes of `self` count as arguments.
    params: where parameters are computed with: placements by name pattern, or None where every op may choose. What no
    pattern matches is replicated.
    stored: where parameters, their gradients and optimiser state are kept between steps, by name pattern. They are
    gathered for the ops that read them and freed again. By default they are kept as they are computed with.
    fully_shard: the same in a word, for parameters that no pattern of `stored` matches: the axes over which they are
    kept in shards; a `FullyShard` with its level; or a dict of these by name pattern.
    inputs: placements of tensor arguments by argument name. The caller passes *global* tensors, equal on all ranks,
    or DTensors; the sizes need not be divisible. `PerRank(Shard(0))` says that each rank passes its own block, as a
    loader with a `DistributedSampler` gives it. The first calls compare what the ranks pass.
    mixed_precision: a `MixedPrecision`, or torch's `MixedPrecisionPolicy`: the dtype to compute with and the one to
    reduce gradients in. Parameters and optimiser state keep theirs.
    bucket_mb: all-reduces that can wait, such as those of gradients, are sent together, up to this many megabytes, and
    so are gathers and reduce-scatters of what is stored in shards; None sends each one alone.
    choose: "program" chooses the placements of all values together, for the least modelled cost, which is never more
    than with "op", where every op takes what is cheapest for itself.
    outputs: placements of the tensors that fn returns, by path: "loss", "0.logits", "result" for one tensor alone.
    Partial() leaves the terms of a sum on the ranks. By default they lie as they were computed, with sums reduced.
    placements: of values inside of the step, and of their gradients alike: by the path of the module that gives them,
    "blocks.*.mlp", or is given them, "blocks.*.mlp.input"; or by the line that makes them, "model.py:31". None in the
    place of a placement leaves an axis open. `spmd.constrain` says the same in the code.
    passes: what is done to each program, in this order: passes by name ("fewer_moves", "chunks", "numbers_late",
    "buckets", "schedule", "overlap", "fused_updates", "fused_norms", "offload"), such a pass with its sizes, or
    functions from `Program` to `Program`. By default all-reduces are sent in buckets of `bucket_mb`, gathers and
    reduce-scatters in those that need no more memory; on GPUs "overlap" chooses buckets and order, so that what is sent
    runs beside what is computed, unless `bucket_mb` is None.
    memory_budget: bytes that may be alive on a rank at one time: parameters, gradients, optimiser state, buckets and
    activations. What does not fit is freed after the forward and computed again in the backward, with the same numbers,
    random ones too, in the least modelled time; `program.reports` say what and at what cost. With choose="program" also
    placements are sought that need less, and the cheapest program of both is taken. The error of a budget that cannot
    be kept names the smallest that can.
    offload: whether, within that budget, values may also wait in host memory, where the machine of the mesh has a copy
    engine (`Machine.host`) and it costs less time; `passes=("offload",)` sends all that waits there, on any machine.
    cache: a folder that keeps programs, by default that of $SPMD_CACHE. A later start with the same code, shapes,
    flags, placements and versions takes them from there, and captures nothing.
    init: for models on the meta device, of which each rank makes its blocks: True runs the initialisers of the modules
    (`reset_parameters`, `_init_weights`); a function is then called with each module; False leaves the memory as it is.
    backend: "inductor", or another of torch.compile's backends, compiles what a rank runs between its collectives; the
    collectives and their order stay. Then numbers are equal up to rounding. "eager" calls the ops one by one.
    stamp_blocks: capture two of the calls of equal modules, and write the others again, where it can be shown that
    their code reads nothing else than that of those two. The graph is the same but for the order of independent ops,
    captured faster. False captures each call.

    What is one tensor, or one list, dict, tuple or object of tensors, on one device is one behind the call, in
    attributes, containers and results; so is `x` and `x.detach()` one memory, and a view of a part of `x` is a view of
    it. But what fn returns of parameters, buffers and gradients, or of an argument that is no DTensor, is a copy: it
    keeps its numbers in later calls.

    Placements are given by axis name, `{"tp": Shard(0)}`, or as a list in mesh order. Returns a `CompiledStep`. Its
    first call turns parameters, buffers and optimiser state into DTensors; tensors that fn returns come back as such.

    Raises ValueError at once for an unknown axis, and in the first call, before anything is changed, for a pattern that
    matches nothing or a placement on a dim that the tensor does not have.

    >>> import torch
    >>> def gradients(model, x):
    ...     model(x).square().mean().backward()
    >>> model, x = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), torch.zeros(4096, 64)
    >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    >>> whole = compile(gradients, mesh, choose="program").program_for(model, x)
    >>> light = compile(gradients, mesh, choose="program", memory_budget=2_500_000).program_for(model, x)
    >>> f"{whole.memory().peak / 1e6:.1f} MB, {light.memory().peak / 1e6:.1f} MB"
    '5.3 MB, 2.4 MB'
    """
    if not callable(fn):
        raise TypeError(f"compile: {fn!r} is not callable; give the function to run, such as train_step")
    settings = Settings.of(
        mesh, params, stored, fully_shard, mixed_precision, inputs, outputs, bucket_mb, choose, placements, passes,
        memory_budget, offload,
    )  # fmt: skip
    check_backend(backend, mesh.device_type)
    return CompiledStep(fn, mesh, settings, library_at(cache), init, backend, stamp_blocks)


NO_SPECS: Mapping[str, Spec] = types.MappingProxyType({})

MOST_PROGRAMS = 64
"""The most programs that a compiled step keeps. One that was forgotten is made again of its capture."""


MOST_REPEATS = 4
"""The most calls of which a compiled step keeps all that it has found out, so that they can be made again at once."""


class CompiledStep:
    """A function compiled for a mesh. `program` is the program that the last call ran."""

    def __init__(
        self, fn: Callable, mesh: DeviceMesh, settings: Settings, library: Library = NOWHERE, init: Init = True,
        backend: Backend = EAGER, stamp_blocks: bool = True,
    ) -> None:  # fmt: skip
        self.fn, self.mesh, self.settings, self._library = fn, mesh, settings, library
        self._init, self._backend = init, backend
        self._table = settings.table(mesh)
        self._signature = signature_of(fn.forward if isinstance(fn, nn.Module) else fn)
        self._kept: Recent[BoundProgram] = Recent(MOST_PROGRAMS)
        self._capture_plainly(not stamp_blocks)
        self._writer = Writer(fn, mesh, settings)
        self._repeats: list[Repeat] = []
        self._read: set[str] = set()
        self._unread: frozenset[str] = frozenset()
        self._attributes = UnreadAttributes()
        self._counted: Names = {}
        self._last: BoundProgram | None = None
        self._for_one_call: list[archive.Entry | CannotKeep] = []
        self._site = caller()
        self._check_every = calls_between_checks()

    @property
    def program(self) -> Program:
        """The program that the last call ran: print it, list its collectives, price it."""
        if self._last is None:
            raise RuntimeError("no program yet: it is made at the first call, from the arguments it gets")
        return self._last.program

    @property
    def programs(self) -> list[Program]:
        """All programs that are kept, the last used one at the end.

        A call with other sizes makes another program.
        """
        return [b.program for b in self._kept]

    def save(self, path: str | os.PathLike) -> None:
        """Write the programs that are kept into one file, for `spmd.load_step`: texts and tensors, no pickled code.

        All ranks have the same programs, so one rank may do it. Raises CannotKeep, a ValueError, where a program has
        something that another process could not find, such as a `local_map` of a function that has no name.
        """
        kept = [entry for bound in self._kept for entry in bound.entries()]
        if self._last is None:
            raise RuntimeError("there is no program to save yet: it is made at the first call")
        archive.write(path, settings_text(self.settings), archive.all_kept([*self._for_one_call, *kept]))

    def count(self, names: Names) -> None:
        """Take numbers in attributes for such that change, by the path of what has them."""
        self._counted = all_names(self._counted, names)

    def program_for(self, *args: Any, **kwargs: Any) -> Program:
        """The program that a call with these arguments would run.

        Nothing is run, moved or sent, and no other rank takes part. No process group is needed: one machine can plan
        for a mesh of any size.
        """
        own = as_equal_blocks(self._find_own(args, kwargs), self.mesh) if self.settings.own else NOTHING_OWN
        call = self._call(args, kwargs, True, own)
        call.find_first_specs()
        with collector_off():
            captured, given = self._captured(call)
            return self._writer.program(captured.known_at(given.shapes, given.numbers), given)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        own = self._own_blocks(args, kwargs) if self.settings.own else NOTHING_OWN
        for repeat in self._repeats:
            if (ready := repeat.ready(args, kwargs, own)) is not None:
                return self._run_again(repeat, ready, args, kwargs, own)
        return self._run_anew(args, kwargs, own)

    def _own_blocks(self, args: tuple, kwargs: dict[str, Any]) -> Own:
        """What takes the place of the blocks that the ranks give as their own."""
        return exchanged(lambda: self._find_own(args, kwargs), self.mesh, self._call_title)

    def _find_own(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, OwnBlock]:
        return own_of_call(self._by_name(args, kwargs), self.settings.inputs, self.settings.own)

    def _run_again(self, repeat: Repeat, ready: Ready, args: tuple, kwargs: dict[str, Any], own: Own) -> Any:
        bound = repeat.bound
        if self.mesh.size() > 1:
            numbers = dict(zip(repeat.paths, ready.numbers, strict=True))
            try:
                calls = self._agree_on_objects(bound, repeat.objects(), repeat.small(ready), numbers)
            except SomeMakeIt:
                return self._run_anew(args, kwargs, own, some_make_it=True)
            if calls < FIRST_CALLS:
                self._check_given(repeat.arguments(ready), own)
        if repeat is not self._repeats[0]:
            self._repeats.remove(repeat)
            self._repeats.insert(0, repeat)
        self._last = bound
        self._kept.use(bound)
        check_explicit(self._title, bound)
        return repeat.run(ready)

    def _check_given(self, arguments: Mapping[str, Any], own: Own) -> None:
        check_given(self._call_title, self.mesh, arguments, {id(x) for x in own.values()})

    def _run_anew(self, args: tuple, kwargs: dict[str, Any], own: Own, some_make_it: bool = False) -> Any:
        """some_make_it: whether the ranks have found out that some have to make the program."""
        call, error = self._prepare(args, kwargs, own)
        bound = self._find_program(call) if call and not some_make_it else None
        try:
            calls = self._agree_to_run(bound, call, error, call.leaf_specs if call and some_make_it else NO_SPECS)
        except SomeMakeIt:
            bound = None
            calls = self._agree_to_run(bound, call, error, arguments=call.leaf_specs)
        is_known = bound is not None
        try:
            bound = self._serve(bound, call) if bound else self._make_program(call)
        except RanksDiffer:  # they may have been given blocks of several sizes
            self._check_given(call.leaves, own)
            raise
        if calls < FIRST_CALLS and self.mesh.size() > 1:
            self._check_given({path: call.leaves.get(path) for path in bound.arguments}, own)
        check_not_written(own, call.leaves, bound.captured.written)
        check_arguments(call.leaves, call.attributes.tensors, call.tensors, (*bound.changed, *bound.captured.written))
        check_can_be_placed(kept := call.kept(bound.captured), call.given_tensors)
        check_can_become(self._title, kept)
        self._last = bound
        check_explicit(self._title, bound)
        call.place_state(self._init)
        call.place_kept(bound.captured)
        made = call.make_first_state(bound.first_state)
        if self._check_every and calls % self._check_every == 0:
            check_equal(self._call_title, self.mesh, call.leaves, call.tensors)
        blocks, given = call.placed_leaves(), call.given_tensors
        leaves = bound.run(call.state, call.tensors, blocks, given, call.numbers, made)
        result = call.give(bound.captured, leaves)
        if is_known and not self._check_every:
            self._expect_again(bound, call, args, kwargs, own)
        return result

    def _expect_again(self, bound: BoundProgram, call: Call, args: tuple, kwargs: dict[str, Any], own: Own) -> None:
        """Note what a call has found out: the next may be the same one."""
        how = self._by_name, self._forget_past, own
        if call.was_in_place and (repeat := repeat_of(bound, call, args, kwargs, *how)):
            del self._repeats[MOST_REPEATS - 1 :]
            self._repeats.insert(0, repeat)

    def _forget_past(self) -> None:
        """Give up the calls whose models are no more, and keep those of others."""
        self._repeats[:] = [repeat for repeat in self._repeats if not repeat.is_over()]

    def _prepare(self, args: tuple, kwargs: dict[str, Any], own: Own) -> tuple[Call | None, Exception | None]:
        """The arguments, state and specs of a call, or the error that they raise. Nothing is moved yet."""
        try:
            call = self._call(args, kwargs, self._last is None, own)
            check_can_become(self._title, call.held())
            if self.mesh.device_type != "meta":
                check_initialisers(call.state.modules, self._init)
            return call, None
        except Exception as error:
            return None, error

    def _agree_to_run(
        self, bound: BoundProgram | None, call: Call | None, error: Exception | None,
        arguments: Mapping[str, Spec] = NO_SPECS,
    ) -> int:  # fmt: skip
        """How often the step was called before. The ranks compare their calls; if they differ, all raise. arguments:
        what they compare, too, where all make a program because some have none."""
        if error is not None:
            agree("", self.mesh, self._call_title, error)
        small = one_element(call.tensors, call.specs)
        return self._agree_on_objects(bound, call.objects, small, call.numbers, arguments)

    def _agree_on_objects(
        self, bound: BoundProgram | None, objects: dict[str, Any], small: Tensors, numbers: dict[str, float],
        arguments: Mapping[str, Spec] = NO_SPECS,
    ) -> int:  # fmt: skip
        text = f"{bound.fingerprint}\n{random_state(bound.captured)}" if bound else TO_BE_MADE
        text = "\n".join([text, *(f"{path}: {spec}" for path, spec in arguments.items())])
        return agree_on_call(self, self._site, self._call_title, self.mesh, text, objects, small, numbers)

    @property
    def _call_title(self) -> str:
        return f"the call of {getattr(self.fn, '__name__', 'the step')}"

    @property
    def _title(self) -> str:
        return f"the program of {getattr(self.fn, '__name__', 'the step')}"

    def _find_program(self, call: Call) -> BoundProgram | None:
        return self._kept.find(call.keys, lambda bound: bound.holds(call.numbers, call.numbers_in))

    def _serve(self, bound: BoundProgram, call: Call) -> BoundProgram:
        """The program, of which it is noted that it serves this call, too."""
        if (key := call.key) not in bound.wanted:
            wanted = self._wanted(call)
            bound.serves(key, wanted)
            self._library.add(wanted, bound.entry)
        return bound

    def _wanted(self, call: Call) -> Wanted:
        numbers = call.numbers | call.numbers_in()
        at = place_of_code(self.mesh, self._backend)
        return Wanted(self._title, key_of_call(self, call), numbers, self.mesh, call.state.modules, at)

    def _make_program(self, call: Call) -> BoundProgram:
        """Capture, expand and bind. The ranks compare their programs, and if one rank fails, all raise."""
        made = agreed(functools.partial(self._made, call), self.mesh, self._title)
        wanted, captured = made.wanted, made.captured
        bound = BoundProgram.of(made.source, captured, self.mesh, self._backend)
        bound.serves(call.key, wanted)
        if captured.is_for_one_call:  # what changes Python state is right for this call alone
            self._for_one_call.append(entry_or_reason(wanted, bound.entry))
        else:
            self._kept.keep(bound, call.keys_of(captured))
        if made.kept is None:
            self._library.add(wanted, bound.entry)
        return bound

    def _made(self, call: Call, plainly: bool) -> Made:
        """The program of a call. plainly: made anew without stamps, and so are later ones."""
        if plainly:
            self._capture_plainly(True)
        call.find_first_specs()
        wanted = self._wanted_with_counted(call)
        found = None if plainly else self._library.find(wanted)
        known = call.state.counters
        captured, source = self._capture_and_expand(call) if found is None else (found.captured, found)
        if call.wanted_with_counted is not None:  # the capture has found numbers that are no guards
            names = [f"{path}{IS_COUNTER}" for path in call.state.counters if path not in known]
            if names:
                self._library.note_counted(wanted, names)
            wanted = call.wanted_with_counted
        self._leave_out_unread(call, captured)
        may_differ = captured.is_stamped or (found is not None and self._library.is_cache)
        return Made(wanted, captured, source, may_differ)

    def _wanted_with_counted(self, call: Call) -> Wanted:
        """What is wanted for a call, in which the numbers are counted that an earlier process has found to change."""
        wanted = self._wanted(call)
        while (names := all_names(self._counted, names_of(self._library.counted(wanted)))) != self._counted:
            self.count(names)
            self._count_in(call)
            wanted = self._wanted(call)
        return wanted

    def _count_in(self, call: Call) -> None:
        call.count(self._counted, self._attributes.unread)
        call.leave_out(self._unread)

    def _capture_plainly(self, plainly: bool) -> None:
        """Make captures with stamps from now on, or without."""
        self._stamp_blocks = not plainly
        self._captures = Captures(self.fn, self._title, self.mesh, how=(self._table.precision, plainly))
        self._forms = Forms(MOST_CAPTURES)

    @collector_off()
    def _capture_and_expand(self, call: Call) -> tuple[Captured, Program]:
        captured, given = self._captured(call)
        known = captured.known_at(given.shapes, given.numbers)
        known = replace(known, given=Results(captured, self.settings.outputs).given)
        alone = self._library is not NOWHERE or captured.is_for_one_call  # ranks that load have no forms
        if alone or self.settings.memory_budget is not None:  # and other sizes need other memory
            return known, self._writer.program(known, given)
        return known, self._forms.program(captured, given, self._writer.program)

    def _captured(self, call: Call) -> tuple[Captured, Given]:
        """A capture that is right for a call, and what its program is written for."""
        captured = None
        while captured is None:
            try:
                captured = self._captures.of(call, functools.partial(self._capture, call))
            except CountersFound as found:
                known = self._counted
                self.count(found.names)
                if known == self._counted:
                    raise RuntimeError(f"{self._title} sets {found.names}, which was to be found before") from found
                self._count_in(call)
                call.wanted_with_counted = self._wanted(call)
        specs = {i: call.specs[i] for i in (*captured.inputs, *captured.outputs) if i in call.specs}
        places = places_of(call.state, call.tensors, self._table)
        return captured, Given(specs, call.leaf_specs, places, call.numbers)

    def _capture(self, call: Call, changed: Names) -> Captured:
        """changed: the attributes of modules that are not what they were in the last call."""
        try:
            name = getattr(self.fn, "__name__", "the step")
            around = unchanged(self.fn, dict(named_leaves(call.given)), call.state.submodules())
            names = self._attributes.to_watch(changed)
            before, attributes = call.guards_of_modules(names), watched(call.state.wholes(), names)
            optimizers = only_optimizers(call.state.optimizers, name)
            with tracing_lock, optimizers, around, attributes as unread:  # traces change classes
                run = functools.partial(self._call_fn, call.state)
                how = self.mesh, call.first, self._stamp_blocks, self._captures.apart, call.known_containers
                captured = capture(self.fn, call.named, run, call.state, *how)
            captured = replace(captured, changes=[(held_in(box), new) for box, new in captured.changes])
            self._leave_out_unread(call, captured)
            self._attributes = self._attributes.after(names, unread)
            call.leave_out_attributes(before, self._attributes.unread)
            return captured
        except AttributeError as error:
            raise of_dtensor(error, DTensor) from error

    def _leave_out_unread(self, call: Call, captured: Captured) -> None:
        """Of tensors in attributes that no program has read, the shapes alone count from now on."""
        self._read |= {i.path for i in captured.inputs if isinstance(i, Argument)} | captured.placed
        self._unread = (self._unread | call.attributes.tensors.keys()) - self._read
        call.leave_out(self._unread)

    def _call(self, args: tuple, kwargs: dict[str, Any], first: bool, own: Own = NOTHING_OWN) -> Call:
        named = self._by_name(args, kwargs)
        reads = Reads()
        search = find_closed_over(self.fn, dict(named_leaves(named)), reads)
        unread = self._unread, self._attributes.unread
        return Call.of(named, search, self._table, self.settings.inputs, first, reads, *unread, self._counted, own)

    def _by_name(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        given = self._signature.bind(*args, **kwargs).arguments
        optional = [p.name for p in self._signature.parameters.values() if p.default is None]
        return {**dict.fromkeys(optional), **given}

    def _call_fn(self, state: State, named: dict[str, Any]) -> Any:
        bound = self._signature.bind_partial()
        bound.arguments.update(named)
        paths = {id(p): path for path, p in state.parameters().items()}
        with computed_in(self._table.precision, state.modules.values(), paths):
            return self.fn(*bound.args, **bound.kwargs)
