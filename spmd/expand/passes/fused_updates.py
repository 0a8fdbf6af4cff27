"""Fuse updates: the chain of small ops by which AdamW or Adam updates a parameter becomes one op.

    mul, lerp, mul, addcmul, sqrt, div, add, addcdiv, and eight of numbers    ->    adamw(p, g, m, v, step, lr, ...)

A chain is found by its structure alone, whoever wrote it. What torch's optimisers do with `foreach` on and off is
known, and so is what a capture makes of those with `fused=True`, whose numbers are written out: 0.99999, say.
A chain is left alone where its tensors lie differently on the mesh or have other dtypes than float32 and float64, where
it is read in the middle, and in deterministic mode, for the kernel rounds in other places.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
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


class _Cast:
    """In the place of an op: the operand, which may have been cast to float32 or float64."""


def _unbiased(beta: str) -> _Op:
    """1 - beta ** step, of tensors."""
    return _op(aten.rsub.Scalar, _op(aten.pow.Scalar, beta, _op(_Cast, "step")), 1)


_SQUARES = _op(aten.mul.Tensor, _op(aten.mul.Tensor, "g", "g"), _less("beta2"))
_V_OF_FUSED = _op(aten.add.Tensor, _op(aten.mul.Tensor, "v", "beta2"), _SQUARES, name="new v")
_ROOT = _op(_Cast, _op(aten.sqrt.default, _unbiased("beta2")))
_SPREAD_OF_FUSED = _op(aten.add.Tensor, _op(aten.div.Tensor, _op(aten.sqrt.default, _V_OF_FUSED), _ROOT), "eps")
_RATE_OF_FUSED = _op(_Cast, _op(aten.mul.Tensor, _op(aten.reciprocal.default, _unbiased("beta1")), "lr"))
_CHANGE = _op(aten.mul.Tensor, _op(aten.div.Tensor, _M, _SPREAD_OF_FUSED), _RATE_OF_FUSED)
OF_FUSED = tuple(_op(aten.sub.Tensor, p, _CHANGE, name="new p") for p in (_DECAYED, "p"))
"""The same of optimisers with `fused=True`."""
TENSORS, NUMBERS = ("p", "g", "m", "v", "step"), ("lr", "beta1", "beta2", "eps", "decay")


def fused(program: Program, patterns: Sequence[_Op] = (*CHAINS, *OF_FUSED)) -> Noted:
    """The same program with its updates fused, and how many. patterns: the ends of the chains that are looked for."""
    many = len(_chains(program.graph, patterns)) if program.mesh.device_type == "cpu" else 0
    if not many:
        return Noted(program)
    if deterministic.is_on():
        return Noted(program, left=(f"{many} updates: deterministic mode keeps the bits",))
    program = copied(program)
    ends = list(_chains(program.graph, patterns))
    for end in ends:
        found = _chain(end, patterns)  # asked again: what it reads may be the result of another update
        _replace(program.graph, end, found)
    return Noted(program, (f"{many} updates are one op each",))


def _chains(graph: fx.Graph, patterns: Sequence[_Op]) -> dict[fx.Node, dict[str, Any]]:
    """The parts of each chain that the kernel can take the place of, by the op that ends it."""
    targets = {pattern.target for pattern in patterns}
    found = {n: _chain(n, patterns) for n in graph.nodes if n.target in targets}
    return {end: parts for end, parts in found.items() if parts is not None and _fits(parts)}


def _chain(end: fx.Node, patterns: Sequence[_Op]) -> dict[str, Any] | None:
    """The parts of the chain that ends here, by name."""
    for pattern in patterns:
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
    if not isinstance(value, fx.Node):
        return _gives(pattern, value, found)
    if pattern.target is _Cast:
        return _matches(pattern.operands[0], _uncast(value), found)
    if value.target is not pattern.target or len(value.args) != len(pattern.operands):
        return False
    if pattern.name:
        found[pattern.name] = value
    if value.kwargs.keys() != ({"value"} if pattern.value is not None else set()):
        return False
    pairs = zip(pattern.operands, value.args, strict=True)
    more = [(pattern.value, value.kwargs["value"])] if pattern.value is not None else []
    # The last operand first: it has the numbers that others are made of.
    return all(_matches(part, x, found) for part, x in reversed((*pairs, *more)))


def _uncast(node: fx.Node) -> fx.Node:
    is_cast = node.target is aten._to_copy.default and node.kwargs.keys() == {"dtype"}
    return node.args[0] if is_cast and node.kwargs["dtype"] in DTYPES else node


def _gives(pattern: _Op, number: Any, found: dict[str, Any]) -> bool:
    """Whether this is the number of the pattern, whose parts are known; of a decay that is not, it is found."""
    if pattern is _DECAYED.operands[1] and "decay" not in found:
        decay = _decay(number, found.get("lr"))
        return decay is not None and found.setdefault("decay", decay) == decay
    known = _number(pattern, found)
    return known is not None and known == number


def _number(pattern: Any, found: dict[str, Any]) -> float | None:
    """The number of a pattern; None where a part of it is not known as a number."""
    if not isinstance(pattern, _Op):
        known = found.get(pattern) if isinstance(pattern, str) else pattern
        return known if isinstance(known, (int, float)) else None
    parts = [_number(part, found) for part in pattern.operands]
    return None if pattern.target in (None, _Cast) or None in parts else pattern.target(*parts)


def _decay(kept: float, lr: Any) -> float | None:
    """The decay with `1 - lr decay` exactly what is kept, with the fewest digits; None where there is none."""
    if not isinstance(lr, float) or not lr:
        return None
    rounded = (float(f"{(1 - kept) / lr:.{digits}g}") for digits in range(1, 18))
    return next((decay for decay in rounded if 1.0 - lr * decay == kept), None)


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
        _drop_copies(graph, last)
    _drop_unread(graph, end)


def _drop_copies(graph: fx.Graph, new: fx.Node) -> None:
    """Erase what writes the new value over the old one: the update does so itself."""
    spec = new.meta["spec"]
    for user in list(new.users):
        is_copy = user.target is aten.copy.default and user.args[1] is new and user.args[0] is not new
        if is_copy and user.meta["spec"].dtype == spec.dtype and user.meta["spec"].same_layout(spec):
            user.replace_all_uses_with(new)
            graph.erase_node(user)


def _drop_unread(graph: fx.Graph, end: fx.Node) -> None:
    """Erase an op that nobody reads, and what only it read."""
    stack, erased = [end], set()
    while stack:
        node = stack.pop()
        if node not in erased and not node.users and node.op == "call_function":
            stack += node.all_input_nodes
            graph.erase_node(node)
            erased.add(node)
