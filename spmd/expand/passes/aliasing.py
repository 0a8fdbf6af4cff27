"""Aliasing in a bound graph: which nodes may share memory with which others.

    y = x.view(-1); z = y + 1       y may alias x; z has memory of its own

The answers are on the safe side: an op that is not known to make a new tensor may alias its first operand.
"""

from __future__ import annotations

import operator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import fx

from spmd import _torch
from spmd.comm.added import COMBINE, added_rows
from spmd.expand.nodes import is_collective
from spmd.tensor.recipes.host import from_host, to_host
from spmd.tensor.recipes.updates import adamw
from spmd.tensor.redistribute import tables

UNDECLARED_ALIASES = {torch.ops.aten._unsafe_view.default}
"""Ops whose results alias their operand although their schemas do not say so."""

SPLITS = {
    torch.ops.aten.split.Tensor, torch.ops.aten.split_with_sizes.default, torch.ops.aten.unbind.int, "split",
    tables.pieces,
}  # fmt: skip
"""Calls that split a tensor into pieces without a common element."""


MAKE_NEW = {
    torch.cat, torch.mm, adamw, added_rows, tables.filled, tables.block, tables.in_row, from_host, to_host, "sum",
    *COMBINE.values(),
}  # fmt: skip
"""Functions and methods, of those that the code of moves and kernels calls, that make a new tensor."""


def may_alias_operand(node: fx.Node) -> bool:
    """Whether the result may share memory with an operand."""
    op = node.target
    if isinstance(op, _torch.OpOverload):
        return may_alias(op)
    if is_loop(node):
        return False
    return op not in MAKE_NEW and node.op not in ("output", "placeholder", "get_attr")


@lru_cache(maxsize=4096)  # asked again for each node that is met on the way to a base
def may_alias(op: _torch.OpOverload) -> bool:
    """Whether the results of an op may share memory with its operands."""
    if op.namespace == "_c10d_functional":
        return op is _torch.c10d_functional.wait_tensor.default
    return op.namespace != "aten" or op in UNDECLARED_ALIASES or _torch.is_view(op) or _torch.writes_first(op)


def is_loop(node: fx.Node) -> bool:
    """Whether a node of a rank's code runs a loop: its results are new, or the memory of operands that it has for
    itself."""
    return hasattr(node.target, "rounds")


def may_read_operand(node: fx.Node) -> bool:
    """Whether the result may share memory with an operand, or still read it, as a collective does until its wait."""
    return may_alias_operand(node) or is_collective(node)


def given_back(node: fx.Node) -> fx.Node | None:
    """The operand of a loop whose memory a result of it has; None for what has other memory."""
    loop = node.args[0] if node.target is operator.getitem else None
    if loop is None or not is_loop(loop) or node.args[1] not in loop.target.given_back:
        return None
    return loop.args[loop.target.given_back[node.args[1]]]


def _source(node: fx.Node) -> fx.Node | None:
    """The operand whose memory a node may share; None where it is new."""
    if not may_alias_operand(node):
        return None
    return given_back(node) or next(iter(_torch.operands_of(node)), None)


def base_of(node: fx.Node) -> fx.Node:
    """The node whose memory this one may share: an input, a constant, or an op that made a new tensor."""
    while (source := _source(node)) is not None:
        node = source
    return node


def written_into(node: fx.Node) -> fx.Node:
    """The node whose memory a chain of in-place ops and loops has written into, up to this one; itself where there is
    none."""
    while True:
        if isinstance(node.target, _torch.OpOverload) and _torch.writes_first(node.target):
            node = node.args[0]
        elif (operand := given_back(node)) is not None:
            node = operand
        else:
            return node


class Memory(NamedTuple):
    """The memory that a node may share: all of its base's, or that of one piece of a split or of one of its results."""

    base: fx.Node
    split: fx.Node | None = None
    index: int = 0

    def overlaps(self, other: Memory) -> bool:
        """Whether the two may have elements in common."""
        if self.base is not other.base:
            return False
        return self.split is None or self.split is not other.split or self.index == other.index


def _makes_several(node: fx.Node) -> bool:
    """Whether the results of a node are new tensors, each with memory of its own."""
    if node.target is adamw or is_loop(node):
        return True
    return isinstance(node.target, _torch.OpOverload) and not may_alias(node.target)


def _is_apart(node: fx.Node, source: fx.Node) -> bool:
    """Whether a node is one of several results of its operand that have no element in common."""
    if node.target is not operator.getitem or source is not node.args[0]:
        return False
    return source.target in SPLITS or _makes_several(source)


def memory_of(node: fx.Node) -> Memory:
    """The memory that a node may share."""
    split, index = None, 0
    while (source := _source(node)) is not None:
        if _is_apart(node, source):
            split, index = source, node.args[1]
        node = source
    return Memory(node, split, index)


def memories(graph: fx.Graph) -> dict[fx.Node, Memory]:
    """The same of all nodes of a graph, in one walk."""
    found: dict[fx.Node, Memory] = {}
    for node in graph.nodes:
        source = _source(node)
        if source is None:
            found[node] = Memory(node)
            continue
        memory = found[source]
        if memory.split is None and _is_apart(node, source):
            memory = Memory(memory.base, source, node.args[1])
        found[node] = memory
    return found
