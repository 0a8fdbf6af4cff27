"""How a rule is spelled for an op that is not in the book.

    equation("m k, k n -> m n")             letters tie dims together, as in an einsum
    equation("... d, d -> ... d")           three dots: all dims before, stretched where an operand's size is 1
    equation("... _, _ -> ... _")           a dim that the op must see all of
    equation("rows cols -> rows", "max")    a letter on the left only: each rank leaves a Partial("max")
    elementwise("max min: p -> p")          every dim by itself; a law: f(max(a, b)) = max(f(a), f(b))
    keep_whole("dim")                       the dims that the argument names are whole, all others free
    reduce_to("sum")                        the dims that `dim` names leave a Partial("sum")

A term stands for a tensor argument of the op's schema, in order; of a list of tensors, for each of them. Arguments
that are no tensors have none. Laws (`spmd.tensor.rules.rule.laws`) say how Partials pass: p partial, q partial of the
opposite kind, r replicated. What is spelled here is a claim; `spmd.debug.prove_rule` asks the op itself.
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
class Spelled:
    """A rule by a family of the book: its text, and the function that reads a call."""

    text: str
    row: Callable[[Call], Rule | None]
    law: tuple[Law, ...] = ()

    def __call__(self, call: Call) -> Rule | None:
        return self.row(call)

    def __str__(self):
        return self.text


def elementwise(*law: str) -> Spelled:
    """Every dim of the result is free; operands are stretched to it.

    >>> print(elementwise("max min: p -> p"))
    elementwise('max min: p -> p')
    """
    read = read_laws(law)
    return Spelled(_text("elementwise", *law), lambda call: families.pointwise(call, read), read)


def keep_whole(arg: str, *law: str) -> Spelled:
    """The dims that the argument of this name names are whole - all dims where it is None - and all others free."""
    read = read_laws(law)
    return Spelled(_text("keep_whole", arg, *law), lambda call: families.one_dim_whole(call, arg, read), read)


def reduce_to(kind: str, *law: str, nonempty: bool = False) -> Spelled:
    """The dims that the argument `dim` names leave a Partial of this kind; nonempty: of no elements it is an error."""
    _check_kind(kind)
    read = read_laws(law)
    row = lambda call: families.reduction(call, kind, read, nonempty)  # noqa: E731
    return Spelled(_text("reduce_to", kind, *law), row, read)


def _text(family: str, *given: str) -> str:
    return f"{family}({', '.join(map(repr, given))})"


def read_laws(texts: tuple[str, ...]) -> tuple[Law, ...]:
    """Laws from their texts; ValueError for one that is none."""
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
    """A rule as an einsum of the tensor arguments; `equation` reads one."""

    ins: tuple[Term, ...]
    outs: tuple[Term, ...]
    kind: str
    law: tuple[Law, ...]
    sizes: str | None

    def __str__(self):
        return " -> ".join(", ".join(" ".join(term) for term in side) for side in (self.ins, self.outs))

    def __call__(self, call: Call) -> Rule:
        sizes: dict[str, tuple[int, str]] = {}
        terms = [self.ins[i] for i in _places(call)]
        operands = [(term, spec.shape, str(spec)) for term, spec in zip(terms, call.tensors, strict=True)]
        outs = self.outs * len(call.outs) if _gives_a_list(call.op) else self.outs
        results = [
            (term, o.shape, f"result {j} of shape {list(o.shape)}")
            for j, (term, o) in enumerate(zip(outs, [o for o in call.outs if o is not None], strict=True))
        ]
        for term, shape, what in operands + results:
            self._check_term(call, term, shape, what, sizes)
        tensors = operands + results
        lead = _stretched([shape[: len(shape) - len(term) + 1] for term, shape, _ in tensors if DOTS in term])
        dims = [_dims(term, shape, lead) for term, shape, _ in tensors]
        left, right = dims[: len(operands)], iter(dims[len(operands) :])
        return Rule(
            tuple(left), tuple(None if o is None else next(right) for o in call.outs), self.kind, self.law,
            sizes=self.sizes,
        )  # fmt: skip

    def _check_term(self, call: Call, term: Term, shape: tuple[int, ...], what: str, sizes: dict) -> None:
        """A term has a letter for each dim, and a letter has one size."""
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
    """Read a rule of letters. kind: what a letter on the left only leaves. sizes: the argument that spells the shape of
    the result, to be replaced by the local one.

    >>> print(equation("m k,k n -> m n", law=("sum avg: p r -> p",)))
    m k, k n -> m n

    ValueError for what does not read as one.
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
        raise ValueError(f"{text!r}: {new[0]!r} stands on the right only; a dim of which no operand knows is '_'")
    return Equation(ins, outs, kind, read_laws(law), sizes)


def _check_names(text: str, term: Term) -> None:
    for name in term:
        if name != DOTS and not name.isidentifier():
            raise ValueError(f"{text!r}: {name!r} is no name of a dim; use letters, '_' for a whole dim, '...' first")
        if name != "_" and term.count(name) > 1:
            raise ValueError(f"{text!r}: {name!r} stands twice in one tensor; dims of one tensor are not tied")
    if DOTS in term[1:]:
        raise ValueError(f"{text!r}: '...' stands for the dims before all others, so it comes first in its term")


def is_tensors(argument) -> bool:
    """Whether an argument, or a result, of a schema is a tensor or a list of them."""
    return "Tensor" in str(argument.type)


def _places(call: Call) -> list[int]:
    """For each operand, the place of its argument among those of the schema that are tensors."""
    names = [a.name for a in _torch.arguments(call.op) if is_tensors(a)]
    return [names.index(name) for name, _ in call.named_tensors]


def _gives_a_list(op) -> bool:
    return any(str(r.type).startswith("List[") for r in _torch.returns(op) if is_tensors(r))


def _stretched(leads: list[tuple[int, ...]]) -> dict[int, int]:
    """The size of each dim that three dots stand for, counted from their right end; a size of 1 is stretched."""
    found: dict[int, int] = {}
    for lead in leads:
        for place, size in enumerate(reversed(lead)):
            if found.get(place, 1) == 1:
                found[place] = size
    return found


def _dims(term: Term, shape: tuple[int, ...], lead: dict[int, int]) -> Dims:
    named = [None if name == "_" else Factor(name) for name in term if name != DOTS]
    before = shape[: len(shape) - len(named)]
    free = [
        Factor(f"{DOTS}{place}") if size == lead[place] else None for place, size in enumerate(reversed(before))
    ]
    return (*reversed(free), *named)
