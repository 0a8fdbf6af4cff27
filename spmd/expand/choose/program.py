"""A program whose placements were chosen for all of it, and never one that costs more than op by op.

    chosen(inputs)    ->    the choice if it costs less and its step is no longer, or else by op, with a `Certificate`

The choice is solved on a model of the graph. Then the program is written with it, as it is without: the specs are
those that really flow, and the moves those that are really made. Both programs are priced in the same way, and the
cheaper one is taken. So whatever the model leaves out, the result is at most as dear as that of the choice by op; and
it is at most as long, by the timelines of both, in which what is sent and what is computed overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import fx

from spmd.comm.chunk import is_unit_of
from spmd.expand.choose.cells import is_tensor, value_shape
from spmd.expand.choose.certificate import Certificate
from spmd.expand.choose.choice import BY_OP, Choice, Pin
from spmd.expand.choose.model import Model
from spmd.expand.choose.normal import normalised
from spmd.expand.choose.price import Cost, program_cost
from spmd.expand.choose.solve import Solved, settled, solve
from spmd.expand.collector import collector_off
from spmd.expand.expand import OutputSpec, expand
from spmd.expand.local_map import settle
from spmd.expand.loops.bodies import with_bodies
from spmd.expand.memory import Memory
from spmd.expand.nodes import operands_in_order
from spmd.expand.places.places import Places
from spmd.expand.places.roles import Roles
from spmd.expand.program import Program
from spmd.mesh import DeviceMesh
from spmd.tensor.placement import Placement, Shard
from spmd.tensor.spec import Spec

DOUBTFUL = 0.01
"""The gap at which layers that choose alike are solved again, each for itself."""

ROUNDING = 1e-9
"""Part of a time by which it has to be longer."""

MOST_APART = 6000
"""Cells of a graph for which that is done: of those of T5 with 12 layers it takes 10 s."""

EXPOSED = 0.8
"""The part of a gradient's reduction that counts where the sum of all costs misleads: the rest is hidden behind the
backward. Between 0.6 and 0.9 the steps of GPT-2, BERT and Mixtral under Megatron's plan differ by 2 %."""

WORTH = 0.02
"""Part of a step by which one has to be shorter to count as shorter: timelines do not know less. A choice that is as
long may still be taken if it sends in fewer collectives, for then nothing speaks against it."""


@dataclass(frozen=True)
class Expansion:
    """What is expanded: the arguments of `expand`. slots: what each placeholder and each output is. owed: as in
    `Program`. passes: what is done to a program before it is priced. kinds: of the inputs, as in `Program`."""

    name: str
    mesh: DeviceMesh
    graph: fx.Graph
    constants: dict[str, torch.Tensor]
    inputs: Sequence[tuple[str, Spec | None]]
    output_names: Sequence[str]
    output_spec: OutputSpec
    slots: tuple[Sequence[object], Sequence[object]] = ((), ())
    places: Mapping[str, Places] = field(default_factory=dict)
    owed: frozenset[str] = frozenset()
    passes: Sequence[Callable[[Program], Program]] = ()
    kinds: tuple[str, ...] = ()

    def program(
        self, choice: Choice = BY_OP, pins: dict[fx.Node, Pin] | None = None, values: dict[str, fx.Node] | None = None
    ) -> Program:
        """The program by a choice. pins: gets, for each op, how it runs. values: as in `expand`."""
        program = expand(
            self.name, self.mesh, self.graph, self.constants, self.inputs, self.output_names, self.output_spec,
            self.roles, self.places, choice, pins, values,
        )  # fmt: skip
        program = replace(program, owed=self.owed, kinds=self.kinds).verify()
        program = with_bodies(program, self._rewritten)
        return self._rewritten(program)

    def _rewritten(self, program: Program) -> Program:
        for rewrite in self.passes:
            new = rewrite(program)
            program = new if new is program else new.verify()
        return program

    @cached_property
    def roles(self) -> Roles:
        """What the nodes are for."""
        return Roles.of(self.graph, *self.slots) if any(self.slots) else Roles()

    @property
    def sources(self) -> dict[fx.Node, Spec]:
        """The specs of the tensors that are given."""
        placeholders = [n for n in self.graph.nodes if n.op == "placeholder"]
        given = {n: spec for n, (_, spec) in zip(placeholders, self.inputs, strict=True) if spec is not None}
        constants = [(n, self.constants[n.target]) for n in self.graph.nodes if n.op == "get_attr"]
        return given | {n: Spec.of(self.mesh, t.shape, t.dtype) for n, t in constants}


AsRun = Callable[[Program], Program]
"""Rewrites a program."""


def as_written(program: Program) -> Program:
    """A program that runs as it was written."""
    return program


def chosen(given: Expansion, as_run: AsRun = as_written) -> Program:
    """The program of a graph, by the choice for the program if it costs less, or by op, with its certificate.

    as_run: what a program becomes before it runs. By that it is priced: many all-reduces of gradients are one bucket.
    """
    return Chosen.of(given, as_run).program


