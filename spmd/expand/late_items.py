"""Numbers that a step only hands out, such as `total += loss.item()`, are read when all else is done.

A number is read on all ranks, and what follows waits for it: for its reduction, and on a GPU for all that was launched.
Read at the end, the numbers of all micro-batches share one reduction, and the rounds stay free of them.
"""

from __future__ import annotations

from math import prod

import torch
from torch import fx

from spmd import _torch
from spmd.expand.places.roles import phase_of

aten = torch.ops.aten


def read_late(graph: fx.Graph) -> None:
    """Move the readings of numbers, and what Python computes with these, behind all else, if no tensor needs them.

    Where a number is part of a larger tensor it is read where it stands, or all of the tensor would be kept.
    """
    output, late = graph.output_node(), {}
    for node in reversed(_numbers_read(graph)):
        if node.users and all(user is output or user in late for user in node.users):
            late[node] = None
    for node in reversed(late):
        output.prepend(node)
        node.meta["phase"] = phase_of(output)


def _numbers_read(graph: fx.Graph) -> dict[fx.Node, None]:
    """The numbers that are read from tensors of one number, and those that Python computes with them, in order."""
    found: dict[fx.Node, None] = {}
    for node in graph.nodes:
        is_read = node.target is aten._local_scalar_dense.default and not _is_part(node.args[0])
        if is_read or (_is_python(node) and any(n in found for n in _torch.operands_of(node))):
            found[node] = None
    return found


def _is_python(node: fx.Node) -> bool:
    """Whether a node is arithmetic of Python numbers."""
    is_function = node.op == "call_function" and not isinstance(node.target, _torch.OpOverload)
    return is_function and isinstance(node.meta.get("val"), _NUMBERS)


_NUMBERS = (torch.SymFloat, torch.SymInt, torch.SymBool, int, float)


def _is_part(node: fx.Node) -> bool:
    """Whether a number is in the memory of a larger tensor."""
    while isinstance(node.target, _torch.OpOverload) and _torch.is_view(node.target):
        node = node.args[0]
    shape = getattr(node.meta.get("val"), "shape", ())
    return not all(type(n) is int for n in shape) or prod(shape) != 1
