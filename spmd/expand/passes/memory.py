"""What a bound graph says about memory: which node's memory another may show.

Told on the safe side: what is not known to make a new tensor may show its first operand.
"""

from __future__ import annotations

import torch
from torch import fx

from spmd import _torch

SAME_MEMORY = {torch.ops.aten._unsafe_view.default}
"""Ops whose results show their operand's memory, which their schemas do not say."""


def may_alias(node: fx.Node) -> bool:
    """Whether the result may show, or still read, the memory of an operand.

    A collective reads its input until it is waited for, and what it gives is waited for in place.
    """
    op = node.target
    if not isinstance(op, _torch.OpOverload):
        return node.op not in ("output", "placeholder", "get_attr")
    return op.namespace != "aten" or op in SAME_MEMORY or _torch.is_view(op) or _torch.writes_first(op)


def base(node: fx.Node) -> fx.Node:
    """The node whose memory this one may show: an input, a constant, or what made a new tensor."""
    while may_alias(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def written_into(node: fx.Node) -> fx.Node:
    """The node that was written into, one op after the other, to give this one; itself where none was."""
    while isinstance(node.target, _torch.OpOverload) and _torch.writes_first(node.target):
        node = node.args[0]
    return node
