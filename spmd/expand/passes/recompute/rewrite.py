"""Write a program in which some units are computed again or wait in host memory: what `again.py` foresees."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

from torch import fx

from spmd.expand.nodes import LINE, added, copied, line_of
from spmd.expand.passes.recompute.again import Lookup
from spmd.expand.passes.recompute.copies import Copy
from spmd.expand.passes.recompute.values import Root, Values
from spmd.expand.program import Program
from spmd.tensor.recipes.host import from_host, on_host, to_host


def rewritten(lookup: Lookup, freed: Collection[int], copies: Sequence[Copy] = ()) -> Program:
    """The program of these values, in which these units are freed and computed again, and these are copied."""
    return _Writer(lookup.values, lookup, frozenset(freed), tuple(copies)).program()


@dataclass
class _Writer:
    """Writes a copy of the program. copied: by place, its nodes in the new graph. again: the copies of some, written
    again or fetched. away: by place, what is on its way to host memory, or there."""

    values: Values
    lookup: Lookup
    freed: frozenset[int]
    copies: tuple[Copy, ...]
    graph: fx.Graph = field(default_factory=fx.Graph)
    copied: dict[fx.Node, fx.Node] = field(default_factory=dict)
    again: dict[int, fx.Node] = field(default_factory=dict)
    away: dict[int, fx.Node] = field(default_factory=dict)

    def program(self) -> Program:
        self.places = {node: i for i, node in enumerate(self.values.nodes)}
        self.hosted = frozenset(copy.unit for copy in self.copies)
        self.begins, self.leaves, self.returns = map(self._at, ("begins", "leaves", "returns"))
        lacking = self.lookup.readers(self.freed | self.hosted)
        for j, node in enumerate(self.values.nodes):
            self._copy(j)
            lacks = lacking.get(j, ())
            for place in lacks:
                self._write(place, j)
            new = {self.values.nodes[place]: self.again[place] for place in lacks}
            self.copied[node] = copied(self.graph, node, lambda n, new=new: new.get(n) or self.copied[n])
        (old,), (output,) = (g.find_nodes(op="output") for g in (self.values.program.graph, self.graph))
        output.meta = dict(old.meta)
        return replace(self.values.program, graph=self.graph)

    def _copy(self, j: int) -> None:
        """Write what is copied before place j."""
        for root in self.begins.get(j - 1, ()):
            self.away[root.place] = self._moved(to_host, root, self.copied[self.values.nodes[root.place]])
        for root in self.leaves.get(j - 1, ()):
            x = self.copied[self.values.nodes[root.place]]
            self.away[root.place] = self._moved(on_host, root, self.away[root.place], x)
        for root in self.returns.get(j, ()):
            self.again[root.place] = self._moved(from_host, root, self.away[root.place])

    def _at(self, when: str) -> dict[int, list[Root]]:
        """By place, the values that are begun, have left or return there."""
        found: dict[int, list[Root]] = {}
        for copy in self.copies:
            found.setdefault(getattr(copy, when), []).extend(self.values.units[copy.unit])
        return found

    def _moved(self, target: Callable, root: Root, *args: fx.Node) -> fx.Node:
        node = self.values.nodes[root.place]
        new = added(self.graph, "call_function", target, args, {}, f"{node.name}_{target.__name__}")
        new.meta |= {"spec": node.meta["spec"], LINE: line_of(node)}
        return new

    def _write(self, place: int, j: int) -> None:
        """Write a node again, before place j, with what it needs and is not there."""
        if place in self.again or self.lookup.is_there(place, j, self.freed, self.hosted):
            return
        node = self.values.nodes[place]
        for r in self.values.work.tasks[place].reads:
            self._write(r, j)
        self.again[place] = copied(self.graph, node, lambda n: self.again.get(self.places[n]) or self.copied[n])
