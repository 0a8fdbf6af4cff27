"""Rules for ops that are not in the book: custom ops, and ops of aten that the book leaves out.

    @torch.library.custom_op("mylib::scaled_mm", mutates_args=())
    def scaled_mm(x: Tensor, w: Tensor, scale: float) -> Tensor: ...

    spmd.register_rule(scaled_mm, "m k, k n -> m n", laws=("sum avg: p r -> p", "sum avg: r p -> p"))
    spmd.debug.prove_rule(scaled_mm, [(torch.randn(5, 4), torch.randn(4, 3), 2.0)])

Without a rule the operands of such an op are gathered, and it runs on replicated tensors. That is right, but slow. A
wrong rule gives wrong numbers, so prove the rule, as in the last line. The op's shapes come from its `register_fake`,
and its gradient from its `register_autograd`. The ops of the gradient are lowered in their turn.

Left out: ops that draw random numbers, or that need to know where their block begins. Write those with `local_map`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from spmd import _torch
from spmd.tensor.cache import forget_decisions
from spmd.tensor.call import Call, base_name
from spmd.tensor.rules.book import book
from spmd.tensor.rules.decompositions import decompositions
from spmd.tensor.rules.equations import DOTS, Equation, FamilyRule, equation, holds_tensors
from spmd.tensor.rules.rule import Law, Rule

_lock = threading.Lock()


class Registered:
    """A registered rule; `remove()` deletes it."""

    def __init__(self, name: str, rule: Callable[[Call], Rule | None]):
        self.name, self.rule = name, rule

    def remove(self) -> None:
        """Delete the rule: the op runs on replicated tensors again. Does nothing if the rule was removed before."""
        with _lock:
            if book.get(self.name) is self.rule:
                del book[self.name]
        forget_decisions()

    def __repr__(self):
        return f"Registered({self.name}: {self.rule})"


def register_rule(
    op: Any, rule: str | Callable[[Call], Rule | None], *, laws: Sequence[str] = (), kind: str = "sum",
    sizes: str | None = None,
) -> Registered:  # fmt: skip
    """Say how an op may be sharded, so that its operands need not be gathered.

    op: a `torch.library.custom_op` function, `torch.ops.lib.op`, an overload of it, or "lib::op". The rule is for all
    overloads, and for the variant that writes in place.
    rule: an equation such as "m k, k n -> m n" (`spmd.rules.equation`), one of `spmd.rules.elementwise`, `keep_whole`
    or `reduce_to`, or a function from a `Call` to a `Rule`.
    laws: how Partials pass through the op. kind: the Partial that a letter leaves which is on the left only.
    sizes: the name of the argument that is the shape of the result. These three are for equations.

    Cached lowerings are forgotten; programs that are compiled already do not change. Register rules when modules are
    imported, the same rules on all ranks. Prove the rule with `spmd.debug.prove_rule`.

    >>> def half(x: torch.Tensor) -> torch.Tensor:
    ...     return x / 2
    >>> half = torch.library.custom_op("docs::half", half, mutates_args=())
    >>> _ = half.register_fake(torch.empty_like)
    >>> register_rule(half, "... -> ...", laws=["sum avg: p -> p"])
    Registered(docs::half: ... -> ...)

    Raises ValueError for an op that torch does not know, that has a rule, or that is made of other ops; and for letters
    that do not fit the op's schema.
    """
    overloads = _overloads(op)
    function = _as_function(overloads[0], rule, tuple(laws), kind, sizes)
    name = base_name(overloads[0])
    for overload in overloads:
        _check_op(overload)
        if not any(a.is_out for a in _torch.arguments(overload)):  # one with `out` uses the overload without it
            _check_fit(overload, function)
    with _lock:
        if name in book:
            raise ValueError(f"{name} has a rule, {_shown(book[name])}; call remove() of what register_rule returned")
        book[name] = function
    forget_decisions()
    return Registered(name, function)


def _overloads(op: Any) -> list:
    overloads = _torch.overloads_of(op)
    if not overloads:
        raise ValueError(
            f"register_rule: {op!r} is no op that torch knows; give a torch.library.custom_op function, "
            'torch.ops.lib.op, or "lib::op", after it was defined'
        )
    return overloads


def _as_function(op, rule, laws: tuple[str, ...], kind: str, sizes: str | None) -> Callable[[Call], Rule | None]:
    if isinstance(rule, str):
        return equation(rule, kind, laws, sizes)
    if laws or sizes or kind != "sum":
        raise ValueError(f"register_rule {op}: laws, kind and sizes go with an equation; here the rule says them")
    if not callable(rule):
        raise TypeError(f"register_rule {op}: {rule!r} is no rule; give an equation, or one of spmd.rules")
    return rule


def _check_op(op) -> None:
    if _torch.is_composite(op) or op in decompositions:
        raise ValueError(
            f"register_rule: {op} is decomposed into other ops, so a rule for it would never be used; register "
            "rules for those"
        )
    if torch.Tag.nondeterministic_seeded in op.tags:
        raise ValueError(f"register_rule: {op} draws random numbers, others on each rank; no rule makes that right")
    if not any(holds_tensors(a) for a in _torch.arguments(op)) or not any(holds_tensors(r) for r in _torch.returns(op)):
        raise ValueError(f"register_rule: {op} does not make tensors of tensors, so there is nothing to shard")


def _check_fit(op, rule: Callable) -> None:
    """Check that the rule has as many terms, and each law as many letters, as the op has tensors.

    The letters of optional tensors may be missing.
    """
    arguments = [a for a in _torch.arguments(op) if holds_tensors(a)]
    returns = [r for r in _torch.returns(op) if holds_tensors(r)]
    if isinstance(rule, Equation):
        _check_count(op, str(rule), "tensor arguments", len(rule.ins), arguments)
        _check_count(op, str(rule), "results", len(rule.outs), returns)
        names = [a.name for a in _torch.arguments(op)]
        if rule.sizes is not None and rule.sizes not in names:
            raise ValueError(f"register_rule: {op} has no argument {rule.sizes!r}; it has {', '.join(names)}")
    lists = any("List[" in str(a.type) for a in (*arguments, *returns))
    for law in rule.law if isinstance(rule, (Equation, FamilyRule)) and not lists else ():
        _check_letters(op, law, "tensor arguments", law.ins, arguments)
        _check_letters(op, law, "results", law.outs, returns)


def _check_count(op, text: str, what: str, n: int, schema: list) -> None:
    if n != len(schema):
        named = ", ".join(a.name or "a result" for a in schema)
        raise ValueError(f"register_rule: {text!r} has {n} terms for the {len(schema)} {what} of {op} ({named})")


def _check_letters(op, law: Law, what: str, letters: tuple[str, ...], schema: list) -> None:
    dotted = bool(letters) and letters[-1].endswith(DOTS)
    optional = sum("Optional" in str(a.type) for a in schema)
    n = len(letters) - dotted
    if n > len(schema) or (not dotted and n < len(schema) - optional):
        raise ValueError(
            f"register_rule: the law '{' '.join(law.kinds)}: {' '.join(law.ins)} -> {' '.join(law.outs)}' has "
            f"{len(letters)} letters for the {len(schema)} {what} of {op}"
        )


def _shown(rule: Callable) -> str:
    return repr(str(rule)) if isinstance(rule, (Equation, FamilyRule)) else "in the book"
