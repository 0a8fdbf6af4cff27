"""Write a program in which some units are freed and computed again: what `again.py` foresees."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace

from torch import fx

from spmd.expand.nodes import copied
from spmd.expand.passes.recompute.again import Lookup
from spmd.expand.passes.recompute.values import Values
from spmd.expand.program import Program


def rewritten(lookup: Lookup, freed: Collection[int]) -> Program:
    """The program of these values, in which these units are freed and computed again."""
    return _Writer(lookup.values, lookup, frozenset(freed)).program()


@dataclass
class _Writer:
    """Writes a copy of the program. copied: by place, its nodes in the new graph. again: the copies of some."""

    values: Values
    lookup: Lookup
    freed: frozenset[int]
    graph: fx.Graph = field(default_factory=fx.Graph)
    copied: dict[fx.Node, fx.Node] = field(default_factory=dict)
    again: dict[int, fx.Node] = field(default_factory=dict)

    def program(self) -> Program:
        self.places = {node: i for i, node in enumerate(self.values.nodes)}
        lacking = self.lookup.readers(self.freed)
        for j, node in enumerate(self.values.nodes):
            lacks = lacking.get(j, ())
            for place in lacks:
                self._write(place, j)
            new = {self.values.nodes[place]: self.again[place] for place in lacks}
            self.copied[node] = copied(self.graph, node, lambda n, new=new: new.get(n) or self.copied[n])
        (old,), (output,) = (g.find_nodes(op="output") for g in (self.values.program.graph, self.graph))
        output.meta = dict(old.meta)
        return replace(self.values.program, graph=self.graph)

    def _write(self, place: int, j: int) -> None:
        """Write a node again, before place j, with what it needs and is not there."""
        if place in self.again or self.lookup.is_there(place, j, self.freed):
            return
        node = self.values.nodes[place]
        for r in self.values.work.tasks[place].reads:
            self._write(r, j)
        self.again[place] = copied(self.graph, node, lambda n: self.again.get(self.places[n]) or self.copied[n])
