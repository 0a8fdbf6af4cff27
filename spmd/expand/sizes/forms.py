"""A program for all sizes that are decided alike (docs/design/sizes.md).

    program at (4, 8), program at (6, 11)     ->     Form: at (8, 12), at (2, 9), ... without another expansion

The first program of a capture is expanded. When other sizes are met, it is expanded again at a probe of sizes: the two
differ in numbers alone, and each number follows from sizes by a text that the capture has. A form serves the sizes at
which its dims are cut as they were: even or uneven, empty or not, one or more. What it gives is verified, as every
program is. Where there is no form, or it does not serve a size, the size is expanded as the first one was; what was
chosen for the program is followed where the sizes are not far from those that it was chosen for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import fx

from spmd import _torch
from spmd.expand.captured import Captured
from spmd.expand.explain.explanation import Explanation
from spmd.expand.local_map import LocalMapGradientOp, LocalMapOp
from spmd.expand.loops.loop import Loop
from spmd.expand.nodes import added
from spmd.expand.places.places import Places
from spmd.expand.program import Program
from spmd.expand.sizes.alike import Alike, Built, NotAlike, Number, Texts, made
from spmd.expand.sizes.probe import Cut, Probe, Values, cuts, decided, texts_of
from spmd.expand.sizes.size import evaluated
from spmd.expand.state import Slot
from spmd.expand.verify import ProgramFault
from spmd.tensor.spec import Spec, strides_like


class Given(NamedTuple):
    """What a program is written for, besides the capture: the specs of the state and of the arguments, the places of
    the parameters, and the numbers of the call."""

    specs: dict[Slot, Spec]
    leaf_specs: dict[str, Spec]
    places: Mapping[str, Places]
    numbers: dict[str, float]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {path: spec.shape for path, spec in self.leaf_specs.items()}

    def at(self, captured: Captured, values: Values) -> Given:
        """The same at other sizes."""
        shapes = {path: list(shape) for path, shape in self.shapes.items()}
        numbers = dict(self.numbers)
        for name, path, dim in captured.assumed.sources:
            if dim is None:
                numbers[path] = values[name]
            else:
                shapes[path][dim] = values[name]
        specs = {path: _with_shape(spec, shapes[path]) for path, spec in self.leaf_specs.items()}
        return self._replace(leaf_specs=specs, numbers=numbers)


def _with_shape(spec: Spec, shape: list[int]) -> Spec:
    return spec if tuple(shape) == spec.shape else spec.with_tensor(shape, stride=strides_like(shape, spec.stride))


FAR = 2520
"""What is added to a size for one that divides alike by small numbers, so that a half or a third of it is none else."""

Write = Callable[[Captured, Given, Program | None], Program]
"""Expands a capture at given sizes, with all passes; with what was chosen for a program, if one is given."""

MOST_TIMES = 8
"""How many times larger or smaller a symbol may be than where it was decided: beyond, other moves may be cheaper."""


@dataclass(frozen=True, eq=False)
class Form:
    """A program with texts in the place of the numbers that follow from sizes.

    program: the one at the sizes `values`, whose decisions are kept. texts: of its numbers, in order. nodes: each with
    its target, arguments and spec. rest: the other fields of the program. cuts: how its dims are cut, with what was
    decided about each. fixed: symbols that may not change. equal: for each
    symbol the one that it has to be equal to.
    """

    program: Program
    values: Values
    texts: tuple[str, ...]
    nodes: tuple[tuple[fx.Node, Any], ...]
    rest: Any
    cuts: tuple[tuple[Any, tuple], ...]
    fixed: Mapping[str, float]
    equal: Mapping[str, str]

    def serves(self, values: Values) -> bool:
        """Whether all that was decided at its own sizes would be decided so at these."""
        if any(values[name] != n for name, n in self.fixed.items()):
            return False
        if any(values[name] != values[other] for name, other in self.equal.items()):
            return False
        if not _near(values, self.values):
            return False
        numbers = evaluated(self.texts, values)
        return all(decided(made(cut, numbers, {})) == was for cut, was in self.cuts)

    def at(self, values: Values) -> Program:
        """The program at these sizes. ValueError or ProgramFault where it is none."""
        numbers, known = evaluated(self.texts, values), {}
        graph = _graph([node for node, _ in self.nodes], [made(form, numbers, known) for _, form in self.nodes])
        inputs, outputs, gathered = made(self.rest, numbers, known)
        return replace(
            self.program, graph=graph, inputs=inputs, outputs=outputs, gathered=gathered, certificate=None, reasons=None
        )


def _graph(nodes: Sequence[fx.Node], said: Sequence[tuple]) -> fx.Graph:
    """A graph of copies of nodes, for each of which its target, arguments and spec are given."""
    graph, copies = _torch.new_graph(), {}
    for node, (target, args, kwargs, spec) in zip(nodes, said, strict=True):
        args, kwargs = fx.map_arg((args, kwargs), copies.__getitem__)
        copies[node] = copy = added(graph, node.op, target, args, kwargs, node.name)
        copy.meta = node.meta | {"spec": spec}
    return graph


def _near(values: Values, others: Values) -> bool:
    """Whether no symbol is more than `MOST_TIMES` larger or smaller."""
    return all(max(values[k], n) <= MOST_TIMES * max(min(values[k], n), 1) for k, n in others.items())


def form_of(captured: Captured, given: Given, program: Program, write: Write) -> Form | None:
    """The form of a program that was written for this; None where it has none."""
    values = captured.assumed.values(given.shapes, given.numbers)
    texts = texts_of(captured.graph, captured.assumed)
    probe = Probe(captured.assumed, texts, values, _sharded(program))
    other = probe.values() if texts else None
    if other is None:
        return None
    at = given.at(captured, other)
    try:
        second = write(captured.known_at(at.shapes, at.numbers), at, program)
        fixed = {name: n for name, n in values.items() if other[name] == n and name not in captured.assumed.arguments}
        symbols = [name for name in values if name not in captured.assumed.arguments]
        pairs = {name: (values[name], other[name]) for name in symbols}
        first = {name: next(k for k in symbols if pairs[k] == pairs[name]) for name in symbols}
        far = [(k, other[k]) for k in symbols]
        third = values | {k: n if k in fixed else n + FAR * (1 + symbols.index(first[k])) for k, n in far}
        return _form(program, second, values, Texts(texts, values, other, third), fixed, first)
    except (NotAlike, ProgramFault, ArithmeticError, ValueError, RuntimeError, NotImplementedError):
        return None


def _sharded(program: Program) -> set[Cut]:
    return {cut for spec in _specs(program) for cut in cuts(spec) if cut.ns}


def _nodes(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes of a graph and of the bodies of its loops."""
    for node in graph.nodes:
        if isinstance(node.target, Loop):
            yield from _nodes(node.target.body.graph)
        yield node


