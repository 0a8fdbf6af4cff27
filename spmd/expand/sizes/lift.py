"""Lift sizes out of the graph of a trace: what depends on sizes alone is text, and no node.

    n = sym_size(x, 0); m = n * 6; view(y, [m])       ->      view(y, [Size("x0 * 6")])

The values of the nodes become `TensorMeta`s, whose sizes may be `Size`s.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import fx

from spmd import _torch
from spmd.expand.sizes.size import Size
from spmd.tensor.call import TensorMeta

SIZED = "sized"
"""In the metadata of a node: whether its arguments or its value have a `Size`."""


def lift_sizes(graph: fx.Graph, symbols: _torch.SizeSymbols) -> fx.Graph:
    """The graph without nodes of sizes. Its nodes have the names that they would have had without."""
    lifted: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "call_function" and _torch.is_symbol(value):
            text = symbols.text(value)
            if text is not None:
                lifted[node] = Size(text)
    _Lift(symbols, lifted).rewrite(graph)
    for node in reversed(lifted):
        graph.erase_node(node)
    return _renumbered(graph)


def _renumbered(graph: fx.Graph) -> fx.Graph:
    new, copies = fx.Graph(), {}
    for node in graph.nodes:
        if _is_whole_slice(node):
            copies[node] = copies[node.args[0]]
            continue
        name = re.sub(r"_\d+$", "", node.name) if node.op == "call_function" else node.name
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), copies.__getitem__)
        copies[node] = new.create_node(node.op, node.target, args, kwargs, name, node.type)
        copies[node].meta = node.meta
    return new


def _is_whole_slice(node: fx.Node) -> bool:
    """Whether a node is `x[:]`, or its gradient. Where sizes are numbers, torch leaves both out by itself."""
    if node.target not in _SLICES or not isinstance(node.meta.get("val"), TensorMeta):
        return False
    whole, part = node.args[0].meta.get("val"), node.meta["val"]
    return part.shape == whole.shape and part.dtype == whole.dtype


_SLICES = {torch.ops.aten.slice.Tensor, torch.ops.aten.slice_backward.default}
"""Results of these have the shape of the operand only if they are the operand."""


class _Lift:
    def __init__(self, symbols: _torch.SizeSymbols, lifted: dict[fx.Node, Any]):
        self.symbols, self.lifted, self.found = symbols, lifted, 0

    def rewrite(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node in self.lifted:
                node.args, node.kwargs = (), {}
                continue
            before = self.found
            if any(n in self.lifted for n in node.all_input_nodes):
                node.args, node.kwargs = fx.node.map_aggregate((node.args, dict(node.kwargs)), self.leaf)
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
        shape, stride = tuple(map(self.size, value.shape)), tuple(map(self.size, value.stride()))
        return TensorMeta(shape, stride, value.dtype, self.size(value.storage_offset()))

    def size(self, n: Any) -> Any:
        if not isinstance(n, torch.SymInt):
            return n
        if n.node.expr.is_number:
            return int(n.node.expr)
        self.found += 1
        return Size(self.symbols.text(n))
