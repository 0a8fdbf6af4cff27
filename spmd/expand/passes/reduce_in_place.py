"""Reduce into the operand where nothing else reads it: `y = all_reduce(g)` becomes `y = all_reduce_(g)`.

A collective gives a new tensor, so an all-reduce begins with a copy of what it reduces: of a bucket of gradients, or of
the product of a tensor-parallel layer. Mostly that was made for the all-reduce alone. Then the sum may overwrite it,
which saves the copy and the memory. Bits stay as they are.

The rewrite is legal when the operand is memory that the program made, and the all-reduce is the only reader of it and
of each view on the way.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

from torch import fx

from spmd.expand.passes.aliasing import may_alias_operand


def reduce_in_place(graph: fx.Graph, all_reduce: Callable, all_reduce_: Callable) -> int:
    """Rewrite a bound graph in place. all_reduce, all_reduce_: the collectives of its transport.

    Returns the number of collectives that were changed.
    """
    changed = [n for n in graph.nodes if n.target == all_reduce and _is_for(n, n.args[0])]
    for node in changed:
        node.target = all_reduce_
    return len(changed)


def _is_for(reader: fx.Node, node: fx.Node) -> bool:
    """Whether the memory of a node was made by an op, and nobody but this reader reads it."""
    while list(node.users) == [reader]:
        if not node.op.startswith("call"):
            return False
        if not may_alias_operand(node):
            return True
        if node.target is operator.getitem and not may_alias_operand(node.args[0]):
            others = [n for n in node.args[0].users if n is not node]
            return all(n.target is operator.getitem and n.args[1] != node.args[1] for n in others)
        if len(node.all_input_nodes) != 1:
            return False
        reader, node = node, node.all_input_nodes[0]
    return False
