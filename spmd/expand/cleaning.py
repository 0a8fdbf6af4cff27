"""What is removed from the graph of a capture when it is complete."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from spmd import _torch
from spmd.expand.nodes import is_dead, read_instead
from spmd.expand.origins import GRADIENT_OF, SITES, moved_to
from spmd.expand.phases import NEW_VALUE

aten = torch.ops.aten

RETURNS_OPERAND = {aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift.default}
"""In a functional graph, these ops return their operand."""


def remove_noops(graph: fx.Graph) -> None:
    """Remove profiler marks, ops that return their operand, and dead code."""
    operands = {n: n.args[0] for n in graph.nodes if n.target in RETURNS_OPERAND}
    values: dict[fx.Node, fx.Node] = {}
    for node, operand in operands.items():
        values[node] = values.get(operand, operand)
    read_instead(values)
    for node in reversed(graph.nodes):
        if node.target in _torch.PROFILER_OPS:
            graph.erase_node(node)
        elif node in operands:
            moved_to(node, operands[node], (NEW_VALUE, SITES, GRADIENT_OF))
            graph.erase_node(node)
        elif is_dead(node):
            graph.erase_node(node)


def remove_inputs(graph: fx.Graph, inputs: tuple, unread: Collection[object]) -> tuple:
    """Remove these of the inputs of a graph, which nothing reads. Returns the others."""
    for n, i in zip(_placeholders(graph), inputs, strict=True):
        if i in unread:
            graph.erase_node(n)
    return tuple(i for i in inputs if i not in unread)


def unread_inputs(graph: fx.Graph, inputs: tuple) -> frozenset:
    """Those of the inputs of a graph that nothing reads."""
    return frozenset(i for n, i in zip(_placeholders(graph), inputs, strict=True) if not n.users)


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "placeholder"]
