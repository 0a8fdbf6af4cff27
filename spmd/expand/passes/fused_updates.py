"""Fuse updates: the chain of small ops by which AdamW or Adam updates a parameter becomes one op.

    mul, lerp, mul, addcmul, sqrt, div, add, addcdiv, and eight of numbers    ->    adamw(p, g, m, v, step, lr, ...)

A chain is found by its structure alone, whoever wrote it; what torch's optimisers do with `foreach` on and off is
known. It is left alone where its tensors lie differently on the mesh or have other dtypes than float32 and float64,
where it is read in the middle, and in deterministic mode, for the kernel rounds in other places.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from spmd.expand.passes.keep_gathered import copied
from spmd.expand.passes.report import Noted
from spmd.expand.program import Program
from spmd.tensor.modes import deterministic
from spmd.tensor.recipes.updates import DTYPES, adamw
from spmd.tensor.spec import Spec

aten = torch.ops.aten


@dataclass(frozen=True)
class _Op:
    """A pattern: a call of this target with operands that fit. value: the pattern of its `value=`. name: what the
    result is called."""

    target: Any
    operands: tuple
    value: Any = None
    name: str = ""


def _op(target: Any, *operands: Any, value: Any = None, name: str = "") -> _Op:
    return _Op(target, operands, value, name)


def _less(x: Any) -> _Op:
    return _op(operator.sub, 1.0, x)


_COUNT = _op(aten._local_scalar_dense.default, "step")
_M = _op(aten.lerp.Scalar, "m", "g", _less("beta1"), name="new m")
_V = _op(aten.addcmul.default, _op(aten.mul.Tensor, "v", "beta2"), "g", "g", value=_less("beta2"), name="new v")
_SPREAD = _op(
    aten.add.Tensor,
    _op(
        aten.div.Tensor,
        _op(aten.sqrt.default, _V),
        _op(operator.pow, _less(_op(operator.pow, "beta2", _COUNT)), 0.5),
    ),
    "eps",
)
_RATE = _op(operator.truediv, "lr", _less(_op(operator.pow, "beta1", _COUNT)))
_DECAYED = _op(aten.mul.Tensor, "p", _less(_op(operator.mul, "lr", "decay")))
CHAINS = tuple(
    _op(aten.addcdiv.default, p, _M, _SPREAD, value=value, name="new p")
    for value in (_op(operator.neg, _RATE), _op(operator.mul, _RATE, -1))
    for p in (_DECAYED, "p")
)
"""The ends of the chains: AdamW, and Adam whose gradient has the decay in it."""
TENSORS, NUMBERS = ("p", "g", "m", "v", "step"), ("lr", "beta1", "beta2", "eps", "decay")


def fused(program: Program) -> Noted:
    """The same program with its updates fused, and how many."""
    many = len(_chains(program.graph)) if program.mesh.device_type == "cpu" else 0
    if not many:
        return Noted(program)
    if deterministic.is_on():
        return Noted(program, left=(f"{many} updates: deterministic mode keeps the bits",))
    program = copied(program)
    ends = list(_chains(program.graph))
    for end in ends:
        _replace(program.graph, end, _chain(end))  # asked again: what it reads may be the result of another update
    return Noted(program, (f"{many} updates are one op each",))


def _chains(graph: fx.Graph) -> dict[fx.Node, dict[str, Any]]:
    """The parts of each chain that the kernel can take the place of, by the op that ends it."""
    found = {n: _chain(n) for n in graph.nodes if n.target is aten.addcdiv.default}
    return {end: parts for end, parts in found.items() if parts is not None and _fits(parts)}


def _chain(end: fx.Node) -> dict[str, Any] | None:
    """The parts of the chain that ends here, by name."""
    for pattern in CHAINS:
        found: dict[str, Any] = {"decay": 0.0} if pattern.operands[0] == "p" else {}
        if _matches(pattern, end, found):
            return found
    return None


def _matches(pattern: Any, value: Any, found: dict[str, Any]) -> bool:
    if isinstance(pattern, str):
        known = found.setdefault(pattern, value)
        return known is value or (not isinstance(value, fx.Node) and known == value)
    if not isinstance(pattern, _Op):
        return not isinstance(value, fx.Node) and value == pattern
    if not isinstance(value, fx.Node) or value.target is not pattern.target or len(value.args) != len(pattern.operands):
        return False
    if pattern.name:
        found[pattern.name] = value
    if value.kwargs.keys() != ({"value"} if pattern.value is not None else set()):
        return False
    pairs = zip(pattern.operands, value.args, strict=True)
    more = [(pattern.value, value.kwargs["value"])] if pattern.value is not None else []
    return all(_matches(part, x, found) for part, x in (*pairs, *more))


def _fits(found: dict[str, Any]) -> bool:
    """Whether the kernel may take the place of the chain: tensors that lie alike, and numbers that are no tensors."""
    tensors = [found[name] for name in TENSORS]
    if not all(isinstance(n, fx.Node) and isinstance(n.meta.get("spec"), Spec) for n in tensors):
        return False
    p, *others, step = (n.meta["spec"] for n in tensors)
    alike = all(s.shape == p.shape and s.dtype == p.dtype and s.same_layout(p) for s in others)
    if not alike or p.dtype not in DTYPES or p.partial or step.dtype != torch.float32 or not step.is_replicated:
        return False
    return all(not isinstance(found[x], fx.Node) or found[x].meta.get("spec") is None for x in NUMBERS)


def _replace(graph: fx.Graph, end: fx.Node, found: dict[str, Any]) -> None:
    """Write the fused update in the place of the end, and drop what nobody reads any more."""
    args = tuple(found[name] for name in (*TENSORS, *NUMBERS))
    old = [found["new p"], found["new m"], found["new v"]]
    with graph.inserting_after(end):
        update = graph.call_function(adamw, args)
    update.meta |= end.meta
    update.meta["spec"] = tuple(n.meta["spec"] for n in old)
    last = update
    for i, n in enumerate(old):
        with graph.inserting_after(last):
            last = graph.call_function(operator.getitem, (update, i))
        last.meta |= n.meta
        n.replace_all_uses_with(last, delete_user_cb=lambda user: user > update)
    _drop_unread(graph, end)


def _drop_unread(graph: fx.Graph, end: fx.Node) -> None:
    """Erase an op that nobody reads, and what only it read."""
    stack, erased = [end], set()
    while stack:
        node = stack.pop()
        if node not in erased and not node.users and node.op == "call_function":
            stack += node.all_input_nodes
            graph.erase_node(node)
            erased.add(node)
