"""`local_map` in a compiled step: a function of blocks is one node of the graph, and its gradient is another.

    y = local_map(scores, [Shard(1)], ([Shard(1)], [Shard(1)]))(q, k)

A step is traced on whole tensors, and the function cannot be. So:

    capture     in place of the function the graph gets `local_map(q, k)`, whose results have the shapes that the blocks
                of all ranks have together; to know them the function is run on fake blocks, once for each shape
    expand      operands are moved to their `in_placements`, which have to be given; results lie as `out_placements` say
    bind        the function is traced with its gradient on fake blocks of this rank, and written in place of the nodes

What the gradient needs of the forward is a value of the rank's graph like any other. Ranks may run different code, as
far as it depends on their shapes or coordinates; the program, which is the same for all, says only what is called.

Left out, and errors: second derivatives; random numbers drawn inside; torch.distributed's collectives in place; results
that are Partial("max"), "min" or "product" and want a gradient.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from spmd import _torch
from spmd._torch import pytree
from spmd.comm import wait
from spmd.mesh import DeviceMesh, as_rank
from spmd.mesh.rank import played_by
from spmd.tensor.call import Call
from spmd.tensor.local_map import LocalMap, Placements, looks_of, specs_of_blocks, traced_whole
from spmd.tensor.placement import REPLICATE
from spmd.tensor.spec import Spec, spec_of

At = tuple[int, ...]
one_at_a_time = threading.Lock()
"""make_fx patches torch while it traces; simulated ranks are threads."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """A call of a function of blocks.

    ins: how its tensors have to lie. wants: which of them get a gradient. given: all leaves of the arguments, None for
    the tensors, in `tree`.
    """

    who: LocalMap
    mesh: DeviceMesh
    ins: tuple[Spec, ...]
    wants: tuple[bool, ...]
    given: tuple
    places: tuple[int, ...]
    tree: Any

    def __call__(self, blocks: Sequence[torch.Tensor]) -> tuple[list, Any]:
        """What the function makes of these blocks, flat, and the structure of it."""
        leaves = list(self.given)
        for place, x in zip(self.places, blocks, strict=True):
            leaves[place] = x
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        return pytree.tree_flatten(self.who.func(*args, **kwargs))

    def fakes(self, at: At) -> list[torch.Tensor]:
        """Blocks as the rank at the coordinate has them; a fake mode is on."""
        return [
            torch.empty(spec.local_shape(at), dtype=spec.dtype, device=self.mesh.device_type).requires_grad_(want)
            for spec, want in zip(self.ins, self.wants, strict=True)
        ]

    @contextmanager
    def on(self, at: At) -> Iterator[None]:
        """Play the rank at the coordinate, on fake tensors, outside of any trace."""
        rank = self.mesh.rank_at(at)
        with _torch.no_modes(), played_by(None), as_rank(rank), traced_whole(None), _torch.forgetful_fakes():
            yield

    def results(self, at: At) -> tuple[list, Any]:
        """What the rank at the coordinate gets, with fake tensors."""
        with self.on(at), torch.set_grad_enabled(any(self.wants)), _Refusing(self.who):
            return self(self.fakes(at))


class _Refusing(_torch.TorchDispatchMode):
    """Inside, ops that a program cannot hold are errors."""

    def __init__(self, who: LocalMap):
        super().__init__()
        self.who = who

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if op.namespace == "c10d":
            raise NotImplementedError(f"{self.who}: {op} works in place on a group; use the collectives of spmd.comm")
        if Call(op, args, kwargs, ()).draws:
            raise NotImplementedError(
                f"{self.who}: {op} draws random numbers, others on each rank; draw them outside of the function, "
                "where all ranks draw together, and pass them to the function"
            )
        return op(*args, **kwargs)


@dataclass(frozen=True, eq=False)
class Mapped:
    """A call in a graph: what `Blocks` gives, and how it and its gradients lie. Specs of results that are tensors.

    smooth: the results that have a gradient. cotangents: how these have to lie, one for each; shares: what a rank takes
    of each. grads: how the gradients lie that come back, one for each operand that wants one.
    """

    blocks: Blocks
    outs: tuple[Spec, ...]
    smooth: tuple[int, ...]
    cotangents: tuple[Spec, ...]
    shares: tuple[float, ...]
    grads: tuple[Spec, ...]

    @property
    def __name__(self) -> str:
        return f"local_map[{self.blocks.who.name}]"

    def __call__(self, *_: Any) -> Any:
        raise AssertionError("it is written out when the program is bound")


@dataclass(frozen=True, eq=False)
class Gradients:
    """The gradients of a call, given its results and their cotangents."""

    of: Mapped

    @property
    def __name__(self) -> str:
        return f"gradients_of_{self.of.__name__}"

    def __call__(self, *_: Any) -> Any:
        raise AssertionError("it is written out when the program is bound")


# ---- capture ----------------------------------------------------------------------------------

_numbers = itertools.count()
_calls: weakref.WeakValueDictionary[int, Mapped] = weakref.WeakValueDictionary()
"""The calls in graphs that are being captured, by the number that stands for them."""


@torch.library.custom_op("spmd::local_map", mutates_args=())
def _mapped_op(tensors: Sequence[torch.Tensor], call: int) -> list[torch.Tensor]:
    raise AssertionError("only traced")


@torch.library.custom_op("spmd::local_map_gradients", mutates_args=())
def _gradients_op(
    results: Sequence[torch.Tensor], cotangents: Sequence[torch.Tensor], call: int
) -> list[torch.Tensor]:
    raise AssertionError("only traced")


@_mapped_op.register_fake
def _(tensors, call):
    return [tensors[0].new_empty(s.shape, dtype=s.dtype) for s in _calls[call].outs]


@_gradients_op.register_fake
def _(results, cotangents, call):
    return [results[0].new_empty(s.shape, dtype=s.dtype) for s in _calls[call].grads]


class _Call(torch.autograd.Function):
    """The call as autograd meets it."""

    @staticmethod
    def forward(ctx, number: int, mapped: Mapped, *tensors: torch.Tensor):
        ctx.number, ctx.mapped = number, mapped
        out = torch.ops.spmd.local_map(list(tensors), number)
        ctx.save_for_backward(*out)
        ctx.mark_non_differentiable(*(x for j, x in enumerate(out) if j not in mapped.smooth))
        return tuple(out)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *cotangents: torch.Tensor):
        # The results are read, so that the gradients come after them whatever the cotangents are made of.
        given = [cotangents[j] for j in ctx.mapped.smooth]
        grads = iter(torch.ops.spmd.local_map_gradients(list(ctx.saved_tensors), given, ctx.number))
        return None, None, *(next(grads) if want else None for want in ctx.mapped.blocks.wants)


@contextmanager
def captured_calls(mesh: DeviceMesh | None) -> Iterator[Callable[[fx.Graph], None]]:
    """Inside, `local_map` writes nodes for the mesh; what comes then puts the calls in place of their numbers."""
    calls: dict[int, Mapped] = {}  # keeps them alive

    def call(who: LocalMap, args: tuple, kwargs: dict[str, Any]) -> Any:
        mapped, tensors, out, tree = _call_of(who, mesh, args, kwargs)
        number = next(_numbers)
        calls[number] = _calls[number] = mapped
        found = iter(_Call.apply(number, mapped, *tensors))
        return pytree.tree_unflatten([next(found) if isinstance(x, torch.Tensor) else x for x in out], tree)

    def settle(graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.target in (torch.ops.spmd.local_map.default, torch.ops.spmd.local_map_gradients.default):
                *args, number = node.args
                is_call = node.target is torch.ops.spmd.local_map.default
                node.target = calls[number] if is_call else Gradients(calls[number])
                node.args = tuple(args)

    with traced_whole(call):
        yield settle


def _call_of(who: LocalMap, mesh: DeviceMesh | None, args: tuple, kwargs: dict[str, Any]):
    """The call, its tensors, and what it gives, flat, with fake tensors in place of its tensors."""
    flat, tree = pytree.tree_flatten((args, kwargs))
    _check(who, mesh, len(pytree.tree_leaves(args)), flat)
    places = tuple(i for i, x in enumerate(flat) if isinstance(x, torch.Tensor))
    tensors = [flat[i] for i in places]
    ins = tuple(spec_of(mesh, who.ins[i] or [REPLICATE] * mesh.ndim, flat[i].shape, flat[i].dtype) for i in places)
    wants = tuple(torch.is_grad_enabled() and x.requires_grad for x in tensors)
    statics = tuple(None if i in places else x for i, x in enumerate(flat))
    blocks = Blocks(who, mesh, ins, wants, statics, places, tree)
    outs, out, out_tree, smooth = _results(blocks)
    placed = [p for p in who.outs if p is not None]
    cotangents = tuple(outs[j].with_layout(outs[j].dims, outs[j].units) for j in smooth)
    shares = tuple(_share(who, outs[j], placed[j]) for j in smooth)
    grads = tuple(
        spec_of(mesh, who.gradient_placements(i, spec), spec.shape, spec.dtype)
        for i, spec, want in zip(places, ins, wants, strict=True)
        if want
    )
    return Mapped(blocks, outs, smooth, cotangents, shares, grads), tensors, out, out_tree


def _check(who: LocalMap, mesh: DeviceMesh, positional: int, flat: list) -> None:
    """What has to be known of the arguments of a call before anything lies on a mesh."""
    if who.ins is None:
        raise NotImplementedError(
            f"{who}: a compiled step is traced on whole tensors, which do not lie on the mesh yet: give in_placements, "
            "for each positional argument; arguments are moved to where they say"
        )
    if who.mesh is not None and who.mesh != mesh:
        raise ValueError(f"{who}: its device_mesh is {who.mesh!r}, but the step is compiled for {mesh!r}; use one mesh")
    who.check_lengths(positional, "tensor")
    for i, x in enumerate(flat):
        placements = who.ins[i] if i < positional else None
        if isinstance(x, torch.Tensor) == (placements is None):
            what = f"a tensor of shape {list(x.shape)}" if placements is None else f"{x!r}"
            raise ValueError(
                f"{who}: argument {i} is {what}, and in_placements for it are {placements}; a tensor needs them, and "
                "has to be passed by position; all else takes None"
            )
        if _torch.is_symbol(x):
            raise NotImplementedError(f"{who}: argument {i} is a number that may change; pass it as a tensor")


def _results(blocks: Blocks) -> tuple[tuple[Spec, ...], list, Any, tuple[int, ...]]:
    """The specs of the results, what else comes, the structure of it, and which tensors have a gradient.

    The function is run once for each shape of blocks; all ranks come to the same.
    """
    mesh, who, found = blocks.mesh, blocks.who, {}
    for at in mesh.coordinates():
        shapes = tuple(spec.local_shape(at) for spec in blocks.ins)
        if shapes not in found:
            found[shapes] = blocks.results(at)
    by_rank = [found[tuple(spec.local_shape(at) for spec in blocks.ins)] for at in mesh.coordinates()]
    out, tree = by_rank[0]
    who.check_results(out)
    looks = [looks_of(_tensors(given)) for given, _ in by_rank]
    outs = specs_of_blocks(repr(who), looks, [p for p in who.outs if p is not None], mesh)
    return outs, out, tree, tuple(j for j, x in enumerate(_tensors(out)) if x.requires_grad)


def _tensors(flat: Sequence[Any]) -> list[torch.Tensor]:
    return [wait(x) for x in flat if isinstance(x, torch.Tensor)]


def _share(who: LocalMap, out: Spec, placements: Placements) -> float:
    """What a rank takes of a cotangent: of an average's a share, and a share of that of a result which many have."""
    if any(kind not in ("sum", "avg") for _, kind in out.partial):
        raise NotImplementedError(
            f"{who}: a result is {out} and wants a gradient, which goes to the rank that has the "
            f"{out.partial[0][1]}; reduce it inside the function, or call it outside of the step"
        )
    ranks = prod(out.mesh.shape[a] for a, kind in out.partial if kind == "avg")
    alike = prod(out.mesh.shape[a] for a, p in enumerate(placements) if p == REPLICATE) if who.grads is None else 1
    return 1 / (ranks * alike)