@dataclass(frozen=True)
class Candidate:
    """A program that may be taken. as_run: as in `chosen`. values: as in `expand`. choice: the one that it follows."""

    program: Program
    as_run: AsRun
    values: Mapping[str, fx.Node]
    choice: Choice = BY_OP

    @classmethod
    def of(
        cls, given: Expansion, as_run: AsRun, choice: Choice = BY_OP,
        pins: dict[fx.Node, Pin] | None = None,
    ) -> Candidate:  # fmt: skip
        """The program of a choice. pins: gets how each op runs."""
        values: dict[str, fx.Node] = {}
        return cls(given.program(choice, pins, values), as_run, values, choice)

    @cached_property
    def run(self) -> Program:
        """The program as it runs."""
        return self.as_run(self.program)

    @cached_property
    def memory(self) -> Memory:
        """What a rank needs of memory."""
        return self.run.memory()

    @cached_property
    def cost(self) -> Cost:
        """All that is sent and computed, one after the other."""
        return program_cost(self.run)

    @cached_property
    def step(self) -> float:
        """Microseconds of a step by the timeline, in which what is sent and what is computed overlap."""
        return self.run.timeline().us

    @cached_property
    def collectives(self) -> int:
        """How many it sends."""
        return len(self.run.collectives)

    def is_no_longer_than(self, other: Candidate) -> bool:
        """Whether a step is at most as long."""
        return self.step <= other.step * (1 + ROUNDING)

    def is_clearly_shorter_than(self, other: Candidate) -> bool:
        """Whether a step is shorter by more than timelines may err."""
        return self.step < other.step * (1 - WORTH)

    def is_clearly_no_longer_than(self, other: Candidate) -> bool:
        """Whether a step is clearly shorter, or is no longer and sends fewer collectives."""
        if self.is_clearly_shorter_than(other):
            return True
        return self.step <= other.step and self.collectives < other.collectives

    def is_better_than(self, other: Candidate) -> bool:
        """Whether a step is clearly shorter, or shorter and no dearer."""
        no_dearer = self.step < other.step and self.cost.us <= other.cost.us * (1 + ROUNDING)
        return no_dearer or self.is_clearly_shorter_than(other)


@dataclass(frozen=True)
class ByOp:
    """What is known before a choice is made. simple: the graph in simple ops. pins: how each runs by itself."""

    simple: Expansion
    pins: dict[fx.Node, Pin]
    candidate: Candidate

    @classmethod
    def of(cls, given: Expansion, as_run: AsRun) -> ByOp:
        """The program by op."""
        pins: dict[fx.Node, Pin] = {}
        simple = replace(given, graph=normalised(given.graph, given.mesh))
        found = Candidate.of(simple, as_run, pins=pins)
        settle(simple.graph, found.program.graph)
        return cls(simple, pins, found)

    def with_choice(self, choice: Choice) -> Candidate:
        """The program of a choice."""
        return Candidate.of(self.simple, self.candidate.as_run, choice)

    def model(self) -> Model:
        """The model of a choice."""
        return _model(self.simple, self.pins)


@dataclass(frozen=True, eq=False)
class Kept:
    """A choice that was made for a graph in simple ops, to be followed where its sizes are others.

    To solve a graph takes longer than all else that a new size needs, and a choice for a batch of 8 is one for 6, too.
    """

    graph: fx.Graph
    choice: Choice

    def at(self, graph: fx.Graph) -> Choice | None:
        """The choice for the nodes of this graph; None where it is another one than that which the choice was for, or
        where shards of the choice stay together in units that these sizes do not have."""
        if [(n.op, n.name) for n in self.graph.nodes] != [(n.op, n.name) for n in graph.nodes]:
            return None
        new = dict(zip(self.graph.nodes, graph.nodes, strict=True))
        pins = {new[n]: pin for n, pin in self.choice.pins.items()}
        held = {new[n]: spec for n, spec in self.choice.held.items()}
        fit = all(_fit(value, spec.placements) for value, spec in held.items()) and all(
            _fit(value, pin.placements(i, value_shape(value)[0]))
            for node, pin in pins.items()
            if pin.moves_first
            for i, value in enumerate(filter(is_tensor, operands_in_order(node)))
        )
        return Choice(pins, held) if fit else None


def _fit(value: fx.Node, placements: Sequence[Placement]) -> bool:
    """Whether the shards have whole units of a value."""
    shape, _ = value_shape(value)
    return all(is_unit_of(shape[p.dim], p.units) for p in placements if isinstance(p, Shard))


