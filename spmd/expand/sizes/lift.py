"""Lift sizes out of the graph of a trace: what depends on sizes alone is text, and no node.

    n = sym_size(x, 0); m = n * 6; view(y, [m])       ->      view(y, [Size("x0 * 6")])

The values of the nodes become `TensorMeta`s, whose sizes may be `Size`s.
"""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from spmd import _torch
from spmd.expand.nodes import read_instead
from spmd.expand.origins import GRADIENT_OF, SITES, moved_to
from spmd.expand.sizes.size import Size
from spmd.tensor.call import TensorMeta

SIZED = "sized"
"""In the metadata of a node: whether its arguments or its value have a `Size`."""


def lift_sizes(graph: fx.Graph, symbols: _torch.SizeSymbols) -> None:
    """Remove the nodes of sizes from a graph. Its nodes have the names that they would have had without."""
    _leave_arguments(graph, symbols)
    lifted: dict[fx.Node, Any] = {}
    texts: dict[int, str | None] = {}  # what is stamped shares its values
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op != "output" and _torch.is_symbol(value):
            if id(value) not in texts:
                texts[id(value)] = symbols.text(value)
            if (text := texts[id(value)]) is not None:
                lifted[node] = Size(text)
    _Lift(symbols, lifted).rewrite(graph)
    for node in reversed(lifted):
        if node.op == "call_function":
            graph.erase_node(node)
    _renumber(graph, symbols)


def _leave_arguments(graph: fx.Graph, symbols: _torch.SizeSymbols) -> None:
    """Find the ints among the inputs that only arithmetic reads. They stay inputs, and are no sizes.

    Which are sizes: those that a shape depends on, or an argument of an op that is a number of indices or a place.
    """
    found = {n for n in graph.find_nodes(op="placeholder") if _torch.is_symbol(n.meta.get("val"))}
    ints = set().union(*(symbols.names_in(n.meta["val"]) for n in found))
    if ints:
        symbols.arguments = frozenset(ints - _sizes(graph, symbols))


def _sizes(graph: fx.Graph, symbols: _torch.SizeSymbols) -> set[str]:
    found: set[str] = set()

    def note(x: Any) -> None:
        if isinstance(x, torch.SymInt):
            found.update(symbols.names_in(x))

    for node in graph.nodes:
        value = node.meta.get("val")
        for x in value if isinstance(value, (tuple, list)) else (value,):
            for n in (*x.shape, *x.stride(), x.storage_offset()) if isinstance(x, torch.Tensor) else ():
                note(n)
        if node.op == "call_function":
            fx.node.map_arg(_counts(node), lambda n: note(n.meta.get("val")))
    return found


def _counts(node: fx.Node) -> Any:
    """The arguments of a node that are sizes, indices or dims, and not scalars or operands of arithmetic."""
    if not isinstance(node.target, _torch.OpOverload):
        return () if getattr(node.target, "__module__", "") in _ARITHMETIC else (node.args, dict(node.kwargs))
    named = zip(node.target._schema.arguments, node.args, strict=False)
    given = {a.name: x for a, x in named} | dict(node.kwargs)
    return [given[a.name] for a in node.target._schema.arguments if a.name in given and "int" in str(a.type)]


_ARITHMETIC = ("_operator", "torch")


def _renumber(graph: fx.Graph, symbols: _torch.SizeSymbols) -> None:
    """Leave out slices that are all of their operand, and give nodes the names that they would have had without."""
    whole: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if _is_whole_slice(node):
            whole[node] = whole.get(node.args[0], node.args[0])
            for condition in _while_whole(node):
                symbols.take_for_granted(condition)
    read_instead(whole)
    for node in reversed(whole):
        moved_to(node, whole[node], (SITES, GRADIENT_OF))
        graph.erase_node(node)
    _torch.rename(graph, lambda node: _without_number(node.name) if node.op == "call_function" else node.name)


@lru_cache(maxsize=1 << 14)
def _without_number(name: str) -> str:
    return _NUMBER.sub("", name)


_NUMBER = re.compile(r"_\d+$")


def _is_whole_slice(node: fx.Node) -> bool:
    """Whether a node is `x[:]`, or its gradient. Where sizes are numbers, torch leaves both out by itself."""
    if node.target not in _SLICES or not isinstance(node.meta.get("val"), TensorMeta):
        return False
    whole, part = node.args[0].meta.get("val"), node.meta["val"]
    return part.shape == whole.shape and part.dtype == whole.dtype


def _while_whole(node: fx.Node) -> list[str]:
    """What has to hold of sizes for such a slice to be all of its operand.

    x[:1024], where x has fewer rows      ["1024 >= x0"]
    x[:y.shape[0]], and as many           ["y0 >= x0"]
    x[:]                                  []
    """
    named = {a.name: x for a, x in zip(node.target._schema.arguments, node.args, strict=False)} | dict(node.kwargs)
    size = node.meta["val"].shape[named.get("dim", 0)]
    start, end = named.get("start") or 0, named.get("end")
    found = []
    if start != 0:
        found.append(f"({start}) == 0 or ({start}) <= -({size})")
    if end is not None and end != size and not (isinstance(end, int) and end == sys.maxsize):
        found.append(f"({end}) >= ({size})")
    return found if any(isinstance(x, Size) for x in (start, end, size)) else []


_SLICES = {torch.ops.aten.slice.Tensor, torch.ops.aten.slice_backward.default}
"""Results of these have the shape of the operand only if they are the operand."""


class _Lift:
    def __init__(self, symbols: _torch.SizeSymbols, lifted: dict[fx.Node, Any]):
        self.symbols, self.lifted, self.found = symbols, lifted, 0
        self.known: dict[int, tuple[Any, TensorMeta, int]] = {}  # what is stamped shares its values

    def rewrite(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node in self.lifted:
                node.args, node.kwargs = (), {}
                continue
            before = self.found
            if not self.lifted.keys().isdisjoint(_torch.operands_of(node)):
                _torch.set_arguments(node, *fx.node.map_aggregate((node.args, dict(node.kwargs)), self.leaf))
            value = node.meta.get("val")
            if isinstance(value, (torch.Tensor, tuple, list)):
                node.meta["val"] = self.metadata(value)
            node.meta[SIZED] = self.found > before

    def leaf(self, x: Any) -> Any:
        if isinstance(x, fx.Node) and x in self.lifted:
            self.found += 1
            return self.lifted[x]
        return x

    def metadata(self, value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return tuple(map(self.metadata, value))
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in self.known:
            before = self.found
            shape, stride = tuple(map(self.size, value.shape)), tuple(map(self.size, value.stride()))
            new = TensorMeta(shape, stride, value.dtype, self.size(value.storage_offset()))
            self.known[id(value)] = value, new, self.found - before
            return new
        _, new, sizes = self.known[id(value)]
        self.found += sizes
        return new

    def size(self, n: Any) -> Any:
        if not isinstance(n, torch.SymInt):
            return n
        if n.node.expr.is_number:
            return int(n.node.expr)
        self.found += 1
        return Size(self.symbols.text(n))
