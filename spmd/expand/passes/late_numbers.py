"""Compute numbers late, so that their reductions travel together.

    s1 = all_reduce(...); n1 = sqrt(s1); s2 = all_reduce(...); n2 = sqrt(s2); stack([n1, n2])
    s1 = all_reduce(...); s2 = all_reduce(...); n1 = sqrt(s1); n2 = sqrt(s2); stack([n1, n2])

An op on single numbers, such as the root in the norm of a gradient, takes no time and no memory wherever it is. Right
behind a reduction it ends a bucket that could have held the reductions of all other norms. So it is written just before
its first reader.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from torch import fx

from spmd import _torch
from spmd.expand.passes.keep_gathered import copied
from spmd.expand.program import Program
from spmd.tensor.redistribute.plan import Step
from spmd.tensor.spec import Spec


def compute_numbers_late(program: Program, own: bool = False) -> Program:
    """The same program, with ops on single numbers that were reduced just before their first readers.

    own: whether the given program is not needed any more, so that its graph can be changed.
    """
    if all(node.next is min(node.users) for node in _late(program.graph)):  # nodes compare by their places
        return program
    program = replace(program) if own else copied(program)
    for node in reversed(_late(program.graph)):
        min(node.users).prepend(node)
    return program


def _late(graph: fx.Graph) -> dict[fx.Node, None]:
    """The ops on single numbers that were reduced, in order."""
    late: dict[fx.Node, None] = {}
    for node in graph.nodes:
        if _is_number_op(node) and any(n in late or isinstance(n.target, Step) for n in _torch.operands_of(node)):
            late[node] = None
    return late


def _is_number_op(node: fx.Node) -> bool:
    """Whether an op has one number as its result and as each of its operands, all of them tensors."""
    is_op = isinstance(node.target, _torch.OpOverload)
    return is_op and _is_number(node) and all(map(_is_number, _torch.operands_of(node)))


def _is_number(node: fx.Node) -> bool:
    spec = node.meta.get("spec")
    return isinstance(spec, Spec) and prod(spec.shape) == 1
