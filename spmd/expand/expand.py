"""Expand: a captured global graph becomes a program, node by node, through the lowering core.

Each op is lowered with the specs that its operands have; its moves are written before it, its sizes made local,
its results given their specs. A value that was moved once is not moved again for the next reader, and one that was
reduced is from then on the reduced one.

Reductions are written right after the value they reduce, so that they can run while the rest is computed; gathers
right before their reader, so that whole tensors do not live long.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from spmd import _torch
from spmd.expand.program import LocalShape, Program
from spmd.mesh import DeviceMesh
from spmd.tensor import fallback
from spmd.tensor.cache import Cache, frozen
from spmd.tensor.call import SCALAR, Call, TensorMeta
from spmd.tensor.dispatch import READS_VALUE
from spmd.tensor.lower import Lowering, lower
from spmd.tensor.random import Draw
from spmd.tensor.redistribute.moves import AllReduce, ReduceScatter
from spmd.tensor.redistribute.plan import Plan, Step, plan
from spmd.tensor.spec import Spec, replicated

SAFE_LOCALLY = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
}
"""Ops that look at strides, by those that do not: a move leaves a block contiguous, whatever the trace saw."""

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
) -> Program:
    """The program of a global graph whose placeholders lie as `inputs` say (a name and a spec; None for a number)."""
    expander = _Expander(mesh, constants)
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
    used = {n.target: constants[n.target] for n in expander.graph.nodes if n.op == "get_attr"}
    return Program(name, mesh, expander.graph, used, tuple(inputs), tuple(outputs), tuple(expander.gathered))


@dataclass
class _Expander:
    """The graph being written, and where each node of the global graph is in it."""

    mesh: DeviceMesh
    constants: dict[str, torch.Tensor]
    graph: fx.Graph = field(default_factory=fx.Graph)
    at: dict[fx.Node, fx.Node] = field(default_factory=dict)
    moved: dict[tuple[fx.Node, Spec], fx.Node] = field(default_factory=dict)
    reduced: dict[fx.Node, fx.Node] = field(default_factory=dict)
    lowerings: Cache = field(default_factory=lambda: Cache(1 << 20))
    gathered: list[tuple[str, int]] = field(default_factory=list)

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
        elif not isinstance(node.target, _torch.OpOverload):
            self._plain(node)
        elif not any(self._spec(n) is not None for n in node.all_input_nodes):
            self._factory(node)
        elif node.target in READS_VALUE:
            self._value(node)
        else:
            self._op(node)

    def _plain(self, node: fx.Node) -> None:
        """getitem of a result, or arithmetic on numbers."""
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

    def _op(self, node: fx.Node) -> None:
        lowering = self._lowering(node)
        plans, now = iter(lowering.plans), {n: self._now(n) for n in node.all_input_nodes}

        def operand(n: fx.Node) -> fx.Node:
            # From where it was when the op was lowered: what the same tensor in another place of it needs, moves it on.
            return now[n] if now[n].meta["spec"] is None else self.move(now[n], next(plans))

        args, kwargs = _in_schema_order(node, operand)
        if lowering.gathered:
            self.gathered.append((str(node.target), lowering.nbytes_gathered))
            fallback.note(node.target, lowering.nbytes_gathered)
        if lowering.sizes:
            shape = LocalShape(lowering.outs[0])
            args, kwargs = _torch.with_argument(node.target, args, kwargs, lowering.sizes, shape)
        local = SAFE_LOCALLY.get(node.target, node.target)
        new = self.graph.create_node("call_function", local, args, kwargs, name=node.name)
        many = isinstance(node.meta["val"], (tuple, list))
        self._done(node, new, lowering.outs if many else lowering.outs[0])

    def _lowering(self, node: fx.Node) -> Lowering:
        def spec(n: fx.Node) -> Any:
            found = self._spec(n)
            return SCALAR if found is None else found

        args, kwargs = fx.map_arg(node.args, spec), fx.map_arg(node.kwargs, spec)
        which = _which(self._operands(node))
        key = (node.target, frozen(args), frozen(kwargs), which)
        return self.lowerings.get(key, lambda: lower(Call(node.target, args, dict(kwargs), _metas(node), which)))

    def _operands(self, node: fx.Node) -> list[fx.Node]:
        """The tensors among the arguments, in schema order, as often as they stand there."""
        found: list[fx.Node] = []
        _in_schema_order(node, lambda n: found.append(n) if self._spec(n) is not None else None)
        return found

    # ---- moves ----------------------------------------------------------------------------------
    def move(self, value: fx.Node, way: Plan) -> fx.Node:
        """The value after the plan; steps that were made before for another reader are used again."""
        for step in way.steps:
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


def _reduces(step: Step) -> bool:
    return isinstance(step.move, (AllReduce, ReduceScatter))


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
    return tuple(TensorMeta.of(t) if isinstance(t, torch.Tensor) else None for t in leaves)