def _specs(program: Program) -> set[Spec]:
    found = [node.meta.get("spec") for node in _nodes(program.graph)]
    return {spec for several in found for spec in (several if isinstance(several, tuple) else (several,)) if spec}


def _form(program: Program, second: Program, values: Values, texts: Texts, fixed: Values, equal: Mapping) -> Form:
    alike = Alike(texts)
    if program.constants.keys() != second.constants.keys():
        raise NotAlike("the programs have other constants")
    nodes = _alike_nodes(program.graph, second.graph, alike)
    rest = alike.of(*((p.inputs, p.outputs, p.gathered) for p in (program, second)))
    numbers = tuple(texts.used)
    return Form(program, values, numbers, tuple(nodes), rest, _cuts(program, alike, second), fixed, equal)


def _alike_nodes(graph: fx.Graph, second: fx.Graph, alike: Alike) -> list[tuple[fx.Node, Any]]:
    """The nodes of a graph, each with the form of its target, arguments and spec."""
    if len(graph.nodes) != len(second.nodes):
        raise NotAlike("the programs have other nodes")
    found = []
    for one, other in zip(graph.nodes, second.nodes, strict=True):
        if isinstance(one.target, (LocalMapOp, LocalMapGradientOp)):
            raise NotAlike("a function of blocks is asked for its results at each size")
        if (one.op, one.name) != (other.op, other.name):
            raise NotAlike(f"{one.name} and {other.name}")
        alike.nodes[one] = other
        ours, theirs = [(n.args, dict(n.kwargs), n.meta.get("spec")) for n in (one, other)]
        is_loop = isinstance(one.target, Loop) and isinstance(other.target, Loop)
        target = _loop(one.target, other.target, alike) if is_loop else alike.of(one.target, other.target)
        found.append((one, Built(tuple, (target, *[alike.of(a, b) for a, b in zip(ours, theirs, strict=True)]))))
    return found


