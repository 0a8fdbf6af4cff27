"""What is alive at one moment of a written program, as values of the graph, and what a byte of each is to cost.

    60,000,000 bytes at mm_7:  relu as it was made, a copy of linear for mm_7, all else 21,103,872

A value is alive as it was made, or as a copy that was moved for some of its readers. What is alive is read from the
program as it runs, so views, buckets and what is written in place are counted as they are. Inputs lie where they were
given, and what ops take for themselves follows from no layout of a value: these are the rest, which nothing changes.

`Prices` are the multipliers of a limit: microseconds a byte, for all that is alive at the moments that were found to
need the most. They say what it is worth that a value is smaller then.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from spmd.expand.memory import Alive, Memory
from spmd.expand.nodes import source_of
from spmd.expand.program import Program
from spmd.tensor.redistribute.bucket import Bucket
from spmd.tensor.redistribute.plan import Step


@dataclass(frozen=True)
class Held:
    """A value that is alive. readers: of a copy, the ops that it was moved for, by name; None for what was made.

    times: how often its bytes are there, such as twice where a collective has sent what is put in order then. nbytes:
    of these as it lies; 0 of an input, which lies where it was given.
    """

    value: str
    readers: tuple[str, ...] | None
    times: float
    nbytes: int


@dataclass(frozen=True)
class Moment:
    """What is alive where a program needs the most. peak: all of its bytes."""

    peak: int
    held: tuple[Held, ...]

    @classmethod
    def of(cls, program: Program, memory: Memory, values: Mapping[str, fx.Node]) -> Moment:
        """The moment at which a program needs the most, by its memory. values: for the nodes of the program that make
        values of the graph, by name, these."""
        return cls(memory.peak, tuple(_Reader(program, values).held(memory.alive)))


@dataclass(frozen=True)
class Rates:
    """Microseconds a byte: of a value as it was made, of each copy of it beside that, and of each layout that is needed
    where only copies are alive."""

    made: float = 0.0
    moved: float = 0.0
    needed: float = 0.0

    @classmethod
    def mean(cls, rates: Sequence[Rates]) -> Rates:
        """The mean of several."""
        of = [(r.made, r.moved, r.needed) for r in rates]
        return cls(*[sum(each) / len(of) for each in zip(*of, strict=True)])


@dataclass(frozen=True)
class Prices:
    """us: microseconds a byte of the peak. shares: the moments at which it has been, with the part that each has."""

    us: float = 0.0
    shares: tuple[tuple[Moment, float], ...] = ()
    _made: dict[str, float] = field(default_factory=Counter, compare=False, repr=False)
    _moved: dict[tuple[str, str], float] = field(default_factory=Counter, compare=False, repr=False)
    _needed: dict[tuple[str, str], float] = field(default_factory=Counter, compare=False, repr=False)

    def __post_init__(self) -> None:
        for moment, share in self.shares:
            made = {held.value for held in moment.held if held.readers is None}
            for held in moment.held:
                if held.readers is None:
                    self._made[held.value] += self.us * share * held.times
                of = self._moved if held.value in made else self._needed
                for reader in held.readers or ():
                    of[held.value, reader] += self.us * share * held.times

    def of(self, made: str | None, value: str, readers: Sequence[str]) -> Rates:
        """The rates of a value that these ops read. made: its name, where it is made and not moved before."""
        moved, needed = (max([of.get((value, r), 0.0) for r in readers], default=0.0)
                         for of in (self._moved, self._needed))  # fmt: skip
        return Rates(self._made.get(made, 0.0), moved, needed)


FREE = Prices()
"""No byte costs anything."""


@dataclass
class _Reader:
    """Reads what is alive. values: as in `Moment.of`."""

    program: Program
    values: Mapping[str, fx.Node]

    def held(self, alive: Iterable[Alive]) -> Iterator[Held]:
        """The values that are alive. What is of no value is left out."""
        nodes = {node.name: node for node in self.program.graph.nodes}
        by_node: dict[fx.Node, list[int]] = {}
        for each in alive:
            if each.of in nodes:
                by_node.setdefault(nodes[each.of], []).append(each.nbytes)
        for node, sizes in by_node.items():
            if node.op == "call_function":
                yield from self._of_node(node, sizes)
            elif node.name in self.values:
                yield Held(self.values[node.name].name, None, 1.0, 0)

    def _of_node(self, node: fx.Node, sizes: Sequence[int]) -> Iterator[Held]:
        target = node.target
        if isinstance(target, Bucket):
            times = sum(sizes) / max(sum([spec.local_nbytes for spec in target.after]), 1)
            items = {user.args[1]: user for user in node.users}
            for i, (value, spec) in enumerate(zip(node.args[0], target.after, strict=True)):
                yield from self._moved(value, items.get(i, node), spec.local_nbytes, times)
        elif _before(node) is not None:
            nbytes = node.meta["spec"].local_nbytes
            yield from self._moved(node, node, nbytes, sum(sizes) / max(nbytes, 1))
        elif isinstance(node.meta.get("spec"), tuple):
            yield from self._several(node, list(sizes))
        elif node.name in self.values:
            yield Held(self.values[node.name].name, None, 1.0, sum(sizes))

    def _several(self, node: fx.Node, sizes: list[int]) -> Iterator[Held]:
        """The results of an op, told apart by their bytes."""
        for user in node.users:
            spec = user.meta.get("spec")
            if user.name in self.values and spec is not None and spec.local_nbytes in sizes:
                sizes.remove(spec.local_nbytes)
                yield Held(self.values[user.name].name, None, 1.0, spec.local_nbytes)

    def _moved(self, node: fx.Node, moved: fx.Node, nbytes: int, times: float) -> Iterator[Held]:
        """A copy of the value that moves have made a node of. moved: what its readers read."""
        maker = node
        while (before := _before(maker)) is not None:
            maker = before
        if maker.name in self.values:
            readers = tuple(dict.fromkeys(source_of(n) for n in _readers(moved)))
            yield Held(self.values[maker.name].name, readers, times, round(nbytes * times))


def _before(node: fx.Node) -> fx.Node | None:
    """What a move has moved to be this; None for what is no move's."""
    if isinstance(node.target, Step):
        return node.args[0]
    if node.target is operator.getitem and isinstance(node.args[0].target, Bucket):
        return node.args[0].args[0][node.args[1]]
    return None


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """The ops that read a value, or what it is moved to."""
    for user in node.users:
        if isinstance(user.target, (Step, Bucket)) or _before(user) is not None:
            yield from _readers(user)
        elif user.op == "call_function":
            yield user
