"""Constraints in a captured graph: identities that say how a value is to lie.

    x = spmd.constrain(self.up(x), {"tp": Shard(2)})      a node `ConstrainOp` in the graph, and one of its gradient
    placements={"blocks.*.mlp": {"tp": Shard(2)}}         the same nodes, put there when the trace is done (`pins.py`)

The expander moves the operand of such a node to its spec and writes nothing else. The choice for the program takes the
spec as given, or, on axes that are open, chooses among the layouts that agree with it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import fx

from spmd.mesh import DeviceMesh
from spmd.tensor.annotations.constraint import Constraint, captured_by
from spmd.tensor.placement import Placement
from spmd.tensor.spec import Spec

_library = torch.library.Library("spmd", "FRAGMENT")
_library.define("constrain(Tensor x, int number) -> Tensor")
_library.impl("constrain", lambda x, number: x.clone(), "CompositeExplicitAutograd")

PINNED = "pinned by"
"""In the metadata of a node of a program: what the user has said of its value."""


@dataclass(frozen=True)
class ConstrainOp:
    """The target of a node of a captured graph: the identity of its operand, which is to lie so."""

    constraint: Constraint

    @property
    def __name__(self) -> str:
        return f"constrain[{self.constraint}]"

    def spec(self, spec: Spec, chosen: tuple[Placement, ...] | None = None) -> Spec:
        """The spec that a value of this spec gets. chosen: what open axes were chosen to be."""
        found = self.constraint.spec(spec)
        if chosen is None or self.constraint.is_complete:
            return found
        pairs = zip(self.constraint.placements, found.placements, chosen, strict=True)
        wanted = [own if p is not None or new.is_partial() else new for p, own, new in pairs]
        return Constraint(tuple(wanted), self.constraint.said).spec(found)

    def __call__(self, *_: object) -> object:
        raise AssertionError("the expander replaces this by moves")


@contextmanager
def capture_constraints(mesh: DeviceMesh | None) -> Iterator[Callable[[fx.Graph], None]]:
    """Inside, `spmd.constrain` writes nodes into the graph. Yields a function that gives them their targets."""
    found: list[Constraint] = []

    def write(x: torch.Tensor, constraint: Constraint) -> torch.Tensor:
        if constraint not in found:
            found.append(constraint)
        return torch.ops.spmd.constrain(x, found.index(constraint))

    def insert(graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.spmd.constrain.default):
            constraint = found[node.args[1]].of_tensor(node.meta["val"].ndim)
            node.target, node.args = ConstrainOp(constraint), node.args[:1]

    with captured_by(mesh, write):
        yield insert


def constrain_node(node: fx.Node, constraint: Constraint, users: Collection[fx.Node] | None = None) -> fx.Node:
    """Put a constraint behind a node, for these that read it, by default all."""
    graph, last = node.graph, node
    if node.op == "placeholder":
        last = [n for n in graph.nodes if n.op == "placeholder"][-1]
    with graph.inserting_after(last):
        new = graph.create_node("call_function", ConstrainOp(constraint), (node,))
    node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new and (users is None or user in users))
    new.meta |= {k: v for k, v in node.meta.items() if k in ("val", "phase", "origin")}
    return new
