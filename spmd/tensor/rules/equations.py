"""How to write a rule for an op that is not in the book.

    equation("m k, k n -> m n")             letters tie dims together, as in an einsum
    equation("... d, d -> ... d")           three dots are all dims before; where an operand has size 1 it is broadcast
    equation("... _, _ -> ... _")           an underscore is a whole dim: the op must see all of it
    equation("rows cols -> rows", "max")    a letter on the left only: each rank leaves a Partial("max")
    elementwise("max min: p -> p")          every dim is free; with a law: f(max(a, b)) = max(f(a), f(b))
    keep_whole("dim")                       the dims that the argument names are whole, all others free
    reduce_to("sum")                        the dims that `dim` names leave a Partial("sum")

There is a term for each tensor argument of the op's schema, in order. A list of tensors has one term, which holds for
each tensor of the list. Other arguments have no term. Laws (`spmd.tensor.rules.rule.laws`) say how Partials pass:
p partial, q partial of the opposite kind, r replicated. A rule is a claim of its author. `spmd.debug.prove_rule` tests
it against the op itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spmd import _torch
from spmd.tensor.call import Call
from spmd.tensor.placement import REDUCE_OPS
from spmd.tensor.rules import families
from spmd.tensor.rules.rule import Dims, Factor, Law, Rule, laws

DOTS = "..."
Term = tuple[str, ...]


@dataclass(frozen=True)
class FamilyRule:
    """A rule of one of the families of the book: its text, and the function from a call to the rule."""

    text: str
    function: Callable[[Call], Rule | None]
    law: tuple[Law, ...] = ()

    def __call__(self, call: Call) -> Rule | None:
        return self.function(call)

    def __str__(self):
        return self.text


def elementwise(*law: str) -> FamilyRule:
    """Every dim of the result is free. Operands are broadcast to the result's shape.

    >>> print(elementwise("max min: p -> p"))
    elementwise('max min: p -> p')
    """
    parsed = parse_laws(law)
    return FamilyRule(_text("elementwise", *law), lambda call: families.pointwise(call, parsed), parsed)


def keep_whole(arg: str, *law: str) -> FamilyRule:
    """The dims that the argument `arg` names are whole, and all others free. If the argument is None, all are whole."""
    parsed = parse_laws(law)
    return FamilyRule(_text("keep_whole", arg, *law), lambda call: families.one_dim_whole(call, arg, parsed), parsed)


def reduce_to(kind: str, *law: str, nonempty: bool = False) -> FamilyRule:
    """The dims that the argument `dim` names leave a Partial of this kind.

    nonempty: the op raises an error for no elements, so no rank may have an empty shard.
    """
    _check_kind(kind)
    parsed = parse_laws(law)
    function = lambda call: families.reduction(call, kind, parsed, nonempty)  # noqa: E731
    return FamilyRule(_text("reduce_to", kind, *law), function, parsed)


def _text(family: str, *given: str) -> str:
    return f"{family}({', '.join(map(repr, given))})"


def parse_laws(texts: tuple[str, ...]) -> tuple[Law, ...]:
    """Laws from their texts. ValueError for a text that is no law."""
    for text in texts:
        kinds, colon, row = text.partition(":")
        ins, arrow, outs = row.partition("->")
        unknown = sorted(set(kinds.split()) - set(REDUCE_OPS))
        letters = [letter for letter in (ins + outs).split() if letter.removesuffix(DOTS) not in ("p", "q", "r")]
        if not (colon and arrow and kinds.split() and outs.split()) or unknown or letters:
            wrong = f" ({unknown[0]!r} is no reduce kind)" if unknown else f" ({letters[0]!r})" if letters else ""
            raise ValueError(
                f"{text!r} is no law{wrong}; one reads like 'sum avg: p r -> p': reduce kinds of "
                f"{', '.join(REDUCE_OPS)}, then p (partial), q (of the opposite kind) or r (replicated) for each tensor"
            )
    return laws(*texts)


def _check_kind(kind: str) -> None:
    if kind not in REDUCE_OPS:
        raise ValueError(f"a rule cannot leave a Partial({kind!r}); kinds are {', '.join(REDUCE_OPS)}")


# ---- equations --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Equation:
    """A rule written as an einsum of the tensor arguments; `equation` parses one."""

    ins: tuple[Term, ...]
    outs: tuple[Term, ...]
    kind: str
    law: tuple[Law, ...]
    sizes: str | None

    def __str__(self):
        return " -> ".join(", ".join(" ".join(term) for term in side) for side in (self.ins, self.outs))

    def __call__(self, call: Call) -> Rule:
        sizes: dict[str, tuple[int, str]] = {}
        terms = [self.ins[i] for i in _schema_positions(call)]
        operands = [(term, spec.shape, str(spec)) for term, spec in zip(terms, call.tensors, strict=True)]
        outs = self.outs * len(call.outs) if _returns_a_list(call.op) else self.outs
        results = [
            (term, o.shape, f"result {j} of shape {list(o.shape)}")
            for j, (term, o) in enumerate(zip(outs, [o for o in call.outs if o is not None], strict=True))
        ]
        for term, shape, what in operands + results:
            self._check_term(call, term, shape, what, sizes)
        tensors = operands + results
        dotted = _broadcast_sizes([shape[: len(shape) - len(term) + 1] for term, shape, _ in tensors if DOTS in term])
        dims = [_dims(term, shape, dotted) for term, shape, _ in tensors]
        left, right = dims[: len(operands)], iter(dims[len(operands) :])
        return Rule(
            tuple(left), tuple(None if o is None else next(right) for o in call.outs), self.kind, self.law,
            sizes=self.sizes,
        )  # fmt: skip

    def _check_term(self, call: Call, term: Term, shape: tuple[int, ...], what: str, sizes: dict) -> None:
        """Check that a term has a letter for each dim, and that all dims of a letter have one size."""
        named = [name for name in term if name != DOTS]
        if len(named) != len(shape) and (DOTS not in term or len(named) > len(shape)):
            raise ValueError(
                f"{call.op}: its rule, {self}, says {' '.join(term)!r} of {what}, which has {len(shape)} dims; "
                "register a rule that fits, such as one with '...' for any number of dims"
            )
        for name, size in zip(named, shape[len(shape) - len(named) :], strict=True):
            known, where = sizes.setdefault(name, (size, what))
            if name != "_" and known != size:
                raise ValueError(
                    f"{call.op}: its rule, {self}, ties {name!r} of {where} to that of {what}, but these are {known} "
                    f"and {size}; dims that a letter ties have one size"
                )


def equation(text: str, kind: str = "sum", law: tuple[str, ...] = (), sizes: str | None = None) -> Equation:
    """Parse a rule of letters.

    kind: the Partial that a letter leaves which is on the left only. sizes: the name of the argument that is the shape
    of the result. It is replaced by the local shape.

    >>> print(equation("m k,k n -> m n", law=("sum avg: p r -> p",)))
    m k, k n -> m n

    Raises ValueError for a text that is no rule.
    """
    _check_kind(kind)
    sides = text.split("->")
    if len(sides) != 2:
        raise ValueError(f"{text!r} is no rule; one reads like 'm k, k n -> m n', with one arrow")
    ins, outs = (tuple(tuple(term.split()) for term in side.split(",")) for side in sides)
    known = {name for term in ins for name in term}
    for term in (*ins, *outs):
        _check_names(text, term)
    new = [name for term in outs for name in term if name not in known | {"_"}]
    if new:
        raise ValueError(f"{text!r}: {new[0]!r} is on the right only; write '_' for a dim that no operand has")
    return Equation(ins, outs, kind, parse_laws(law), sizes)


def _check_names(text: str, term: Term) -> None:
    for name in term:
        if name != DOTS and not name.isidentifier():
            raise ValueError(f"{text!r}: {name!r} is no name of a dim; use letters, '_' for a whole dim, '...' first")
        if name != "_" and term.count(name) > 1:
            raise ValueError(f"{text!r}: {name!r} is twice in one term; dims of one tensor are not tied")
    if DOTS in term[1:]:
        raise ValueError(f"{text!r}: '...' is all dims before the others, so it comes first in its term")


def holds_tensors(argument) -> bool:
    """Whether an argument, or a result, of a schema is a tensor or a list of tensors."""
    return "Tensor" in str(argument.type)


def _schema_positions(call: Call) -> list[int]:
    """For each operand, the position of its argument among the tensor arguments of the schema."""
    names = [a.name for a in _torch.arguments(call.op) if holds_tensors(a)]
    return [names.index(name) for name, _ in call.named_tensors]


def _returns_a_list(op) -> bool:
    return any(str(r.type).startswith("List[") for r in _torch.returns(op) if holds_tensors(r))


def _broadcast_sizes(leads: list[tuple[int, ...]]) -> dict[int, int]:
    """The size of each dim that three dots represent, counted from their right end. A size of 1 is broadcast."""
    sizes: dict[int, int] = {}
    for lead in leads:
        for place, size in enumerate(reversed(lead)):
            if sizes.get(place, 1) == 1:
                sizes[place] = size
    return sizes


def _dims(term: Term, shape: tuple[int, ...], dotted: dict[int, int]) -> Dims:
    """The dims of a tensor from its term. dotted: the sizes of the dims that three dots represent."""
    named = [None if name == "_" else Factor(name) for name in term if name != DOTS]
    before = shape[: len(shape) - len(named)]
    free = [
        Factor(f"{DOTS}{place}") if size == dotted[place] else None for place, size in enumerate(reversed(before))
    ]
    return (*reversed(free), *named)
