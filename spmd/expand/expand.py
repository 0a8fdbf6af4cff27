"""Expand: a captured global graph becomes a program, node by node, through the lowering core.

    mm(f32[8@dp, 4], f32[4, 6])    ->  mm on blocks: f32[8@dp, 6]
    sum(f32[8@dp, 6])              ->  sum on blocks: f32[] +sum@dp, then an all-reduce over dp

Each op is lowered with the specs of its operands. Its moves are written before it, its sizes are made local, and its
results get their specs. An op that is decomposed for such operands (`decompose`) is written as the ops of its
decomposition. An op with a recipe, such as a look-up along a sharded dim, is written as its recipe. The decisions are
those of eager calls. A value that was moved for one reader is not moved again for the next one. After a value has been
reduced, all later readers read the reduced value.

A reduction is written right after the value that it reduces, so that it can run while the rest is computed. A gather
is written right before its reader, so that a replicated tensor does not live long. A gradient goes to its place as
soon as it is made, and the optimiser reads it from there. Where a parameter is read is said by `places/reads.py`.
"""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from spmd import _torch
from spmd.expand.choose.choice import BY_OP, Choice, Pin, arriving
from spmd.expand.constraints import PINNED, ConstrainOp
from spmd.expand.decompose import SpecTensor, decomposed
from spmd.expand.local_map import LocalMapGradientOp, LocalMapOp, settled
from spmd.expand.local_ops import SAFE_LOCALLY, LocalCount, LocalShape, UnlessEmpty
from spmd.expand.loops.loop import Loop
from spmd.expand.loops.write import Named, before_the_loop, body_of, roles_in, specs_of_results
from spmd.expand.lowered import lowered
from spmd.expand.nodes import (
    LINE,
    SOURCE,
    added,
    copied,
    described_call,
    first_positions,
    in_schema_order,
    is_dead,
    line_of,
    operands_in_order,
    result_metadata,
    source_of,
)  # fmt: skip
from spmd.expand.places.places import Places
from spmd.expand.places.reads import Reads
from spmd.expand.places.roles import MARK, Roles, gradient_places, phase_of, widened
from spmd.expand.places.travel import gradient_plans
from spmd.expand.program import Program
from spmd.mesh import DeviceMesh
from spmd.tensor import fallback
from spmd.tensor.cache import Cache, frozen
from spmd.tensor.call import READS_VALUE, SCALAR, Call
from spmd.tensor.lower import Lowering, lower, rows_as_given
from spmd.tensor.recipes import MADE_IN_SHARDS
from spmd.tensor.recipes.random import Draw
from spmd.tensor.recipes.recipe import Recipe
from spmd.tensor.redistribute.plan import Plan, Step, plan
from spmd.tensor.rules.decompositions import decompositions
from spmd.tensor.rules.meta import out_metas
from spmd.tensor.rules.rule import Row
from spmd.tensor.spec import Spec, placed, replicated

OutputSpec = Callable[[int, Spec], Spec]
"""Given the index of an output and the spec that its value has, returns the spec that the output must have."""

ResultSpecs = Spec | tuple[Spec | None, ...] | None
"""Of a node: a spec, one for each of several results, or None for a number."""


