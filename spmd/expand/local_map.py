"""`local_map` in a compiled step: a function of blocks is one node of the graph, and its gradient is another.

    y = local_map(scores, [Shard(1)], ([Shard(1)], [Shard(1)]))(q, k)

A step is traced on global tensors, but the function works on blocks. So:

    capture     the graph gets a node `local_map(q, k)` in place of the function. The shapes of its results follow from
                the blocks of all ranks; to know them, the function is run on fake blocks, once for each block shape
    expand      operands are moved to their `in_placements`, which must be given; results have the `out_placements`
    bind        the function and its gradient are traced on fake blocks of this rank and written in place of the nodes

A forward value that the gradient needs is an ordinary value of the rank's graph. Ranks may run different code if the
function depends on their shapes or coordinates. The program is the same for all ranks: it only names the function.

Not supported, and errors: second derivatives; random numbers drawn inside; torch.distributed's in-position collectives;
results that are Partial("max"), "min" or "product" and require a gradient.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from spmd import _torch
from spmd._torch import pytree
from spmd.comm import wait
from spmd.expand.nodes import is_collective
from spmd.mesh import DeviceMesh, as_rank
from spmd.mesh.rank import simulated_by
from spmd.tensor.annotations.block_function import (
    BlockFunction,
    OpenBlockFunction,
    Placements,
    metadata_of,
    specs_of_blocks,
    traced_by,
)
from spmd.tensor.cache import frozen
from spmd.tensor.call import Call
from spmd.tensor.placement import REPLICATE
from spmd.tensor.spec import Spec, spec_of

Coordinate = tuple[int, ...]
tracing_lock = threading.RLock()
"""make_fx patches torch while it traces, and simulated ranks are threads: only one of them may trace at a time."""


@dataclass(frozen=True, eq=False)
class BlockCall:
    """A call of a function of blocks, with the specs of its tensors.

    ins: the specs that its tensors must have. needs_grad: for each tensor, whether it gets a gradient. The arguments
    are flattened: statics has all leaves, None in place of a tensor; positions are those of the tensors among the
    leaves; tree is the structure.
    """

    function: BlockFunction
    mesh: DeviceMesh
    ins: tuple[Spec, ...]
    needs_grad: tuple[bool, ...]
    statics: tuple
    positions: tuple[int, ...]
    tree: Any

    def __call__(self, blocks: Sequence[torch.Tensor]) -> tuple[list, Any]:
        """Run the function on these blocks. Returns its results, flattened, and their structure."""
        leaves = list(self.statics)
        for position, x in zip(self.positions, blocks, strict=True):
            leaves[position] = x
        args, kwargs = _torch.unflatten(leaves, self.tree)
        return pytree.tree_flatten(self.function.func(*args, **kwargs))

    def fake_blocks(self, at: Coordinate) -> list[torch.Tensor]:
        """Fake blocks of the operands, for the rank at the coordinate. A fake mode must be on."""
        return [
            torch.empty(spec.local_shape(at), dtype=spec.dtype, device=self.mesh.device_type).requires_grad_(want)
            for spec, want in zip(self.ins, self.needs_grad, strict=True)
        ]

    @contextmanager
    def as_rank_at(self, at: Coordinate) -> Iterator[None]:
        """Inside, this thread is the rank at the coordinate of the current mesh, tensors are fake, and no trace is
        active."""
        rank = self.mesh.rank_at(at)
        alone = _torch.no_modes(), simulated_by(None), traced_by(None)
        with ExitStack() as stack:
            for each in (*alone, as_rank(rank), self.mesh, _torch.uncached_fake_mode()):
                stack.enter_context(each)
            yield

    def results_at(self, at: Coordinate) -> tuple[list, Any]:
        """The results that the rank at the coordinate gets, with fake tensors."""
        with self.as_rank_at(at), torch.set_grad_enabled(any(self.needs_grad)), _RefuseOps(self.function):
            return self(self.fake_blocks(at))


class _RefuseOps(_torch.TorchDispatchMode):
    """Inside, ops that a program cannot contain raise."""

    def __init__(self, fn: BlockFunction):
        super().__init__()
        self.function = fn

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if op.namespace == "c10d":
            raise NotImplementedError(
                f"{self.function}: {op} works in place on a group; use the collectives of spmd.comm"
            )
        if Call(op, args, kwargs, ()).draws:
            raise NotImplementedError(
                f"{self.function}: {op} draws random numbers, different ones on each rank; draw them outside of the "
                "function, where all ranks draw together, and pass them to it"
            )
        return op(*args, **kwargs)


@dataclass(frozen=True, eq=False)
class LocalMapOp:
    """A call of a function of blocks as the target of a graph node.

    outs: the specs of the results that are tensors. differentiable: the indices of the results that have a gradient.
    cotangents: the specs that their cotangents must have, one for each; scales: the factor by which a rank multiplies
    each. grads: the specs of the gradients, one for each operand that needs one. settles: the call that was open on
    some axes, of which this is made.
    """

    call: BlockCall
    outs: tuple[Spec, ...]
    differentiable: tuple[int, ...]
    cotangents: tuple[Spec, ...]
    scales: tuple[float, ...]
    grads: tuple[Spec, ...]
    settles: LocalMapOp | None = None

    def does_as(self, other: LocalMapOp) -> bool:
        """Whether another call does the same: its tensors are others, and all else is equal."""
        return self._described == other._described

    @cached_property
    def _described(self) -> Hashable:
        call = self.call
        given = frozen(call.statics), call.ins, call.needs_grad, call.positions, call.tree
        return call.function, *given, self.outs, self.differentiable, self.cotangents, self.scales, self.grads

    @property
    def __name__(self) -> str:
        return f"local_map[{self.call.function.name}]"

    def __call__(self, *_: Any) -> Any:
        raise AssertionError("bind replaces this by the ops of the function")


@dataclass(frozen=True, eq=False)
class LocalMapGradientOp:
    """The gradients of a call as the target of a graph node; its operands are the results and their cotangents."""

    of: LocalMapOp

    @property
    def __name__(self) -> str:
        return f"gradients_of_{self.of.__name__}"

    def __call__(self, *_: Any) -> Any:
        raise AssertionError("bind replaces this by the ops of the function")


# ---- capture ----------------------------------------------------------------------------------

_numbers = itertools.count()
_calls: weakref.WeakValueDictionary[int, LocalMapOp] = weakref.WeakValueDictionary()
"""The calls in graphs that are being captured. An op cannot take such a call, so it takes this number."""


# Only traced: the kernels know the shapes alone. `custom_op` would search the sources of all modules at every import.
_library = torch.library.Library("spmd", "FRAGMENT")
_library.define("local_map(Tensor[] tensors, int call) -> Tensor[]")
_library.define("local_map_gradients(Tensor[] results, Tensor[] cotangents, int call) -> Tensor[]")


@torch.library.impl(_library, "local_map", "Meta")
def _local_map_kernel(tensors: Sequence[torch.Tensor], call: int) -> list[torch.Tensor]:
    return [tensors[0].new_empty(s.shape, dtype=s.dtype) for s in _calls[call].outs]


@torch.library.impl(_library, "local_map_gradients", "Meta")
def _gradients_kernel(
    results: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor], call: int
) -> list[torch.Tensor]:
    return [results[0].new_empty(s.shape, dtype=s.dtype) for s in _calls[call].grads]


class _LocalMapFunction(torch.autograd.Function):
    """The call as an op of autograd."""

    @staticmethod
    def forward(ctx, number: int, op: LocalMapOp, *tensors: torch.Tensor):
        ctx.number, ctx.op = number, op
        out = torch.ops.spmd.local_map(list(tensors), number)
        ctx.save_for_backward(*out)
        ctx.mark_non_differentiable(*(x for j, x in enumerate(out) if j not in op.differentiable))
        return tuple(out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *cotangents: torch.Tensor):
        # The results are operands, so that the gradients come after them in the graph, whatever the cotangents are.
        wanted = [cotangents[j] for j in ctx.op.differentiable]
        grads = iter(torch.ops.spmd.local_map_gradients(list(ctx.saved_tensors), wanted, ctx.number))
        return None, None, *(next(grads) if want else None for want in ctx.op.call.needs_grad)


@contextmanager
def capture_local_maps(mesh: DeviceMesh | None) -> Iterator[Callable[[fx.Graph], None]]:
    """Inside, `local_map` writes nodes into the graph. Yields a function that replaces call numbers by the calls."""
    calls: dict[int, LocalMapOp] = {}  # keeps the calls alive

    def call(fn: BlockFunction, args: tuple, kwargs: dict[str, Any]) -> Any:
        op, tensors, out, tree = _make_call(fn, mesh, args, kwargs)
        number = next(_numbers)
        calls[number] = _calls[number] = op
        found = iter(_LocalMapFunction.apply(number, op, *tensors))
        return _torch.unflatten([next(found) if isinstance(x, torch.Tensor) else x for x in out], tree)

    def insert_calls(graph: fx.Graph) -> None:
        for op in (torch.ops.spmd.local_map.default, torch.ops.spmd.local_map_gradients.default):
            is_call = op is torch.ops.spmd.local_map.default
            for node in graph.find_nodes(op="call_function", target=op):
                *args, number = node.args
                node.target = calls[number] if is_call else LocalMapGradientOp(calls[number])
                node.args = tuple(args)

    with traced_by(call):
        yield insert_calls


def _make_call(fn: BlockFunction, mesh: DeviceMesh | None, args: tuple, kwargs: dict[str, Any]):
    """The call, its operands, and its flattened results, in which tensors are fake, with their structure."""
    flat, tree = pytree.tree_flatten((args, kwargs))
    _check_arguments(fn, mesh, len(pytree.tree_leaves(args)), flat)
    positions = tuple(i for i, x in enumerate(flat) if isinstance(x, torch.Tensor))
    tensors = [flat[i] for i in positions]
    shapes = {i: tuple(map(int, flat[i].shape)) for i in positions}  # blocks have sizes and no symbols
    ins = tuple(spec_of(mesh, fn.ins[i] or [REPLICATE] * mesh.ndim, shapes[i], flat[i].dtype) for i in positions)
    needs_grad = tuple(torch.is_grad_enabled() and x.requires_grad for x in tensors)
    statics = tuple(None if i in positions else x for i, x in enumerate(flat))
    op, out, out_tree = _op_of(BlockCall(fn, mesh, ins, needs_grad, statics, positions, tree))
    return op, tensors, out, out_tree


def _op_of(call: BlockCall) -> tuple[LocalMapOp, list, Any]:
    """The call as a target, and its flattened results, in which tensors are fake, with their structure."""
    fn, mesh = call.function, call.mesh
    outs, out, out_tree, differentiable = _results_on_fakes(call)
    placed = [p for p in fn.outs if p is not None]
    cotangents = tuple(outs[j].with_layout(outs[j].dims, outs[j].units) for j in differentiable)
    scales = tuple(_cotangent_scale(fn, outs[j], placed[j]) for j in differentiable)
    grads = tuple(
        spec_of(mesh, fn.gradient_placements(i, spec), spec.shape, spec.dtype)
        for i, spec, want in zip(call.positions, call.ins, call.needs_grad, strict=True)
        if want
    )
    return LocalMapOp(call, outs, differentiable, cotangents, scales, grads), out, out_tree


def _check_arguments(fn: BlockFunction, mesh: DeviceMesh, positional: int, flat: list) -> None:
    """Check the arguments of a call: each tensor needs placements, because a traced tensor is on no mesh."""
    if fn.ins is None:
        raise NotImplementedError(
            f"{fn}: a compiled step is traced on global tensors, which are not on the mesh yet: give in_placements "
            "for each positional argument; the arguments are redistributed to them"
        )
    if fn.mesh is not None and fn.mesh != mesh:
        raise ValueError(f"{fn}: its device_mesh is {fn.mesh!r}, but the step is compiled for {mesh!r}; use one mesh")
    fn.check_lengths(positional, "tensor")
    for i, x in enumerate(flat):
        placements = fn.ins[i] if i < positional else None
        if isinstance(x, torch.Tensor) == (placements is None):
            what = f"a tensor of shape {list(x.shape)}" if placements is None else f"{x!r}"
            raise ValueError(
                f"{fn}: argument {i} is {what}, and in_placements for it are {placements}; a tensor needs them, and "
                "must be passed by position; any other argument takes None"
            )
        if _torch.is_symbol(x):
            raise NotImplementedError(
                f"{fn}: argument {i} is a number that may change between calls; pass it as a tensor"
            )


def _results_on_fakes(call: BlockCall) -> tuple[tuple[Spec, ...], list, Any, tuple[int, ...]]:
    """The specs of the results, the flattened results, their structure, and which of the tensors have a gradient.

    The function is run once for each shape of its blocks. Every rank finds the same.
    """
    mesh, fn, found = call.mesh, call.function, {}
    for at in mesh.coordinates():
        shapes = tuple(spec.local_shape(at) for spec in call.ins)
        if shapes not in found:
            found[shapes] = call.results_at(at)
    by_rank = [found[tuple(spec.local_shape(at) for spec in call.ins)] for at in mesh.coordinates()]
    out, tree = by_rank[0]
    fn.check_results(out)
    metadata = [metadata_of(_tensors(results)) for results, _ in by_rank]
    outs = specs_of_blocks(repr(fn), metadata, [p for p in fn.outs if p is not None], mesh)
    return outs, out, tree, tuple(j for j, x in enumerate(_tensors(out)) if x.requires_grad)


def _tensors(flat: Sequence[Any]) -> list[torch.Tensor]:
    return [wait(x) for x in flat if isinstance(x, torch.Tensor)]


def _cotangent_scale(fn: BlockFunction, out: Spec, placements: Placements) -> float:
    """The factor by which a rank multiplies a cotangent: 1 / n for an average or a replicated result of n ranks."""
    if any(kind not in ("sum", "avg") for _, kind in out.partial):
        raise NotImplementedError(
            f"{fn}: a result is {out} and requires a gradient, which goes to the rank that has the "
            f"{out.partial[0][1]}; reduce it inside the function, or call it outside of the step"
        )
    ranks = prod(out.mesh.shape[a] for a, kind in out.partial if kind == "avg")
    copies = prod(out.mesh.shape[a] for a, p in enumerate(placements) if p == REPLICATE) if fn.grads is None else 1
    return 1 / (ranks * copies)


# ---- functions that are open on some axes -------------------------------------------------------


def settled(op: LocalMapOp, specs: Sequence[Spec]) -> LocalMapOp:
    """The call for operands of these specs, whose function may be open on some axes."""
    call = op.call
    if not isinstance(call.function, OpenBlockFunction):
        return op
    fn = call.function.settled(specs)
    ins = tuple(spec_of(call.mesh, fn.ins[i], s.shape, s.dtype) for i, s in zip(call.positions, call.ins, strict=True))
    return replace(_op_of(replace(call, function=fn, ins=ins))[0], settles=op)


def settle(graph: fx.Graph, written: fx.Graph) -> None:
    """Let the calls of a captured graph be those that they were settled as, in a program that was written of it."""
    targets = [node.target for node in written.nodes]
    ops = {target.settles: target for target in targets if isinstance(target, LocalMapOp) and target.settles}
    for node in graph.nodes:
        if isinstance(node.target, LocalMapOp):
            node.target = ops.get(node.target, node.target)
        elif isinstance(node.target, LocalMapGradientOp):
            node.target = LocalMapGradientOp(ops.get(node.target.of, node.target.of))


# ---- bind -------------------------------------------------------------------------------------


class BlockTrace:
    """The traced code of a call on one rank: the forward, and the gradients if they are needed.

    inputs: the placeholders, first the blocks, then the cotangents. forward: the nodes that the results need, in order,
    and all that it sends: other ranks wait for that, whether this rank's results need it or not. backward: the other
    nodes. `bind` copies both into the rank's graph.
    """

    def __init__(self, op: LocalMapOp, at: Coordinate, with_gradients: bool):
        self.module, sent = _trace(op, at, with_gradients)
        nodes = self.module.graph.nodes
        self.inputs = [n for n in nodes if n.op == "placeholder"]
        results = next(n for n in nodes if n.op == "output").args[0]
        n = len(op.outs)
        self.results, self.gradients = results[:n], results[n:]
        needed = set(_ancestors([*self.results, *sent]))
        inner = [n for n in nodes if n.op not in ("placeholder", "output")]
        self.forward = [n for n in inner if n in needed]
        self.backward = [n for n in inner if n not in needed]


def _ancestors(nodes: Sequence[fx.Node]) -> Iterator[fx.Node]:
    seen, todo = set(), list(nodes)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += node.all_input_nodes
            yield node


def _trace(op: LocalMapOp, at: Coordinate, with_gradients: bool) -> tuple[fx.GraphModule, list[fx.Node]]:
    """The function on the blocks of one rank, as a functional graph: (blocks, cotangents) -> (results, gradients).

    Also the collectives in it that are the forward's.
    """
    call, fn = op.call, op.call.function
    sent: list[fx.Node] = []

    def run(blocks: list[torch.Tensor], cotangents: list[torch.Tensor]) -> list[torch.Tensor]:
        with _torch.FunctionalTensorMode(), _RefuseOps(fn), torch.set_grad_enabled(with_gradients):
            wrapped = [_torch.to_functional(x) for x in (*blocks, *cotangents)]
            wants = [want and with_gradients for want in call.needs_grad]
            leaves = [x.requires_grad_(want) for x, want in zip(wrapped, wants, strict=False)]
            out = _tensors(call(leaves)[0])
            _check_result_shapes(op, at, out)
            sent.extend(n for n in _torch.proxy_mode().tracer.graph.nodes if is_collective(n))
            grads = _gradients(op, leaves, out, wrapped[len(blocks) :]) if with_gradients else []
        if any(_torch.from_functional(x) is not b for x, b in zip(wrapped, blocks, strict=False)):
            raise RuntimeError(f"{fn}: writes into its argument; in a compiled step let it return the new value")
        return [_torch.from_functional(x) for x in (*out, *grads)]

    with tracing_lock, call.as_rank_at(at):
        blocks = [x.detach() for x in call.fake_blocks(at)]
        shapes = [spec.local_shape(at) for spec in op.cotangents] if with_gradients else []
        cotangents = [
            torch.empty(shape, dtype=s.dtype, device=call.mesh.device_type)
            for shape, s in zip(shapes, op.cotangents, strict=False)
        ]
        return make_fx(run, tracing_mode="fake")(blocks, cotangents), sent


def _check_result_shapes(op: LocalMapOp, at: Coordinate, out: list[torch.Tensor]) -> None:
    """Result sizes must follow from the block sizes. A function whose sizes depend on the rank is found here."""
    want = [spec.local_shape(at) for spec in op.outs]
    if [tuple(x.shape) for x in out] != want:
        raise ValueError(
            f"{op.call.function}: the rank at {at} gives {[list(x.shape) for x in out]}, but blocks of "
            f"{', '.join(map(str, op.outs))} have {[list(w) for w in want]} there"
        )


def _gradients(op: LocalMapOp, leaves: list, out: list, cotangents: list) -> list[torch.Tensor]:
    operands = [x for x, want in zip(leaves, op.call.needs_grad, strict=True) if want]
    terms = [c if scale == 1 else c * scale for c, scale in zip(cotangents, op.scales, strict=True)]
    found = torch.autograd.grad([out[j] for j in op.differentiable], operands, terms, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(operands, found, strict=True)]
