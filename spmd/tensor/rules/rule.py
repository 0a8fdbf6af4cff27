"""A rule ties the dims of an op's tensors together by factors. The rows of the rule follow from the factors.

There are three kinds of factors:

    free     on both sides       each rank works on its own shard alone
    summed   only on the left    each rank leaves a Partial of the rule's kind. An operand that every rank would add to
                                 that Partial in full must be a Partial, too (`Rule.added`)
    whole    None, no name       the op must see all of the dim

`mm` is `m k, k n -> m n`: m and n are free, k is summed. So the rows of one axis are

    Shard(0), Replicate() -> Shard(0)          m
    Shard(1), Shard(0)    -> Partial()         k
    Replicate(), Shard(1) -> Shard(1)          n
    Partial(), Replicate() -> Partial()        a law: mm is linear in each operand
    Replicate(), Replicate() -> Replicate()    always right

Rows compose over axes: a right row on one axis can be combined with any right row on another axis, except for two
kinds of Partial on one tensor.

Left out: ops whose local call needs the offset of the rank's block (masks, random numbers). They are recipes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from spmd.comm.chunk import Unit, joined_unit
from spmd.tensor.placement import REPLICATE, Partial, Placement, Shard


@dataclass(frozen=True)
class Factor:
    """Ties a dim to the other dims with the same factor name. `unit` indices of the dim make one index of the factor.

    Flattening [6, 5] to [30] ties dim 0 of the input (unit 1) to dim 0 of the result (unit 5). It may also tie dim 1 of
    the input to the result: that has all indices of the factor six times, in six `blocks`, one after the other.
    """

    name: Hashable
    unit: int = 1
    blocks: int = 1

    @property
    def units(self) -> Unit:
        """How the dim is made of the factor."""
        return joined_unit(self.blocks, self.unit)

    def __repr__(self):
        text = str(self.name) if self.unit == 1 else f"{self.unit}*{self.name}"
        return text if self.blocks == 1 else f"{self.blocks}x{text}"


Dims = tuple[Factor | None, ...]
"""One entry for each tensor dim: its factor, or None where the op must see all of the dim."""


@dataclass(frozen=True)
class Law:
    """How Partials of some kinds pass through an op. `ins` and `outs` are letters, see `laws`."""

    kinds: tuple[str, ...]
    ins: tuple[str, ...]
    outs: tuple[str, ...]


OPPOSITE = {"max": "min", "min": "max"}


def laws(*texts: str) -> tuple[Law, ...]:
    """Laws from their notation: reduce kinds, then a letter for each operand, then a letter for each result.

    p: a Partial of the kind. q: a Partial of the opposite kind (max, min). r: replicated. A last letter with dots is
    repeated for all further tensors.

    >>> laws("sum avg: p r -> p")
    (Law(kinds=('sum', 'avg'), ins=('p', 'r'), outs=('p',)),)
    """
    return tuple(_law(text) for text in texts)


def _law(text: str) -> Law:
    kinds, row = text.split(":")
    ins, outs = row.split("->")
    return Law(tuple(kinds.split()), tuple(ins.split()), tuple(outs.split()))


class CountArguments(NamedTuple):
    """The names of arguments that count indices of a dim, and whether it is of the first result, not operand."""

    names: tuple[str, ...]
    dim: int
    of_result: bool = False


@dataclass(frozen=True)
class Rule:
    """Says which placements are right for one op on one axis.

    ins: the dims of each operand. outs: the dims of each result; None for a result that is the same on every rank.
    kind: the Partial that a summed factor leaves, or None if no factor may be summed.
    nonempty: factors of which no rank may have an empty shard (a maximum of nothing is an error).
    sizes: the name of the argument that is the size of a result. It is replaced by the local size. sized: the position
    of that result.
    counts: the names of arguments that count indices of a dim of the first operand, or of the first result, and that
    dim. Each counts whole blocks of the dim; on the ranks it is replaced by how many of these indices the rank has.
    added: the positions of the operands that the op adds to its sums. Where a factor is summed they must be a Partial
    of the kind, because otherwise they would be counted once for each rank. `x.index_add(0, i, y)` has one, x, where
    the rows of y are sharded.
    """

    ins: tuple[Dims, ...]
    outs: tuple[Dims | None, ...]
    kind: str | None = None
    laws: tuple[Law, ...] = ()
    nonempty: frozenset = field(default_factory=frozenset)
    sizes: str | None = None
    added: frozenset = field(default_factory=frozenset)
    sized: int = 0
    counts: CountArguments | None = None

    @property
    def factors(self) -> tuple[Hashable, ...]:
        """The factors that may be sharded, in order of appearance."""
        left = dict.fromkeys(f.name for dims in self.ins for f in dims if f)
        right = {f.name for dims in self.outs if dims is not None for f in dims if f}
        return tuple(f for f in left if f in right or self.kind)

    def is_free(self, factor: Hashable) -> bool:
        """Whether every result has a dim of the factor, so that an empty block gives empty results."""
        return all(dims is not None and any(f and f.name == factor for f in dims) for dims in self.outs)

    def __str__(self):
        def side(tensors: Iterable[Dims | None]) -> str:
            return ", ".join(" ".join(str(f or "_") for f in t) if t is not None else "*" for t in tensors)

        return f"{side(self.ins)} -> {side(self.outs)}"


@dataclass(frozen=True)
class Row:
    """One right choice of placements on one axis. `factor` is the factor that is sharded, if there is one."""

    ins: tuple[Placement, ...]
    outs: tuple[Placement, ...]
    factor: Hashable | None = None

    @cached_property
    def has_partial(self) -> bool:
        """Whether some tensor is Partial by it."""
        return any([isinstance(placement, Partial) for placement in (*self.ins, *self.outs)])

    def __str__(self):
        return f"{', '.join(map(str, self.ins))} -> {', '.join(map(str, self.outs))}"


def rows(rule: Rule) -> tuple[Row, ...]:
    """All rows of a rule on one axis. The replicated row is the first."""
    replicated = Row((REPLICATE,) * len(rule.ins), (REPLICATE,) * len(rule.outs))
    sharded = tuple(_factor_row(rule, f) for f in rule.factors)
    partial = tuple(row for law in rule.laws for row in _law_rows(law, rule))
    return (replicated, *sharded, *partial)


def _factor_row(rule: Rule, name: Hashable) -> Row:
    summed = Partial(rule.kind) if rule.kind else REPLICATE
    on_right = any(f and f.name == name for dims in rule.outs if dims is not None for f in dims)
    added = rule.added if not on_right else ()
    ins = tuple(_placement(dims, name, summed if i in added else REPLICATE) for i, dims in enumerate(rule.ins))
    outs = tuple(REPLICATE if dims is None else _placement(dims, name, summed) for dims in rule.outs)
    return Row(ins, outs, name)


def _placement(dims: Dims, name: Hashable, absent: Placement) -> Placement:
    return next((Shard(d, f.unit, f.blocks) for d, f in enumerate(dims) if f and f.name == name), absent)


def _law_rows(law: Law, rule: Rule) -> Iterable[Row]:
    ins, outs = letters_for(law.ins, len(rule.ins)), letters_for(law.outs, len(rule.outs))
    if ins is None or outs is None:
        return
    for kind in law.kinds:
        placements = {"r": REPLICATE, "p": Partial(kind), "q": Partial(OPPOSITE.get(kind, kind))}
        results = tuple(
            REPLICATE if dims is None else placements[c] for c, dims in zip(outs, rule.outs, strict=True)
        )
        yield Row(tuple(placements[c] for c in ins), results)


def letters_for(letters: tuple[str, ...], n: int) -> tuple[str, ...] | None:
    """The letters for n tensors, or None if the law is about another number of tensors."""
    if letters and letters[-1].endswith("..."):
        fixed, last = letters[:-1], letters[-1][0]
        return (*fixed, *last * (n - len(fixed))) if n >= len(fixed) else None
    return letters if len(letters) == n else None
