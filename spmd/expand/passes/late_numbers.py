"""Compute numbers late, so that their reductions travel together.

    s1 = all_reduce(...); n1 = sqrt(s1); s2 = all_reduce(...); n2 = sqrt(s2); stack([n1, n2])
    s1 = all_reduce(...); s2 = all_reduce(...); n1 = sqrt(s1); n2 = sqrt(s2); stack([n1, n2])

An op on single numbers, such as the root in the norm of a gradient, takes no time and no memory wherever it is. Right
behind a reduction it ends a bucket that could have held the reductions of all other norms. So it is written just before
its first reader.
"""

from __future__ import annotations

from math import prod

from torch import fx

from spmd import _torch
from spmd.expand.passes.keep_gathered import copied
from spmd.expand.program import Program
from spmd.tensor.spec import Spec


def compute_numbers_late(program: Program) -> Program:
    """The same program, with ops on single numbers just before their first readers."""
    program = copied(program)
    for node in reversed(list(program.graph.nodes)):
        if node.users and _is_number_op(node):
            min(node.users).prepend(node)  # nodes compare by their places
    return program


def _is_number_op(node: fx.Node) -> bool:
    """Whether an op has one number as its result and as each of its operands, all of them tensors."""
    operands = node.all_input_nodes
    return isinstance(node.target, _torch.OpOverload) and bool(operands) and all(map(_is_number, (node, *operands)))


def _is_number(node: fx.Node) -> bool:
    spec = node.meta.get("spec")
    return isinstance(spec, Spec) and prod(spec.shape) == 1