@dataclass(frozen=True)
class Chosen:
    """What is known when a choice has been made. end: the candidate that is taken. certificate: None where a choice is
    followed that was made for other sizes."""

    start: ByOp
    end: Candidate
    certificate: Certificate | None

    @classmethod
    def of(cls, given: Expansion, as_run: AsRun) -> Chosen:
        """The choice for the program if it costs less, or by op.

        The objective knows no order, and moves that others hide are dear in it. So two more are looked at, for which
        reductions of gradients, which the backward hides, cost less. One is what the choice settles to then: it is
        taken if its step is the shorter one. A choice whose step is longer than by op is not taken. Then the other one
        is solved; it is taken if it costs less than by op and is clearly the shorter one, or as long with fewer
        collectives.
        """
        return cls._solved(ByOp.of(given, as_run))

    @classmethod
    def like(cls, kept: Kept, given: Expansion, as_run: AsRun) -> Chosen:
        """The choice that was made at other sizes, or by op where that costs less here or its step is shorter."""
        start = ByOp.of(given, as_run)
        choice, by_op = kept.at(start.simple.graph), start.candidate
        if choice is None:
            return cls._solved(start)
        end = start.with_choice(choice) if choice != BY_OP else by_op
        taken = end.cost.us < by_op.cost.us and end.is_no_longer_than(by_op)
        return cls(start, end if taken else by_op, None)

    @classmethod
    def _solved(cls, start: ByOp) -> Chosen:
        by_op = start.candidate
        solution = solved_choice(start.simple, start.pins)
        end = start.with_choice(solution.choice)
        if end.cost.us < by_op.cost.us:
            end = _shortest(start, solution, end)
        taken = end.cost.us < by_op.cost.us
        if taken and not end.is_no_longer_than(by_op):
            end = start.with_choice(solved_choice(start.simple, start.pins, EXPOSED).choice)
            taken = end.cost.us < by_op.cost.us and end.is_clearly_no_longer_than(by_op)
        end = end if taken else by_op
        solved = solution.solved
        certificate = Certificate(end.cost.us, by_op.cost.us, solved.us, solved.at_least, taken)
        return cls(start, end, certificate)

    @property
    def by_op(self) -> Candidate:
        """The program by op."""
        return self.start.candidate

    @property
    def kept(self) -> Kept:
        """What was chosen, for other sizes."""
        return Kept(self.start.simple.graph, self.end.choice)

    @property
    def program(self) -> Program:
        """The program that is taken, with its certificate."""
        return replace(self.end.program, certificate=self.certificate)


@dataclass(frozen=True)
class Solution:
    """A model that was solved."""

    model: Model
    solved: Solved

    @property
    def choice(self) -> Choice:
        """What was chosen."""
        return self.model.choice(self.solved.x)

    def settled(self, exposed: float) -> Choice | None:
        """What it becomes where this part of a gradient's reduction counts, if single cells change as long as each
        costs less; None if nothing does. That takes a twentieth of solving it anew."""
        with collector_off():
            model = self.model.exposing(exposed)
            x = settled(model.problem, self.solved.x)
            return None if x == self.solved.x else model.choice(x)


def _shortest(start: ByOp, solution: Solution, first: Candidate) -> Candidate:
    """The candidate of a solution, or of what it settles to where the backward hides reductions of gradients."""
    choice = solution.settled(EXPOSED)
    if choice is None:
        return first
    other = start.with_choice(choice)
    return other if other.cost.us < start.candidate.cost.us and other.is_better_than(first) else first


def solved_choice(given: Expansion, pins: dict[fx.Node, Pin], exposed: float = 1.0) -> Solution:
    """The choice for a graph in simple ops. pins: how each op runs by itself. exposed: the part of a gradient's
    reduction that counts.

    Layers choose alike in a deep graph. Where that leaves a doubt, they are solved once more with a choice for each.
    Where a small graph does, it is solved once more from where reductions of gradients lead that cost less.
    """
    with collector_off():
        model, solved = _solved(given, pins, exposed)
        if solved.gap > DOUBTFUL and model.classes.are_shared and len(model.cells.every) <= MOST_APART:
            other, apart = _solved(given, pins, exposed, apart=True)
            at_least = max(solved.at_least, apart.at_least)
            model, solved = (other, apart) if apart.us < solved.us else (model, solved)
            solved = replace(solved, at_least=min(at_least, solved.us))
        elif solved.gap > DOUBTFUL and exposed > EXPOSED and not model.classes.are_shared:
            _, near = _solved(given, pins, EXPOSED)
            again = solve(model.problem, [solved.x, near.x])
            solved = replace(again, at_least=min(max(solved.at_least, again.at_least), again.us))
        return Solution(model, solved)


def _solved(given: Expansion, pins: dict[fx.Node, Pin], exposed: float, apart: bool = False) -> tuple[Model, Solved]:
    model = _model(given, pins, exposed, apart)
    return model, solve(model.problem, [model.by_itself()])


def _model(given: Expansion, pins: dict[fx.Node, Pin], exposed: float = 1.0, apart: bool = False) -> Model:
    known = given.mesh, given.graph, given.sources, given.output_spec, given.roles, given.places
    return Model(*known, pins, apart, exposed)