# ---- bind -------------------------------------------------------------------------------------


class Written:
    """The code of a call on one rank: a graph of the forward, and of the gradients if they are wanted.

    `forward` and `backward` write it by copying its nodes, given what to copy their operands to.
    """

    def __init__(self, mapped: Mapped, at: At, with_gradients: bool):
        self.module = _traced(mapped, at, with_gradients)
        nodes = self.module.graph.nodes
        self.inputs = [n for n in nodes if n.op == "placeholder"]
        results = next(n for n in nodes if n.op == "output").args[0]
        n = len(mapped.outs)
        self.results, self.gradients = results[:n], results[n:]
        needed = set(_ancestors(self.results))
        inner = [n for n in nodes if n.op not in ("placeholder", "output")]
        self.first = [n for n in inner if n in needed]
        self.rest = [n for n in inner if n not in needed]


def _ancestors(nodes: Sequence[fx.Node]) -> Iterator[fx.Node]:
    seen, todo = set(), list(nodes)
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            todo += node.all_input_nodes
            yield node


def _traced(mapped: Mapped, at: At, with_gradients: bool) -> fx.GraphModule:
    """The function on the blocks of one rank as a functional graph: results, and gradients by cotangents."""
    blocks, who = mapped.blocks, mapped.blocks.who

    def run(given: list[torch.Tensor], cotangents: list[torch.Tensor]) -> list[torch.Tensor]:
        with _torch.FunctionalTensorMode(), _Refusing(who), torch.set_grad_enabled(with_gradients):
            wrapped = [_torch.functional(x) for x in (*given, *cotangents)]
            leaves = [x.requires_grad_(want and with_gradients) for x, want in zip(wrapped, blocks.wants, strict=False)]
            out = _tensors(blocks(leaves)[0])
            _check_shapes(mapped, at, out)
            grads = _gradients(mapped, leaves, out, wrapped[len(given) :]) if with_gradients else []
        if any(_torch.settled(x) is not g for x, g in zip(wrapped, given, strict=False)):
            raise RuntimeError(f"{who}: writes into its argument; in a compiled step let it return the new value")
        return [_torch.settled(x) for x in (*out, *grads)]

    with one_at_a_time, blocks.on(at):
        given = [x.detach() for x in blocks.fakes(at)]
        shapes = [spec.local_shape(at) for spec in mapped.cotangents] if with_gradients else []
        cotangents = [
            torch.empty(shape, dtype=s.dtype, device=blocks.mesh.device_type)
            for shape, s in zip(shapes, mapped.cotangents, strict=False)
        ]
        return make_fx(run, tracing_mode="fake")(given, cotangents)


def _check_shapes(mapped: Mapped, at: At, out: list[torch.Tensor]) -> None:
    """A function whose results have sizes by rank, and not by its arguments, is seen through at last here."""
    want = [spec.local_shape(at) for spec in mapped.outs]
    if [tuple(x.shape) for x in out] != want:
        raise ValueError(
            f"{mapped.blocks.who}: the rank at {at} gives {[list(x.shape) for x in out]}, but blocks of "
            f"{', '.join(map(str, mapped.outs))} have {[list(w) for w in want]} there"
        )


def _gradients(mapped: Mapped, leaves: list, out: list, cotangents: list) -> list[torch.Tensor]:
    wanted = [x for x, want in zip(leaves, mapped.blocks.wants, strict=True) if want]
    terms = [c if share == 1 else c * share for c, share in zip(cotangents, mapped.shares, strict=True)]
    found = torch.autograd.grad([out[j] for j in mapped.smooth], wanted, terms, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]
