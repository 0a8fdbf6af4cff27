"""The local regions of a rank's code, compiled: what stands between its collectives.

    a = mm(x, w); b = relu(a); c = all_reduce(b); d = wait(c); e = add(d, a)
    ->  a, b = region_0(x, w); c = all_reduce(b); d = wait(c); (e,) = region_1(d, a)

Collectives, waits and draws of random numbers stay where they are, in their order, and so does the overlap that a
schedule has planned. Regions with the same ops on values of the same shapes, such as those of repeated layers, are one
function, which is compiled once.

The body of a loop has regions of its own, which are compiled once and called in each round.

Numbers that change between calls, such as a learning rate, come into a region as tensors of one element, because
torch.compile would compile a function of Python numbers for each of their values. So ops with such a number are written
with a tensor (`WITH_TENSORS`); an op that cannot be stands between regions.
"""

from __future__ import annotations

import importlib.util
import operator
import os
import shutil
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from spmd import _torch
from spmd.expand.loops.bound import BoundLoop
from spmd.expand.passes.aliasing import SPLITS, base_of
from spmd.tensor.cache import frozen
from spmd.tensor.call import READS_VALUE
from spmd.tensor.recipes.random import Draw
from spmd.tensor.spec import Spec

Backend = str | Callable
"""The name of one of torch.compile's backends, or a function `(graph module, example inputs) -> callable`."""

EAGER = "eager"
"""The backend that calls ops one by one: the code of a rank as it is."""

LEAST = 4
"""Parts of a region with fewer nodes stay in it, whether or not they repeat: a call of its own would cost more."""


def check_backend(backend: Backend, device: str) -> None:
    """ValueError for a backend that torch does not know; RuntimeError where the compiler that it calls is missing."""
    if callable(backend) or backend == EAGER:
        return
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise ValueError(f'compile: backend is {backend!r}; give "eager", {", ".join(map(repr, known))} or a function')
    if backend == "inductor" and device == "cpu" and cpp_compiler() is None:
        raise RuntimeError(
            'compile: backend="inductor" makes C++ code for CPUs, and there is no C++ compiler on this machine: '
            'install g++, name one in $CXX, or use backend="eager"'
        )
    if backend == "inductor" and device == "cuda" and importlib.util.find_spec("triton") is None:
        raise RuntimeError(
            'compile: backend="inductor" needs triton for GPUs, which is not installed: install it, or use '
            'backend="eager"'
        )


def cpp_compiler() -> str | None:
    """The path of the C++ compiler that Inductor would call; None where there is none."""
    named = os.environ.get("CXX")
    return next(filter(None, map(shutil.which, [named] if named else ["g++", "clang++"])), None)


def with_compiled_regions(module: fx.GraphModule, backend: Backend) -> fx.GraphModule:
    """The code with its regions compiled; the code itself for the backend that does nothing.

    A region is compiled when it is called for the first time.
    """
    if backend == EAGER:
        return module
    return _Splitter(module, lambda region: torch.compile(region.forward, backend=backend, fullgraph=True)).split()


class Region:
    """A region as the target of a graph node. code: its ops. run: the same, compiled."""

    def __init__(self, number: int, code: fx.GraphModule, run: Callable):
        self.__name__, self.code, self.run = f"region_{number}", code, run

    def __call__(self, *values: Any) -> tuple:
        return self.run(*(torch.tensor(x, dtype=torch.float64) if isinstance(x, float) else x for x in values))


