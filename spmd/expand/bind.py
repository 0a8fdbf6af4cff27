"""Bind: a program becomes plain torch code for one rank.

Moves are written out by running their own code (`Move.start`, `Move.finish`) over fx proxies, and so are recipes, which
depend on where the rank's block begins; axes become the names of this rank's groups; local shapes become numbers. What
is left is torch ops and functional collectives: no mesh, no spec, no process group object, ready for Inductor or for
running as it is. Only a draw of random numbers keeps its spec, from which it knows the rank's tiles.

A collective is launched where its move stands and waited for just before its first reader.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import fx, nn

from spmd import _torch
from spmd.comm import Transport
from spmd.expand.mapped import Gradients, Mapped, Written
from spmd.expand.program import SAFE_LOCALLY, LocalShape, Program, UnlessEmpty
from spmd.tensor.random import Draw
from spmd.tensor.recipe import Recipe
from spmd.tensor.redistribute.bucket import Bucket
from spmd.tensor.redistribute.plan import Step
from spmd.tensor.rules.products import KERNELS
from spmd.tensor.spec import Spec

aten = torch.ops.aten


def bind(
    program: Program,
    coordinate: tuple[int, ...],
    transport: Transport,
    passes: Sequence[Callable[[fx.Graph], object]] = (),
) -> fx.GraphModule:
    """The program of the rank at `coordinate`, its collectives carried by `transport`.

    passes: rewrite the rank's graph in place, one after the other, before it is made into code.
    """
    return _Binder(program, coordinate, transport).bound(passes)


@dataclass(frozen=True)
class _Launch:
    """A move under way: what it launched, and how to finish it."""

    handle: fx.Proxy
    step: Step | Bucket

    def wait(self, coordinate: tuple[int, ...], transport: Transport) -> fx.Node | list[fx.Node]:
        done, after = self.step.finish(self.handle, coordinate, transport), self.step.after
        if isinstance(done, list):
            return [_noted(p.node, spec) for p, spec in zip(done, after, strict=True)]
        return _noted(done.node, after)


def _noted(node: fx.Node, spec: Spec) -> fx.Node:
    node.meta["spec"] = spec
    return node


class _Binder:
    def __init__(self, program: Program, coordinate: tuple[int, ...], transport: Transport):
        self.program, self.coordinate = program, coordinate
        self.graph = fx.Graph()
        self.tracer = fx.proxy.GraphAppendingTracer(self.graph)
        self.transport = _Written(transport, self.tracer)
        self.at: dict[fx.Node, fx.Node | list[fx.Node] | _Launch | _Item] = {}
        self.written: dict[Mapped, tuple[Written, dict[fx.Node, fx.Node]]] = {}
        self.constants = dict(program.constants)

    def bound(self, passes: Sequence[Callable[[fx.Graph], object]]) -> fx.GraphModule:
        for node in self.program.graph.nodes:
            if isinstance(node.target, (Step, Bucket)):
                self.at[node] = self._launch(node)
            elif node.target is operator.getitem and isinstance(node.args[0].target, Bucket):
                self.at[node] = _Item(*node.args)
            elif isinstance(node.target, Recipe):
                self.at[node] = self._recipe(node)
            elif isinstance(node.target, UnlessEmpty):
                self.at[node] = self._unless_empty(node)
            elif isinstance(node.target, Mapped):
                self.at[node] = self._mapped(node)
            elif isinstance(node.target, Gradients):
                self.at[node] = self._gradients(node)
            elif node.target in KERNELS:
                self.at[node] = self._written_out(node)
            elif node.target is operator.getitem and isinstance(self.at[node.args[0]], list):
                self.at[node] = self.at[node.args[0]][node.args[1]]
            else:
                self._copy(node)
        for rewrite in passes:
            rewrite(self.graph)
        root = nn.Module()
        for name, constant in self.constants.items():
            root.register_buffer(name, constant, persistent=False)
        return fx.GraphModule(root, self.graph, class_name=self.program.name)

    def _launch(self, node: fx.Node) -> _Launch:
        blocks = fx.map_arg(node.args[0], lambda n: fx.Proxy(self._ready(n), self.tracer))
        return _Launch(node.target.start(blocks, self.coordinate, self.transport), node.target)

    def _recipe(self, node: fx.Node) -> fx.Node | list[fx.Node]:
        blocks = [fx.Proxy(self._ready(n), self.tracer) for n in _operands(node)]
        found = node.target(self.coordinate, blocks)
        made = [_noted(p.node, spec) for p, spec in zip(found, node.target.outs, strict=True)]
        return made if len(made) > 1 else made[0]

    # ---- functions of blocks --------------------------------------------------------------------
    def _mapped(self, node: fx.Node) -> list[fx.Node]:
        mapped = node.target
        wanted = any(isinstance(n.target, Gradients) and n.target.of is mapped for n in self.program.graph.nodes)
        written, env = self.written[mapped] = Written(mapped, self.coordinate, wanted), {}
        env.update(zip(written.inputs, map(self._ready, _operands(node)), strict=False))
        return self._write(written, written.first, written.results, mapped.outs, env)

    def _gradients(self, node: fx.Node) -> list[fx.Node]:
        mapped = node.target.of
        written, env = self.written[mapped]
        given = written.inputs[len(mapped.blocks.ins) :]
        env.update(zip(given, map(self._ready, _operands(node)[len(mapped.outs) :]), strict=True))
        return self._write(written, written.rest, written.gradients, mapped.grads, env)

    def _write(self, written: Written, nodes, results, specs: Sequence[Spec], env: dict[fx.Node, fx.Node]) -> list:
        """Copy these nodes; each result is a node of its own, with its spec."""
        for n in nodes:
            env[n] = self._inner(n, written, env)
        return [
            _noted(self.graph.call_function(aten.alias.default, (env[n],)), spec)
            for n, spec in zip(results, specs, strict=True)
        ]

    def _inner(self, node: fx.Node, written: Written, env: dict[fx.Node, fx.Node]) -> fx.Node:
        """A node of a function of blocks: its collectives are those of the transport."""
        if node.op == "get_attr":
            name = f"constant{len(self.constants)}_of_blocks"
            self.constants[name] = getattr(written.module, node.target)
            return self.graph.get_attr(name)
        target = SAFE_LOCALLY.get(node.target, node.target)
        if getattr(target, "namespace", "") == "_c10d_functional":
            target = self.transport.collective(target)
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        return self.graph.create_node(node.op, target, args, kwargs, name=node.name)

    # ---- ops as they are ------------------------------------------------------------------------
    def _written_out(self, node: fx.Node) -> list[fx.Node | None]:
        """The results of an op that has no kernel, by ops that have."""
        args = fx.map_arg(node.args, lambda n: fx.Proxy(self._ready(n), self.tracer))
        found = zip(KERNELS[node.target](*args), node.meta["spec"], strict=True)
        return [None if p is None else _noted(p.node, spec) for p, spec in found]

    def _unless_empty(self, node: fx.Node) -> fx.Node | list[fx.Node]:
        """The op; where its results are empty, these, for it would refuse its operands."""
        outs = node.target.outs
        shapes = [spec.local_shape(self.coordinate) for spec in outs]
        if any(map(prod, shapes)):
            return self._called(node, node.target.op)
        like = self._ready(_operands(node)[0])
        made = [
            _noted(self.graph.call_function(aten.new_empty.default, (like, list(shape)), {"dtype": spec.dtype}), spec)
            for shape, spec in zip(shapes, outs, strict=True)
        ]
        return made if isinstance(node.meta["spec"], tuple) else made[0]

    def _copy(self, node: fx.Node) -> None:
        target = replace(node.target, at=self.coordinate) if isinstance(node.target, Draw) else node.target
        self.at[node] = self._called(node, target)

    def _called(self, node: fx.Node, target: Any) -> fx.Node:
        args = _localized(fx.map_arg(node.args, self._ready), self.coordinate)
        kwargs = _localized(fx.map_arg(node.kwargs, self._ready), self.coordinate)
        new = self.graph.create_node(node.op, target, args, kwargs, name=node.name)
        new.meta["spec"] = node.meta.get("spec")
        return new

    def _ready(self, node: fx.Node) -> fx.Node:
        """The node's value, waited for if it was in flight."""
        found = self.at[node]
        if isinstance(found, _Launch):
            found = self.at[node] = found.wait(self.coordinate, self.transport)
        elif isinstance(found, _Item):
            found = self.at[node] = self._ready(found.of)[found.index]
        return found


@dataclass(frozen=True)
class _Item:
    """One tensor of a bucket that may still be under way."""

    of: fx.Node
    index: int


class _Written:
    """A transport whose collectives are written into the graph instead of carried out."""

    def __init__(self, transport: Transport, tracer: fx.proxy.GraphAppendingTracer):
        self._transport, self._tracer = transport, tracer
        self.group = transport.group

    def collective(self, op: _torch.OpOverload) -> Callable:
        """What carries this functional collective of torch's."""
        return getattr(self._transport, _torch.qualified_name(op).split("::")[1])

    def __getattr__(self, name: str) -> Callable[..., fx.Proxy]:
        collective = getattr(self._transport, name)
        return lambda *args: self._tracer.create_proxy("call_function", collective, args, {})


def _operands(node: fx.Node) -> list[fx.Node]:
    """The nodes among the arguments, as often as they stand there."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _localized(args, coordinate: tuple[int, ...]):
    if isinstance(args, LocalShape):
        return list(args.spec.local_shape(coordinate))
    if isinstance(args, (list, tuple)):
        return type(args)(_localized(a, coordinate) for a in args)
    if isinstance(args, dict):
        return {k: _localized(v, coordinate) for k, v in args.items()}
    return args
