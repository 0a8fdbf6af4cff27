"""A rule ties the dims of an op's tensors together by factors; its rows are read off from that.

On one axis a factor has one of three fates:

    free     on both sides       every rank works on its own shard alone
    summed   only on the left    every rank leaves a Partial of the rule's kind; what each would add to it, in full, is
                                 one, too (`Rule.added`)
    whole    None, not named     the op must see all of it

`mm` is `m k, k n -> m n`: m and n are free, k is summed, so the rows of one axis are

    Shard(0), Replicate() -> Shard(0)          m
    Shard(1), Shard(0)    -> Partial()         k
    Replicate(), Shard(1) -> Shard(1)          n
    Partial(), Replicate() -> Partial()        a law: mm is linear in each operand
    Replicate(), Replicate() -> Replicate()    always right

Rows compose over axes: any right row on one axis goes with any right row on another, but for two kinds of
Partial on one tensor.

Left out here: ops whose local call needs the rank's offset (masks, random numbers); they are recipes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field

from spmd.tensor.placement import REPLICATE, Partial, Placement, Shard


@dataclass(frozen=True)
class Factor:
    """A dim's tie to others of the same name; `unit` of its indices make one index of the factor.

    Flattening [6, 5] to [30] ties dim 0 of the input (unit 1) to dim 0 of the result (unit 5).
    """

    name: Hashable
    unit: int = 1

    def __repr__(self):
        return str(self.name) if self.unit == 1 else f"{self.unit}*{self.name}"


Dims = tuple[Factor | None, ...]
"""One entry per tensor dim: its factor, or None where the op must see all of the dim."""


@dataclass(frozen=True)
class Law:
    """How partials pass through an op: `ins` and `outs` are letters, see `laws`."""

    kinds: tuple[str, ...]
    ins: tuple[str, ...]
    outs: tuple[str, ...]


OPPOSITE = {"max": "min", "min": "max"}


def laws(*texts: str) -> tuple[Law, ...]:
    """Laws from their notation: reduce kinds, then one letter an operand, then one a result.

    p: partial of the kind; q: partial of the opposite kind (max, min); r: replicated. A last letter with
    dots repeats for as many tensors as there are.

    >>> laws("sum avg: p r -> p")
    (Law(kinds=('sum', 'avg'), ins=('p', 'r'), outs=('p',)),)
    """
    return tuple(_law(text) for text in texts)


def _law(text: str) -> Law:
    kinds, row = text.split(":")
    ins, outs = row.split("->")
    return Law(tuple(kinds.split()), tuple(ins.split()), tuple(outs.split()))


@dataclass(frozen=True)
class Rule:
    """Which placements are right for one op on one axis.

    ins: one `Dims` per operand. outs: one per result; None for a result that is the same on every rank.
    kind: the Partial that a summed factor leaves, or None when no factor may be summed.
    nonempty: factors of which no rank may hold an empty shard (a maximum of nothing is an error).
    sizes: the name of the argument that spells the size of the result, to be rewritten to the local one.
    added: the operands to which the rest is added, by place: where a factor is summed they are a Partial of the kind,
    for else they would be counted once a rank. `x.index_add(0, i, y)` has one, with the rows of y on the ranks.
    """

    ins: tuple[Dims, ...]
    outs: tuple[Dims | None, ...]
    kind: str | None = None
    laws: tuple[Law, ...] = ()
    nonempty: frozenset = field(default_factory=frozenset)
    sizes: str | None = None
    added: frozenset = field(default_factory=frozenset)

    @property
    def factors(self) -> tuple[Hashable, ...]:
        """The factors that may be sharded, in order of appearance."""
        left = dict.fromkeys(f.name for dims in self.ins for f in dims if f)
        right = {f.name for dims in self.outs if dims is not None for f in dims if f}
        return tuple(f for f in left if f in right or self.kind)

    def __str__(self):
        def side(tensors: Iterable[Dims | None]) -> str:
            return ", ".join(" ".join(str(f or "_") for f in t) if t is not None else "*" for t in tensors)

        return f"{side(self.ins)} -> {side(self.outs)}"


@dataclass(frozen=True)
class Row:
    """One right choice of placements on one axis; `factor` is what it shards, if anything."""

    ins: tuple[Placement, ...]
    outs: tuple[Placement, ...]
    factor: Hashable | None = None

    def __str__(self):
        return f"{', '.join(map(str, self.ins))} -> {', '.join(map(str, self.outs))}"


def rows(rule: Rule) -> tuple[Row, ...]:
    """All rows of a rule on one axis, the replicated one first."""
    whole = Row((REPLICATE,) * len(rule.ins), (REPLICATE,) * len(rule.outs))
    sharded = tuple(_factor_row(rule, f) for f in rule.factors)
    lawful = tuple(row for law in rule.laws for row in _law_rows(law, rule))
    return (whole, *sharded, *lawful)


def _factor_row(rule: Rule, name: Hashable) -> Row:
    summed = Partial(rule.kind) if rule.kind else REPLICATE
    on_right = any(f and f.name == name for dims in rule.outs if dims is not None for f in dims)
    added = rule.added if not on_right else ()
    ins = tuple(_at(dims, name, summed if i in added else REPLICATE) for i, dims in enumerate(rule.ins))
    outs = tuple(REPLICATE if dims is None else _at(dims, name, summed) for dims in rule.outs)
    return Row(ins, outs, name)


def _at(dims: Dims, name: Hashable, absent: Placement) -> Placement:
    return next((Shard(d, f.unit) for d, f in enumerate(dims) if f and f.name == name), absent)


def _law_rows(law: Law, rule: Rule) -> Iterable[Row]:
    ins, outs = fill(law.ins, len(rule.ins)), fill(law.outs, len(rule.outs))
    if ins is None or outs is None:
        return
    for kind in law.kinds:
        read = {"r": REPLICATE, "p": Partial(kind), "q": Partial(OPPOSITE.get(kind, kind))}
        placed = tuple(
            REPLICATE if dims is None else read[c] for c, dims in zip(outs, rule.outs, strict=True)
        )
        yield Row(tuple(read[c] for c in ins), placed)


def fill(letters: tuple[str, ...], n: int) -> tuple[str, ...] | None:
    """The letters for n tensors, or None when the law is about another number of them."""
    if letters and letters[-1].endswith("..."):
        fixed, last = letters[:-1], letters[-1][0]
        return (*fixed, *last * (n - len(fixed))) if n >= len(fixed) else None
    return letters if len(letters) == n else None
