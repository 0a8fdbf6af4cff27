"""Take the norms of many tensors together: their roots, one for each tensor, become one op.

    n1 = sqrt(s1); n2 = sqrt(s2); ...; stack([n1, n2, ...])    ->    sqrt(stack([s1, s2, ...]))

`clip_grad_norm_` takes the norm of each gradient and stacks them. What a norm owes to other ranks is a sum of squares,
so each norm is a sum, its reduction and its root. The reductions travel in one bucket already (`bucket.py`); the roots,
and the casts of half precision behind them, are ops on one number each, which cost a launch or a call apiece.

A root rounds correctly, alone and among others, so bits stay. A power does not: the kernel for several numbers at once
is another one than that for one number, so norms of other orders than 2 keep theirs. The sums themselves stay apart,
too: `_foreach_norm` adds in another order, and in float32 with fewer digits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from spmd.expand.passes.keep_gathered import copied
from spmd.expand.passes.report import Noted
from spmd.expand.program import Program
from spmd.tensor.spec import Spec

aten = torch.ops.aten

SAME_ANYWHERE = (aten.sqrt.default, aten.abs.default, aten._to_copy.default)
"""Ops on one number whose bits do not depend on what is computed beside it."""


def fused_norms(program: Program) -> Noted:
    """The same program with the roots of norms that are stacked taken together, and how many."""
    left = _powers(program.graph)
    if not any(_alike(node) for node in _stacks(program.graph)):
        return Noted(program, left=left)
    program, did = copied(program), []
    for stack in _stacks(program.graph):
        while alike := _alike(stack):
            did.append(f"{len(alike)} ops {alike[0].target} on one number each are one op")
            _join(program.graph, stack, alike)
    return Noted(program, tuple(did), left)


def _stacks(graph: fx.Graph) -> list[fx.Node]:
    return list(graph.find_nodes(op="call_function", target=aten.stack.default))


def _powers(graph: fx.Graph) -> tuple[str, ...]:
    """A sentence for each stack of roots that are powers."""
    stacks = [[n for n in stack.args[0] if n.target is aten.pow.Tensor_Scalar] for stack in _stacks(graph)]
    return tuple(f"{len(ns)} roots of other orders than 2: bits of a power depend on its place" for ns in stacks if ns)


def _alike(stack: fx.Node) -> list[fx.Node]:
    """What a stack reads, if it is the same op of single numbers each time and nobody else reads it; else nothing."""
    numbers = list(dict.fromkeys(stack.args[0]))
    first = numbers[0]
    if len(numbers) < 2 or first.target not in SAME_ANYWHERE or not _is_number_op(first):
        return []
    same = all(_call(n) == _call(first) and _is_number_op(n) and list(n.users) == [stack] for n in numbers)
    return numbers if same else []


def _call(node: fx.Node) -> tuple:
    """What ops that are joined have in common: the op, its other arguments, and the specs before and after."""
    read = node.args[0].meta.get("spec") if node.args else None
    return node.target, node.args[1:], node.kwargs, read, node.meta.get("spec")


def _is_number_op(node: fx.Node) -> bool:
    """Whether an op has one number, which is complete on each rank, as its result and as its only operand."""
    if len(node.args) != 1 or node.all_input_nodes != [node.args[0]] or node.kwargs.keys() - {"dtype"}:
        return False
    specs = [n.meta.get("spec") for n in (node, node.args[0])]
    return all(isinstance(spec, Spec) and spec.shape == () and spec.is_replicated for spec in specs)


def _join(graph: fx.Graph, stack: fx.Node, alike: Sequence[fx.Node]) -> None:
    """Let a stack read what the ops read, and write one op of their kind behind it."""
    first, spec = alike[0], stack.meta["spec"]
    with graph.inserting_after(stack):
        one = graph.create_node("call_function", first.target, (stack,), first.kwargs, name=first.name)
    stack.replace_all_uses_with(one, delete_user_cb=lambda user: user is not one)
    one.meta |= {**first.meta, "spec": spec}
    stack.meta["spec"] = spec.with_tensor(spec.shape, first.args[0].meta["spec"].dtype)
    stack.args = ([n.args[0] for n in stack.args[0]], *stack.args[1:])
    for node in alike:
        graph.erase_node(node)
