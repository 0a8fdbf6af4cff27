"""Bind: turn a program into plain torch code for one rank.

    all_reduce f32[6] over dp    ->    x = _c10d_functional.all_reduce(g, "sum", "ranks:0-1")
                                       y = _c10d_functional.wait_tensor(x)

Moves are recorded by running their own code (`Move.start`, `Move.finish`) on fx proxies. So are recipes, which depend
on where the rank's block begins. Axes become the names of this rank's groups, and local shapes become numbers. The
result has only torch ops and functional collectives: no mesh, no spec, no process group object; over very many ranks
also functions of tensors and numbers that stand for many ops (`redistribute/tables.py`). It can be run as it is or
given to Inductor. Only a draw of random numbers keeps its spec, because it needs the rank's tiles.

A collective is launched at its move and waited for just before its first reader, and so is a copy from host memory.
Where reduce-scatters are exchanges of terms, a bucket of them is waited for before the next one is launched, at the
latest. A tensor of a bucket of gathers is cut out where the program names it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from spmd import _torch
from spmd.comm import Transport
from spmd.comm.rows import EXCHANGE_ROWS, written_rows
from spmd.expand.local_map import BlockTrace, LocalMapGradientOp, LocalMapOp
from spmd.expand.local_ops import SAFE_LOCALLY, LocalCount, LocalShape, UnlessEmpty
from spmd.expand.loops.bound import BoundLoop
from spmd.expand.loops.loop import Loop
from spmd.expand.nodes import LINE, MADE_FOR, added, described_call, first_positions
from spmd.expand.recorded import Recorded, Recording, Tracer, nodes_in
from spmd.expand.splits import in_short
from spmd.tensor.recipes.host import arrived, from_host
from spmd.tensor.recipes.random import Draw
from spmd.tensor.recipes.recipe import Recipe
from spmd.tensor.redistribute.bucket import Bucket
from spmd.tensor.redistribute.plan import Step
from spmd.tensor.rules.products import KERNELS
from spmd.tensor.spec import Spec

if TYPE_CHECKING:
    from spmd.expand.program import Program

aten = torch.ops.aten
ALL_TO_ALL = _torch.c10d_functional.all_to_all_single.default
WAIT = _torch.c10d_functional.wait_tensor.default

MOVE, LAUNCHED = "move", "launched"
"""In the metadata of a collective of a rank's code: the move of the program that it carries out, by name, and its name
and arguments as it was launched."""


def bind(
    program: Program,
    coordinate: tuple[int, ...],
    transport: Transport,
    passes: Sequence[Callable[[fx.Graph], object]] = (),
    code_of_body: Callable[[Program], fx.GraphModule] | None = None,
) -> fx.GraphModule:
    """The code of the program for the rank at `coordinate`. `transport` carries out its collectives.

    passes: functions that rewrite the rank's graph in place, in this order, before it becomes code. code_of_body: gives
    the code of the body of a loop; by default it is bound as the program is, without passes.
    """
    code = code_of_body or (lambda body: bind(body, coordinate, transport))
    return _Binder(program, coordinate, transport, code).bound(passes)


@dataclass(frozen=True)
class _Launch:
    """A move that was started and not yet waited for. handle: the result of its `start`."""

    handle: fx.Node
    step: Step | Bucket


def _with_spec(node: fx.Node, spec: Spec) -> fx.Node:
    node.meta["spec"] = spec
    return node


class _Binder:
    def __init__(
        self, program: Program, coordinate: tuple[int, ...], transport: Transport,
        code_of_body: Callable[[Program], fx.GraphModule],
    ):  # fmt: skip
        self.program, self.coordinate, self.code_of_body = program, coordinate, code_of_body
        self.graph = _torch.new_graph()
        self.tracer = Tracer(self.graph)
        self.transport = _GraphTransport(transport, self.tracer)
        self.exchanges_terms = transport.exchanges_terms(program.mesh.device_type)
        self.values: dict[fx.Node, fx.Node | list[fx.Node] | _Launch | _BucketItem | _Fetched] = {}
        self.traces: dict[LocalMapOp, tuple[BlockTrace, dict[fx.Node, fx.Node]]] = {}
        self.constants = dict(program.constants)
        self.scattered: list[fx.Node] = []  # the last bucket of reduce-scatters
        self.noted: dict[str, fx.Node] = {}  # the last node that has its line, and that has what it was made for
        self.kernels: dict[Hashable, Recording] = {}  # by the arguments of the calls of them
        self.moves: dict[tuple[str | int, ...], Recording] = {}  # by a part of them, and the identities of their steps

    def bound(self, passes: Sequence[Callable[[fx.Graph], object]]) -> fx.GraphModule:
        for node in self.program.graph.nodes:
            if isinstance(node.target, _torch.OpOverload) and node.target not in KERNELS:
                self._copy(node)
            elif isinstance(node.target, (Step, Bucket)):
                self.values[node] = self._launch(node)
            elif node.target is operator.getitem and isinstance(node.args[0].target, Bucket):
                self.values[node] = self._item(*node.args)
            elif isinstance(node.target, Recipe):
                self.values[node] = self._recipe(node)
            elif node.target is from_host:
                self.values[node] = _Fetched(self._copied(node, from_host))
            elif isinstance(node.target, UnlessEmpty):
                self.values[node] = self._op_or_empty(node)
            elif isinstance(node.target, LocalMapOp):
                self.values[node] = self._local_map(node)
            elif isinstance(node.target, Loop):
                self.values[node] = self._loop(node)
            elif isinstance(node.target, LocalMapGradientOp):
                self.values[node] = self._gradients(node)
            elif node.target in KERNELS:
                self.values[node] = self._without_kernel(node)
            elif node.target is operator.getitem and isinstance(self.values[node.args[0]], list):
                self.values[node] = self.values[node.args[0]][node.args[1]]
            else:
                self._copy(node)
            self._note(MADE_FOR, node.name)
            self._note(LINE, node.meta.get(LINE, ""))
        for rewrite in passes:
            rewrite(self.graph)
        root = nn.Module()
        for name, constant in self.constants.items():
            root.register_buffer(name, constant, persistent=False)
        return _torch.GraphModuleWhenCalled(root, self.graph, class_name=self.program.name)

    def _note(self, what: str, said: str) -> None:
        """Note something of a node of the program on the nodes that were written for it: its name, and the user's line.

        What a pass has written for several lines, such as a bucket, has no line. What finishes a move is written before
        its reader, and is of the line of that; it was made for the move.
        """
        last = self.noted.get(what)
        written = next(iter(self.graph.nodes), None) if last is None else last.next
        while written is not None and written.op != "root":
            written.meta[what] = said
            self.noted[what], written = written, written.next

    def _launch(self, node: fx.Node) -> _Launch:
        if isinstance(node.target, Bucket) and node.target.kind == "reduce_scatter" and self.exchanges_terms:
            for earlier in self.scattered:  # what comes is freed: the terms of all ranks
                self._ready(earlier)
            self.scattered = [node]
        step, operand = node.target, node.args[0]
        inputs = [self._ready(n) for n in (operand if isinstance(step, Bucket) else [operand])]
        self.transport.move = node.name
        (handle,) = self._moved("start", step, inputs, lambda *blocks: [
            step.start(list(blocks) if isinstance(step, Bucket) else blocks[0], self.coordinate, self.transport)
        ])  # fmt: skip
        self.transport.move = None
        return _Launch(handle, step)

    def _arrived(self, launch: _Launch) -> fx.Node | list[fx.Node]:
        """Wait for what was launched."""
        step, at = launch.step, (self.coordinate, self.transport)
        if not isinstance(step, Bucket):
            (made,) = self._moved("finish", step, [launch.handle], lambda y: [step.finish(y, *at)])
            return _with_spec(made, step.after)
        pieces = self._moved("arrived", step, [launch.handle], lambda y: step.arrived(y, *at))
        if step.copies_out:  # what is there is cut
            return pieces
        return [_with_spec(n, spec) for n, spec in zip(pieces, step.after, strict=True)]

    def _item(self, of: fx.Node, index: int) -> fx.Node | _BucketItem:
        """A tensor of a bucket, cut out here if it has memory of its own."""
        bucket, at = of.target, (self.coordinate, self.transport)
        if not bucket.copies_out:
            return _BucketItem(of, index)
        (cut,) = self._moved(index, bucket, [self._ready(of)[index]], lambda y: [bucket.cut(index, y, *at)])
        return _with_spec(cut, bucket.after[index])

    def _moved(
        self, what: str | int, step: Step | Bucket, inputs: Sequence[fx.Node], run: Callable[..., Sequence[Any]]
    ) -> list[fx.Node]:
        """What the code of a move gives on this rank: recorded once, and written again for equal moves. what: a part of
        its code. Equal plans are one object, and so are their steps. What is written for one tensor that is sent twice
        is not what is written for two."""
        is_one = first_positions(nodes_in(inputs)) if len(inputs) > 1 else ()
        key = (what, is_one, *map(id, step.steps if isinstance(step, Bucket) else (step,)))
        if (known := self.moves.get(key)) is not None:
            return known.again(self.graph, inputs, self._launched)
        known = self.moves[key] = Recording.of(self.tracer, inputs, run)
        return list(known.results)

    def _launched(self, node: fx.Node) -> dict[str, Any]:
        """What is noted on the copy of a node: that of a collective is launched for another move."""
        launched = node.meta.get(LAUNCHED)
        return {} if launched is None else {MOVE: self.transport.move, LAUNCHED: launched}

    def _recipe(self, node: fx.Node) -> fx.Node | list[fx.Node]:
        blocks = [Recorded(self._ready(n), self.tracer) for n in _operands(node)]
        outs = zip(node.target(self.coordinate, blocks), node.target.made, strict=True)
        results = [None if spec is None else _with_spec(p.node, spec) for p, spec in outs]
        return results if len(results) > 1 else results[0]

    def _loop(self, node: fx.Node) -> fx.Node:
        """A loop. What its body writes into is copied first."""
        bound = BoundLoop(node.target, self.code_of_body(node.target.body))
        operands = [self._ready(n) for n in node.args]
        for i in bound.overwritten:
            copy = self.graph.call_function(aten.clone.default, (operands[i],))
            operands[i] = _with_spec(copy, operands[i].meta["spec"])
        new = added(self.graph, "call_function", bound, tuple(operands), {}, node.name)
        new.meta["spec"] = node.meta["spec"]
        return new

    # ---- functions of blocks --------------------------------------------------------------------
    def _local_map(self, node: fx.Node) -> list[fx.Node]:
        op = node.target
        targets = (n.target for n in self.program.graph.nodes)
        with_gradients = any(isinstance(t, LocalMapGradientOp) and t.of is op for t in targets)
        trace, env = self.traces[op] = BlockTrace(op, self.coordinate, with_gradients), {}
        env.update(zip(trace.inputs, map(self._ready, _operands(node)), strict=False))
        return self._copy_nodes(trace, trace.forward, trace.results, op.outs, env)

    def _gradients(self, node: fx.Node) -> list[fx.Node]:
        op = node.target.of
        trace, env = self.traces[op]
        cotangents = trace.inputs[len(op.call.ins) :]
        env.update(zip(cotangents, map(self._ready, _operands(node)[len(op.outs) :]), strict=True))
        return self._copy_nodes(trace, trace.backward, trace.gradients, op.grads, env)

    def _copy_nodes(
        self, trace: BlockTrace, nodes, results, specs: Sequence[Spec], env: dict[fx.Node, fx.Node]
    ) -> list[fx.Node]:
        """Copy these nodes. Each result gets a node of its own, with its spec."""
        for n in nodes:
            env[n] = self._copy_inner(n, trace, env)
        return [
            _with_spec(self.graph.call_function(aten.alias.default, (env[n],)), spec)
            for n, spec in zip(results, specs, strict=True)
        ]

    def _copy_inner(self, node: fx.Node, trace: BlockTrace, env: dict[fx.Node, fx.Node]) -> fx.Node:
        """Copy a node of a function of blocks; its collectives become those of the transport."""
        if node.op == "get_attr":
            name = f"constant{len(self.constants)}_of_blocks"
            self.constants[name] = getattr(trace.module, node.target)
            return self.graph.get_attr(name)
        if node.target is EXCHANGE_ROWS:
            return self._exchange_rows(node, env)
        target = SAFE_LOCALLY.get(node.target, node.target)
        if getattr(target, "namespace", "") == "_c10d_functional":
            target = self.transport.collective(target)
        args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
        return added(self.graph, node.op, target, args, kwargs, node.name)

    def _exchange_rows(self, node: fx.Node, env: dict[fx.Node, fx.Node]) -> fx.Node:
        """An all-to-all whose sizes are read where it stands."""
        x, sizes, rows, group = node.args
        launch, wait = self.transport.collective(ALL_TO_ALL), self.transport.collective(WAIT)

        def write(function: Callable, *args: Any) -> fx.Node:
            return added(self.graph, "call_function", function, args, {}, function.__name__)

        between = len(x.meta["val"]), rows
        return written_rows(write, launch, wait, env[x], env[sizes], between, group)

    # ---- other ops ------------------------------------------------------------------------------
    def _without_kernel(self, node: fx.Node) -> list[fx.Node | None]:
        """The results of an op without a kernel on CPU and CUDA, computed by ops that have one."""
        key = described_call(node, lambda n: fx.Node)
        if key not in self.kernels:
            self.kernels[key] = _kernel_of(node)
        made = self.kernels[key].again(self.graph, [self._ready(n) for n in _operands(node)])
        outs = zip(made, node.meta["spec"], strict=True)
        return [None if n is None else _with_spec(n, spec) for n, spec in outs]

    def _op_or_empty(self, node: fx.Node) -> fx.Node | list[fx.Node]:
        """The op itself, or empty tensors if all its results are empty: the op would raise on empty operands."""
        outs, (like, *_) = node.target.outs, [self._ready(n) for n in _operands(node)]  # what was sent is waited for
        shapes = [spec.local_shape(self.coordinate) for spec in outs]
        if any(map(prod, shapes)):
            return self._copied(node, node.target.op)
        made = [
            self.graph.call_function(aten.new_empty.default, (like, list(shape)), {"dtype": spec.dtype})
            for shape, spec in zip(shapes, outs, strict=True)
        ]
        made = [_with_spec(n, spec) for n, spec in zip(made, outs, strict=True)]
        return made if isinstance(node.meta["spec"], tuple) else made[0]

    def _copy(self, node: fx.Node) -> None:
        target = replace(node.target, at=self.coordinate) if isinstance(node.target, Draw) else node.target
        self.values[node] = self._copied(node, target)

    def _copied(self, node: fx.Node, target: Any) -> fx.Node:
        args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), self._here)
        new = added(self.graph, node.op, target, args, kwargs, node.name)
        new.meta["spec"] = node.meta.get("spec")
        return new

    def _here(self, x: Any) -> Any:
        """What an argument is on this rank."""
        if isinstance(x, fx.Node):
            return value if type(value := self.values[x]) is fx.Node else self._ready(x)
        if isinstance(x, LocalShape):
            return list(x.spec.local_shape(self.coordinate))
        return x.at(self.coordinate) if isinstance(x, LocalCount) else x

    def _ready(self, node: fx.Node) -> fx.Node:
        """The node's value in the rank's graph. If it comes from a move under way, the wait is written here."""
        value = self.values[node]
        if isinstance(value, fx.Node):
            return value
        if isinstance(value, _Launch):
            value = self.values[node] = self._arrived(value)
            self._note(MADE_FOR, node.name)
        elif isinstance(value, _BucketItem):
            value = self.values[node] = self._ready(value.of)[value.index]
        elif isinstance(value, _Fetched):
            wait = self.graph.call_function(arrived, (value.copy,))
            value = self.values[node] = _with_spec(wait, node.meta["spec"])
        return value


def _kernel_of(node: fx.Node) -> Recording:
    """For a call of an op without a kernel, the ops that stand for it, of its operands, as often as they occur."""
    graph, operands = _torch.new_graph(), []
    fx.map_arg(node.args, operands.append)
    inputs = [added(graph, "placeholder", n.name, (), {}, n.name) for n in operands]

    def kernel(*given: fx.Proxy) -> Sequence[fx.Proxy | None]:
        remaining = iter(given)
        return KERNELS[node.target](*fx.map_arg(node.args, lambda n: next(remaining)))

    return Recording.of(Tracer(graph), inputs, kernel)


@dataclass(frozen=True)
class _BucketItem:
    """One tensor of a bucket; the bucket may still be under way."""

    of: fx.Node
    index: int


@dataclass(frozen=True)
class _Fetched:
    """A copy from host memory that was started and not yet waited for."""

    copy: fx.Node


class _GraphTransport:
    """A transport that writes collectives into the graph instead of carrying them out."""

    def __init__(self, transport: Transport, tracer: fx.proxy.GraphAppendingTracer):
        self._transport, self._tracer = transport, tracer
        self.group, self.exchanges_terms = transport.group, transport.exchanges_terms
        self.move: str | None = None  # the move of the program that is being launched

    def collective(self, op: _torch.OpOverload) -> Callable:
        """The method of the transport for this functional collective of torch."""
        return getattr(self._transport, _torch.qualified_name(op).split("::")[1])

    def __getattr__(self, name: str) -> Callable[..., fx.Proxy]:
        collective = getattr(self._transport, name)

        def write(*args: Any) -> fx.Proxy:
            given = tuple(map(in_short, args))
            proxy = self._tracer.create_proxy("call_function", collective, given, {})
            if self.move is not None:
                proxy.node.meta |= {MOVE: self.move, LAUNCHED: (name, *given[1:-1])}
            return proxy

        return write


def _operands(node: fx.Node) -> list[fx.Node]:
    """The nodes among the arguments. A node that occurs twice is listed twice."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found