@dataclass
class _Splitter:
    """A rank's code while it is written with regions. regions: by what they do. outside: the nodes that are in none."""

    module: fx.GraphModule
    compile: Callable[[fx.GraphModule], Callable]
    graph: fx.Graph = field(default_factory=fx.Graph)
    values: dict[fx.Node, fx.Node] = field(default_factory=dict)
    regions: dict[Hashable, Region] = field(default_factory=dict)
    outside: set[fx.Node] = field(default_factory=set)

    def __post_init__(self):
        self.numbers = _numbers(self.module.graph)

    def split(self) -> fx.GraphModule:
        pieces = list(self._pieces())
        kinds = Counter(_what_it_does(part) for parts in pieces if isinstance(parts, list) for part in parts)
        for piece in pieces:
            if isinstance(piece, list):
                self._close(piece, kinds)
            else:
                self.values[piece] = copy = self.graph.node_copy(piece, self.values.__getitem__)
                if isinstance(piece.target, BoundLoop):
                    body = _Splitter(piece.target.module, self.compile).split()
                    copy.target = replace(piece.target, module=body)
        return fx.GraphModule(self.module, self.graph, class_name=type(self.module).__name__)

    def _pieces(self) -> Iterator[fx.Node | list[list[fx.Node]]]:
        """The nodes outside of regions, and the parts of each region, in order."""
        region: list[fx.Node] = []
        for node in self.module.graph.nodes:
            if _is_local(node, self.numbers) and not self._is_piece(node):
                region.append(node)
                continue
            if region and not (self._waits_for_nothing(node) or self._is_piece(node)):
                yield _parts(region)
                region = []
            self.outside.add(node)
            yield node

    def _waits_for_nothing(self, node: fx.Node) -> bool:
        """Whether a node that is in no region may come before the region that it stands in: inputs, constants, numbers.
        """
        read = node.target in READS_VALUE
        return node.op in ("placeholder", "get_attr") or (node in self.numbers and not read)

    def _is_piece(self, node: fx.Node) -> bool:
        """Whether a node splits what came from outside of regions, such as a bucket, or is one of the pieces. In a
        region it would tie together what the pieces are for."""
        splits = node.target in SPLITS or (node.target is operator.getitem and node.args[0].target in SPLITS)
        return splits and self.outside.issuperset(node.all_input_nodes)

    def _close(self, parts: list[list[fx.Node]], kinds: Counter[Hashable]) -> None:
        """Write calls of the parts of a region that repeat anywhere, and of the rest. kinds: how often each part is."""
        apart = [part for part in parts if len(part) >= LEAST and kinds[_what_it_does(part)] > 1]
        taken = {n for part in apart for n in part}
        rest = sorted(n for part in parts for n in part if n not in taken)  # nodes compare by their places
        for region in (*apart, rest):
            if region:
                self._call(region)

    def _call(self, region: list[fx.Node]) -> None:
        inputs, outputs = _inputs(region), _outputs(region)
        call = self.graph.call_function(self._region(region, inputs, outputs), tuple(self.values[n] for n in inputs))
        for i, node in enumerate(outputs):
            self.values[node] = new = self.graph.call_function(operator.getitem, (call, i))
            new.meta |= node.meta

    def _region(self, region: Sequence[fx.Node], inputs: Sequence[fx.Node], outputs: Sequence[fx.Node]) -> Region:
        key = _what_it_does(region)
        if key not in self.regions:
            graph, values = fx.Graph(), {}
            for n in inputs:
                values[n] = graph.placeholder(n.name)
            for n in region:
                values[n] = _written(graph, n, values, self.numbers)
            graph.output(tuple(values[n] for n in outputs))
            code = fx.GraphModule(nn.Module(), graph, class_name=f"region_{len(self.regions)}")
            self.regions[key] = Region(len(self.regions), code, self.compile(code))
        return self.regions[key]


