"""One call of a compiled step: its arguments, the state in them, and where all of it lies."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from spmd import _torch
from spmd._torch import pytree
from spmd.expand.attributes import attribute_guards
from spmd.expand.captured import Captured
from spmd.expand.closed_over import Search
from spmd.expand.containers import AROUND, There, shared
from spmd.expand.counters import Names, counters_of
from spmd.expand.first_state import FirstState, filled, first_state
from spmd.expand.given_specs import block_of, input_spec, places_of, state_spec, state_specs
from spmd.expand.guards import NOTHING, flags_guard, guard_key, is_number, module_guard, plain_number
from spmd.expand.kept_numbers import numbers_in
from spmd.expand.layouts import guards_of_layouts, note_layout
from spmd.expand.module_attributes import Attributes, is_attribute, set_attributes
from spmd.expand.modules import named_within
from spmd.expand.named_values import NOTHING as NOT_PLAIN
from spmd.expand.named_values import PlainValues, named_values
from spmd.expand.objects import with_containers
from spmd.expand.one_tensor import Pairs, ones
from spmd.expand.own_arguments import NOTHING_OWN, Given
from spmd.expand.places.slices import present_spec
from spmd.expand.places.table import PlacesTable
from spmd.expand.reads import Reads
from spmd.expand.state import Slot, State, Tensors, in_order, named_leaves
from spmd.expand.unread_attributes import left_out
from spmd.mesh import DeviceMesh
from spmd.tensor.annotations.patterns import placements_for, require_matches
from spmd.tensor.eager.dtensor import DTensor
from spmd.tensor.eager.identity import become, placed
from spmd.tensor.eager.meta_models import Init, initialise, is_to_be_made, made_empty
from spmd.tensor.modes import deterministic
from spmd.tensor.spec import Spec, spec_of_value


@dataclass
class Call:
    """A call: its arguments by name, the state and the plain arguments in them, and the specs of all tensors.

    given: the arguments as they came. named: the same with objects that hold tensors opened. containers: those in each.
    leaves: what is in them, and the tensors in attributes of modules. around: the guards of Python values. reads: where
    the state and what it depends on were found. was_in_place: whether nothing of the state had to be made or moved.
    wanted_with_counted: what a library is asked for (`Wanted`) where the capture for the call has found numbers that
    change.

    Making this changes nothing. `place_state` and `placed_leaves` then place the tensors as their specs say.
    """

    given: dict[str, Any]
    named: dict[str, Any]
    containers: dict[str, list[Any]]
    state: State
    tensors: Tensors
    specs: dict[Slot, Spec]
    attributes: Attributes
    leaves: dict[str, Any]
    leaf_specs: dict[str, Spec]
    table: PlacesTable
    numbers: dict[str, float]
    around: tuple
    search: Search
    was_in_place: bool = True
    wanted_with_counted: Any = None

    @classmethod
    def of(
        cls, arguments: dict[str, Any], around: Search, table: PlacesTable, inputs, first: bool, reads: Reads,
        unread: Collection[str] = (), unread_attributes: Names = NOTHING, counted: Names = NOTHING,
        own: Given = NOTHING_OWN,
    ) -> Call:  # fmt: skip
        """unread: the tensors in attributes of modules that no program reads so far. unread_attributes: others.
        counted: numbers that were found to change, besides those that the code says. own: what takes the place of
        arguments that are blocks of this rank."""
        both = {name: with_containers(x) for name, x in arguments.items()}
        named, containers = ({name: each[i] for name, each in both.items()} for i in (0, 1))
        if own:
            found, structure = pytree.tree_flatten(named)
            named = _torch.unflatten([own.get(id(x), x) for x in found], structure)
        state = State.of(named, around)
        state.counters = counters_of(state, around, counted)
        tensors = state.tensors()
        apart = {*state.modules, *state.optimizers, *around.holding}
        leaves = {k: v for k, v in named_leaves(named) if k not in apart}
        given = {k: v for k, v in leaves.items() if isinstance(v, torch.Tensor)}
        require_matches(inputs, [*given, *(k for k, v in leaves.items() if v is None)], "inputs")
        specs = state_specs(state, tensors, table, first)
        leaf_specs = {k: input_spec(k, v, table.mesh, placements_for(inputs, [k])) for k, v in given.items()}
        attributes = Attributes.of(state)
        found = tensors, specs, attributes, leaves, leaf_specs
        call = cls(arguments, named, containers, state, *found, table, {}, (), around)
        call.look_around(unread_attributes)
        call.leave_out(unread)
        return call

    @property
    def reads(self) -> Reads:
        """What was read of Python objects."""
        return self.search.reads

    def look_around(self, unread_attributes: Names) -> None:
        """Find the numbers of the call, and the guards of what is no number."""
        state, reads = self.state, self.search.reads
        self.numbers = state.numbers() | {k: plain_number(v) for k, v in self.leaves.items() if is_number(v)}
        reads.may_change(state.apart)
        values = named_values(self.search)
        read = {f"{text} around the step": guard_key(x) for text, x in values.items()}
        read |= self._held_values() | guards_of_layouts(self._given_by_path())
        owners = *state.wholes().values(), *state.optimizers.values(), *state.objects.values()
        self.search.note_kinds({*map(type, owners), *self.search.classes})
        read |= self._guards_of_loose()
        guards = state.constants(reads, self.attributes.guards(), unread_attributes)
        if one := shared(self.containers | dict(self.attributes.containers)):
            read["containers that are one"] = one
        if pairs := self.ones:
            read["tensors that are one"] = pairs
        read |= attribute_guards(self.leaves | self.attributes.tensors, reads)
        if parameters := tuple([path for path, x in self.leaves.items() if isinstance(x, nn.Parameter)]):
            read["parameters among the arguments"] = parameters
        self.around = tuple((guards | read).items())

    def _guards_of_loose(self) -> dict[str, tuple]:
        """The guards of modules in plain containers, of which the state knows nothing."""
        known = {id(m) for m in self.state.submodules()} if self.search.loose else ()
        roots = {f"module {i} in a container": m for i, m in enumerate(self.search.loose.values())}
        return {path: module_guard(m, self.search.reads) for path, m in named_within(roots) if id(m) not in known}

    def _given_by_path(self) -> dict[str, torch.Tensor]:
        """The tensors that the step is given, and that lie in memory as the user has laid them."""
        state = {str(slot): t for slot, t in self.tensors.items() if slot.kind in ("parameter", "buffer")}
        arguments = {path: x for path, x in self.leaves.items() if isinstance(x, torch.Tensor)}
        return state | self.attributes.tensors | arguments

    @property
    def ones(self) -> Pairs:
        """The arguments that are one tensor with others, or with one of the state or in an attribute."""
        known = {str(slot): t for slot, t in self.tensors.items()} | self.attributes.tensors
        return ones(known, {path: x for path, x in self.leaves.items() if path not in self.attributes.tensors})

    def _held_values(self) -> dict[str, Any]:
        """The guards of plain values in the objects among the arguments, and in those that these hold."""
        found: dict[str, Any] = {
            path: guard_key(type(x)) for path, x in self.search.holding.items() if path not in self.state.libraries
        }  # fmt: skip
        roots, reads = tuple(f"{path}." for path in self.search.holding), self.search.reads
        plain = PlainValues(self.search)
        for path, x in self.state.objects.items():
            if path in self.search.holding or path.startswith(roots):
                own = self.state.attributes_of(x).items()
                fixed = ((name, y) for name, y in own if not reads.is_changing(vars(x), name))
                values = ((name, plain.of(y)) for name, y in fixed)
                found |= {f"{path}.{name}": guard_key(y) for name, y in values if y is not NOT_PLAIN}
        return found

    def count(self, counted: Names, unread_attributes: Names) -> None:
        """Take further numbers for such that change."""
        self.state.counters = counters_of(self.state, self.search, counted)
        self.attributes = Attributes.of(self.state)
        self.look_around(unread_attributes)
        self._forget_keys()

    def _take_attribute(self, path: str, x: torch.Tensor) -> None:
        self.leaves[path] = x
        self.leaf_specs[path] = input_spec(path, x.detach() if x.requires_grad else x, self.table.mesh, None)

    def leave_out(self, unread: Collection[str]) -> None:
        """Leave out tensors in attributes of modules, by path, that no program reads: of these the shape counts."""
        for path, x in self.attributes.tensors.items():
            if path in unread:
                self.leaves.pop(path, None)
                self.leaf_specs.pop(path, None)
            elif path not in self.leaves:
                self._take_attribute(path, x)
        self._forget_keys()

    def guards_of_modules(self, paths: Iterable[str]) -> dict[str, tuple]:
        """The guards of all attributes of these modules."""
        modules, of_tensors = self.state.wholes(), self.attributes.guards()
        there, counted = {path: modules[path] for path in paths if path in modules}, self.state.counted()
        apart = self.state.apart
        return {
            path: module_guard(m, None, of_tensors.get(id(m), NOTHING), counted.get(id(m), ()), apart)
            for path, m in there.items()
        }

    def leave_out_attributes(self, guards: Mapping[str, tuple], unread: Names) -> None:
        """Leave out guards of attributes of modules that no program reads. guards: of these modules, with all."""
        if guards:
            self.around = left_out(tuple((path, guards.get(path, key)) for path, key in self.around), unread)
            self._forget_keys()

    def _forget_keys(self) -> None:
        vars(self).pop("common_key", None)
        vars(self).pop("keys", None)

    @cached_property
    def common_key(self) -> tuple:
        """What a program depends on, but for the tensors of the state and the branches on numbers
        (`BoundProgram.holds`)."""
        tree = str(pytree.tree_structure(self.named))
        return tree, flags_guard(), deterministic.is_on(), self._arguments(), self.around

    def _arguments(self) -> tuple:
        tensors = self.attributes.tensors
        unread = tuple((k, (tuple(x.shape), x.dtype, x.device)) for k, x in tensors.items() if k not in self.leaves)
        return unread + tuple(
            (k, (self.leaf_specs[k], v.device) if k in self.leaf_specs else type(v) if is_number(v) else guard_key(v))
            for k, v in self.leaves.items()
        )

    @property
    def key(self) -> tuple:
        """The key of a program for this call alone."""
        return self.keys[0]

    @cached_property
    def keys(self) -> list[tuple]:
        """The keys of programs that may serve: one for just these gradients, and one for any."""
        return self._keys(self.tensors)

    def keys_of(self, captured: Captured) -> list[tuple]:
        """The keys of the calls that a capture is for: this one, and the later ones, which have the first state."""
        first = {slot: self.first[slot] for slot in captured.first if slot not in self.tensors}
        keys = [self._keys(tensors) for tensors in (self.tensors, in_order(self.tensors | first))[: 1 + bool(first)]]
        return [several[captured.ignores_gradients] for several in keys]

    def _keys(self, tensors: Tensors) -> list[tuple]:
        layout = [(slot, self.specs[slot], t.requires_grad) for slot, t in tensors.items()]
        trained = {slot.path for slot, _, requires_grad in layout if slot.kind == "parameter" and requires_grad}
        gradients = tuple(each for each in layout if each[0].kind == "grad" and each[0].path in trained)
        others = tuple(each for each in layout if each[0].kind != "grad" or each[0].path not in trained)
        return [(*self.common_key, others, gradients), (*self.common_key, others, ANY_GRADIENTS)]

    @cached_property
    def first(self) -> FirstState:
        """The state that optimisers without state would make now, in their first step."""
        return first_state(self.state)

    def numbers_in(self, slots: Iterable[Slot] | None = None) -> dict[str, float]:
        """The numbers that tensors of the state hold, or would hold in the first step of an optimiser."""
        there = slots is not None and all(slot in self.tensors for slot in slots)
        return numbers_in(self.tensors if there else self.first | self.tensors, slots)

    def find_first_specs(self) -> None:
        """Find out where the first state of optimisers is to lie."""
        places = places_of(self.state, self.tensors, self.table)
        self.specs |= {slot: state_spec(slot, t, self.table.mesh, places) for slot, t in self.first.items()}

    def make_first_state(self, wanted: dict[Slot, Spec]) -> frozenset[Slot]:
        """Make the state of optimisers that is not there yet: all of it or nothing, as for the call of the capture."""
        if all(slot in self.tensors for slot in itertools.islice(wanted, 1)):
            return frozenset()
        with torch.inference_mode(False):  # the state outlives the mode
            made = {slot: DTensor(filled(self.first[slot], spec), spec) for slot, spec in wanted.items()}
        self.state.install(self.tensors | made)
        self.was_in_place = False
        self.tensors = self.state.tensors()
        return frozenset(made)

    def place_state(self, init: Init) -> None:
        """Put the tensors of the state on the mesh. Those that do not have their specs yet are moved, and those on the
        meta device are made there. init: as in `compile`."""
        fresh = {slot for slot, t in self.tensors.items() if is_to_be_made(t, self.specs[slot])}
        if fresh or any(getattr(t, "_spec", None) is not self.specs[slot] for slot, t in self.tensors.items()):
            with torch.inference_mode(False):  # the state outlives the mode
                makers = {slot: made_empty if slot in fresh else placed for slot in self.tensors}
                there = {slot: _on_whole_mesh(t, self.table.mesh) for slot, t in self.tensors.items()}
                new = {slot: makers[slot](t, self.specs[slot]) for slot, t in there.items()}
                for slot, t in self.held():
                    note_layout(t)
                    become(t, new[slot])
            self.state.install(new | dict(self.held()))
            self.was_in_place = False
            initialise(self.state.modules, [t for slot, t in self.held() if slot in fresh], init)
            self.tensors = self.state.tensors()

    @property
    def objects(self) -> dict[str, Any]:
        """The modules and optimisers, by path."""
        return self.state.modules | self.state.optimizers

    def held(self) -> list[tuple[Slot, torch.Tensor]]:
        """The tensors that stay the objects that they are when they are placed: others may hold them."""
        return [(slot, t) for slot, t in self.tensors.items() if slot.kind in ("parameter", "buffer", "hyper")]

    @property
    def given_tensors(self) -> dict[str, Any]:
        """The tensors in arguments and attributes, by path, as they are found there."""
        return self.leaves | self.attributes.tensors

    def kept(self, captured: Captured) -> list[tuple[str, torch.Tensor]]:
        """The tensors in attributes, and those in arguments that a capture writes into, that are placed as buffers are:
        they stay the objects that they are."""
        written = {i.path for i in captured.written}
        there = self.attributes.tensors.keys() | written
        return [(path, self.given_tensors[path]) for path in sorted(captured.placed & there)]

    def place_kept(self, captured: Captured) -> None:
        """Put these on the mesh."""
        with torch.inference_mode(False):  # they outlive the mode
            for path, x in self.kept(captured):
                if (present := spec_of_value(x)) is not (spec := self.leaf_specs[path]):
                    note_layout(x)
                    become(x, placed(x, spec) if present is None else DTensor(block_of(x, spec), spec))
                    self.was_in_place = False

    def placed_leaves(self) -> dict[str, Any]:
        """The plain arguments, with this rank's block in place of each tensor."""
        return {k: block_of(v, self.leaf_specs[k]) if k in self.leaf_specs else v for k, v in self.leaves.items()}

    def give(self, captured: Captured, leaves: Sequence[Any]) -> Any:
        """Give arguments, attributes and counters what the step has changed, and return what it returns. leaves: of
        all that."""
        outcome = captured.outcome
        there = {place: self.container(place) for place in outcome.places}
        changed, done = outcome.keep(leaves, there)
        self.state.set_counters(changed)
        others = {
            path: new for path, new in changed.items() if is_attribute(path) and path not in self.state.counters
        }  # fmt: skip
        places = self.places_of_buffers(others)
        set_attributes(self.state, {path: new for path, new in others.items() if path not in places})
        for path, several in places.items():
            for own, name in several:
                own[name] = others[path]
        return outcome.returned(leaves, there, done)

    @property
    def known_containers(self) -> dict[str, list[Any]]:
        """Those in the arguments, and those around the step, by path."""
        return self.containers | {f"{AROUND}{name}": [x] for name, x in reversed(self.search.boxes)}

    def container(self, place: There) -> Any:
        """The container that is at a place before the step."""
        known = {**self.attributes.constant, **self.attributes.containers, **self.known_containers}
        return known[place.path][place.number]

    def places_of_buffers(self, changed: Iterable[str]) -> dict[str, list[tuple[dict, str]]]:
        """Where the buffers are, by path, among what a step changes."""
        return self.state.places_of_buffers([path for path in changed if Slot("buffer", path) in self.tensors])


def _on_whole_mesh(t: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The same block as a tensor of the whole mesh, if it is one of a slice."""
    spec = present_spec(t, mesh)
    if spec is spec_of_value(t):
        return t
    return DTensor(t.detach()._local_tensor, spec).requires_grad_(t.requires_grad)


ANY_GRADIENTS = ((Slot("grad", "any"),),)
"""In the key of a program that reads no gradients of earlier steps, in their place."""
