"""Expand: a captured global graph becomes a program, node by node, through the lowering core.

Each op is lowered with the specs that its operands have; its moves are written before it, its sizes made local,
its results given their specs. What is spelled in other ops for operands that lie so (`spelled`) is written as those,
and what looks up along a sharded dim as its recipe: the decisions are those of eager calls. A value that was moved once
is not moved again for the next reader, and one that was reduced is from then on the reduced one.

Reductions are written right after the value they reduce, so that they can run while the rest is computed; gathers
right before their reader, so that whole tensors do not live long. What has to lie in one way at the end, as gradients
do, is moved there when it is made, and what the optimiser then reads is that.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from spmd import _torch
from spmd.expand.mapped import Gradients, Mapped
from spmd.expand.program import SAFE_LOCALLY, LocalShape, Program, UnlessEmpty
from spmd.expand.spelled import Stand, spelled_out
from spmd.mesh import DeviceMesh
from spmd.tensor import fallback
from spmd.tensor.cache import Cache, frozen
from spmd.tensor.call import SCALAR, Call, TensorMeta
from spmd.tensor.dispatch import READS_VALUE
from spmd.tensor.lower import Lowering, lower
from spmd.tensor.meta import out_metas
from spmd.tensor.random import Draw
from spmd.tensor.recipes import recipe_for
from spmd.tensor.redistribute.moves import AllReduce, ReduceInOrder, ReduceScatter
from spmd.tensor.redistribute.plan import Plan, Step, plan
from spmd.tensor.rules.decompositions import decompositions
from spmd.tensor.spec import Spec, replicated

OutputSpec = Callable[[int, Spec], Spec]
"""Given the index of an output and the spec it comes with, the spec it shall have."""

SpecTree = Spec | tuple[Spec | None, ...] | None


def expand(
    name: str,
    mesh: DeviceMesh,
    graph: fx.Graph,
    constants: dict[str, torch.Tensor],
    inputs: Sequence[tuple[str, Spec | None]],
    output_names: Sequence[str],
    output_spec: OutputSpec,
    settled_early: Sequence[int] = (),
) -> Program:
    """The program of a global graph whose placeholders lie as `inputs` say (a name and a spec; None for a number).

    settled_early: the outputs that lie as `output_spec` says from when they are made.
    """
    returned = graph.output_node().args[0]
    homes = {returned[i]: lambda spec, i=i: output_spec(i, spec) for i in settled_early}
    expander = _Expander(mesh, constants, homes)
    specs = iter(inputs)
    outputs: list[tuple[str, Spec | None]] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            expander.placeholder(node, next(specs)[1])
        elif node.op == "get_attr":
            expander.constant(node)
        elif node.op == "output":
            outputs = expander.output(node, output_names, output_spec)
        else:
            expander.call(node)
        expander.settle(node)
    used = {n.target: constants[n.target] for n in expander.graph.nodes if n.op == "get_attr"}
    return Program(name, mesh, expander.graph, used, tuple(inputs), tuple(outputs), tuple(expander.gathered))


@dataclass
class _Expander:
    """The graph being written, and where each node of the global graph is in it."""

    mesh: DeviceMesh
    constants: dict[str, torch.Tensor]
    homes: dict[fx.Node, Callable[[Spec], Spec]]
    graph: fx.Graph = field(default_factory=fx.Graph)
    at: dict[fx.Node, fx.Node] = field(default_factory=dict)
    moved: dict[tuple[fx.Node, Spec], fx.Node] = field(default_factory=dict)
    reduced: dict[fx.Node, fx.Node] = field(default_factory=dict)
    lowerings: Cache = field(default_factory=lambda: Cache(1 << 20))
    gathered: list[tuple[str, int]] = field(default_factory=list)
    results: dict[fx.Node, Sequence[Stand | None]] = field(default_factory=dict)
    spelled: fx.Graph = field(default_factory=fx.Graph)

    # ---- nodes without operands ---------------------------------------------------------------
    def placeholder(self, node: fx.Node, spec: Spec | None) -> None:
        new = self.graph.placeholder(node.name)
        self._done(node, new, spec)

    def constant(self, node: fx.Node) -> None:
        t = self.constants[node.target]
        new = self.graph.create_node("get_attr", node.target, (), {}, name=node.name)
        self._done(node, new, Spec.of(self.mesh, t.shape, t.dtype, stride=t.stride()))

    # ---- ops ------------------------------------------------------------------------------------
    def call(self, node: fx.Node) -> None:
        if isinstance(node.target, Draw):
            self._draw(node)
        elif isinstance(node.target, Mapped):
            self._blocks(node, node.target.blocks.ins, node.target.outs)
        elif isinstance(node.target, Gradients):
            self._blocks(node, (*node.target.of.outs, *node.target.of.cotangents), node.target.of.grads)
        elif not isinstance(node.target, _torch.OpOverload):
            self._plain(node)
        elif not any(self._spec(n) is not None for n in node.all_input_nodes):
            self._factory(node)
        elif node.target in READS_VALUE:
            self._value(node)
        elif not self._spell(node):
            self._op(node)

    def _plain(self, node: fx.Node) -> None:
        """getitem of a result, or arithmetic on numbers."""
        if node.args[0] in self.results:
            self.at[node] = self.at[self.results[node.args[0]][node.args[1]].node]
            return
        new = self.graph.node_copy(node, self._now)
        source = node.args[0]
        spec = self._spec(source) if isinstance(source, fx.Node) else None
        self._done(node, new, spec[node.args[1]] if isinstance(spec, tuple) else None)

    def _factory(self, node: fx.Node) -> None:
        """A tensor made from nothing is the same on every rank."""
        new = self.graph.node_copy(node, self._now)
        metas = _metas(node)
        specs = tuple(m and Spec.of(self.mesh, m.shape, m.dtype, stride=m.stride) for m in metas)
        self._done(node, new, specs if isinstance(node.meta["val"], (tuple, list)) else specs[0])

    def _value(self, node: fx.Node) -> None:
        def whole(n: fx.Node) -> fx.Node:
            spec = self._spec(n)
            return self._now(n) if spec is None else self.move(self._now(n), plan(spec, replicated(spec)))

        self._done(node, self.graph.node_copy(node, whole), None)

    def _draw(self, node: fx.Node) -> None:
        """Random numbers in the shape of the first operand, which is not read."""
        x, rng, *args = node.args
        draw, specs = node.target, fx.map_arg((x, *args), lambda n: self._spec(n) or SCALAR)
        lowering = lower(Call(draw.op, specs, dict(node.kwargs), _metas(node)))
        operands = self.move(self._now(x), lowering.plans[0]), self._now(rng), *fx.map_arg(args, self._now)
        target = replace(draw, spec=lowering.outs[0])
        new = self.graph.create_node("call_function", target, operands, dict(node.kwargs), name=node.name)
        self._done(node, new, lowering.outs[0])

    def _blocks(self, node: fx.Node, ins: Sequence[Spec], outs: tuple[Spec, ...]) -> None:
        """A function of blocks, or its gradient: operands lie as is said, and so do results."""
        targets = iter(ins)
        args = fx.map_arg(node.args, lambda n: self.move(self._now(n), plan(self._spec(n), next(targets))))
        self._done(node, self.graph.create_node("call_function", node.target, args, {}, name=node.name), outs)

    # ---- spelled in other ops -------------------------------------------------------------------
    def _spell(self, node: fx.Node) -> bool:
        """Write the node as its decomposition, if it has one for operands that lie so. Numbers have no stands."""
        if node.target not in decompositions or any(self._spec(n) is None for n in node.all_input_nodes):
            return False
        stands = {n: Stand(n, self._spec(n), self._write) for n in node.all_input_nodes}
        args, kwargs = fx.map_arg((node.args, node.kwargs), stands.__getitem__)
        out = spelled_out(node.target, args, kwargs)
        if out is NotImplemented:
            return False
        if isinstance(out, Stand):
            self.at[node] = self.at[out.node]
        else:
            self.results[node] = out
        return True

    def _write(self, op: _torch.OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Write an op of a decomposition, given the nodes of its operands: stands of its results."""
        specs = fx.map_arg((args, kwargs), self._spec)
        node = self.spelled.create_node("call_function", op, args, kwargs)
        node.meta["val"] = out_metas(op, *specs, torch.device(self.mesh.device_type))
        many = _torch.returns_many(op)
        if not many:
            (node.meta["val"],) = node.meta["val"]
        self.call(node)
        if not many:
            return Stand(node, self._spec(node), self._write)
        return [None if meta is None else self._write_item(node, i) for i, meta in enumerate(node.meta["val"])]

    def _write_item(self, node: fx.Node, i: int) -> Stand:
        item = self.spelled.create_node("call_function", operator.getitem, (node, i))
        self.call(item)
        return Stand(item, self._spec(item), self._write)

    # ---- lowered --------------------------------------------------------------------------------
    def _op(self, node: fx.Node) -> None:
        way = self._way(node)
        plans, now = iter(way.plans), {n: self._now(n) for n in node.all_input_nodes}

        def operand(n: fx.Node) -> fx.Node:
            # From where it was when the op was lowered: what the same tensor in another place of it needs, moves it on.
            return now[n] if now[n].meta["spec"] is None else self.move(now[n], next(plans))

        args, kwargs = _in_schema_order(node, operand)
        if way.gathered:
            self.gathered.append((str(node.target), way.nbytes_gathered))
            fallback.note(node.target, way.nbytes_gathered)
        if way.sizes:
            shape = LocalShape(way.outs[0])
            args, kwargs = _torch.with_argument(node.target, args, kwargs, way.sizes, shape)
        local = way.local or SAFE_LOCALLY.get(node.target, node.target)
        if way.empties:
            local = UnlessEmpty(local, way.outs)
        new = self.graph.create_node("call_function", local, args, kwargs, name=node.name)
        many = isinstance(node.meta["val"], (tuple, list))
        self._done(node, new, way.outs if many else way.outs[0])

    def _way(self, node: fx.Node) -> Lowering:
        def spec(n: fx.Node) -> Any:
            found = self._spec(n)
            return SCALAR if found is None else found

        args, kwargs = fx.map_arg(node.args, spec), fx.map_arg(node.kwargs, spec)
        which = _which(self._operands(node))
        key = (node.target, frozen(args), frozen(kwargs), which)
        return self.lowerings.get(key, lambda: _lowered(Call(node.target, args, dict(kwargs), _metas(node), which)))

    def _operands(self, node: fx.Node) -> list[fx.Node]:
        """The tensors among the arguments, in schema order, as often as they stand there."""
        found: list[fx.Node] = []
        _in_schema_order(node, lambda n: found.append(n) if self._spec(n) is not None else None)
        return found

    # ---- moves ----------------------------------------------------------------------------------
    def move(self, value: fx.Node, way: Plan) -> fx.Node:
        """The value after the plan; steps that were made before for another reader are used again."""
        for step in way.as_made.steps:
            key = (value, step.after)
            if key not in self.moved:
                self.moved[key] = self._step(value, step)
            if _reduces(step):
                self.reduced[value] = self.moved[key]
            value = self.moved[key]
        return value

    def _step(self, value: fx.Node, step: Step) -> fx.Node:
        early = _reduces(step) and value.op != "placeholder"
        with self.graph.inserting_after(value) if early else contextlib.nullcontext():
            new = self.graph.create_node("call_function", step, (value,), {}, name=step.move.kind)
        new.meta["spec"] = step.after
        return new

    def settle(self, node: fx.Node) -> None:
        """Move a value that has a home there; it is from then on the one that lies so."""
        if node in self.homes and node.op == "call_function":
            value, spec = self._now(node), self._spec(node)
            home = self.move(value, plan(spec, self.homes[node](spec)))
            if home is not self._now(node):
                self.reduced[self._now(node)] = home

    # ---- outputs --------------------------------------------------------------------------------
    def output(self, node: fx.Node, names: Sequence[str], output_spec: OutputSpec) -> list[tuple[str, Spec | None]]:
        values, outputs = [], []
        for i, (name, source) in enumerate(zip(names, node.args[0], strict=True)):
            spec = self._spec(source)
            value = self._now(source)
            if spec is not None:
                way = plan(spec, output_spec(i, spec))
                value, spec = self.move(value, way), way.dst
            values.append(value)
            outputs.append((name, spec))
        self.graph.output(tuple(values))
        return outputs

    # ---- the books ------------------------------------------------------------------------------
    def _now(self, node: fx.Node) -> fx.Node:
        """Where the value of a node of the global graph is: its last reduction, if it was reduced."""
        value = self.at[node]
        while value in self.reduced:
            value = self.reduced[value]
        return value

    def _spec(self, node: fx.Node) -> SpecTree:
        return self._now(node).meta["spec"]

    def _done(self, node: fx.Node, new: fx.Node, spec: SpecTree) -> None:
        new.meta["spec"] = spec
        self.at[node] = new


