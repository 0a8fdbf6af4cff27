"""The problem of a graph: a variable for each class of cells, and a value for each equal kind of value.

    12 layers, 1,328 cells    ->    292 variables, 450 values with weights

What each class chooses from is found in `choosers.py`. `Model` lets the specs that are given be layouts, and writes
what is moved between makers and readers. `choice` turns an assignment into the pins of all nodes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import fx

from spmd.expand.choose.alive import FREE, Moment, Prices, Rates
from spmd.expand.choose.cells import Cells, cells_of, is_tensor
from spmd.expand.choose.choice import Choice, Pin
from spmd.expand.choose.choosers import Chooser, Choosers
from spmd.expand.choose.classes import Classes, Group, Meeting
from spmd.expand.choose.following import END, UPDATE, Following
from spmd.expand.choose.layouts import Layouts
from spmd.expand.choose.problem import FIXED, End, Problem, Value
from spmd.expand.nodes import source_of
from spmd.expand.places.places import Places
from spmd.expand.places.roles import MARK, Roles, before_widened, gradient_places
from spmd.mesh import DeviceMesh
from spmd.tensor.lower import lower
from spmd.tensor.spec import Spec

OutputSpec = Callable[[int, Spec], Spec]
NEVER_US = 1e7
"""The price of a reduction in a narrower dtype than the gradient is to be reduced in: ten seconds for one move."""


class Model:
    """The problem of a graph, and the way back from an assignment to a choice. exposed: the part of a gradient's
    reduction that counts; what the backward hides does not."""

    def __init__(
        self, mesh: DeviceMesh, graph: fx.Graph, sources: dict[fx.Node, Spec], output_spec: OutputSpec,
        roles: Roles, places: Mapping[str, Places], by_op: dict[fx.Node, Pin], apart: bool = False,
        exposed: float = 1.0,
    ) -> None:  # fmt: skip
        self.mesh, self.graph, self.sources, self.by_op = mesh, graph, sources, by_op
        self._others: dict[Spec, Spec] = {}
        self.output_spec, self.roles, self.exposed = output_spec, roles, exposed
        self.gradients = gradient_places(roles, places)
        self.places = {n: places[path] for n, path in roles.parameters.items() if not places[path].is_one}
        self.following = Following(graph, roles, self.places)
        self.ways = Choosers(mesh, by_op, self.gradients, self.following)
        self.axes = self.ways.axes
        self.cells: Cells = cells_of(graph, self.gradients)
        self.homes = self._homes()
        self.classes = Classes(self.cells, {**sources, **self.places, **self.gradients}, self._meetings(), apart)
        self.choosers = self.ways.of(self.classes, self.cells)
        self._admit_given()
        self.ways.find_packings(self.choosers, sources.values())
        self.ways.find_options(self.choosers)
        self.holds: list[tuple[int, Group]] = []
        self.before_widened = before_widened(graph)
        self.prices = FREE
        self.problem = self._problem()

    def priced(self, prices: Prices) -> Model:
        """The same with prices of the bytes of values."""
        return self._with(prices=prices)

    def exposing(self, part: float) -> Model:
        """The same where this part of a gradient's reduction counts."""
        return self._with(exposed=part)

    def _with(self, **changed: Prices | float) -> Model:
        found = copy.copy(self)
        vars(found).update(changed, holds=[])
        found.problem = found._problem()
        return found

    # ---- what is given -------------------------------------------------------------------------
    def _admit_given(self) -> None:
        """Let the specs that are given be layouts: of inputs, outputs and functions of blocks."""
        for value, spec in (*self.sources.items(), *self.gradients.items()):
            for each in (spec, *self._read_places(value)):
                self.ways.layouts(value).admit(each)
        for chooser in self.choosers:
            for side, values in zip(chooser.given or (), (chooser.operands, chooser.cell.writes), strict=False):
                for value, spec in zip(values, side, strict=False):
                    self.ways.layouts(value).admit(spec)
        for value, (homes, _) in self.homes.items():
            for home in homes:
                self.ways.layouts(value).admit(home)

        for value, spec in self.following.reordered(self.sources, lambda *of: lower(self.ways.call(*of)[0]).outs[0]):
            self.ways.layouts(value).admit(spec)
        self.ways.admit_orders()
        self.ways.admit_inside(self.choosers, self.sources.values())

    def _read_places(self, value: fx.Node) -> tuple[Spec, ...]:
        """Where ops that update read a parameter that is stored elsewhere; else nothing."""
        return (self.places[value].state,) if value in self.places else ()

    def _homes(self) -> dict[fx.Node, tuple[tuple[Spec, ...], tuple[tuple[int, Spec, Spec], ...]]]:
        """For each value that is returned the specs that it must have, and the outputs whose spec depends on its own.

        These are told apart by what becomes of two specs that have nothing in common.
        """
        specs: dict[fx.Node, dict[Spec, None]] = {}
        free: dict[fx.Node, dict[tuple[Spec, Spec], int]] = {}
        for i, value in enumerate(self.graph.output_node().args[0]):
            if not isinstance(value, fx.Node) or not is_tensor(value):
                continue
            bare = self.ways.bare(value)
            other = self._others.get(bare) or self._others.setdefault(bare, self._other(bare))
            ends = self.output_spec(i, bare), self.output_spec(i, other)
            if bare.ndim and ends[0] is ends[1]:
                specs.setdefault(value, {})[ends[0]] = None
            else:
                free.setdefault(value, {}).setdefault(ends, i)
        return {
            value: (
                _in_order(specs.get(value, ())),
                tuple((i, *e) for e, i in free.get(value, {}).items()),
            )
            for value in [*specs, *[value for value in free if value not in specs]]
        }

    def _other(self, bare: Spec) -> Spec:
        dims = [(tuple(self.axes),) + ((),) * (bare.ndim - 1)] if bare.ndim else [()]
        owing = [(a, "max" if bare.dtype is torch.bool else "sum") for a in self.axes]  # bools have no sum
        return bare.with_layout(dims[0]) if bare.ndim else bare.with_layout((), partial=owing)

    # ---- values --------------------------------------------------------------------------------
    def _problem(self) -> Problem:
        counts = np.bincount(self.classes.of, minlength=len(self.choosers))
        self.variable = [FIXED] * len(self.choosers)
        self.work: list[np.ndarray] = []
        self.count: list[int] = []
        for k, chooser in enumerate(self.choosers):
            if chooser.options is not None:
                self.variable[k] = len(self.work)
                self.work.append(chooser.options.us * counts[k])
                self.count.append(int(counts[k]))
        self.rates = self._rates()
        parts = [part for part in map(self._value, self.classes.groups) if part is not None]
        held = {value.kind for value, group in parts if self._may_be_held(value, group)}
        values: list[Value] = []
        for value, group in parts:
            if value.kind in held:
                self.holds.append((len(values), group))
                value = replace(value, held=self._costs_to_hold(value.costs, group))
            values.append(self._paying_where_needed(value, group))
        return Problem(self.work, values, self.count)

    @property
    def made(self) -> frozenset[str]:
        """The values, by name, that are made where the assignment says."""
        groups = [g for g in self.classes.groups if g.maker and self.variable[g.maker[0]] != FIXED]
        return frozenset([member.value.name for group in groups for member in group.members])

    def rest(self, moment: Moment) -> int:
        """The bytes of a moment that no assignment changes."""
        return moment.peak - sum([h.nbytes for h in moment.held if h.readers is not None or h.value in self.made])

    def _rates(self) -> dict[int, Rates]:
        """What a byte of the values of each kind costs: their mean, for no class can tell them apart."""
        if self.prices is FREE:
            return {}
        found: dict[int, list[Rates]] = {}
        for group in self.classes.groups:
            found.setdefault(group.kind, []).extend(map(self._rates_of, group.members))
        return {kind: Rates.mean(each) for kind, each in found.items()}

    def _rates_of(self, meeting: Meeting) -> Rates:
        readers = [source_of(n) for i, _ in meeting.readers for n in self.cells.every[i].nodes]
        return self.prices.of(meeting.value.name if meeting.maker else None, meeting.value.name, readers)

    def _paying_where_needed(self, value: Value, group: Group) -> Value:
        """A value of which the copies are alive and what was made is not: it pays for each layout that is needed."""
        rate = self.rates[group.kind].needed if self.rates else 0.0
        return replace(value, costs=value.costs + rate * self._layouts_of(group).local_nbytes) if rate else value

    def _meetings(self) -> list[Meeting]:
        """All values with the cells around them. A parameter that is stored elsewhere than it is computed with is moved
        for each phase that computes with it, and for those that update it; so is what follows from it alone."""
        following, placed = self.following, self.places
        readers: dict[tuple[fx.Node, int | None], list[tuple[int, int]]] = {}
        writer = {value: (i, at) for i, cell in enumerate(self.cells.every) for at, value in enumerate(cell.writes)}
        for i, (cell, operands) in enumerate(zip(self.cells.every, self.cells.operands, strict=True)):
            for at, n in enumerate(operands):
                for when in following.moved_in(n, cell.node) if n in following.of else (None,):
                    readers.setdefault((n, when), []).append((i, at))
        for value in self.homes:
            if value not in placed or value in writer:
                readers.setdefault((value, END if value in placed else None), [])
        return [
            meeting
            for (value, when), own in readers.items()
            for meeting in self._of_value(value, when, own, writer.get(value))
        ]

    def _of_value(
        self, value: fx.Node, when: int | None, readers: list[tuple[int, int]], writer: tuple[int, int] | None
    ) -> list[Meeting]:
        """A value at one time. A gradient that is computed from gradients goes to its place first."""
        if when == UPDATE:
            return [Meeting(value, (self.places[value].state, (), (), when), None, readers)]
        shape = self.cells.shapes[value]
        spec = None if writer else self.sources.get(value) or self.ways.bare(value)
        homes, free = self.homes.get(value, ((), ())) if when in (None, END) else ((), ())
        rest = homes, tuple(each[1:] for each in free), when
        if writer is None or value not in self.gradients or value.target is MARK:
            return [Meeting(value, (spec or shape, *rest), writer, readers)]
        place = self.gradients[value]
        made = Meeting(value, (shape, (place,), (), when), writer, [])
        return [made, Meeting(value, (place, *rest), None, readers)]

    def _value(self, group: Group) -> tuple[Value, Group] | None:
        """The values of a group, if they are moved; what they owe at the end is part of their makers' work."""
        first, weight = group.members[0], float(len(group.members))
        (spec, homes, owed, _), (_, free) = first.known, self.homes.get(first.value, ((), ()))
        layouts = self.ways.layouts(first.value)
        made = self._end(layouts, group.maker or spec)
        ends = self._readers(layouts, group, homes)
        if owed and made.variable != FIXED:
            self.work[made.variable] = self.work[made.variable] + weight * self._owed(layouts, free[0][0])[made.layouts]
        costs = self._costs_to_places(layouts, group, homes)
        if self.rates:
            rates, nbytes = self.rates[group.kind], layouts.local_nbytes
            costs = costs + rates.moved * nbytes * ~np.eye(len(nbytes), dtype=bool)
            if made.variable != FIXED:
                self.work[made.variable] = self.work[made.variable] + weight * rates.made * nbytes[made.layouts]
        return (Value(weight, costs, made, tuple(ends), group.kind), group) if ends else None

    def _costs_to_places(self, layouts: Layouts, group: Group, homes: Sequence[Spec]) -> np.ndarray:
        """The costs of the moves of a value. A gradient goes to its place as it does in a program."""
        marks = [self.choosers[k].cell.node for k, _ in group.readers]
        places = [self.gradients[n] for n in marks if n in self.gradients and n.target is MARK]
        places += [place for place in homes if self.gradients.get(group.members[0].value) is place]
        costs = layouts.costs
        for place in dict.fromkeys(places):
            costs = costs.copy()
            costs[:, layouts.number(place)] = self.exposed * layouts.costs_as_gradient(place)
        if group.members[0].value in self.before_widened:
            owed = [frozenset(spec.partial) for spec in layouts.specs]
            reduced = np.array([[not before <= after for after in owed] for before in owed])
            costs = np.where(reduced, NEVER_US, costs)
        return costs

    def _may_be_held(self, value: Value, group: Group) -> bool:
        """Whether a value may owe a reduction and has several readers: then it may be reduced once for all of them."""
        ends = len({end.variable for end in value.readers} - {FIXED})
        ends += sum(end.variable == FIXED for end in value.readers)
        free = value.maker.variable != FIXED and group.members[0].value not in self.following
        return free and ends > 1 and self._may_owe(self._layouts_of(group), value.maker)

    def _costs_to_hold(self, costs: np.ndarray, group: Group) -> np.ndarray:
        """The costs from where a value is made to where it is held: as it is made, or with nothing owed. A program with
        part of the sums reduced sends more, because there what one reader has reduced is there for all that follow."""
        owed = np.array([bool(spec.partial) for spec in self._layouts_of(group).specs])
        return np.where(owed & ~np.eye(len(costs), dtype=bool), np.inf, costs)

    def _layouts_of(self, group: Group) -> Layouts:
        return self.ways.layouts(group.members[0].value)

    def _readers(self, layouts: Layouts, group: Group, homes: Sequence[Spec]) -> list[End]:
        """The ends where a value is read or returned."""
        ends = [
            replace(self._end(layouts, reader, reads=True), slot=slot)
            for reader, slot in zip(group.readers, group.slots, strict=True)
        ]
        return ends + [replace(_fixed(layouts, home), slot=home) for home in homes]

    def _may_owe(self, layouts: Layouts, made: End) -> bool:
        owed = np.array([bool(spec.partial) for spec in layouts.specs])
        return bool(owed[made.layouts].any())

    def _owed(self, layouts: Layouts, i: int) -> np.ndarray:
        """What an output without a home owes, by the layout of its value."""
        at = [self.output_spec(i, spec) for spec in layouts.specs]
        return np.array([layouts.costs[s, layouts.number(spec)] for s, spec in enumerate(at)])

    def _end(self, layouts: Layouts, of, reads: bool = False) -> End:
        if isinstance(of, Spec):
            return _fixed(layouts, of)
        k, at = of
        chooser = self.choosers[k]
        if chooser.given:
            return _fixed(layouts, chooser.given[0 if reads else 1][at])
        if reads:
            return End(self.variable[k], chooser.options.needs[at])
        return End(self.variable[k], self._gives(chooser, at))

    def _gives(self, chooser: Chooser, at: int) -> np.ndarray:
        """The layouts of a result, by its place among what the cell writes."""
        if chooser.op is None:
            return chooser.options.gives[at]
        value = chooser.cell.writes[at]
        port = value.args[1] if value is not chooser.cell.node else 0
        made = [j for j, out in enumerate(chooser.op.outs) if out is not None]
        return chooser.options.gives[made.index(port)]

    # ---- by op ---------------------------------------------------------------------------------
    def by_itself(self) -> list[int]:
        """The assignment in which each class runs as its first op by itself, where the problem has that option."""
        x = [0] * len(self.problem.work)
        for k, chooser in enumerate(self.choosers):
            if chooser.options is not None:
                x[self.variable[k]] = self._option_by_op(chooser)
        return x

    def _option_by_op(self, chooser: Chooser) -> int:
        pins = [self.by_op.get(node) for node in chooser.cell.nodes]
        if pins[-1] is None:
            return 0
        digits = []
        for axis, ways in zip(self.axes, chooser.ways, strict=True):
            row = pins[-1].rows[axis]
            same = [d for d, way in enumerate(ways) if way.row.outs[-1:] == row.outs[-1:]]
            if chooser.op is not None:
                same = [d for d in same if (ways[d].row.ins, ways[d].row.outs) == (row.ins, row.outs)]
            digits.append(same[0] if same else 0)
        match = (chooser.options.digits == np.array(digits, int)[:, None]).all(0)
        return int(match.argmax())

    # ---- the way back --------------------------------------------------------------------------
    def choice(self, x: Sequence[int]) -> Choice:
        """The pins and the held values of an assignment."""
        taken = [
            self._pins(chooser, x[self.variable[k]]) if chooser.options is not None else None
            for k, chooser in enumerate(self.choosers)
        ]
        pins: dict[fx.Node, Pin] = {}
        for k, cell in zip(self.classes.of, self.cells.every, strict=True):
            if taken[k] is not None:
                pins.update(zip(cell.nodes, taken[k], strict=True))
        held = {}
        for v, group in self.holds:
            spec = self._layouts_of(group).specs[self.problem.values[v].held_at(x)]
            held |= dict.fromkeys([member.value for member in group.members], spec)
        return Choice(pins, held)

    def _pins(self, chooser: Chooser, option: int) -> list[Pin]:
        """The pin of each op of a cell."""
        pin = chooser.options.pin(option, self.axes, self.mesh.ndim)
        if chooser.op is not None:
            return [pin]
        given = [row.outs[0] for row in pin.rows]
        return [Pin(tuple(by_out[p] for p in given)) for by_out in chooser.members]


def _in_order(specs: Collection[Spec]) -> tuple[Spec, ...]:
    """Specs in an order of their own."""
    return tuple(sorted(specs, key=str) if len(specs) > 1 else specs)


def _fixed(layouts: Layouts, spec: Spec) -> End:
    return End(FIXED, np.array([layouts.number(spec)]))
