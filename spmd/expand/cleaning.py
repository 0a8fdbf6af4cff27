"""What is removed from the graph of a capture when it is complete."""

from __future__ import annotations

import torch
from torch import fx

from spmd import _torch
from spmd.expand.nodes import read_instead
from spmd.expand.origins import GRADIENT_OF, SITES, moved_to
from spmd.expand.phases import NEW_VALUE
from spmd.expand.state import Slot

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
        elif not node.users and node.op not in ("placeholder", "output") and not node.is_impure():
            graph.erase_node(node)


def remove_unmade(graph: fx.Graph, inputs: tuple, unmade: frozenset[Slot]) -> tuple:
    """Remove the inputs for state that no optimiser has made."""
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    for n, i in zip(placeholders, inputs, strict=True):
        if i in unmade:
            graph.erase_node(n)
    return tuple(i for i in inputs if i not in unmade)
