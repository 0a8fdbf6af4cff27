"""Why a program is as it is: what its parts cost, and what it would cost if one of its values lay elsewhere.

An op of the captured graph may be several in the program, with moves between them. Each node of the program knows the
op that it was written for (`SOURCE`), so all of its cost is told apart: a reduction belongs to the op that leaves it,
any other move to the op that reads what it gives, and the parts add up to the cost of the program.

What else a value could be is tried, and not guessed: the program is made again as it would be if the user had pinned
the value, with the same choice, and priced in the same way. So it costs what is said here if the user does so. Two
prices are told: the sum of all costs, which a choice makes least, and the time of a step, in which what is sent and
what is computed overlap, and which no choice makes longer. What is less by one may be more by the other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from spmd.expand.choose.price import node_work, program_cost
from spmd.expand.choose.program import Expansion, Kept
from spmd.expand.choose.work import Roofline
from spmd.expand.constraints import ConstrainOp
from spmd.expand.explain.explanation import Alternative, Explained, Explanation, Option, Price, Sent
from spmd.expand.explain.where import is_line, lines_with, nodes_of, parameters_of
from spmd.expand.local_ops import op_text
from spmd.expand.nodes import SOURCE, graph_copied, source_of
from spmd.expand.origins import SITES
from spmd.expand.pins import Pins, names_match, pin_of, pinned, sites_of
from spmd.expand.places.places import Places
from spmd.expand.places.roles import MARK, in_backward
from spmd.expand.program import Program
from spmd.tensor.annotations.constraint import placements_text
from spmd.tensor.placement import REPLICATE, Placement, Shard
from spmd.tensor.redistribute.plan import Step
from spmd.tensor.spec import Spec, spec_of


@dataclass(frozen=True)
class Way:
    """How a program is made of an expansion. chosen: "by op" or "for the program". write: makes it. as_run: what it
    becomes before it runs; by that its timeline is told. kept: what was chosen, if anything was."""

    chosen: str
    write: Callable[[Expansion], Program]
    as_run: Callable[[Program], Program]
    kept: Kept | None = None

    def price(self, program: Program) -> Price:
        """What a program costs that was written so."""
        sent = program.moved
        step = self.as_run(program).timeline().us
        return Price(program_cost(program).us, step, sum(c.nbytes for c in sent), len(sent))


def written(given: Expansion, pins: Pins, way: Way) -> Program:
    """The program of an expansion with pins, with its reasons."""
    return with_reasons(way.write(to_write(given, pins)), given, pins, way)


def to_write(given: Expansion, pins: Pins) -> Expansion:
    """What is written of an expansion with pins. Its nodes know their own names, so that what is written does."""
    for node in given.graph.nodes:
        node.meta[SOURCE] = node.name
    return with_pins(given, pins)


def with_reasons(program: Program, given: Expansion, pins: Pins, way: Way) -> Program:
    """A program that was written so, with its reasons."""
    return replace(program, reasons=Reasons(given, pins, way))


def with_pins(given: Expansion, pins: Pins) -> Expansion:
    """The expansion with a constraint behind each value that a pin names. The graph of `given` stays as it is."""
    return replace(given, graph=pinned(graph_copied(given.graph), pins, given.mesh)) if pins else given


@dataclass(frozen=True, eq=False)
class Reasons:
    """What a program was made of. given: without pins."""

    given: Expansion
    pins: Pins
    way: Way

    @cached_property
    def program(self) -> Program:
        """The program as it was written, before the passes, which have changed its graph."""
        return self.way.write(with_pins(self.given, self.pins))

    @cached_property
    def price(self) -> Price:
        """What it costs."""
        return self.way.price(self.program)

    def explain(self, of: str) -> Explanation:
        """See `Program.explain`."""
        given = with_pins(self.given, self.pins)
        where = nodes_of(of, given.graph, given.roles, given.slots[1])
        costs = _Costs(self.program)
        explained = costs.explained(given, where)
        alternatives = [*self._values(of, costs), *self._parameters(of)]
        us = program_cost(self.program).us
        return Explanation(of, self.way.chosen, us, _together(explained), tuple(alternatives))

    # ---- what else a value could be -------------------------------------------------------------
    def _values(self, of: str, costs: _Costs) -> Iterator[Alternative]:
        """Of the values that a pin can name: the results of the modules, or of the lines."""
        sites = list(sites_of(self.given.graph, SITES))
        keys = [of] if is_line(of) or any(names_match(of, site) for _, site in sites) else []
        for key in keys or [str(line) for line in lines_with(of, self.given.graph)]:
            nodes = [n for n, site in sites if names_match(key, site)]
            specs = [spec for n in nodes if (spec := costs.result(n)) is not None]
            if len(specs) == len(nodes) > 0:
                yield from self._alternative(key, specs, lambda p, key=key: self._with_pin(key, p), "placements", True)

    def _parameters(self, of: str) -> Iterator[Alternative]:
        """Of the parameters that are in one place, by their names in the modules."""
        groups: dict[str, list[str]] = {}
        for path in parameters_of(of, self.given.roles) if not is_line(of) else ():
            named = of.rpartition(".")[2] == path.rpartition(".")[2]
            groups.setdefault(of if named else f"{of}.{path.rpartition('.')[2]}", []).append(path)
        for key, paths in groups.items():
            places = [self.given.places[path] for path in paths]
            if all(of.is_one and of.computed is of.gradient is of.stored for of in places):
                specs = [of.stored for of in places]
                yield from self._alternative(
                    key, specs, lambda p, paths=paths: with_parameters(self.given, paths, p), "params", False
                )

    def _alternative(
        self, key: str, specs: Sequence[Spec], changed: Callable[[tuple], Expansion], argument: str, leaves_open: bool
    ) -> Iterator[Alternative]:
        """The options of a value, or of several that are pinned together."""
        tried = [self._tried(key, p, changed(p), argument) for p in _others(specs, leaves_open)]
        here = self._tried(key, at, changed(at), argument) if leaves_open and (at := _where(specs)) else None
        if here is not None and not here.price.is_like(self.price):
            tried, here = [*tried, here], None
        if tried:
            options = sorted(tried, key=lambda o: (round(o.worse, 6), o.said))
            yield Alternative(key, specs[0], tuple(options), here)

    def _tried(self, key: str, placements: tuple[Placement | None, ...], changed: Expansion, argument: str) -> Option:
        mesh, now = self.given.mesh, self.price
        price = self.way.price(self.way.write(changed))
        text = placements_text(mesh, placements)
        by_axis = dict(zip(mesh.axis_names, placements, strict=True))
        said = f"{argument}={{{key!r}: {text}}}"
        return Option(said, key, by_axis, price, price.us - now.us, price.step - now.step)

    def _with_pin(self, key: str, placements: tuple[Placement | None, ...]) -> Expansion:
        return with_pins(self.given, {key: pin_of(key, placements), **{k: p for k, p in self.pins.items() if k != key}})


def _others(specs: Sequence[Spec], leaves_open: bool) -> Iterator[tuple[Placement | None, ...]]:
    """Placements of all of these values that differ from those of the first on one axis. On the others they are open,
    or as they are."""
    mesh = specs[0].mesh
    for axis, n in enumerate(mesh.shape):
        dims = [d for d in range(min(s.ndim for s in specs)) if all(s.shape[d] >= n for s in specs)]
        for p in (REPLICATE, *map(Shard, dims)):
            if n > 1 and any(not _is_on(spec, axis, p) for spec in specs):
                rest = [None if leaves_open else specs[0].on(a) for a in range(mesh.ndim)]
                yield tuple(p if a == axis else own for a, own in enumerate(rest))


def _where(specs: Sequence[Spec]) -> tuple[Placement | None, ...] | None:
    """The placements that all of these values have, open on an axis on which they differ or owe a reduction; None
    where nothing is left to say."""
    here = [{spec.on(a) for spec in specs} for a in range(specs[0].mesh.ndim)]
    said = tuple(next(iter(own)) if len(own) == 1 and not _owes(own) else None for own in here)
    return None if set(said) == {None} else said


def _owes(placements: set[Placement]) -> bool:
    return any(p.is_partial() for p in placements)


def _is_on(spec: Spec, axis: int, p: Placement) -> bool:
    own = spec.on(axis)
    return own.is_shard(p.dim) if isinstance(p, Shard) else own == p


def with_parameters(given: Expansion, paths: Sequence[str], placements: tuple[Placement, ...]) -> Expansion:
    """The expansion as it would be if `params=` said this of these parameters."""
    stored = {path: given.places[path].stored for path in paths}
    new = {path: spec_of(spec.mesh, placements, spec.shape, spec.dtype) for path, spec in stored.items()}
    places = {**given.places, **{path: Places.same(spec) for path, spec in new.items()}}
    slots_in, slots_out = given.slots

    def own(slot: object, spec: Spec | None) -> Spec | None:
        found = new.get(getattr(slot, "path", None))
        return found if found is not None and spec is not None and spec.shape == found.shape else None

    def input_spec(slot: object, spec: Spec | None) -> Spec | None:
        found = own(slot, spec)
        return spec if found is None else found.with_tensor(spec.shape, spec.dtype)

    def output_spec(i: int, spec: Spec) -> Spec:
        found = own(slots_out[i], spec)
        return given.output_spec(i, spec) if found is None else spec.with_layout(found.dims, found.units)

    inputs = [(name, input_spec(slot, spec)) for slot, (name, spec) in zip(slots_in, given.inputs, strict=True)]
    return replace(given, inputs=inputs, output_spec=output_spec, places=places)


# ---- what the parts cost ----------------------------------------------------------------------


class _Costs:
    """The nodes of a program by the op that they were written for, with what each costs."""

    def __init__(self, program: Program):
        self.program, self.roofline = program, Roofline(program.mesh.topology)
        self.ops: dict[str, list[fx.Node]] = {}
        self.moves: dict[str, Sent] = {}
        self.owed: dict[str, Sent] = {}
        for node in program.graph.nodes:
            if isinstance(node.target, Step):
                self._add(node)
            elif SOURCE in node.meta:
                self.ops.setdefault(node.meta[SOURCE], []).append(node)

    def _add(self, node: fx.Node) -> None:
        maker = node
        while isinstance(maker.target, Step):
            maker = maker.args[0]
        owes = node.target.reduces and SOURCE in maker.meta
        side, source = (self.owed, maker.meta[SOURCE]) if owes else (self.moves, node.meta[SOURCE])
        sent = Sent(node.target.cost, node.target.nbytes if node.target.sends else 0)
        side[source] = side.get(source, Sent()) + sent

    def explained(self, given: Expansion, where: Mapping[fx.Node, tuple[str, ...]]) -> list[Explained]:
        """Each op of the captured graph, once."""
        found = []
        for node, paths in where.items():
            name = source_of(node)
            nodes = [n for n in self.ops.get(name, ()) if n.target is not operator.getitem]
            if nodes or name in self.moves or name in self.owed:
                found.append(self._one(node, nodes, paths, given))
        return found

    def _one(self, node: fx.Node, nodes: list[fx.Node], where: tuple[str, ...], given: Expansion) -> Explained:
        operands = [s for n in nodes[:1] for x in n.all_input_nodes if isinstance(s := x.meta["spec"], Spec)]
        results = [s for n in nodes[-1:] for s in _specs(n)]
        updates = given.roles.parameters and node not in given.roles.compute
        phase = "update" if updates else "backward" if in_backward(node) else "forward"
        work = sum([node_work(n, self.program.mesh, self.roofline) for n in nodes])
        name, none = source_of(node), Sent()
        return Explained(
            _name(node), phase, 1, where[:1], tuple(operands), tuple(results), self.moves.get(name, none), work,
            self.owed.get(name, none),
        )  # fmt: skip

    def result(self, node: fx.Node) -> Spec | None:
        """The spec of a value, with its sums reduced where that is done at once; None for an input."""
        made = [n for n in self.ops.get(source_of(node), ()) if isinstance(n.meta["spec"], Spec)]
        if not made:
            return None
        at = made[-1]
        while after := [n for n in at.users if isinstance(n.target, Step) and n.target.reduces]:
            at = after[0]
        return at.meta["spec"]


def _specs(node: fx.Node) -> list[Spec]:
    spec = node.meta["spec"]
    return [s for s in (spec if isinstance(spec, tuple) else (spec,)) if s is not None]


def _name(node: fx.Node) -> str:
    if node.target is MARK:
        return "gradient"
    if isinstance(node.target, ConstrainOp):
        return "constrain"
    return op_text(node.target).removeprefix("aten.").partition(".")[0]


def _together(explained: Sequence[Explained]) -> tuple[Explained, ...]:
    """Equal ops as one."""
    groups: dict[tuple, list[Explained]] = {}
    for each in explained:
        key = each.op, each.phase, each.operands, each.results, each.moves, each.work, each.owes
        groups.setdefault(key, []).append(each)
    where = [tuple(dict.fromkeys(w for e in group for w in e.where)) for group in groups.values()]
    return tuple(g[0]._replace(times=len(g), where=w) for g, w in zip(groups.values(), where, strict=True))