def expand(
    name: str,
    mesh: DeviceMesh,
    graph: fx.Graph,
    constants: dict[str, torch.Tensor],
    inputs: Sequence[tuple[str, Spec | None]],
    output_names: Sequence[str],
    output_spec: OutputSpec,
    roles: Roles,
    places: Mapping[str, Places],
    choice: Choice = BY_OP,
    pins: dict[fx.Node, Pin] | None = None,
    values: dict[str, fx.Node] | None = None,
) -> Program:
    """The program of a global graph.

    inputs: a name and a spec for each placeholder; the spec of a number is None. roles: what the nodes are for. places:
    of the parameters, by path. choice: how ops run and where values are held; an op without a pin is decided by itself.
    pins: gets, for each op, how it runs. values: gets, for the node that makes a value, by name, the node of the graph.
    """
    expander = _Expander(mesh, constants, gradient_places(roles, places), choice, {} if pins is None else pins)
    chosen = choice is not BY_OP
    reads = Reads(expander, roles, {n: places[path] for n, path in roles.parameters.items()}, chosen)
    specs = iter(inputs)
    outputs: list[tuple[str, Spec | None]] = []
    for node in graph.nodes:
        expander.source, expander.line, expander.phase = source_of(node), line_of(node), phase_of(node)
        if node.op == "placeholder":
            expander.placeholder(node, next(specs)[1])
        elif node.op == "get_attr":
            expander.constant(node)
        elif node.op == "output":
            reads.end(node)
            outputs = expander.output(node, output_names, output_spec)
        elif isinstance(node.target, Loop):
            reads.give(node)
            expander.loop(node, roles, places)
        elif not reads.write(node):
            try:
                expander.write(node)
            except NotImplementedError as error:
                raise NotImplementedError(f"{error}\n  at {expander.line}" if expander.line else str(error)) from error
        expander.move_to_final_spec(node)
        reads.begin(node)
    if values is not None:
        values |= expander.makers(graph)
    _remove_unread(expander.graph)
    used = {n.target: constants[n.target] for n in expander.graph.nodes if n.op == "get_attr"}
    gathered = tuple(expander.gathered)
    return Program(name, mesh, expander.graph, used, tuple(inputs), tuple(outputs), gathered, dict(places))


