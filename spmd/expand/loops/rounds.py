"""The rounds of a captured graph, and whether one repeats another.

    round 0    phases 0 and 1: the first forward pass, and the backward pass behind it
    round 1    phases 2 and 3

A round may have several backward passes, such as one of a discriminator and one of a generator: as few as it takes for
the next one to be like it. It repeats the one before if it calls the same with the same, node by node. An operand is a
node of the same round, one of the round before, or something from outside; of these the places count, and of the last
only shape, strides and dtype, for each round may be given its own.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import fx

from spmd import _torch
from spmd.expand.local_map import LocalMapGradientOp, LocalMapOp
from spmd.expand.phases import NEW_VALUE
from spmd.expand.places.roles import phase_of
from spmd.tensor.call import TensorMeta, is_pointwise
from spmd.tensor.recipes.random import Draw
from spmd.tensor.rules.decompositions import decompositions

OUTSIDE = (0, 0)
"""The place of an operand from outside. All others are two numbers as well: how many rounds before the operand is made,
counted from 1 for the same round, and its index there."""

Place = tuple[int, int]

LEAST = 2
"""How many rounds a loop has at least."""


@dataclass(frozen=True, eq=False)
class Round:
    """The nodes of a round. at: the index of each. differing: of those whose arguments are not those in the round
    before, as far as that was asked. numbers: of those that differ from there in numbers alone."""

    nodes: tuple[fx.Node, ...]
    before: Round | None = None
    differing: set[int] = field(default_factory=set)
    numbers: set[int] = field(default_factory=set)

    @cached_property
    def at(self) -> dict[fx.Node, int]:
        return {node: i for i, node in enumerate(self.nodes)}

    def place(self, operand: fx.Node) -> Place:
        """Where an operand of one of the nodes is made."""
        if (index := self.at.get(operand)) is not None:
            return 1, index
        index = None if self.before is None else self.before.at.get(operand)
        return OUTSIDE if index is None else (2, index)

    def may_be_given(self, node: fx.Node, is_first: bool = False) -> bool:
        """Whether the round may be given what a node makes: it is made of what is there before, or of views of that."""
        if isinstance(node.target, Draw):
            return False
        return all([self._is_there(n, is_first) for n in _torch.operands_of(node)])

    def _is_there(self, operand: fx.Node, is_first: bool) -> bool:
        rounds_before, _ = self.place(operand)
        if rounds_before == 1:
            return _is_view(operand) and self.may_be_given(operand, is_first)
        return is_first or rounds_before == 0

    def note_differing(self, node: fx.Node) -> None:
        """Note that a node is not what it is in the round before; then the views that it reads are made as it is."""
        self.differing.add(self.at[node])
        for n in _torch.operands_of(node):
            if n in self.at:
                self.note_differing(n)

    def repeats(self, other: Round, is_first: bool) -> bool:
        """Whether it does what the other does, which is the one before. is_first: whether the other is the first of a
        loop, which reads from outside what later ones read of the round before."""
        if not self.nodes or len(self.nodes) != len(other.nodes):
            return False
        pairs = _Pairs(self, other, is_first)
        return all(map(pairs.are_alike, other.nodes, self.nodes)) and len(pairs.strides) <= 1


@dataclass(frozen=True)
class _Pairs:
    """Nodes of a round beside those of the one before. strides: by how much the numbers of their draws differ. unlike:
    the nodes, by their indices, whose values are of another size, say: a round may be given what is made of them."""

    round: Round
    other: Round
    is_first: bool
    strides: set[int] = field(default_factory=set)
    unlike: set[int] = field(default_factory=set)

    def are_alike(self, one: fx.Node, next_: fx.Node) -> bool:
        """Whether the node does in its round what the one does in the round before."""
        if one.op != next_.op or one.meta.get(NEW_VALUE) != next_.meta.get(NEW_VALUE):
            return False
        is_constant, is_like = one.op == "get_attr", make_alike(one.meta.get("val"), next_.meta.get("val"))
        if is_constant and is_like:
            self.round.differing.add(self.round.at[next_])
            return True
        if one.target is not next_.target and not self._targets_are_alike(one.target, next_.target):
            return False
        if not is_like:
            self.unlike.add(self.round.at[next_])
            return self._may_differ(one, next_)
        if self._are_alike(one.args, next_.args) and self._are_alike(one.kwargs, next_.kwargs):
            return True
        return self._may_differ(one, next_) or self._differ_in_numbers(one, next_)

    def _targets_are_alike(self, one: Any, next_: Any) -> bool:
        if isinstance(one, Draw) and isinstance(next_, Draw):
            self.strides.add(next_.number - one.number)
            return replace(one, number=0) == replace(next_, number=0)
        if isinstance(one, LocalMapOp) and isinstance(next_, LocalMapOp):
            return one.does_as(next_)
        if isinstance(one, LocalMapGradientOp) and isinstance(next_, LocalMapGradientOp):
            return one.of.does_as(next_.of)
        return type(one) is type(next_) and one == next_

    def _are_alike(self, one: Any, next_: Any) -> bool:
        if isinstance(one, fx.Node):
            if not isinstance(next_, fx.Node):
                return False
            mine, theirs = self.other.place(one), self.round.place(next_)
            if mine[0] == 1 or theirs[0] == 1:
                return mine == theirs and theirs[1] not in self.unlike
            return (mine == theirs or self.is_first) and make_alike(one.meta.get("val"), next_.meta.get("val"))
        if isinstance(one, (tuple, list)):
            return type(one) is type(next_) and len(one) == len(next_) and all(map(self._are_alike, one, next_))
        if isinstance(one, dict):
            return one.keys() == next_.keys() and all([self._are_alike(one[name], next_[name]) for name in one])
        return type(one) is type(next_) and (one is next_ or one == next_)

    def _may_differ(self, one: fx.Node, next_: fx.Node) -> bool:
        """Whether each round may be given what these nodes make, so that their arguments may differ."""
        if not isinstance(one.target, _torch.OpOverload) and one.op != "call_function":
            return False
        if not (self.other.may_be_given(one, self.is_first) and self.round.may_be_given(next_)):
            return False
        self.round.note_differing(next_)
        return True

    def _differ_in_numbers(self, one: fx.Node, next_: fx.Node) -> bool:
        """Whether they differ in numbers alone that each round may be given."""
        places = numbers_of(one)
        if not places or places != numbers_of(next_):
            return False
        mine, theirs = ([None if i in places else x for i, x in enumerate(n.args)] for n in (one, next_))
        if not (self._are_alike(mine, theirs) and self._are_alike(one.kwargs, next_.kwargs)):
            return False
        self.round.numbers.add(self.round.at[next_])
        return True


def numbers_of(node: fx.Node) -> dict[int, type]:
    """The arguments, by their places, that are numbers and may as well be known only when the program runs: factors and
    terms of ops on elements. With their types."""
    op = node.target
    if not isinstance(op, _torch.OpOverload) or not is_pointwise(op) or op in decompositions:
        return {}
    named = enumerate(zip(op._schema.arguments, node.args, strict=False))
    return {i: type(x) for i, (a, x) in named if type(x) in (int, float) and "int" not in str(a.type) and _is_plain(x)}


def _is_plain(x: float) -> bool:
    """Whether rules say the same of a number whatever it is: of zero and infinity they say less."""
    return x != 0 and math.isfinite(x)


def make_alike(one: Any, next_: Any) -> bool:
    """Whether two values are alike, without their data."""
    if one is next_:
        return True
    if isinstance(one, (tuple, list)):
        return type(one) is type(next_) and len(one) == len(next_) and all(map(make_alike, one, next_))
    if isinstance(one, torch.Tensor) and isinstance(next_, torch.Tensor):
        one, next_ = TensorMeta.of(one), TensorMeta.of(next_)
    if isinstance(one, TensorMeta):
        return one == next_
    return type(one) is type(next_)


def _is_view(node: fx.Node) -> bool:
    """Whether a node shows what its operand has, or is a constant."""
    is_op = isinstance(node.target, _torch.OpOverload)
    return node.op == "get_attr" or node.target is operator.getitem or (is_op and _torch.is_view(node.target))


Pass = list[fx.Node]
"""The nodes of a forward pass, of the backward pass behind it, and of the step of an optimiser behind that."""


def passes_of(graph: fx.Graph) -> list[Pass]:
    """The passes of a graph that have a backward one; none where its phases are not in order, or there are too few."""
    if phase_of(next(iter(reversed(graph.nodes)))) < 2 * LEAST:  # most graphs: there are too few
        return []
    found: list[Pass] = []
    last, of_step = 0, _of_steps(graph)
    for node in graph.nodes:
        if node.op not in ("call_function", "get_attr"):
            continue
        phase = phase_of(node)
        if phase < last:
            return []
        found += [[] for _ in range(phase // 2 + 1 - len(found))]
        found[-2 if node in of_step else -1].append(node)
        last = phase
    return found[: (last + 1) // 2]


def _of_steps(graph: fx.Graph) -> set[fx.Node]:
    """The nodes behind backward passes, up to the last new value of a parameter that an optimiser's step makes, and
    what clears or logs what was made before it. So no gradients go from round to round, but new parameters."""
    found: set[fx.Node] = set()
    phases = [list(nodes) for _, nodes in groupby(list(graph.nodes), phase_of)]  # its iterator does not stay at the end
    for before, nodes in pairwise(phases):
        ends = [i for i, n in enumerate(nodes) if NEW_VALUE in n.meta]
        if not ends or phase_of(nodes[0]) % 2:
            continue
        end, new = max(ends) + 1, {nodes[i] for i in ends}
        earlier = {*before, *nodes[:end]} - new
        while end < len(nodes) and not (read := set(_torch.operands_of(nodes[end]))) & new and read & earlier:
            earlier.add(nodes[end])
            end += 1
        found.update(nodes[:end])
    return found


def longest_run(passes: Sequence[Pass]) -> Sequence[Round]:
    """The rounds, each of which repeats the one before, that have most of the passes; none where there are none."""
    kinds, best, most = _kinds(passes), [], 0
    for length in range(1, len(passes) // LEAST + 1):
        starts = [start for start in range(length) if _may_repeat(kinds, start, length)]
        for start in _between_few(passes, starts, length) if most < len(passes) - length else ():
            found = _longest_run(_rounds(passes, start, length))
            if len(found) * length > most:
                best, most = found, len(found) * length
    return best


def in_pairs(run: Sequence[Round]) -> Sequence[Round]:
    """Of rounds that repeat each other the last ones, two and two as one: what reads the round before the last reads
    the one before then."""
    return _longest_run(_rounds([list(each.nodes) for each in run], len(run) % 2, 2))


def _between_few(passes: Sequence[Pass], starts: Sequence[int], length: int) -> Sequence[int]:
    """Of the places where rounds of several passes may begin, those where the fewest values are carried: a round that
    begins with the second pass of the user's would be given all that his first one has made for it."""
    if length == 1 or not starts:
        return starts
    middle = (len(passes) - length) // 2
    counts = {start: _crossing(passes, middle + (start - middle) % length) for start in starts}
    return [start for start in starts if counts[start] == min(counts.values())]


