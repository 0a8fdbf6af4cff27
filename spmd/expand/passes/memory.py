"""What a bound graph says about memory: which node's memory another may show.

Told on the safe side: what is not known to make a new tensor may show its first operand.
"""

from __future__ import annotations

import operator
from typing import NamedTuple

import torch
from torch import fx

from spmd import _torch

SAME_MEMORY = {torch.ops.aten._unsafe_view.default}
"""Ops whose results show their operand's memory, which their schemas do not say."""

PIECES = {torch.ops.aten.split.Tensor, torch.ops.aten.split_with_sizes.default, torch.ops.aten.unbind.int, "split"}
"""Calls that cut a tensor into pieces which have no element in common."""


def shows_operand(node: fx.Node) -> bool:
    """Whether the result may show the memory of an operand."""
    op = node.target
    if isinstance(op, _torch.OpOverload):
        if op.namespace == "_c10d_functional":
            return op is _torch.c10d_functional.wait_tensor.default
        return op.namespace != "aten" or op in SAME_MEMORY or _torch.is_view(op) or _torch.writes_first(op)
    return op is not torch.cat and node.op not in ("output", "placeholder", "get_attr")


def holds_operand(node: fx.Node) -> bool:
    """Whether the result may show, or still read, the memory of an operand; a collective does until waited for."""
    return shows_operand(node) or getattr(node.target, "namespace", "") == "_c10d_functional"


def base(node: fx.Node) -> fx.Node:
    """The node whose memory this one may show: an input, a constant, or what made a new tensor."""
    while shows_operand(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def written_into(node: fx.Node) -> fx.Node:
    """The node that was written into, one op after the other, to give this one; itself where none was."""
    while isinstance(node.target, _torch.OpOverload) and _torch.writes_first(node.target):
        node = node.args[0]
    return node


class Part(NamedTuple):
    """The part of a base's memory that a node may show: all of it, or what one piece of a cut shows."""

    base: fx.Node
    cut: fx.Node | None = None
    index: int = 0

    def meets(self, other: Part) -> bool:
        """Whether the two may have elements in common."""
        if self.base is not other.base:
            return False
        return self.cut is None or self.cut is not other.cut or self.index == other.index


def part(node: fx.Node) -> Part:
    """What memory a node may show."""
    cut, index = None, 0
    while shows_operand(node) and node.all_input_nodes:
        source = node.all_input_nodes[0]
        if node.target is operator.getitem and source.target in PIECES:
            cut, index = source, node.args[1]
        node = source
    return Part(node, cut, index)