@dataclass
class _Expander:
    """The program's graph while it is written. chosen: for each op that was written, how it runs.

    local: for each node of the global graph, the node of its value in `graph`. final_specs: where nodes of the global
    graph are moved as soon as they are made. moved: for a node of `graph`, a spec and a phase, the node of the same
    value with this spec; for a node and a halo, the node of what the halo gives. moved_anew: nodes of `graph` that are
    moved in each phase anew. phase: that of the node that is written. reduced: for a node of `graph`, the node of its
    last reduction. known: how ops are written that are not decomposed, by their arguments. travels: how gradients get
    from a spec to that of their place. gathered: ops that no rule knows, with the bytes gathered for them. results: for
    a decomposed op with several results, these. settled: calls of functions of blocks, which may be open on some axes,
    as they are written. decomposition_graph: holds the ops of decompositions as nodes of global tensors. source: the op
    of the captured graph that is being written, by name. line: of the user's code.
    """

    mesh: DeviceMesh
    constants: dict[str, torch.Tensor]
    final_specs: Mapping[fx.Node, Spec]
    choice: Choice
    chosen: dict[fx.Node, Pin]
    graph: fx.Graph = field(default_factory=_torch.new_graph)
    local: dict[fx.Node, fx.Node] = field(default_factory=dict)
    moved: dict[tuple[fx.Node, Spec | Step, int | None], fx.Node] = field(default_factory=dict)
    moved_anew: set[fx.Node] = field(default_factory=set)
    phase: int = 0
    reduced: dict[fx.Node, fx.Node] = field(default_factory=dict)
    lowerings: Cache = field(default_factory=lambda: Cache(1 << 20))
    known: dict[Hashable, tuple[Lowering, Pin]] = field(default_factory=dict)
    travels: dict[tuple[Spec, Spec], tuple[Plan, ...]] = field(default_factory=dict)
    gathered: list[tuple[str, int]] = field(default_factory=list)
    results: dict[fx.Node, Sequence[SpecTensor | None]] = field(default_factory=dict)
    settled: dict[LocalMapOp, LocalMapOp] = field(default_factory=dict)
    decomposition_graph: fx.Graph = field(default_factory=_torch.new_graph)
    source: str = ""
    line: str = ""

    # ---- nodes without operands ---------------------------------------------------------------
    def placeholder(self, node: fx.Node, spec: Spec | None) -> None:
        new = added(self.graph, "placeholder", node.name, (), {}, node.name)
        self._record(node, new, spec)

    def constant(self, node: fx.Node) -> None:
        t = self.constants[node.target]
        new = self.graph.create_node("get_attr", node.target, (), {}, name=node.name)
        self._record(node, new, Spec.of(self.mesh, t.shape, t.dtype, stride=t.stride()))

    # ---- ops ------------------------------------------------------------------------------------
    def call(self, node: fx.Node) -> None:
        """Write a node. What is written while it is written is written for it."""
        outer = self.source, self.line
        self.source, self.line = node.meta.get(SOURCE, self.source), line_of(node) or self.line
        self.write(node)
        self.source, self.line = outer

    def write(self, node: fx.Node) -> None:
        """Write a node, for the op of which that is known."""
        if isinstance(node.target, _torch.OpOverload):
            self._op(node)
        elif isinstance(node.target, Draw):
            self._draw(node)
        elif isinstance(node.target, ConstrainOp):
            self._constrain(node)
        elif isinstance(node.target, LocalMapOp):
            op = self.settled[node.target] = settled(node.target, [self._spec(n) for n in self._operands(node)])
            self._block_function(node, op, op.call.ins, op.outs)
        elif isinstance(node.target, LocalMapGradientOp):
            op = self.settled[node.target.of]
            self._block_function(node, LocalMapGradientOp(op), (*op.outs, *op.cotangents), op.grads)
        else:
            self._python_call(node)

    def _op(self, node: fx.Node) -> None:
        """An op of torch's. Where one of the same arguments was lowered, that is how it is written."""
        if node.target is MARK:
            self.local[node] = self._current(node.args[0])
            return
        current = {n: self._current(n) for n in _torch.operands_of(node)}
        if all([n.meta["spec"] is None for n in current.values()]):
            self._factory(node)
        elif node.target in READS_VALUE:
            self._read_value(node)
        elif (known := self.known.get(key := self._key(node, current))) is not None:
            self._write_lowered(node, *known, current)
        else:
            with self._arriving(node):
                if not self._decompose(node):
                    lowering = self._lowered(node)
                    if key is not None:
                        self.known[key] = lowering, self.chosen[node]

    def _key(self, node: fx.Node, current: Mapping[fx.Node, fx.Node]) -> Hashable:
        """What decides how an op is written: its arguments, the specs of its operands, and which of these are one. None
        where more does: a choice, or a reader. current: what has the values of its operands."""
        if node in self.choice.pins or node.target in MADE_IN_SHARDS or widened(node):
            return None
        met: list[fx.Node] = []

        def spec(n: fx.Node) -> ResultSpecs:
            met.append(n)
            return current[n].meta["spec"]

        key = described_call(node, spec)
        return key, first_positions(met) if len(met) > len(current) else None

    @contextlib.contextmanager
    def _arriving(self, node: fx.Node) -> Iterator[None]:
        """Inside, the operands of a node have the placements of its pin, if they decide what is written."""
        pin = self.choice.pins.get(node)
        if pin is None or not (pin.moves_first or node.target in decompositions):
            yield
            return
        operands = self._operands(node)
        kept = {n: self.local[n] for n in operands}
        for i, n in reversed(list(enumerate(operands))):  # of several wishes for one tensor the first counts
            spec = self._spec(n)
            self.local[n] = self.move(self._current(n), plan(spec, placed(spec, pin.placements(i, spec.shape))))
        yield
        self.local |= kept

    def _python_call(self, node: fx.Node) -> None:
        """A Python function: getitem of a result, or arithmetic on numbers."""
        if node.args[0] in self.results:
            self.local[node] = self.local[self.results[node.args[0]][node.args[1]].node]
            return
        new = copied(self.graph, node, self._current)
        source = node.args[0]
        spec = self._spec(source) if isinstance(source, fx.Node) else None
        self._record(node, new, spec[node.args[1]] if isinstance(spec, tuple) else None)

    def _factory(self, node: fx.Node) -> None:
        """A tensor that is made without operands is the same on every rank."""
        new = copied(self.graph, node, self._current)
        metadata = result_metadata(node)
        specs = tuple(m and Spec.of(self.mesh, m.shape, m.dtype, stride=m.stride) for m in metadata)
        self._record(node, new, specs if isinstance(node.meta["val"], (tuple, list)) else specs[0])

    def _read_value(self, node: fx.Node) -> None:
        """An op that reads a number from a tensor gets the replicated tensor."""

        def replicate(n: fx.Node) -> fx.Node:
            spec = self._spec(n)
            return self._current(n) if spec is None else self.move(self._current(n), plan(spec, replicated(spec)))

        self._record(node, copied(self.graph, node, replicate), None)

    def _draw(self, node: fx.Node) -> None:
        """Random numbers in the shape of the first operand. Its values are not read."""
        x, rng, *args = node.args
        draw, specs = node.target, fx.map_arg((x, *args), lambda n: self._spec(n) or SCALAR)
        lowering = lower(Call(draw.op, specs, dict(node.kwargs), result_metadata(node)), chosen=self._rows(node))
        self.chosen[node] = Pin(lowering.rows)
        operands = self.move(self._current(x), lowering.plans[0]), self._current(rng), *fx.map_arg(args, self._current)
        target = replace(draw, spec=lowering.outs[0])
        new = added(self.graph, "call_function", target, operands, dict(node.kwargs), node.name)
        self._record(node, new, lowering.outs[0])

    def _constrain(self, node: fx.Node) -> None:
        """The same value, moved to where the user wants it."""
        value, pin = self._current(node.args[0]), self.choice.pins.get(node)
        spec = value.meta["spec"]
        wanted = node.target.spec(spec, pin and tuple(row.outs[0] for row in pin.rows))
        self.chosen[node] = arriving([wanted], [wanted])
        self.local[node] = self.move(value, plan(spec, wanted))
        self.local[node].meta[PINNED] = node.target.constraint.said

    def _block_function(
        self, node: fx.Node, op: LocalMapOp | LocalMapGradientOp, ins: Sequence[Spec], outs: tuple[Spec, ...]
    ) -> None:
        """A function of blocks, or its gradient. The specs of its operands and results are given."""
        targets = iter(ins)
        args = fx.map_arg(node.args, lambda n: self.move(self._current(n), plan(self._spec(n), next(targets))))
        self._record(node, self.graph.create_node("call_function", op, args, {}, name=node.name), outs)

    # ---- loops ----------------------------------------------------------------------------------
    def loop(self, node: fx.Node, roles: Roles, places: Mapping[str, Places]) -> None:
        """A loop. Its body is written as a program of its own, and what it reads is moved to where it begins."""
        loop, values = node.target, [self._current(n) for n in node.args]
        specs = loop.first([n.meta["spec"] for n in values])

        def write(inputs: Named, names: list[str], output_spec: OutputSpec, in_body: Roles) -> Program:
            body = expand("body", self.mesh, loop.body, {}, inputs, names, output_spec, in_body, places)
            self.gathered.extend(body.gathered)
            return body

        program = body_of(loop, specs, roles_in(node, roles), write)
        wanted = [spec for _, spec in program.inputs]
        program, moved = before_the_loop(program, loop.invariants, places)
        new = replace(loop, body=program, invariants=loop.invariants + len(moved))
        given = [self._to_spec(n, spec) for n, spec in zip(values, loop.for_all(wanted), strict=True)]
        invariants = given[: loop.invariants]
        for each in moved:
            invariants.append(self._moved_by(invariants[each.of], each.step, None))
        operands = (*invariants, *given[loop.invariants :])
        made = added(self.graph, "call_function", new, operands, {}, node.name)
        self._record(node, made, specs_of_results(new, program))

    def _to_spec(self, value: fx.Node, spec: Spec | None) -> fx.Node:
        return value if spec is None else self.move(value, plan(value.meta["spec"], spec))

    # ---- decomposed -----------------------------------------------------------------------------
    def _decompose(self, node: fx.Node) -> bool:
        """Write the node as its decomposition, if it has one for operands with these specs.

        A number cannot be a SpecTensor, so ops with symbolic numbers are not decomposed.
        """
        if node.target not in decompositions or any(self._spec(n) is None for n in _torch.operands_of(node)):
            return False
        tensors = {n: SpecTensor(n, self._spec(n), self._emit) for n in _torch.operands_of(node)}
        args, kwargs = fx.map_arg((node.args, node.kwargs), tensors.__getitem__)
        out = decomposed(node.target, args, kwargs)
        if out is NotImplemented:
            return False
        ins = [self._spec(n) for n in self._operands(node)]
        if isinstance(out, SpecTensor):
            self.local[node] = self.local[out.node]
        else:
            self.results[node] = out
        results = [out] if isinstance(out, SpecTensor) else out
        self.chosen[node] = arriving(ins, [None if x is None else self._spec(x.node) for x in results])
        return True

    def _emit(self, op: _torch.OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Write an op of a decomposition, given the nodes of its operands. Returns SpecTensors of its results."""
        specs = fx.map_arg((args, kwargs), self._spec)
        node = self.decomposition_graph.create_node("call_function", op, args, kwargs)
        node.meta["val"] = out_metas(op, *specs, torch.device(self.mesh.device_type))
        many = _torch.returns_many(op)
        if not many:
            (node.meta["val"],) = node.meta["val"]
        self.call(node)
        if not many:
            return SpecTensor(node, self._spec(node), self._emit)
        return [None if meta is None else self._emit_item(node, i) for i, meta in enumerate(node.meta["val"])]

    def _emit_item(self, node: fx.Node, i: int) -> SpecTensor:
        item = self.decomposition_graph.create_node("call_function", operator.getitem, (node, i))
        self.call(item)
        return SpecTensor(item, self._spec(item), self._emit)

    # ---- lowered --------------------------------------------------------------------------------
    def _lowered(self, node: fx.Node) -> Lowering:
        """Write a node as it is lowered, behind the moves of its operands."""
        lowering = self.lowering(node, {})
        arrive = [p.dst for p in lowering.plans]
        pin = Pin(lowering.rows) if lowering.rows else arriving(arrive, lowering.outs)
        self._write_lowered(node, lowering, pin, {n: self._current(n) for n in _torch.operands_of(node)})
        return lowering

    def _write_lowered(self, node: fx.Node, lowering: Lowering, pin: Pin, before: Mapping[fx.Node, fx.Node]) -> None:
        """Write a node as it is lowered, behind the moves of its operands. pin: how it runs. before: what has the
        values of its operands."""
        plans = iter(lowering.plans)

        def operand(n: fx.Node) -> fx.Node:
            # Each plan begins at the spec that the tensor had when the op was lowered. If a tensor is an operand twice,
            # a reduction for the one changes what `_current` gives, so the values are looked up before any move.
            return before[n] if before[n].meta["spec"] is None else self.move(before[n], next(plans))

        moves_nothing = not any([p.effective.steps for p in lowering.plans])
        self._written(node, lowering, pin, *in_schema_order(node, before.__getitem__ if moves_nothing else operand))

    def _written(self, node: fx.Node, lowering: Lowering, pin: Pin, args: tuple, kwargs: dict[str, Any]) -> None:
        """Write what a rank calls for a node. pin: how it runs."""
        self.chosen[node] = pin
        if lowering.gathered:
            self.gathered.append((str(node.target), lowering.nbytes_gathered))
            fallback.note(node.target, lowering.nbytes_gathered)
        if lowering.sizes:
            shape = LocalShape(lowering.outs[lowering.sized])
            args, kwargs = _torch.with_argument(node.target, args, kwargs, lowering.sizes, shape)
        if (counts := lowering.counts) is not None:
            args, kwargs = counts.in_arguments(node.target, args, kwargs, functools.partial(LocalCount, counts))
        local = lowering.local or SAFE_LOCALLY.get(node.target, node.target)
        if lowering.skips_empty:
            local = UnlessEmpty(local, lowering.outs)
        new = added(self.graph, "call_function", local, args, kwargs, node.name)
        many = isinstance(node.meta["val"], (tuple, list))
        if isinstance(local, Recipe) and local.sums:
            self._record_sums(node, new, local, many)
        else:
            self._record(node, new, lowering.outs if many else lowering.outs[0])

    def _record_sums(self, node: fx.Node, new: fx.Node, recipe: Recipe, many: bool) -> None:
        """Write the moves that add up results of a recipe."""
        new.meta["spec"] = recipe.made if many else recipe.made[0]
        if not many:
            self._record(node, self.move(new, recipe.sums[0]), recipe.outs[0])
            return
        items = []
        for i, (made, spec, p) in enumerate(zip(recipe.made, recipe.outs, recipe.sums, strict=True)):
            if spec is None:
                items.append(None)
                continue
            value = self.graph.create_node("call_function", operator.getitem, (new, i))
            value.meta.update({"spec": made, SOURCE: self.source, LINE: self.line})
            item = self.decomposition_graph.create_node("call_function", operator.getitem, (node, i))
            self._record(item, value if p is None else self.move(value, p), spec)
            items.append(SpecTensor(item, spec, self._emit))
        self.results[node] = items

    def lowering(self, node: fx.Node, specs: Mapping[fx.Node, Spec]) -> Lowering:
        """How the node is lowered, if these operands have these specs."""

        def spec(n: fx.Node) -> Any:
            found = specs[n] if n in specs else self._spec(n)
            return SCALAR if found is None else found

        args, kwargs = fx.map_arg(node.args, spec), fx.map_arg(node.kwargs, spec)
        repeats = first_positions([n for n in operands_in_order(node) if n in specs or self._spec(n) is not None])
        rows, place, as_given = self._rows(node), self._place(node), widened(node)
        key = (node.target, frozen(args), frozen(kwargs), repeats, rows, place, as_given)

        def by_rows() -> Lowering:
            call = Call(node.target, args, dict(kwargs), result_metadata(node), repeats)
            return lowered(call, (rows_as_given(call) if as_given else None) or rows, place)

        return self.lowerings.get(key, by_rows)

    def _place(self, node: fx.Node) -> Spec | None:
        """Where a gradient goes that the node makes, or that is computed from what it makes alone."""
        if node.target not in MADE_IN_SHARDS:
            return None
        while node not in self.final_specs:
            reader = next(iter(node.users)) if len(node.users) == 1 else node
            if reader is node or getattr(reader.meta.get("val"), "shape", None) != node.meta["val"].shape:
                return None
            node = reader
        return self.final_specs[node]

    def _rows(self, node: fx.Node) -> tuple[Row, ...] | None:
        """The rows that are chosen for a node; None if it is lowered by itself."""
        pin = self.choice.pins.get(node)
        return None if pin is None or pin.arrives else pin.rows

    def _operands(self, node: fx.Node) -> list[fx.Node]:
        """The tensors among the arguments, in schema order. A tensor that occurs twice is listed twice."""
        return [n for n in operands_in_order(node) if self._spec(n) is not None]

    # ---- moves ----------------------------------------------------------------------------------
    def move(self, value: fx.Node, moves: Plan, phase: int | None = None) -> fx.Node:
        """The value after the moves of a plan. Moves that were written before, for another reader, are used again.

        phase: only those that were written for a reader of this phase.
        """
        if value in self.moved_anew:
            phase = self.phase
        for step in moves.effective.steps:
            value = self._moved_by(value, step, phase)
        return value

    def _moved_by(self, value: fx.Node, step: Step, phase: int | None) -> fx.Node:
        key = (value, step.after if step.move.keeps_tensor else step, phase)
        if key not in self.moved:
            self.moved[key] = self._step(value, step)
        if step.reduces:
            self.reduced[value] = self.moved[key]
        return self.moved[key]

    def _step(self, value: fx.Node, step: Step) -> fx.Node:
        early = step.reduces and value.op != "placeholder"
        with self.graph.inserting_after(value) if early else contextlib.nullcontext():
            new = added(self.graph, "call_function", step, (value,), {}, step.move.kind)
        new.meta.update({"spec": step.after, SOURCE: self.source, LINE: self.line})
        return new

    def move_to_final_spec(self, node: fx.Node) -> None:
        """Move a value whose final spec is given; all later readers read the moved value.

        A view of a parameter is moved when it is written, for a reader.
        """
        if node not in self.local:
            return
        if node in self.final_specs:
            value, final = self._current(node), self.final_specs[node]
            for moves in self._travel(value.meta["spec"], final):
                value = self.move(value, moves)
            self.local[node] = value
        elif node in self.choice.held:
            spec = self._spec(node)
            self.local[node] = self.move(self._current(node), plan(spec, self.choice.spec_of(node, spec)))

    def _travel(self, spec: Spec, final: Spec) -> tuple[Plan, ...]:
        """How a gradient gets to its place."""
        if (spec, final) not in self.travels:
            self.travels[spec, final] = tuple(gradient_plans(spec, final))
        return self.travels[spec, final]

    # ---- outputs --------------------------------------------------------------------------------
    def output(self, node: fx.Node, names: Sequence[str], output_spec: OutputSpec) -> list[tuple[str, Spec | None]]:
        values, outputs = [], []
        for i, (name, source) in enumerate(zip(names, node.args[0], strict=True)):
            if not isinstance(source, fx.Node):  # a number that follows from sizes
                values.append(source)
                outputs.append((name, None))
                continue
            spec, value = self._spec(source), self._current(source)
            if spec is not None:
                moves = plan(spec, output_spec(i, spec))
                value, spec = self.move(value, moves), moves.dst
            values.append(value)
            outputs.append((name, spec))
        self.graph.output(tuple(values))
        return outputs

    # ---- bookkeeping ----------------------------------------------------------------------------
    def makers(self, graph: fx.Graph) -> dict[str, fx.Node]:
        """For the nodes that make the values of the global graph, by name, before these are moved, its nodes."""
        found: dict[str, fx.Node] = {}
        for node, value in self.local.items():
            if node.graph is not graph:  # of a decomposition
                continue
            while isinstance(value.target, Step):
                value = value.args[0]
            found.setdefault(value.name, node)
        return found

    def _current(self, node: fx.Node) -> fx.Node:
        """The node that has the value of a node of the global graph now: its last reduction, if it was reduced."""
        value = self.local[node]
        while value in self.reduced:
            value = self.reduced[value]
        return value

    def _spec(self, node: fx.Node) -> ResultSpecs:
        return self._current(node).meta["spec"]

    def _record(self, node: fx.Node, new: fx.Node, spec: ResultSpecs) -> None:
        new.meta.update({"spec": spec, SOURCE: self.source, LINE: self.line})
        self.local[node] = new


def _remove_unread(graph: fx.Graph) -> None:
    """Remove what is not read: where a decomposition leaves out an operand, nothing reads what was moved for it."""
    for node in reversed(graph.nodes):
        if node.op == "call_function" and is_dead(node):
            graph.erase_node(node)