def _crossing(passes: Sequence[Pass], at: int) -> int:
    """How many values of the passes before one are read by it or later."""
    before = {node for each in passes[:at] for node in each}
    return len({n for each in passes[at:] for node in each for n in _torch.operands_of(node)} & before)


def _kinds(passes: Sequence[Pass]) -> tuple[int, ...]:
    """A number for each pass: the same for those that call the same ops."""
    seen: dict[tuple, int] = {}
    return tuple([seen.setdefault(tuple(map(_kind, nodes)), len(seen)) for nodes in passes])


def _kind(node: fx.Node) -> object:
    return id(node.target) if isinstance(node.target, _torch.OpOverload) else type(node.target)


def _may_repeat(kinds: tuple[int, ...], start: int, length: int) -> bool:
    """Whether rounds of so many passes follow each other that are alike, and of which no part is a round already."""
    rounds = [kinds[i : i + length] for i in range(start, len(kinds) - length + 1, length)]
    return any(a == b and not _is_of_equal_parts(a) for a, b in pairwise(rounds))


def _is_of_equal_parts(kinds: tuple[int, ...]) -> bool:
    n = len(kinds)
    return any(n % part == 0 and kinds == kinds[:part] * (n // part) for part in range(1, n // 2 + 1))


def _rounds(passes: Sequence[Pass], start: int, length: int) -> list[Round]:
    rounds: list[Round] = []
    for i in range(start, len(passes) - length + 1, length):
        nodes = tuple([node for each in passes[i : i + length] for node in each])
        rounds.append(Round(nodes, rounds[-1] if rounds else None))
    return rounds


def _longest_run(rounds: Sequence[Round]) -> Sequence[Round]:
    best, start = rounds[:0], 0
    while start + 1 < len(rounds):
        end = start + 1
        while end < len(rounds) and rounds[end].repeats(rounds[end - 1], is_first=end - 1 == start):
            end += 1
        if end - start > max(1, len(best)):
            best = rounds[start:end]
        start = max(end - 1, start + 1) if end - start > 1 else end
    return best
