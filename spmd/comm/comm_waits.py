"""Where a program with in-place collectives waits: before the first node that needs the data, and nowhere else.

`place_waits` reads a complete graph. A collective is in flight from its launch until a wait. In the meantime

- nothing may touch what it writes: a reader waits for that tensor, and for no other output of the collective;
- nothing may write what it reads;
- the program may not end: what nobody has read is waited for at the end.

Views and sizes do not touch the data. Two nodes share memory if the schemas between them say so - a view of a tensor,
the result of `add_` - or if their tensors did in the trace. The parts of one tensor count as that tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

from torch.fx import Graph, Node

from spmd import _torch
from spmd.comm.comm_launch import collective_of, leaves, pair

WAIT = _torch.c10d_functional.wait_tensor.default

METADATA = {
    "aten::sym_size", "aten::sym_stride", "aten::sym_numel", "aten::sym_storage_offset", "aten::sym_is_contiguous",
    "aten::size", "aten::stride", "aten::numel", "aten::dim", "aten::storage_offset", "prim::device",
}  # fmt: skip
"""Ops that look at a tensor's shape and not at its data; so do the factories, `empty_like` and `new_zeros`."""


def place_waits(graph: Graph, alike: Iterable[tuple[Node, ...]] = ()) -> None:
    """Put a wait_tensor where the program first needs what a collective has in flight.

    alike: nodes that share memory in ways the graph does not show, such as inputs that are views of one tensor.
    RuntimeError for collectives of torch.distributed on tensors that were not wrapped.
    """
    memory = _Memory(graph, alike)
    order = {node: i for i, node in enumerate(graph.nodes)}
    flights: list[_Flight] = []
    for node in order:
        _refuse_unwrapped(node)
        if node.target is pair:
            flights.append(_Flight.of(node, memory))
            continue
        for flight in flights:
            for part in flight.needed_by(node, memory):
                flight.land(part)
                _wait(part, node, order)
            if node.target is WAIT:
                flight.land(node.args[0])
        flights = [flight for flight in flights if flight.parts]


def _wait(part: Node, reader: Node, order: dict[Node, int]) -> None:
    """Wait for the part before the reader, which reads what arrived, as do all later ones."""
    graph = part.graph
    with graph.inserting_before(reader):
        arrived = graph.create_node("call_function", WAIT, (part,), name="wait_tensor")
    arrived.meta = dict(part.meta)
    for user in list(part.users):
        if user is not arrived and order.get(user, -1) >= order[reader]:
            user.replace_input_with(part, arrived)


@dataclass
class _Flight:
    """A collective between launch and wait."""

    parts: list[Node]  # what `pair` gave and nobody has waited for
    writes: bool  # whether the parts are what the collective writes; else there is nothing but what it reads
    reads: set[Node]  # the memory that it reads
    landed: bool = False  # whether one part has been waited for, so that all has arrived

    @classmethod
    def of(cls, node: Node, memory: _Memory) -> _Flight:
        launch = node.args[1]
        collective = collective_of(launch.target)
        parts = [user for user in node.users if user.target is operator.getitem]
        reads = {memory[x] for x in collective.read(launch.args)}
        return cls(parts, bool(collective.written(launch.args)), reads)

    def needed_by(self, node: Node, memory: _Memory) -> list[Node]:
        """The parts that must arrive before the node runs."""
        if node.op == "output":
            return list(self.parts)
        needed = []
        if self.writes and not _is_passive(node):
            touched = {memory[x] for x in node.all_input_nodes}
            needed = [part for part in self.parts if memory[part] in touched]
        if not needed and not self.landed and self.reads & {memory[x] for x in _written(node)}:
            needed = self.parts[:1]
        return needed

    def land(self, part: Node) -> None:
        """The part is waited for."""
        if part in self.parts:
            self.parts.remove(part)
            self.landed = True


def _is_passive(node: Node) -> bool:
    """Whether the node leaves the data of its inputs alone."""
    target = node.target
    if target in (pair, operator.getitem, WAIT):
        return True
    if not isinstance(target, _torch.OpOverload):
        return False
    # reshape, contiguous and the like are views at times and copies at others.
    view = _torch.is_view(target) and not _torch.is_composite(target)
    name = _torch.qualified_name(target)
    return view or name in METADATA or name.endswith("_like") or name.startswith("aten::new_")


def _written(node: Node) -> list[Node]:
    """The inputs that the node writes; of a function we do not know all."""
    if node.op in ("placeholder", "get_attr", "output") or _is_passive(node):
        return []
    if (collective := collective_of(node.target)) is not None:
        return collective.written(node.args)
    if not isinstance(node.target, _torch.OpOverload):
        return node.all_input_nodes
    return _given(node, _torch.written(node.target))


def _given(node: Node, names: tuple[str, ...]) -> list[Node]:
    """The nodes among the arguments of these names."""
    given = dict(zip((a.name for a in _torch.arguments(node.target)), node.args, strict=False)) | node.kwargs
    return [x for x in leaves([given.get(name) for name in names]) if isinstance(x, Node)]


class _Memory:
    """Which nodes share memory: `memory[x]` is the same node for all that do."""

    def __init__(self, graph: Graph, alike: Iterable[tuple[Node, ...]]) -> None:
        self._parent: dict[Node, Node] = {}
        for node in graph.nodes:
            for other in _sharing(node):
                self._join(node, other)
        for first, *others in alike:
            for other in others:
                self._join(first, other)

    def __getitem__(self, node: Node) -> Node:
        while (parent := self._parent.get(node, node)) is not node:
            node = parent
        return node

    def _join(self, a: Node, b: Node) -> None:
        self._parent[self[b]] = self[a]


def _sharing(node: Node) -> list[Node]:
    """The inputs whose memory the node shows, or may show."""
    if node.op in ("placeholder", "get_attr", "output") or node.target is pair:
        return []
    if collective_of(node.target) is not None:
        return []
    if isinstance(node.target, _torch.OpOverload):
        return _given(node, _torch.shown(node.target))
    if node.target is operator.getitem:
        source, index = node.args
        if isinstance(source, Node) and source.target is pair:
            return [source.args[0][index]]
        return [source] if _sharing(source) else []
    return node.all_input_nodes


def _refuse_unwrapped(node: Node) -> None:
    if isinstance(node.target, _torch.OpOverload) and node.target.namespace == "c10d":
        name = _torch.qualified_name(node.target).removeprefix("c10d::").strip("_")
        raise RuntimeError(
            f"{name}: traced before the first CommTensor, it freezes this run's process group in the graph. Wrap what "
            f"it is given, {name}(CommTensor(x)), or any tensor before it."
        )
