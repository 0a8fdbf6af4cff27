"""A call that is made again: what it needs is found in microseconds, or it is not the same call.

    loss = step(model, optimizer, x, y)      finds the state, its specs and guards, and looks up the program
    loss = step(model, optimizer, x, y)      the same objects, with arguments alike: runs the program at once

A `Repeat` is what a call has found out, with all that this depends on: the structure, shapes and placements of the
arguments; the modes around the call; the containers in which modules, optimisers and their tensors were found
(`reads`); the placements, flags and hooks of these tensors; what attributes with tensors hold; which gradients are
there. Where one of them has changed, `ready` gives nothing, and the call is made the long way, which notices what it
is. Numbers, such as the learning rate, and the numbers that the trace has decided by are read at each call, as in the
long way.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn

from spmd import _torch
from spmd.expand.again.attributes import Held
from spmd.expand.again.decided import Decided
from spmd.expand.again.given import Given, likeness
from spmd.expand.again.results import Made, builder, picker
from spmd.expand.again.tensors import Kept, are_in_place
from spmd.expand.bound_program import BoundProgram, write_into
from spmd.expand.captured import Argument
from spmd.expand.draws import Draws
from spmd.expand.given_specs import block_of, blocks_like
from spmd.expand.guards import flags_guard
from spmd.expand.module_attributes import is_attribute
from spmd.expand.one_tensor import places as firsts
from spmd.expand.own_arguments import NOTHING_OWN
from spmd.expand.own_arguments import Given as Own
from spmd.expand.same_call import one_element
from spmd.expand.state import Slot, State, Tensors, named_leaves
from spmd.expand.variables import Place
from spmd.tensor.modes import deterministic
from spmd.tensor.recipes import stream
from spmd.tensor.spec import spec_of_value


class Ready(NamedTuple):
    """What a call that is made again has read: its arguments, its numbers, the gradients that are there, the tensors in
    attributes, and the containers there and in arguments."""

    leaves: list[Any]
    numbers: list[float]
    gradients: list[Any]
    held: list[torch.Tensor]
    containers: list[Any]


Find = Callable[[Ready], torch.Tensor]
"""Finds a tensor in what a call has read."""


class _Counter(NamedTuple):
    """A number that the step keeps. of: has its place; weak where that is an object, which shall not be kept alive.
    kind: the type of the number."""

    of: Callable[[], Any]
    name: str
    kind: type

    @classmethod
    def of_place(cls, place: Place) -> _Counter:
        is_alone = isinstance(place.of, (dict, types.CellType)) or type(place.of).__weakrefoffset__ == 0
        of = partial(_same, place.of) if is_alone else weakref.ref(place.of)
        return cls(of, place.name, type(place.value))

    def value(self) -> Any:
        return Place(self.of(), self.name).value

    def set(self, value: Any) -> None:
        Place(self.of(), self.name).set(value)


def _same(x: Any) -> Any:
    return x


class Repeat:
    """A call that a program has served, to be made again."""

    def __init__(
        self, bound: BoundProgram, call: Any, given: Given, paths: dict[str, int], counts: dict[str, int],
        held: Held, buffers: Collection[Slot], ended: Callable,
    ) -> None:  # fmt: skip
        """buffers: those that the step sets to other tensors, which are among what is held."""
        held.leave_out_of(call.reads)
        self._held = held
        self.bound, self._given, self._outcome = bound, given, bound.captured.outcome
        self._build = builder(self._outcome.result)
        self._surroundings, self._read = surroundings(), call.reads.snapshot()
        self._kept = Kept({slot: t for slot, t in call.tensors.items() if slot not in buffers}, bound)
        self._buffers = {slot: held.paths.index(slot.path) for slot in buffers}
        self.paths = list(call.numbers)
        self._numbers = list(call.numbers.values())
        at = {path: i for i, path in enumerate(self.paths)}
        self._options = [(at[path], group, key) for path, group, key in call.state.floats_of_groups() if path in at]
        self._arguments = [(at[path], i) for path, i in paths.items() if path in at]
        counters = {path: _Counter.of_place(place) for path, place in call.state.counters.items()}
        self._counters = [(at[path], counter) for path, counter in counters.items()]
        self._counts = [(counters[path], i) for path, i in counts.items()]
        self._decided = Decided(bound.captured, self.paths, self._kept.slots)
        self._objects = {path: weakref.ref(x, lambda _: ended()) for path, x in call.objects.items()}
        self._classes = list(map(type, call.objects.values()))
        self._small = list(one_element(call.tensors, call.specs))
        self._take(call, paths)
        self._give(call, paths)

    def _take(self, call: Any, paths: dict[str, int]) -> None:
        """Where the inputs of the program come from: places in the lists of all that a call has.

        _added: the gradients that the program reads, by the place of their parameter.
        """
        captured, known = self.bound.captured, list(self._kept.slots)
        self._read_arguments = {path: paths[path] for path in self.bound.arguments if path in paths}
        self._blocks = [
            (paths[path], blocks_like(call.leaves[path], spec))
            for path, spec in call.leaf_specs.items() if path in paths
        ]  # fmt: skip
        # They are cut at each call, as arguments are: somebody may write into them.
        moving: dict[Any, int] = {
            Argument(path): i for i, path in enumerate(self._held.paths) if path in call.leaf_specs
        }  # fmt: skip
        moving |= self._buffers
        specs = {**{Argument(path): spec for path, spec in call.leaf_specs.items()}, **call.specs}
        self._moving = [(i, specs[where]) for where, i in moving.items()]
        # Where these are is among the reads.
        known_paths = call.leaf_specs.keys() - set(self._held.paths)
        fixed = {path: x for path, x in call.attributes.tensors.items() if path in known_paths}
        self._attributes = [(x, call.leaf_specs[path]) for path, x in fixed.items()]
        self._attributes_alike = [likeness(x) for x in fixed.values()]
        self._tensors = [i for i, _ in self._blocks]
        there = {slot.path: call.tensors[slot] for slot in self._buffers} | call.attributes.tensors
        given = [call.leaves[path] for path in call.leaf_specs if path in paths]
        self._ones = firsts([*(there[path] for path in self._held.paths), *given])
        self._staying = {id(x): i for i, x in enumerate((*self._kept.all, *fixed.values()))}
        self._stayed = [self._staying.get(id(x)) for x in given]
        self._may_give_gradients = any(spec_of_value(call.leaves[path]) for path in call.leaf_specs if path in paths)
        self._draws = [i for i in captured.inputs if isinstance(i, Draws)]
        gradients = [Slot("grad", path) for path in self._kept.parameters]
        self._added = [i for i, slot in enumerate(gradients) if slot in self.bound.read]
        sources: list[Any] = [*known, *(gradients[i] for i in self._added)]
        sources += [Argument(path) for path in call.leaf_specs if path in paths]
        sources += [*map(Argument, fixed), *moving]
        sources += [Argument(path) for path in self.paths] + self._draws
        at = {source: i for i, source in enumerate(sources)}
        places = [len(sources) if i in self.bound.dropped else at[i] for i in captured.inputs]
        self._in_order = picker(places)
        self._freed = [p for path, p in self._kept.parameters.items() if Slot("grad", path) not in self.bound.read]

    def _find(self, there: Mapping[Any, Any], paths: dict[str, int], where: Slot | Argument) -> Find:
        """How a tensor that the step is given is found in what a later call has read. there: those of this call."""
        if where in self._buffers or (isinstance(where, Argument) and where.path in self._held.paths):
            i = self._held.paths.index(where.path)
            return lambda ready: ready.held[i]
        if isinstance(where, Argument) and where.path in paths:
            i = paths[where.path]
            return lambda ready: ready.leaves[i]
        fixed = there[where]
        return lambda _: fixed

    def _give(self, call: Any, paths: dict[str, int]) -> None:
        """Where the outputs of the program go to."""
        there = {**call.tensors, **{Argument(path): x for path, x in call.given_tensors.items()}}
        find = partial(self._find, there, paths)
        captured, outputs = self.bound.captured, self.bound.outputs
        found = {where: (i, spec) for i, (where, (_, spec)) in enumerate(zip(captured.outputs, outputs, strict=True))}
        homes = {slot: i for i, slot in enumerate(self._kept.slots)}
        written = [(i, where) for where, (i, _) in found.items() if where in homes]
        self._homes = [self._kept.slots[where] for _, where in written]
        self._shared = [home for home in self._homes if home._memory is not None]
        self._new, self._old = picker([i for i, _ in written]), picker([homes[where] for _, where in written])
        self._gradients = [
            (p, found[slot][0], Made(found[slot][1])) if (slot := Slot("grad", path)) in found else (p, -1, None)
            for path, p in self._kept.parameters.items()
        ]
        self._written = [(find(where), found[where][0]) for where in captured.written]
        self._given_back = [
            (leaf, find(where), leaf in captured.detached)
            for leaf, where in captured.given.items()
            if leaf not in found or spec_of_value(there[where]) is not None
        ]
        self._views = [
            (leaf, None if type(view.of) is int else find(view.of), view)
            for leaf, view in captured.views.items()
            if leaf not in found or spec_of_value(there[view.of]) is not None
        ]
        given = {leaf for leaf, *_ in self._given_back} | {leaf for leaf, *_ in self._views}
        self._results = [
            (where, i, None if spec is None else Made(spec))
            for where, (i, spec) in found.items()
            if type(where) is int and where not in given
        ]
        made = {leaf: made.beside for leaf, _, made in self._results if made is not None}
        another = {leaf: made.get(first, torch.Tensor.detach) for leaf, first in captured.same.items()}
        self._same = [(leaf, first) for leaf, first in captured.same.items() if leaf not in captured.detached]
        self._detached = [(leaf, captured.same[leaf], another[leaf]) for leaf in captured.detached if leaf in another]
        self._leaves = list(captured.leaves)

    def ready(self, args: tuple, kwargs: dict[str, Any], own: Own = NOTHING_OWN) -> Ready | None:
        """What the call reads, if it is the same call with other numbers; else None. Nothing is sent or changed. own:
        what takes the place of arguments that are blocks of this rank."""
        leaves = self._given.leaves(args, kwargs, own)
        if leaves is None or not self._surroundings.are_so() or not self._read.holds():
            return None
        if not all([type(of()) is kind for of, kind in zip(self._objects.values(), self._classes, strict=True)]):
            return None
        if not all([alike(x) for alike, (x, _) in zip(self._attributes_alike, self._attributes, strict=True)]):
            return None
        given = self._given.containers(args, kwargs)
        gradients, held = self._kept.gradients(), self._held.read([leaves[i] for i, _ in self._blocks], given)
        if gradients is None or held is None or not self._kept.are_as_before():
            return None
        if self._tensors and not self._are_ones_as_before([leaves[i] for i in self._tensors], held[0]):
            return None
        numbers = self._numbers.copy()
        for i, group, key in self._options:
            numbers[i] = group[key]
            if type(numbers[i]) is not float:
                return None
        for i, counter in self._counters:
            numbers[i] = counter.value()
            if type(numbers[i]) is not counter.kind:
                return None
        for i, leaf in self._arguments:
            numbers[i] = leaves[leaf]
        if not self._decided.alike(numbers, self._kept.known_blocks):
            return None
        return Ready(leaves, numbers, gradients, *held)

    def _are_ones_as_before(self, given: list[torch.Tensor], held: list[torch.Tensor]) -> bool:
        """Whether the arguments are one tensor with each other, with those of the state and with what attributes hold
        where they were, and none is a gradient."""
        mine = list(map(id, given))
        if list(map(self._staying.get, mine)) != self._stayed or firsts([*held, *given]) != self._ones:
            return False
        gradients = self._kept.present_gradients() if self._may_give_gradients else []
        return not gradients or set(mine).isdisjoint(map(id, gradients))

    def is_over(self) -> bool:
        """Whether a module or an optimiser of the call is no more."""
        return any(of() is None for of in self._objects.values())

    def small(self, ready: Ready) -> Tensors:
        """The tensors whose values the ranks compare."""
        kept = self._kept.slots
        return {x: ready.held[self._buffers[x]] if x in self._buffers else kept[x] for x in self._small}

    def arguments(self, ready: Ready) -> dict[str, Any]:
        """The arguments that the program reads, by path."""
        return {path: ready.leaves[i] for path, i in self._read_arguments.items()}

    def objects(self) -> dict[str, Any]:
        """The modules and optimisers of the call, by path."""
        return {path: of() for path, of in self._objects.items()}

    def run(self, ready: Ready) -> Any:
        """Run the program, and store and return what it gives."""
        blocks = self._kept.blocks()
        flat = self._inputs(ready, blocks)
        out = self.bound.execute(flat)
        del flat
        self._store(out, blocks)
        for of, i in self._written:
            write_into(of(ready), out[i])
        for name in self.bound.captured.stepped:
            _torch.note_step(self._objects[name]())
        leaves = self._leaves.copy()
        for where, i, made in self._results:
            leaves[where] = out[i] if made is None else made.of(out[i])
        for where, of, is_detached in self._given_back:
            leaves[where] = of(ready).detach() if is_detached else of(ready)
        for where, of, view in self._views:
            leaves[where] = view.shown(leaves[view.of] if of is None else of(ready))
        for where, first, another in self._detached:
            leaves[where] = another(leaves[first])
        for where, first in self._same:
            leaves[where] = leaves[first]
        for counter, i in self._counts:
            counter.set(leaves[i])
        there = self._held.containers.at(ready.containers)
        changed, done = self._outcome.keep(leaves, there)
        self._held.set(changed)
        return self._build(leaves) if self._build else self._outcome.returned(leaves, there, done)

    def _inputs(self, ready: Ready, blocks: list[torch.Tensor]) -> Sequence[Any]:
        for p in self._freed:  # of the previous step; nothing reads it: free it now
            p.grad = None
        values = [*blocks, *(ready.gradients[i]._current_block for i in self._added)]
        del ready.gradients[:]
        values += [block_like(ready.leaves[i]) for i, block_like in self._blocks]
        values += [block_of(x, spec) for x, spec in self._attributes]
        values += [block_of(ready.held[i], spec) for i, spec in self._moving]
        values += ready.numbers
        values += [stream.reserve_draws(self.bound.mesh, each.count) for each in self._draws]
        values.append(None)
        return self._in_order(values)

    def _store(self, out: Sequence[Any], blocks: list[torch.Tensor]) -> None:
        """Write what has a home into it, and set the gradients."""
        new = self._new(out)
        if not all(map(is_, new, self._old(blocks))):
            for home, value in zip(self._homes, new, strict=True):
                if value is not home._local_tensor:
                    home._local_tensor.copy_(value)
        for home in self._shared:
            home._note_write()
        for p, i, made in self._gradients:
            p.grad = None if made is None else made.of(out[i])


def repeat_of(
    bound: BoundProgram, call: Any, args: tuple, kwargs: dict[str, Any], by_name: Callable[..., dict[str, Any]],
    ended: Callable[[], object], own: Own = NOTHING_OWN,
) -> Repeat | None:  # fmt: skip
    """The call, which a program has served, to be made again; None where that has to be done the long way.

    by_name: gives arguments by their names. ended: is called when one of its modules or optimisers is no more.
    """
    given, outcome = Given(args, kwargs, own), bound.captured.outcome
    if not given.can_repeat or bound.captured.is_for_one_call or not _is_found_plainly(call.state):
        return None
    counts = {path: outcome.changed[path] for path in call.state.counters if path in outcome.changed}
    changed = [path for path in outcome.changed if path not in counts and is_attribute(path)]
    buffers = {Slot("buffer", path): several for path, several in call.places_of_buffers(changed).items()}
    if not buffers.keys().isdisjoint((*bound.captured.outputs, *bound.captured.watched)):
        return None
    others = [x for slot, x in call.tensors.items() if slot not in buffers]
    places_of_buffers = {slot.path: several for slot, several in buffers.items()}
    writes = bool(bound.captured.written)
    there = {place: call.container(place) for place in outcome.places}
    given_containers = given.containers(args, kwargs)
    held = Held.of(
        call.attributes, changed, others, call.leaf_specs, writes, places_of_buffers, given_containers, there
    )  # fmt: skip
    if held is None or None in [likeness(x) for path, x in call.attributes.tensors.items() if path not in held.paths]:
        return None
    if not (are_in_place(call.tensors) and _is_plainly_stored(bound.captured.outputs, call.tensors)):
        return None
    places = {path: i for path, i in named_leaves(by_name(*given.numbered())) if type(i) is int}
    return Repeat(bound, call, given, places, counts, held, buffers, ended)


def _is_plainly_stored(outputs: Sequence[Slot | int], tensors: Tensors) -> bool:
    """Whether all new state goes where state is, and no optimiser gets or loses any."""
    slots = {x for x in outputs if isinstance(x, Slot)}
    homes = {slot for slot in slots if slot.kind != "grad"}
    kept = {slot for slot in tensors if slot.kind == "optimizer"}
    return homes <= tensors.keys() and kept <= homes


def _is_found_plainly(state: State) -> bool:
    """Whether modules have their tensors where torch's have them."""
    classes = {type(module) for module in state.submodules()}
    return all(getattr(cls, name) is getattr(nn.Module, name) for cls in classes for name in WHERE_TENSORS_ARE)


WHERE_TENSORS_ARE = ("named_parameters", "named_buffers", "named_modules", "modules", "parameters")


def surroundings() -> Surroundings:
    """The modes and flags around a call that its program depends on, as they are now."""
    return Surroundings(flags_guard(), deterministic.is_on())


class Surroundings:
    """What was around a call."""

    def __init__(self, flags: tuple, is_deterministic: bool) -> None:
        self._flags, self._is_deterministic = flags, is_deterministic
        self._around = _torch.Around()

    def are_so(self) -> bool:
        """Whether it is around this one, too."""
        if deterministic.is_on() is not self._is_deterministic:
            return False
        if self._around.is_so():
            return True
        if flags_guard() != self._flags:
            return False
        self._around = _torch.Around()
        return True
