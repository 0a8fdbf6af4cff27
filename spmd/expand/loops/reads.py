"""What the rounds of a loop read: of themselves, of each other, and from outside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from torch import fx

from spmd.expand.loops.rounds import Round, make_alike, numbers_of
from spmd.tensor.recipes.random import Draw

BODY, CARRIED, INVARIANT, ITEM, NUMBER, DRAWS = "body", "carried", "invariant", "item", "number", "draws"


class Source(NamedTuple):
    """Where a round has an operand from. key: for a value of the body, or one that is carried, the index of the node
    that makes it; for an invariant its node; for an item the nodes, or the texts of the numbers, of all rounds."""

    kind: str
    key: Any = None


class CannotRoll(Exception):
    """Rounds that read more of each other than a loop can give them."""


@dataclass
class RoundReads:
    """given: the indices of the nodes that are made before the loop. of: for each other node its operands, as often as
    they occur. invariants, items: those that are read. carried: by the index of a node, the one from outside that the
    first round reads in its place. numbers: those of all rounds, by their texts. numbers_of: by the index of a node and
    the place of an argument, which of these it is. draws: where random numbers begin. stride: how many draws a round
    makes."""

    rounds: Sequence[Round]
    given: frozenset[int] = frozenset()
    of: dict[int, list[Source]] = field(default_factory=dict)
    invariants: dict[fx.Node, None] = field(default_factory=dict)
    items: dict[tuple[fx.Node, ...], None] = field(default_factory=dict)
    carried: dict[int, fx.Node] = field(default_factory=dict)
    numbers: dict[tuple[str, ...], tuple[float, ...]] = field(default_factory=dict)
    numbers_of: dict[int, dict[int, Source]] = field(default_factory=dict)
    draws: fx.Node | None = None
    stride: int = 0

    @classmethod
    def find(cls, rounds: Sequence[Round]) -> RoundReads:
        """What the rounds read, each of which repeats the one before. CannotRoll where no loop could give it."""
        found = cls(rounds)
        several = list(zip(*[each.nodes for each in rounds], strict=True))
        found.given = frozenset(set().union(*[each.differing for each in rounds[1:]]))
        before = {n for i in found.given for n in several[i]}
        inside = {n for nodes in several for n in nodes} - before
        for i, nodes in enumerate(several):
            operands = list(zip(*map(_leaves, nodes), strict=True))
            if i in found.given:
                if any(n in inside for each in operands for n in each):
                    raise CannotRoll
            else:
                found.of[i] = [found._source(nodes, each, inside) for each in operands]
        for i in set().union(*[each.numbers for each in rounds[1:]]) - found.given:
            found.numbers_of[i] = {place: found._number(several[i], place) for place in numbers_of(several[i][0])}
        return found

    @property
    def times(self) -> int:
        """How many rounds there are."""
        return len(self.rounds)

    def _source(self, readers: tuple[fx.Node, ...], operands: tuple[fx.Node, ...], inside: set[fx.Node]) -> Source:
        if isinstance(readers[0].target, Draw) and operands[0] is readers[0].args[1]:
            return self._draws(readers, operands[0])
        rounds_before, index = self.rounds[1].place(operands[1])
        if rounds_before and index not in self.given:
            if rounds_before == 1:
                return Source(BODY, index)
            made = self.rounds[0].nodes[index].meta.get("val")
            if operands[0] in inside or not make_alike(operands[0].meta.get("val"), made):
                raise CannotRoll
            if self.carried.setdefault(index, operands[0]) is not operands[0]:
                raise CannotRoll
            return Source(CARRIED, index)
        if not inside.isdisjoint(operands):
            raise CannotRoll
        if all(n is operands[0] for n in operands):
            self.invariants.setdefault(operands[0])
            return Source(INVARIANT, operands[0])
        self.items.setdefault(operands)
        return Source(ITEM, operands)

    def _number(self, readers: tuple[fx.Node, ...], place: int) -> Source:
        numbers = tuple([n.args[place] for n in readers])
        key = tuple(map(repr, numbers))
        self.numbers.setdefault(key, numbers)
        return Source(NUMBER, key)

    def _draws(self, readers: tuple[fx.Node, ...], draws: fx.Node) -> Source:
        numbers = [n.target.number for n in readers]
        strides = {b - a for a, b in pairwise(numbers)}
        if len(strides) > 1 or (self.draws is not None and strides != {self.stride}):
            raise CannotRoll
        self.draws, self.stride = draws, strides.pop()
        return Source(DRAWS)


def _leaves(node: fx.Node) -> list[fx.Node]:
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found
