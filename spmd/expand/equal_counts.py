"""Counts of steps that are equal are one number in a capture, and what is computed of it is written once.

    a = step_w + 1; n = a.item(); p = 0.9 ** n            step_w and step_b are 3
    b = step_b + 1; m = b.item(); q = 0.9 ** m      ->    b = step_b + 1; and n and p in the place of m and q

An optimiser counts its steps in a tensor for each parameter, and computes with the count as with a number of Python.
Each tensor is still counted up. But the numbers that equal ones make in equal ways are equal, to the bit. The capture
is then right only where these tensors are equal again (`used`), which is asked before each call.

Ways are equal where the nodes are, one by one: pointwise ops on tensors of one element, and arithmetic of numbers.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from spmd import _torch
from spmd.expand.nodes import read_instead

READS = torch.ops.aten._local_scalar_dense.default
"""What `item()` is in a graph."""


class EqualCounts:
    """The numbers of one trace. names: the inputs of its graph that are counts; equal ones have one name.

    used: the names of those by whose equality nodes were left out.
    """

    def __init__(self, names: Mapping[fx.Node, str]) -> None:
        self._names = names
        self._first: dict[Hashable, fx.Node] = {}
        self._made_of: dict[fx.Node, frozenset[str] | None] = {}
        self.used: set[str] = set()

    def write_once(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """Let readers of a number that was made before read that one. Returns the numbers that are made of counts.

        nodes: in the order of the graph; all numbers that lead to theirs were among them, or among earlier ones. Those
        that nobody reads any more stay in the graph.
        """
        instead: dict[fx.Node, fx.Node] = {}
        found = set()
        for n in nodes:
            if n.op == "call_function" and _is_number(n) and (names := self._counts(n)) is not None:
                first = self._first.setdefault(self._way(n, instead), n)
                if names:
                    found.add(first)
                if first is not n:
                    instead[n] = first
                    self.used |= names
        read_instead(instead)
        return found

    def finish(self, graph: fx.Graph) -> None:
        """To be called when the trace is complete: numbers may have been read that no `write_once` has met."""
        if any(n not in self._made_of for n in graph.find_nodes(op="call_function", target=READS, sort=False)):
            self.write_once(graph.nodes)

    def way(self, node: fx.Node) -> Hashable:
        """How a tensor of one element is made of counts; equal for tensors that are equal. None for other tensors."""
        return self._way(node, {}) if self._counts(node) is not None else None

    def _way(self, node: fx.Node, instead: Mapping[fx.Node, fx.Node]) -> Hashable:
        """A key of what a node computes."""

        def described(x: Any) -> Hashable:
            if not isinstance(x, fx.Node):
                return tuple(map(described, x)) if isinstance(x, (list, tuple)) else (type(x), repr(x))
            return instead.get(x, x) if _is_number(x) else self._way(x, instead)

        if node.op in ("placeholder", "get_attr"):
            return node.target if node.op == "get_attr" else self._names.get(node, node)
        return node.target, *map(described, node.args), *((k, described(x)) for k, x in node.kwargs.items())

    def _counts(self, node: fx.Node) -> frozenset[str] | None:
        """The names of the counts that a number, or a tensor of one, is made of, if it is made of nothing else but
        numbers that the trace is given, and constants; else None."""
        if node not in self._made_of:
            self._made_of[node] = self._found_counts(node)
        return self._made_of[node]

    def _found_counts(self, node: fx.Node) -> frozenset[str] | None:
        if node.op == "placeholder":
            return frozenset([self._names[node]]) if node in self._names else frozenset() if _is_number(node) else None
        if node.op == "get_attr":
            return frozenset()
        if node.op != "call_function" or not (_is_number(node) or _is_pointwise_on_one(node)):
            return None
        found = [self._counts(n) for n in node.all_input_nodes]
        return frozenset().union(*found) if found and None not in found else None


def _is_number(node: fx.Node) -> bool:
    return _torch.is_symbol(node.meta.get("val"))


def _is_pointwise_on_one(node: fx.Node) -> bool:
    """Whether a node is a tensor of one element on the CPU whose bits depend on its operands alone."""
    x, op = node.meta.get("val"), node.target
    if not isinstance(x, torch.Tensor) or x.ndim or x.device.type != "cpu" or not isinstance(op, _torch.OpOverload):
        return False
    pointwise = torch.Tag.pointwise in op.tags and torch.Tag.nondeterministic_seeded not in op.tags
    return op in COPIES or (pointwise and op.namespace == "aten")


COPIES = {
    getattr(torch.ops.aten, name).default
    for name in ("detach", "alias", "clone", "lift_fresh", "lift_fresh_copy", "_to_copy")
}
"""Ops that give what they get, perhaps in another dtype."""