def _loop(loop: Loop, other: Loop, alike: Alike) -> Any:
    """The form of a loop: that of its body, which runs as often with as many values."""
    if loop.counts != other.counts:
        raise NotAlike(f"a loop of {loop.counts} and one of {other.counts}")
    nodes = _alike_nodes(loop.body.graph, other.body.graph, alike)
    rest = alike.of(*((p.inputs, p.outputs, p.gathered) for p in (loop.body, other.body)))

    def make(parts: list) -> Loop:
        *said, (inputs, outputs, gathered) = parts
        graph = _graph([node for node, _ in nodes], said)
        return replace(loop, body=replace(loop.body, graph=graph, inputs=inputs, outputs=outputs, gathered=gathered))

    return Built(make, (*[form for _, form in nodes], rest))


def _cuts(program: Program, alike: Alike, second: Program) -> tuple[tuple[Any, tuple], ...]:
    """How the dims that follow from sizes are cut, with what was decided about each."""
    found: dict[tuple, tuple[Any, tuple]] = {}
    for one, other in zip(_nodes(program.graph), _nodes(second.graph), strict=True):
        pair = one.meta.get("spec"), other.meta.get("spec")
        for spec, twin in zip(*(x if isinstance(x, tuple) else (x,) for x in pair), strict=True):
            for cut, counterpart in zip(cuts(spec), cuts(twin), strict=True) if spec is not twin else ():
                form = alike.of(cut, counterpart)
                if isinstance(form, Built):
                    key = tuple(part.place if isinstance(part, Number) else repr(part) for part in form.parts)
                    found.setdefault(key, (form, decided(cut)))
    return tuple(found.values())


@dataclass(frozen=True, eq=False)
class _Reasons:
    """The reasons of a program of a form: those of an expansion at its sizes, which is made when they are asked for."""

    captured: Captured
    given: Given
    write: Write
    like: Program

    def explain(self, of: str) -> Explanation:
        """As `Program.explain`."""
        written = self.write(self.captured.known_at(self.given.shapes, self.given.numbers), self.given, self.like)
        return written.reasons.explain(of)


# ---- the programs of a step -------------------------------------------------------------------


@dataclass
class _Written:
    """A program that was expanded. values: the sizes that its placements were chosen for. form: its form; None before
    it was asked for, False where there is none."""

    given: Given
    program: Program
    values: Values
    form: Form | bool | None = None


class Forms:
    """The programs of the captures of a step that were expanded, and their forms. most: how many captures are kept."""

    def __init__(self, most: int):
        self._most = most
        self._of: dict[int, tuple[Captured, list[_Written]]] = {}

    def program(self, captured: Captured, given: Given, write: Write) -> Program:
        """The program for this: of a form, or expanded."""
        while len(self._of) >= self._most and id(captured) not in self._of:
            del self._of[next(iter(self._of))]
        _, written = self._of.setdefault(id(captured), (captured, []))
        found = self._of_a_form(captured, given, written, write) if captured.assumed.sources else None
        if found is None:
            values = captured.assumed.values(given.shapes, given.numbers)
            like = next((w for w in written if _given_alike(w.given, given) and _near(values, w.values)), None)
            found = write(captured.known_at(given.shapes, given.numbers), given, like and like.program)
            written.append(_Written(given, found, like.values if like else values))
            del written[:-MOST_WRITTEN]
        return found

    def _of_a_form(self, captured: Captured, given: Given, written: list[_Written], write: Write) -> Program | None:
        values = captured.assumed.values(given.shapes, given.numbers)
        for each in sorted(written, key=lambda w: w.form is None):  # those first whose form is known
            if not _given_alike(each.given, given):
                continue
            if each.form is None:
                each.form = form_of(captured, each.given, each.program, write) or False
            if each.form and each.form.serves(values):
                try:
                    reasons = _Reasons(captured, given, write, each.program)
                    return replace(each.form.at(values), reasons=reasons).verify()
                except (ProgramFault, ValueError, ArithmeticError):
                    continue
        return None


MOST_WRITTEN = 16
"""How many programs of a capture are kept to be asked for other sizes."""


def _given_alike(one: Given, other: Given) -> bool:
    """Whether two calls differ in sizes alone."""
    layouts = [
        {path: (spec.dims, spec.units, spec.partial) for path, spec in given.leaf_specs.items()}
        for given in (one, other)
    ]
    return one.specs == other.specs and layouts[0] == layouts[1]
