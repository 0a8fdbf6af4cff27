"""A captured graph in which rounds that repeat are one loop.

    round 0, round 1, round 2, ..., round 7    ->    round 0, loop 6 times: round 1; round 7

The first round stays, where it begins what later ones add to. So does the last one, whose gradients are reduced while
it runs. What a round reads from outside is an invariant if all read the same, and an item if each reads another one.
What is made of outside values alone with other numbers, such as `tokens[i]`, is made before the loop.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import fx

from spmd import _torch
from spmd.expand.loops.loop import Loop
from spmd.expand.loops.reads import BODY, CARRIED, DRAWS, NUMBER, CannotRoll, RoundReads, Source
from spmd.expand.loops.rounds import LEAST, Round, in_pairs, longest_run, passes_of
from spmd.expand.nodes import added
from spmd.expand.phases import NEW_VALUE
from spmd.expand.places.roles import phase_of
from spmd.expand.sizes.lift import SIZED
from spmd.tensor.recipes.stream import later


def rolled(graph: fx.Graph) -> fx.Graph:
    """A graph with equal rounds as a loop; the graph itself where there are none, or where more is between them."""
    passes = passes_of(graph)
    if len(passes) <= LEAST:
        return graph
    run = longest_run(passes[:-1])
    reads = _reads_of(run)
    if reads is None or 2 * reads.times < len(run):  # they may read what is further back
        of_pairs = _reads_of(in_pairs(run))
        if of_pairs is not None and (reads is None or 2 * of_pairs.times > reads.times):
            reads = of_pairs
    return graph if reads is None else _Writer(graph, reads).written()


def _reads_of(run: Sequence[Round]) -> RoundReads | None:
    """What the rounds of a loop read: all of these, or the last of them."""
    while len(run) >= LEAST:
        with contextlib.suppress(CannotRoll):  # what the first one reads may be of another dtype than what is carried
            return RoundReads.find(run)
        run = run[1:]
    return None


@dataclass
class _Writer:
    """Writes the graph with a loop. copies: the nodes of the new graph, by those of the given one."""

    graph: fx.Graph
    reads: RoundReads
    new: fx.Graph = field(default_factory=_torch.new_graph)
    copies: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def written(self) -> fx.Graph:
        """The new graph."""
        _torch.take_names(self.new, self.graph)
        rounds, given = self.reads.rounds, self.reads.given
        before = {each.nodes[i] for each in rounds for i in given}
        last = rounds[-1].nodes[-1]
        for node in self.graph.nodes:
            if node not in self._inside or node in before:
                self._copy(node)
            if node is last:
                self._name_results(self._loop())
        return self.new

    @cached_property
    def _inside(self) -> set[fx.Node]:
        return {n for each in self.reads.rounds for n in each.nodes}

    def _copy(self, node: fx.Node) -> None:
        arguments = fx.map_arg((node.args, node.kwargs), self.copies.__getitem__)
        self.copies[node] = copy = _torch.copy_named(self.new, node, *arguments)
        copy.meta.update(node.meta)

    # ---- the loop -------------------------------------------------------------------------------
    def _loop(self) -> fx.Node:
        reads, made = self.reads, self._made
        items = len(reads.items) + len(reads.numbers) + (reads.draws is not None)
        counts = len(reads.invariants), len(reads.carried), items, len(made.last), len(made.every)
        loop = Loop(self._body(), reads.times, *counts)
        operands = [*reads.invariants, *reads.carried.values(), *[n for several in reads.items for n in several]]
        given = [*[self.copies[n] for n in operands], *self._numbers(), *self._draws()]
        node = added(self.new, "call_function", loop, tuple(given), {}, "loop")
        first, last = reads.rounds[0].nodes, reads.rounds[-1].nodes[-1]
        values = loop.results([first[i].meta.get("val") for i in made.indices])
        is_sized = any(first[i].meta.get(SIZED) for i in made.indices)
        node.meta.update({"val": values, "phase": phase_of(last), SIZED: is_sized})
        return node

    def _numbers(self) -> list[fx.Node]:
        """Numbers of Python that are others in each round."""
        found = []
        for number in (x for numbers in self.reads.numbers.values() for x in numbers):
            node = added(self.new, "call_function", operator.pos, (number,), {}, "number")
            node.meta.update({"val": number, "phase": phase_of(self.reads.rounds[0].nodes[0])})
            found.append(node)
        return found

    def _draws(self) -> list[fx.Node]:
        """Where the random numbers of each round begin."""
        if self.reads.draws is None:
            return []
        rng, found = self.copies[self.reads.draws], []
        for number in range(self.reads.times):
            node = added(self.new, "call_function", later, (rng, number * self.reads.stride), {}, "later")
            node.meta["phase"] = phase_of(self.reads.rounds[0].nodes[0])
            found.append(node)
        return found

    @cached_property
    def _made(self) -> _Made:
        """What the loop gives."""
        carried, last, every = list(self.reads.carried), [], []
        end = self.reads.times - 1
        for i in range(len(self.reads.rounds[0].nodes)):
            readers = [any(n not in self._inside for n in each.nodes[i].users) for each in self.reads.rounds]
            if i not in self.reads.given and any(readers[:end]):
                every.append(i)
            elif i not in self.reads.given and readers[end] and i not in self.reads.carried:
                last.append(i)
        return _Made(carried, last, every)

    def _name_results(self, loop: fx.Node) -> None:
        """Write what names the results of the loop that are read behind it."""
        end = self.reads.times - 1
        for place, (i, number) in enumerate(self._made.results(self.reads.times)):
            of = self.reads.rounds[end if number is None else number].nodes[i]
            if of not in self.copies and any(n not in self._inside for n in of.users):
                item = added(self.new, "call_function", operator.getitem, (loop, place), {}, "getitem")
                value = {name: of.meta[name] for name in ("val", SIZED, NEW_VALUE) if name in of.meta}
                item.meta.update(value | {"phase": loop.meta["phase"]})
                self.copies[of] = item

    # ---- its body -------------------------------------------------------------------------------
    def _body(self) -> fx.Graph:
        body, reads, inputs = _torch.new_graph(), self.reads, {}
        first = reads.rounds[0].nodes
        sources = [
            *[(Source("invariant", n), n.meta) for n in reads.invariants],
            *[(Source(CARRIED, i), first[i].meta) for i in reads.carried],
            *[(Source("item", several), several[0].meta) for several in reads.items],
            *[(Source(NUMBER, key), {"val": numbers[0]}) for key, numbers in reads.numbers.items()],
            *([(Source(DRAWS), reads.draws.meta)] if reads.draws is not None else []),
        ]
        for source, like in sources:
            inputs[source] = node = added(body, "placeholder", source.kind, (), {}, source.kind)
            node.target = node.name
            value = {name: like[name] for name in ("val", SIZED) if name in like}
            node.meta.update(value | {"phase": phase_of(first[0])})
        for i, node in enumerate(first):
            if i not in reads.given:
                operands = iter([inputs[source] for source in reads.of[i]])
                args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n, operands=operands: next(operands))
                numbers = reads.numbers_of.get(i, {})
                args = tuple([inputs[numbers[place]] if place in numbers else x for place, x in enumerate(args)])
                inputs[Source(BODY, i)] = copy = added(body, node.op, node.target, args, kwargs, node.name)
                copy.meta.update(node.meta)
        body.output(tuple([inputs[Source(BODY, i)] for i in self._made.indices]))
        return body


@dataclass(frozen=True)
class _Made:
    """The nodes of a round, by their indices, that the next round reads, and those that are read behind the loop."""

    carried: Sequence[int]
    last: Sequence[int]
    every: Sequence[int]

    @property
    def indices(self) -> list[int]:
        """Those of all outputs of the body."""
        return [*self.carried, *self.last, *self.every]

    def results(self, times: int) -> list[tuple[int, Any]]:
        """The index of each result of the loop, and its round; None for the last one."""
        once = [(i, None) for i in (*self.carried, *self.last)]
        return once + [(i, number) for i in self.every for number in range(times)]
