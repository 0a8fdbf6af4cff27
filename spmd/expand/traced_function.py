"""The function that is traced: it runs the step on values of the trace, and notes what the step does besides.

    TracedFunction(...)([p, x])    [value of the loss, new value of p]

What the step returns, what it has changed in Python, which of all that is one object and which shares memory, goes into
fields; Python objects are put back. So a trace leaves everything as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import is_
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from spmd import _torch
from spmd._torch import pytree
from spmd.expand.assigned import assigned_tensor
from spmd.expand.attributes import check_no_gradients, first_set, give_attributes
from spmd.expand.captured import Argument
from spmd.expand.caught import Caught
from spmd.expand.closed_over import search_of
from spmd.expand.containers import (
    AROUND,
    Before,
    Containers,
    Copies,
    There,
    check_not_parted,
    in_arguments,
    is_filled,
)
from spmd.expand.counters import all_numbers, check_constant, is_number_or_symbol
from spmd.expand.equal_counts import EqualCounts
from spmd.expand.first_state import FirstSteps
from spmd.expand.given_gradients import GivenGradients
from spmd.expand.hooks import copy_hooks, hooks_of
from spmd.expand.keep_products import KeepProducts
from spmd.expand.layouts import asked_for
from spmd.expand.masked import check_not_kept
from spmd.expand.module_attributes import (
    Attributes,
    Others,
    SetByStep,
    leaves_of,
)
from spmd.expand.new_options import (
    NewOptions,
    check_kept,
    check_memories,
    check_shapes,
    new_options,
    options_in,
    shapes_of,
)
from spmd.expand.nodes import line_of
from spmd.expand.objects import NAMED, PLAIN, differs, with_containers
from spmd.expand.one_tensor import ones
from spmd.expand.origins import Origins
from spmd.expand.outside import line_naming
from spmd.expand.phases import Phases, mark_gradient, new_values_noted
from spmd.expand.python_state import KeptOfRun, PythonState, all_boxes, variables_of
from spmd.expand.shared_leaves import SharedLeaves
from spmd.expand.skipped_steps import SkippedSteps
from spmd.expand.sources.layout import Contents
from spmd.expand.stamp.blocks import Blocks
from spmd.expand.stamp.repeats import Structure
from spmd.expand.state import Slot, State, Tensors, named_leaves, own_attributes
from spmd.expand.told import FrozenValue, Told
from spmd.expand.traced_calls import TracedCalls
from spmd.expand.traced_ops import Normalise
from spmd.expand.variables import Place
from spmd.expand.views import View, common_base, share_elements, views_of
from spmd.tensor.recipes import stream

Opened = tuple[Any, Sequence[Any]]
"""A value with its objects opened, and the containers in it."""

FROZEN = (
    "the step changes a Python value in {} ({}); it would be frozen in the program. Keep tensors with register_buffer, "
    "counts in tensors or in attributes of the module itself, and set flags outside the step."
)


def changed_guards(before: dict[str, Hashable], now: dict[str, Hashable]) -> list[str]:
    """The paths of the constants that differ, in order."""
    return [path for path in {**before, **now} if before.get(path) != now.get(path)]


_KEPT = int, float, bool, str, type(None)
"""The types of what a program may let an optimiser keep."""


class _StandIns(NamedTuple):
    """What a step is given in a trace.

    given: values of the trace, by input. wrapped: what the step sees of them. new: of these, what is in the place of
    the tensors of the state. first: the state that optimisers make first. numbers: of these, what stands for numbers
    and for tensors in arguments and attributes, by path. own: what users have set on tensors of the state.
    """

    given: dict[Slot | Argument, Any]
    wrapped: dict[Slot | Argument, Any]
    new: Tensors
    first: Tensors
    numbers: dict[str, Any]
    own: dict[Slot, dict[str, Any]]


class _Before(NamedTuple):
    """What is there before a step runs in a trace: to be compared with, and to be put back."""

    counters: dict[str, Place]
    counts: dict[str, Any]
    others: Others
    attributes: Attributes
    copies: Copies
    constants: dict[str, Hashable]
    plain: Any
    kept: Collection[Any]
    options: Mapping[tuple[str, Any], Any]
    shapes: dict[Any, str]
    python: PythonState


class _Given(NamedTuple):
    """What a step has given. now: what it has left in its arguments. filled: the containers that it was given and has
    written. arguments: as they were. inside: the containers that were in them. held: all that it was given."""

    result: Opened
    now: dict[str, Opened]
    filled: list[Opened]
    arguments: dict[str, Any]
    inside: dict[str, Sequence[Any]]
    held: Before

    @property
    def changed(self) -> dict[str, Opened]:
        """The arguments that are not what they were."""
        return {name: x for name, x in self.now.items() if _is_changed(x, self.arguments[name], self.inside[name])}


class _Ran(NamedTuple):
    """What a step has done in a trace. written: the tensors that it wrote into. after: those of the state. counted: the
    counters that it set. new_state: what says which new state of optimisers counts."""

    given: _Given
    written: list[Argument]
    after: Tensors
    attributes: SetByStep
    counted: dict[str, Any]
    new_state: Tensors


@dataclass
class TracedFunction:
    """The function that make_fx runs, from flat tensors to flat tensors. Other return values go into its fields.

    more: inputs behind the first one, which make_fx is not told of.
    """

    fn: Callable
    call: Callable
    args: dict[str, Any]
    containers: Containers
    state: State
    attributes: Attributes
    slots: Tensors
    inputs: tuple[Slot | Argument, ...]
    note: dict[Slot, Callable[[torch.Tensor], None]]
    names: dict[Slot, str]
    first: tuple[Slot, ...]
    stamped: Callable[[EqualCounts], contextlib.AbstractContextManager]
    structures: Mapping[int, Structure]
    sizes: _torch.SizeSymbols
    more: list[torch.Tensor]
    outputs: tuple = ()
    leaves: tuple = ()
    tree: Any = None
    identities: dict[int, There | int] = field(default_factory=dict)
    shared: SharedLeaves = field(default_factory=SharedLeaves)
    views: dict[int, View] = field(default_factory=dict)
    changes: Contents = field(default_factory=list)
    set_attributes: dict[str, Any] = field(default_factory=dict)
    grown: tuple[str, ...] = ()
    phases: Phases = field(default_factory=Phases)
    unmade: frozenset[Slot] = frozenset()
    ignores_gradients: bool = False
    stepped: tuple[str, ...] = ()
    first_kept: dict[tuple[str, Any, Any], Any] = field(default_factory=dict)
    new_options: NewOptions = field(default_factory=dict)

    def watch_errors(self, functions: Collection[FunctionType], is_exact: bool) -> None:
        """To be called before the trace. functions: the user's. is_exact: whether sizes are numbers."""
        self.caught = Caught(functions, type(self)._called.__code__, is_exact)

    def __post_init__(self) -> None:
        self.origins = Origins.of(self.state.modules, type(self)._called.__code__)
        self.normalise = Normalise(self.phases, self.origins)
        self.blocks = Blocks(self.state, self.origins, self.phases, self.normalise.numbering)
        self.new_numbers: dict[Slot, torch.SymFloat] = {}
        self.counts = EqualCounts({})
        self.own: Tensors = {}
        self.written: list[Any] = []

    def __call__(self, flat_inputs: list) -> list:
        given = self._given(flat_inputs)
        with _torch.quick_functional_mode():
            there = self._stand_ins(given)
            with self.state.swap(there.new, there.numbers):
                ran = self._run(there)
                with _torch.no_function_modes():
                    self._check_state(ran.after)
        return self._outputs_of(there, ran)

    def _given(self, flat_inputs: list) -> dict[Slot | Argument, Any]:
        """The values of the trace by input, also those that make_fx was not told of."""
        tracer = _torch.proxy_mode().tracer
        values = _torch.with_more_inputs(flat_inputs, self.more, tracer)
        self.sizes.track()
        nodes = _torch.walked(tracer.graph).find_nodes(op="placeholder")
        of_counts = {n: self.names[i] for n, i in zip(nodes, self.inputs, strict=True) if i in self.names}
        self.counts = EqualCounts(of_counts)
        return dict(zip(self.inputs, values, strict=True))

    def _stand_ins(self, given: dict[Slot | Argument, Any]) -> _StandIns:
        for slot, note in self.note.items():
            note(given[slot])
        wrapped = _wrapped(given)
        with _torch.no_function_modes():
            new = {slot: self._as_original(slot, wrapped[slot]) for slot in self.slots}
        given_tensors = {i: x for i, x in wrapped.items() if isinstance(i, Argument) and isinstance(x, torch.Tensor)}
        for path in (path for path, x in named_leaves(self.args) if isinstance(x, nn.Parameter)):
            _torch.as_parameter(wrapped[Argument(path)], requires_grad=False)
        own, self.own = self._give_attributes(new | given_tensors), dict(new)
        numbers = {a.path: v for a, v in wrapped.items() if isinstance(a, Argument)}
        numbers |= self._ones(new, numbers)
        first = {slot: new.pop(slot) for slot in self.first}
        return _StandIns(given, wrapped, new, first, numbers, own)

    def _ones(self, new: Tensors, arguments: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """What stands for arguments that are one tensor with others, or with one of the state or in an attribute."""
        state = {str(slot): slot for slot in self.slots}
        known = {path: self.slots[slot] for path, slot in state.items()} | self.attributes.tensors
        pairs = ones(known, dict(named_leaves(self.args)))
        return {path: new[state[other]] if other in state else arguments[other] for path, other in pairs}

    def _run(self, there: _StandIns) -> _Ran:
        """Run the step in the trace. What it does to Python objects is noted, and taken back."""
        paths = {id(p): path for path, p in self.state.parameters().items()}
        before = self._before(there)
        steps = FirstSteps(self.state.optimizers, paths, there.first)
        skipped = SkippedSteps(self.state.optimizers, steps.give)
        before.python.replace({id(x): there.new[slot] for slot, x in self._replaced().items()})
        arguments = _with_leaves(self.args, there.numbers)
        passed = {name: before.copies.of(x, self.containers[name]) for name, x in arguments.items()}
        inside = {name: with_containers(x)[1] for name, x in passed.items()}
        around = {path: x for path, x in self.containers.items() if path.startswith(AROUND)}
        held = Before(inside | dict(before.attributes.containers), {**before.attributes.constant, **around})
        originals = Before({path: self._only_given(x) for path, x in in_arguments(self.containers).items()}, {})
        try:
            result = self._called(passed, steps, skipped)
            check_not_parted(originals)
            self.written = self._written_originals(held)
            written = self._written(there.given, there.wrapped)
            with _torch.no_function_modes():
                after = self.state.tensors()
                attributes = SetByStep.between(before.attributes, Attributes.of(self.state), self.state)
                given_back = with_containers(result), *_given_to(passed, held)  # before all is put back
            counted = self._checked(there, before, held, after, attributes)
            before.others.put_back(attributes.places)
        except BaseException:
            before.others.put_all_back()
            raise
        finally:
            before.python.restore()
            self.state.counters = before.counters
        given = _Given(*given_back, arguments, inside, held)
        return _Ran(given, written, after, attributes, counted, skipped.new_state)

    def _only_given(self, containers: Iterable[Any]) -> list[Any]:
        """Those that are in no attribute: of what is in one, the trace has the same copy there."""
        in_attributes = {id(x) for several in self.attributes.containers.values() for x in several}
        return [x for x in containers if id(x) not in in_attributes]

    def _written_originals(self, held: Before) -> list[Any]:
        """The containers in arguments alone of which the step has written the copies."""
        given, places = in_arguments(self.containers), map(held.place, held.written())
        return self._only_given([given[at.path][at.number] for at in places if at.path in given])

    def _before(self, there: _StandIns) -> _Before:
        """Give the modules their attributes, and note what is there."""
        counters = self.state.counters
        counts = {path: place.value for path, place in counters.items()}
        others = Others(self.state)
        given_attributes = {path: there.wrapped[Argument(path)] for path in self.attributes.tensors}
        copies = Copies()
        held = self.attributes.put(given_attributes, self.state, copies)
        with _torch.no_function_modes():
            constants, plain = self.state.constants(), all_numbers(self.state)
            kept, options = self.state.kept_by_optimizers().keys(), self.state.options()
            held_by_optimizers = [(x, dict(own_attributes(x))) for x in self.state.optimizers.values()]
            python = PythonState(_each_once(self.state.wholes()), self._around(there.own), held_by_optimizers)
        first = counters, counts, others, held, copies, constants, plain, kept, options
        return _Before(*first, shapes_of(self.state), python)

    def _called(self, passed: dict[str, Any], steps: FirstSteps, skipped: SkippedSteps) -> Any:
        """What the step returns. Notes which optimisers have made a step, and whether gradients were asked for."""
        gradients = GivenGradients()
        with contextlib.ExitStack() as within:
            for mode in self._modes(steps, skipped, gradients):
                within.enter_context(mode)
            result = self.call(passed)
        self.unmade, self.stepped = frozenset(steps.left), tuple(sorted(steps.stepped))
        self.ignores_gradients = gradients.ignored(self.state.parameters().values())
        return result

    def _checked(
        self, there: _StandIns, before: _Before, held: Before, after: Tensors, attributes: SetByStep
    ) -> dict[str, Any]:
        """The counters that the step has set. Notes what else it has changed; raises for what no program does."""
        self._check_slots(after)
        given = {i: x for i, x in there.wrapped.items() if isinstance(i, Argument) and isinstance(x, torch.Tensor)}
        _check_attributes(there.new | given, there.own)
        check_no_gradients({i.path: x for i, x in given.items()})
        before.python.replace({id(there.new[slot]): x for slot, x in self._replaced().items()})
        counted = self._counted(before.counts)
        check_constant(before.plain, self.state, before.python)
        self.first_kept = self._first_kept(before.kept)
        check_kept(self.state)
        check_memories(there.new, after, given)
        check_shapes(before.shapes, self.state)
        self.new_options, numbers = new_options(before.options, self.state, after)
        self.new_numbers |= numbers
        self._note_changes(before.constants, before.python, there.numbers, attributes)
        self._check_parted(held, before.attributes)
        before.python.check_around()
        return counted

    def _outputs_of(self, there: _StandIns, ran: _Ran) -> list:
        set_to = ran.attributes.trees
        changed = ran.given.changed | {path: (x, ran.attributes.containers[path]) for path, x in set_to.items()}
        buffers = self._other_buffers(ran.after)
        changed |= {path: (x, ()) for path, x in (ran.counted | {i.path: x for i, x in buffers.items()}).items()}
        was_there = {i: x for i, x in there.wrapped.items() if isinstance(i, Argument)} | self._unreplaced(ran.after)
        homes = {slot: x for slot, x in ran.after.items() if slot not in buffers}
        homes |= {i: self.own[i] for i in buffers if _torch.from_functional(self.own[i]) is not there.given[i]}
        homes |= ran.new_state | self.new_numbers | {i: there.wrapped[i] for i in ran.written}
        return self._flat_outputs(ran.given.result, changed, ran.given.filled, ran.given.held, was_there, homes)

    def _modes(
        self, steps: FirstSteps, skipped: SkippedSteps, gradients: GivenGradients
    ) -> Iterator[contextlib.AbstractContextManager]:
        """What is on while the step runs."""
        yield steps.given()
        yield self.stamped(self.counts)
        yield new_values_noted(self.state.parameters())
        yield gradients.watched(lambda: bool(self.phases.ends))
        yield self.normalise
        yield _torch.scaled_steps(skipped.run)
        yield TracedCalls(self.normalise.constrained, asked_for(self._given_tensors()), self.caught)
        yield KeepProducts(self.origins.made)
        yield self.origins.noted()
        yield _torch.assignable_data()
        yield _torch.copied_deeply()
        yield _torch.seen_as_compiling()
        yield _torch.symbolic_min_max()
        yield _torch.symbolic_math()
        yield _torch.python_methods()
        yield _torch.read_as_numbers()
        yield _torch.replaced_once()
        yield _torch.averages_traced()
        yield _torch.inference_without_gradients()
        yield stream.traced()
        if self.structures:
            yield self.blocks.stamped(self.structures)

    def _given_tensors(self) -> dict[Any, torch.Tensor]:
        """The tensors that the caller has given, by path."""
        arguments = {path: x for path, x in named_leaves(self.args) if isinstance(x, torch.Tensor)}
        return self._replaced() | self.attributes.tensors | arguments

    def _as_original(self, slot: Slot, x: torch.Tensor) -> torch.Tensor:
        if slot.kind != "parameter":
            return x
        parameter = _torch.as_parameter(x, self.slots[slot].requires_grad)
        mark_gradient(parameter, slot.path, self.phases, self.origins.note)
        copy_hooks(parameter, self.slots[slot])
        return parameter

    def _give_attributes(self, new: Mapping[Any, torch.Tensor]) -> dict[Any, dict[str, Any]]:
        """Give the new tensors what users have set on parameters, buffers and what is given, and say what each has
        then."""
        there = {**dict(named_leaves(self.args)), **self.attributes.tensors}
        given = {i: there[i.path] for i in new if isinstance(i, Argument)}
        stand_ins = {id(x): new[slot] for slot, x in self._replaced().items()}
        for at, x in (*self._replaced().items(), *given.items()):
            give_attributes(new[at], x, stand_ins)
        return {at: _torch.user_attributes(x) for at, x in new.items()}

    def _around(self, attributes: Mapping[Any, dict[str, Any]]) -> list[Any]:
        """What else than modules may hold tensors of the state."""
        of_hooks = [x for hook in hooks_of(self._replaced().values()) for x in variables_of(hook)]
        own = [x for optimizer in self.state.optimizers.values() for _, x in own_attributes(optimizer)]
        of_optimizers = [x for x in own if any(isinstance(leaf, nn.Parameter) for leaf in pytree.tree_leaves(x))]
        return of_hooks + of_optimizers + [x for each in attributes.values() for x in each.values()]

    def _replaced(self) -> Tensors:
        """The tensors that others stand in for, wherever the Python state of a module or of a hook has them."""
        return {slot: x for slot, x in self.slots.items() if slot.kind in ("parameter", "buffer")}

    def _note_changes(
        self, constants: dict[str, Hashable], python: PythonState, numbers: dict[str, Any], new: SetByStep
    ) -> None:
        """Note what the step changes in modules. Raise for Python values that it changes elsewhere, or to tensors that
        no program sets."""
        present = dict(self.state.hyper_parameters())
        for path, symbol in numbers.items():
            if path in present and present[path] is not symbol:
                if not isinstance(present[path], torch.SymFloat):
                    raise RuntimeError(
                        f"the step sets {path} itself, to a value that the program would freeze; change it between "
                        "steps, or compute it from floats that the step is given"
                    )
                self.new_numbers[Slot("number", path)] = present[path]
        self.set_attributes, self.grown = new.stand_ins(), new.changed
        with _torch.no_function_modes():
            before, now = (self._but_for(new.places, x) for x in (constants, self.state.constants()))
        first = {f"{root}.state.{i}.{key}" for root, i, key in self.first_kept}
        first |= options_in({**before, **now}, self.new_options)
        changed = [path for path in changed_guards(before, now) if path not in first]
        if not changed:
            return
        if elsewhere := [path for path in changed if not self.state.is_of_module(path)]:
            raise RuntimeError(FROZEN.format(elsewhere[0], "a flag, a count kept as a number"))
        if assigned := assigned_tensor(self.state.wholes(), python, new.places):
            raise RuntimeError(assigned)
        try:
            self.changes = python.changes(new.places)
        except KeptOfRun as error:
            line = line_naming(search_of(self.fn, self.state.holders).functions, {error.name})
            raise RuntimeError(f"{error}{line}") from error

    def _first_kept(self, before: Collection[tuple[str, Any, Any]]) -> dict[tuple[str, Any, Any], Any]:
        """The plain values that optimisers keep for parameters, and did not keep before the step."""
        kept = self.state.kept_by_optimizers().items()
        return {at: x for at, x in kept if at not in before and type(at[1]) is int and type(x) in _KEPT}

    def _check_parted(self, before: Before, held: Attributes) -> None:
        """Raise where the step shares a container between an attribute with tensors and one without, or writes one that
        is shared so: the trace has a copy for the one, and none for the other. held: the attributes of the trace."""
        named = [(path, i, x) for path, several in self.attributes.containers.items() for i, x in enumerate(several)]
        plain = {id(x): path for path, several in self.attributes.constant.items() for x in several}
        of_both = {id(x): path for path, _, x in named if id(x) in plain}
        written = {id(held.containers[path][i]): path for path, i, x in named if id(x) in of_both}
        paths = [written[id(x)] for x in before.written() if id(x) in written]
        for box, new in self.changes:
            inside = (x for each in (new.values() if isinstance(new, dict) else new) for x in all_boxes(each))
            paths += [place.path for x in inside if (place := before.copied(x)) is not None]
            paths += [of_both[id(box)]] if id(box) in of_both else []
        if paths:
            names = {path.rpartition(".")[2] for path in (paths[0], *(plain[x] for x in of_both))}
            line = line_naming(search_of(self.fn, self.state.holders).functions, names)
            raise RuntimeError(
                f"the step writes or sets a list or dict that is in {paths[0]} and in an attribute without tensors, and"
                f" its program would part the two; give each its own{line}"
            )

    def _counted(self, before: dict[str, Any]) -> dict[str, Any]:
        """The counters that the step has set, with the new numbers. Puts those before in their place again."""
        found = {}
        for path, place in self.state.counters.items():
            now, old = place.value, before[path]
            place.set(old)
            if type(now) is Told:
                raise FrozenValue(now._what)
            if now is not old and not is_number_or_symbol(now):
                kind = "nothing" if now is None else f"a {_torch.plain_type(now).__name__}"
                raise RuntimeError(
                    f"the step sets {path}, a number, to {kind}; its program would not. Set it between steps."
                )
            if now is not old and repr(now) != repr(old):
                found[path] = now
        return found

    def _but_for(self, places: Collection[tuple[int, str]], constants: dict[str, Hashable]) -> dict[str, Hashable]:
        """The guards without those of some attributes, given by the identity of the module and by name."""
        found = dict(constants)
        owners = {owner for owner, _ in places}
        for root, optimizer in self.state.optimizers.items():
            for name in (name for owner, name in places if owner == id(optimizer)):
                found.pop(f"{root}.{name}", None)
        for path, module in self.state.wholes().items() if owners else ():
            if id(module) in owners:
                own = tuple(each for each in constants[path].attributes if (id(module), each[0]) not in places)
                found[path] = constants[path]._replace(attributes=own)
        return found

    def _check_slots(self, after: Tensors) -> None:
        """Raise if the step adds or removes tensors of a module."""
        before = {slot for slot in self.slots if slot.kind in ("parameter", "buffer")}
        differing = before ^ {slot for slot in after if slot.kind in ("parameter", "buffer")}
        if differing:
            slot = min(differing)
            raise RuntimeError(f"the step adds or removes {slot}; register what a module holds before the step")

    def _check_state(self, after: Tensors) -> None:
        """Raise if the step changes the shape or dtype of a tensor of state."""
        for slot in self.slots.keys() & after.keys():
            old, new = self.slots[slot], after[slot]
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                raise RuntimeError(
                    f"the step makes {slot}, {list(old.shape)} of {old.dtype}, a tensor of {list(new.shape)} of "
                    f"{new.dtype}; state keeps its shape and dtype. Let the step return what grows."
                )

    def _written(self, given: dict, wrapped: dict) -> list[Argument]:
        """The tensors in arguments and in attributes of modules that the step writes into.

        Raises for an argument that is a tensor itself: the caller's would have to become a DTensor.
        """
        tensors = {i: x for i, x in wrapped.items() if isinstance(i, Argument) and isinstance(x, torch.Tensor)}
        found = [i for i, x in tensors.items() if _torch.from_functional(x) is not given[i]]
        for i in found:
            if i.path in self.args:
                raise RuntimeError(f"the step writes into its argument {i.path}; let it return the new value instead")
            if (tensors[i].shape, tensors[i].dtype) != (given[i].shape, given[i].dtype):
                raise RuntimeError(
                    f"the step makes {i.path}, {list(given[i].shape)} of {given[i].dtype}, a tensor of "
                    f"{list(tensors[i].shape)} of {tensors[i].dtype} in place; set it to a new tensor instead"
                )
        return found

    def _flat_outputs(
        self, result: Opened, changed: dict[str, Opened], written: list[Opened], before: Before,
        there: Mapping[Any, Any], homes: Tensors,
    ) -> list:  # fmt: skip
        """written: the containers that the step was given and has written. before: all of these. there: the tensors of
        arguments, attributes and state. homes: what is written into these, and new state."""
        kept = {id(x) for _, inside in changed.values() for x in inside}
        written = [each for each in written if id(each[1][0]) not in kept]
        values = result[0], {path: x for path, (x, _) in changed.items()}, [x for x, _ in written]
        leaves, self.tree = pytree.tree_flatten(values)
        returned = len(pytree.tree_leaves(result[0]))
        parts = result[1], *(inside for _, inside in changed.values()), *(inside for _, inside in written)
        parts = [[()], parts[0], [()], *parts[1 : 1 + len(changed)], [()], *parts[1 + len(changed) :]]
        self.identities = before.numbers([x for part in parts for x in part])
        self.shared = SharedLeaves.of(leaves, returned, there)
        foreign = next((x for x in leaves if not isinstance(x, (*PLAIN, *NAMED)) and not _torch.is_symbol(x)), None)
        if type(foreign) is Told:
            raise FrozenValue(foreign._what)
        check_not_kept(foreign)
        if foreign is not None:
            raise TypeError(
                f"the step returns a {type(foreign).__name__}; it may return tensors, numbers, strings, None, and "
                "lists, tuples, dicts or objects of them"
            )
        self.leaves = tuple(None if isinstance(x, torch.Tensor) or _torch.is_symbol(x) else x for x in leaves)
        self.outputs = (*self.shared.found, *homes)
        values = [leaves[i] for i in self.shared.found] + list(homes.values())
        values = [_torch.from_functional(v) if isinstance(v, torch.Tensor) else v for v in values]
        tracer = _torch.proxy_mode().tracer
        self.nodes = [_torch.node_of(v, tracer) if isinstance(v, torch.Tensor) else None for v in values]
        return [v for v, node in zip(values, self.nodes, strict=True) if node is None]

    def _other_buffers(self, after: Tensors) -> Tensors:
        """The buffers that a step has set to other tensors: they are set as attributes are. The old ones may be held by
        others, and keep their values."""
        return {slot: x for slot, x in after.items() if slot.kind == "buffer" and self.own.get(slot) is not x}

    def _unreplaced(self, after: Tensors) -> Tensors:
        """The tensors that were there before a step, but for gradients and those that it has replaced: a program writes
        the values of those that are in the place of others into these. Buffers that it has replaced are still there."""
        return {
            slot: x for slot, x in self.own.items()
            if slot.kind == "buffer" or (after.get(slot) is x and slot.kind != "grad")
        }  # fmt: skip

    def finish(self, graph: fx.Graph) -> None:
        """Complete the graph of the trace by what was noted beside it. Raises where that says that it is wrong."""
        self.write_outputs(graph)
        self.phases.mark(graph)
        self.blocks.finish(graph)
        self.normalise.constrained.check(graph)

    def take_views(self, graph: fx.Graph, inputs: Collection[Slot | Argument]) -> None:
        """Take results that are views of something else out of a complete graph, and note them. inputs: of the graph.
        Raises for those that have common elements with others, and are no views of them."""
        if not self.shared.bases:
            return
        output = graph.output_node()
        nodes = dict(zip(inputs, graph.find_nodes(op="placeholder"), strict=True))
        nodes |= zip(self.outputs, output.args[0], strict=True)
        self.views = views_of(self.shared.bases, nodes)
        for base in dict.fromkeys(self._base_of_both(*pair, nodes) for pair in self._overlapping(nodes)):
            self._give_too(base, nodes)
        kept = [i for i in self.outputs if i not in self.views or self._may_be_plain(self.views[i].of)]
        self.outputs, values = tuple(kept), [nodes[i] for i in kept]
        output.args = (values,)

    def _overlapping(self, nodes: Mapping[Any, fx.Node]) -> list[tuple[int, Any]]:
        """The results with common elements of which neither is a view of something else."""
        alone = [i for i in self.shared.bases if i not in self.views and i not in self.shared.copies]
        pairs = ((i, j) for i in alone for j in self.shared.bases[i] if j not in self.views)
        return [(i, j) for i, j in pairs if share_elements(nodes[i], nodes[j])]

    def _base_of_both(self, one: int, other: Any, nodes: Mapping[Any, fx.Node]) -> fx.Node:
        """The value that two of these are views of. Raises where there is none, or where one is written into what the
        step was given, which has a memory of its own."""
        base = common_base(nodes[one], nodes[other]) if type(other) is int else None
        if base is None:
            raise RuntimeError(self._sharing(one, other, line_of(nodes[one])))
        return base

    def _give_too(self, base: fx.Node, nodes: dict[Any, fx.Node]) -> None:
        """Let the graph give a value that the step does not give, of which it gives views."""
        number = len(self.leaves)
        self.leaves, self.outputs = (*self.leaves, None), (*self.outputs, number)
        nodes[number] = base
        self.shared.bases = {i: [*others, number] for i, others in self.shared.bases.items()}
        self.views = views_of(self.shared.bases, nodes)

    def _may_be_plain(self, base: Any) -> bool:
        """Whether something is a tensor of the caller's that is no DTensor, of which a result is a copy."""
        return isinstance(base, Argument) and base.path not in self.attributes.tensors

    def _sharing(self, one: int, other: Any, line: str) -> str:
        result, changed, _ = pytree.tree_unflatten(range(self.tree.num_leaves), self.tree)
        names = {number: path for path, number in named_leaves({"result": result})}
        names |= {number: at for path, tree in changed.items() for at, number in leaves_of(path, tree)}
        one, other = (names.get(each, str(each)) for each in (one, other))
        return (
            f"{one} and {other} have common elements, and neither is a view of the other, so that a write into one "
            f"would not be seen in the other behind the step: give one of them a clone(){line and f', {line}'}"
        )

    def write_outputs(self, graph: fx.Graph) -> None:
        """Let the graph give all outputs: torch is told only of those without a node, such as constants and numbers."""
        output = graph.output_node()
        others = iter(output.args[0])
        output.args = ([next(others) if node is None else node for node in self.nodes],)


def _each_once(owners: Mapping[str, Any]) -> list[Any]:
    return list({id(x): x for x in owners.values()}.values())


def _given_to(arguments: dict[str, Any], before: Before) -> tuple[dict[str, Opened], list[Opened]]:
    """What a step has left in its arguments, by name, and in the containers that it has written."""
    written = before.written()
    for x in written:
        if not is_filled(x):
            raise RuntimeError(
                f"the step writes into a {type(x).__name__}, which its program could not; let it make a new one, or "
                "keep what changes in a list, a dict or an object"
            )
    return {name: with_containers(x) for name, x in arguments.items()}, [with_containers(x) for x in written]


def _is_changed(now: Opened, before: Any, containers: Sequence[Any]) -> bool:
    """Whether an argument holds anything else than it did. before: its tree. containers: those that were in it."""
    tree, inside = now
    return differs(before, tree) or not all(map(is_, inside, containers))


def _wrapped(given: dict[Any, Any]) -> dict[Any, Any]:
    """What the step is given in the place of values of the trace."""
    tensors = {k: x for k, x in given.items() if isinstance(x, torch.Tensor)}
    functional = dict(zip(tensors, _torch.all_to_functional(list(tensors.values())), strict=True))
    rest = {k: _torch.Integer(x.node) if isinstance(x, torch.SymInt) else x for k, x in given.items()}
    return rest | functional


def _check_attributes(tensors: Mapping[Any, torch.Tensor], before: Mapping[Any, dict[str, Any]]) -> None:
    """Refuse attributes that the step has set on tensors of the state, or on others that it was given: those of a trace
    are not the ones that stay."""
    for at, x in tensors.items():
        if at in before and (name := first_set(x, before[at])):
            of = f"{at.kind} {at.path}" if isinstance(at, Slot) else f"argument {at}"
            raise RuntimeError(
                f"the step sets the attribute {name} of the {of}, which its program would not; set "
                "it before the step, or keep the value in a module"
            )


def _with_leaves(args: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    return _torch.unflatten([new.get(path, x) for path, x in named_leaves(args)], pytree.tree_structure(args))