def _numbers(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that are numbers: inputs, what is read of tensors, and Python functions of such ones."""
    found: set[fx.Node] = set()
    for n in graph.nodes:
        is_function = n.op == "call_function" and not isinstance(n.target, (_torch.OpOverload, Draw))
        given = n.op == "placeholder" and n.meta.get("spec") is None
        if given or n.target in READS_VALUE or (is_function and n.args and found.issuperset(n.all_input_nodes)):
            found.add(n)
    return found


def _is_local(node: fx.Node, numbers: set[fx.Node]) -> bool:
    """Whether a node computes tensors of this rank alone, and may be in a region."""
    if node.op == "call_method":
        return True
    if node.op != "call_function" or isinstance(node.target, Draw) or node in numbers:
        return False
    if isinstance(node.target, _torch.OpOverload):
        sends = node.target.namespace == _torch.c10d_functional.wait_tensor.default.namespace
        return not sends and (numbers.isdisjoint(node.all_input_nodes) or _takes_tensors(node, numbers))
    module = getattr(node.target, "__module__", None) or ""
    is_of_torch = module.partition(".")[0] == "torch"
    return is_of_torch or (node.target is operator.getitem and _is_local(node.args[0], numbers))


def _inputs(region: Sequence[fx.Node]) -> list[fx.Node]:
    inside = set(region)
    return list(dict.fromkeys(n for node in region for n in node.all_input_nodes if n not in inside))


def _outputs(region: Sequence[fx.Node]) -> list[fx.Node]:
    inside = set(region)
    return [n for n in region if any(user not in inside for user in n.users)]


def _parts(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """The parts of these nodes that need nothing of each other, such as the updates of several parameters.

    Whoever reads what another overwrites needs it.
    """
    inside, root = set(nodes), {}

    def find(x: Any) -> Any:
        while root.setdefault(x, x) is not x:
            x = root[x]
        return x

    written = {base_of(n) for n in nodes if isinstance(n.target, _torch.OpOverload) and _torch.written(n.target)}
    for n in nodes:
        for x in n.all_input_nodes:
            if x in inside:
                root[find(n)] = find(x)
            if base_of(x) in written:  # outside of the region: a place for all that read it
                root[find(n)] = find(base_of(x))
    parts: dict[Hashable, list[fx.Node]] = {}
    for n in nodes:
        parts.setdefault(find(n), []).append(n)
    return list(parts.values())


def _what_it_does(region: Sequence[fx.Node]) -> Hashable:
    """The ops of a region on numbered values, and what is known of the shapes of its inputs."""
    inputs, outputs = _inputs(region), _outputs(region)
    numbers = {n: i for i, n in enumerate([*inputs, *region])}

    def numbered(n: fx.Node) -> Any:
        return _Value(numbers[n])

    ops = tuple(
        (n.op, n.target, frozen(fx.map_arg(n.args, numbered)), frozen(fx.map_arg(dict(n.kwargs), numbered)))
        for n in region
    )
    return ops, tuple(n.meta.get("spec") for n in inputs), tuple(numbers[n] for n in outputs)


@dataclass(frozen=True)
class _Value:
    """Stands for a value in a region."""

    number: int


# ---- numbers ----------------------------------------------------------------------------------

aten = torch.ops.aten


def _added(add: Callable, x: Any, y: Any, alpha: Any = 1) -> Any:
    return add(x, y) if isinstance(alpha, (int, float)) and alpha == 1 else add(x, aten.mul.Tensor(y, alpha))


def _with_product(add: Callable, product: Callable, x: Any, a: Any, b: Any, value: Any = 1) -> Any:
    return add(x, aten.mul.Tensor(product(a, b), value))


def _between(add: Callable, x: Any, y: Any, weight: Any) -> Any:
    return add(x, aten.mul.Tensor(aten.sub.Tensor(y, x), weight))


add, add_ = aten.add.Tensor, aten.add_.Tensor
WITH_TENSORS: dict[_torch.OpOverload, Callable] = {
    aten.add.Tensor: partial(_added, add), aten.add_.Tensor: partial(_added, add_),
    aten.sub.Tensor: partial(_added, aten.sub.Tensor), aten.sub_.Tensor: partial(_added, aten.sub_.Tensor),
    aten.mul.Tensor: aten.mul.Tensor, aten.mul_.Tensor: aten.mul_.Tensor,
    aten.div.Tensor: aten.div.Tensor, aten.div_.Tensor: aten.div_.Tensor,
    aten.addcmul.default: partial(_with_product, add, aten.mul.Tensor),
    aten.addcmul_.default: partial(_with_product, add_, aten.mul.Tensor),
    aten.addcdiv.default: partial(_with_product, add, aten.div.Tensor),
    aten.addcdiv_.default: partial(_with_product, add_, aten.div.Tensor),
    aten.lerp.Scalar: partial(_between, add), aten.lerp_.Scalar: partial(_between, add_),
}  # fmt: skip
"""Ops that are given numbers, written for a number that is a tensor of one element."""


def _takes_tensors(node: fx.Node, numbers: set[fx.Node]) -> bool:
    """Whether the numbers of an op may be tensors without another dtype of its result: its operands are floating, of
    one dtype, and have dims, and so their dtype counts."""
    specs = [n.meta.get("spec") for n in node.all_input_nodes if n not in numbers]
    if node.target not in WITH_TENSORS or not all(isinstance(spec, Spec) for spec in specs):
        return False
    dtypes = {spec.dtype for spec in specs}
    return len(dtypes) == 1 and dtypes.pop().is_floating_point and all(spec.ndim for spec in specs)


def _written(graph: fx.Graph, node: fx.Node, values: dict[fx.Node, fx.Node], numbers: set[fx.Node]) -> fx.Node:
    """The node in the graph of a region."""
    if numbers.isdisjoint(node.all_input_nodes):
        return graph.node_copy(node, values.__getitem__)
    tracer = fx.proxy.GraphAppendingTracer(graph)
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: fx.Proxy(values[n], tracer))
    return WITH_TENSORS[node.target](*args, **kwargs).node
