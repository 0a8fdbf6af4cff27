"""When what is stored in shards is moved: in each phase anew, and so is what follows from it alone.

    w: stored f32[64@dp, 16]      t = aten.t(w)      mm(x, t)      mm(g, t)

In the forward w is moved for the view of it, or the view for the product; in the backward again, because the program
lets go of what was gathered, and writes the view once more (`places/reads.py`). So for each phase there is a value to
be moved. A reader does not take the shards for terms of a sum either: that sum would be as large as what is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

from torch import fx

from spmd import _torch
from spmd.expand.places.places import Places
from spmd.expand.places.reads import phases_of_reading
from spmd.expand.places.roles import Roles
from spmd.tensor.call import is_pointwise
from spmd.tensor.rules.rule import Row
from spmd.tensor.spec import Spec

UPDATE, END = -1, -2
"""In the place of a phase in which a parameter is moved: for its update, and where its new value is kept."""


class Following:
    """The values that follow parameters which are stored elsewhere than they are computed with: views, and arithmetic
    on the shards. of: for each the parameter."""

    def __init__(self, graph: fx.Graph, roles: Roles, places: Mapping[fx.Node, Places]) -> None:
        self.roles, self.places = roles, places
        self.of: dict[fx.Node, fx.Node] = {n: n for n in places}
        for node in graph.nodes:
            operands = node.all_input_nodes
            if len(operands) == 1 and operands[0] in self.of and node in roles.compute and _follows(node, operands[0]):
                self.of[node] = self.of[operands[0]]

    def __contains__(self, value: fx.Node) -> bool:
        return value in self.of

    def moved_in(self, value: fx.Node, reader: fx.Node) -> Sequence[int | None]:
        """When a value is moved for a reader: in the phases of those that read it or a view of it; once if it is kept
        for all of them; for the update; None where it is moved once for all readers."""
        if value not in self.of:
            return (None,)
        if reader not in self.roles.compute:
            return (UPDATE,) if value in self.places else (None,)
        if self.places[self.of[value]].reshard is False:
            return (0,) if value in self.places else (None,)
        return phases_of_reading(reader)

    def reordered(
        self, sources: Mapping[fx.Node, Spec], spec_of: Callable[[fx.Node, Mapping[fx.Node, Spec]], Spec]
    ) -> Iterator[tuple[fx.Node, Spec]]:
        """Values with their specs that follow parameters of which two axes shard a dim in another order than that of
        the mesh. spec_of: that of the result of a node for these operands."""
        given = {n: sources[n] for n in self.places if n in sources and sources[n].is_reordered}
        for node in self.of:
            operands = node.all_input_nodes
            if node not in self.places and operands[0] in given:
                given[node] = spec_of(node, given)
                yield node, given[node]

    def may_take(self, row: Row, operands: Sequence[fx.Node]) -> bool:
        """Whether a reader may have its operands so. What is smaller than another operand may be a term of a sum, as a
        bias that is added to a product: the sum is of the other one's size, and owed by it, too."""
        most = max([_size(n) for n in operands], default=0)
        terms = [n for p, n in zip(row.ins, operands, strict=True) if p.is_partial()]
        return not any(n in self.of and _size(n) == most for n in terms)


def _size(node: fx.Node) -> int:
    return prod(node.meta["val"].shape)


def _follows(node: fx.Node, operand: fx.Node) -> bool:
    """Whether a node is a view of its operand, or has each of its elements changed."""
    if not isinstance(node.target, _torch.OpOverload) or not hasattr(node.meta.get("val"), "shape"):
        return False
    same = node.meta["val"].shape == operand.meta["val"].shape
    return _torch.is_view(node.target) or (is_pointwise(node.target) and same)