def _lowered(call: Call) -> Lowering:
    """The decisions of `spmd.tensor.dispatch`, which asks in the same order."""
    recipe = recipe_for(call)
    if recipe is not None:
        return Lowering(recipe.plans_from(call.tensors), recipe.outs, local=recipe)
    return lower(call, skips_empty=call.makes_new)


def _reduces(step: Step) -> bool:
    return isinstance(step.move, (AllReduce, ReduceInOrder, ReduceScatter))


def _which(operands: Sequence[fx.Node]) -> tuple[int, ...]:
    """For each operand, the first place where the same tensor stands."""
    return tuple(operands.index(n) for n in operands)


def _in_schema_order(node: fx.Node, operand: Callable[[fx.Node], fx.Node]) -> tuple[tuple, dict]:
    """Map the operands of a call in the order of `Call.tensors`: positional first, then keywords by schema."""
    args = fx.map_arg(node.args, operand)
    order = sorted(node.kwargs, key=lambda name: _torch.argument_index(node.target, name))
    return args, {name: fx.map_arg(node.kwargs[name], operand) for name in order}


def _metas(node: fx.Node) -> tuple[TensorMeta | None, ...]:
    value = node.meta["val"]
    leaves = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(map(_meta, leaves))


def _meta(value: Any) -> TensorMeta | None:
    """Of a fake tensor that the capture met, or as it was found out for an op of a decomposition."""
    if isinstance(value, torch.Tensor):
        return TensorMeta.of(value)
    return value if isinstance(value, TensorMeta) else None
