"""Place the waits of a program with in-place collectives: before the first node that needs the data, nowhere else.

`place_waits` takes a complete graph. A collective is in flight from its launch until a wait. In the meantime

- no node may use a tensor that it writes: a reader waits for that tensor, and for no other output of the collective;
- no node may write a tensor that it reads;
- the program may not end: an output that no node has read is waited for at the end.

Views and sizes do not use the data. Two nodes share memory if the schemas between them say so (a view of a tensor, the
result of `add_`), or if their tensors shared memory in the trace. A part of a tensor counts as that tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from dataclasses import dataclass

from torch.fx import Graph, Node

from spmd import _torch
from spmd.comm.comm_tensor_ops import collective_of, leaves, pair

WAIT = _torch.c10d_functional.wait_tensor.default

METADATA = {
    "aten::sym_size", "aten::sym_stride", "aten::sym_numel", "aten::sym_storage_offset", "aten::sym_is_contiguous",
    "aten::size", "aten::stride", "aten::numel", "aten::dim", "aten::storage_offset", "prim::device",
}  # fmt: skip
"""Ops that read a tensor's metadata and not its data. The factories `empty_like`, `new_zeros` etc. do so as well."""


def place_waits(graph: Graph, aliases: Iterable[tuple[Node, ...]] = ()) -> None:
    """Put a wait_tensor before the first node that needs a tensor in flight.

    aliases: nodes that share memory in ways the graph does not show, such as inputs that are views of one tensor.
    RuntimeError for collectives of torch.distributed on tensors that were not wrapped.
    """
    memory = _SharedMemory(graph, aliases)
    order = {node: i for i, node in enumerate(graph.nodes)}
    flights: list[_InFlight] = []
    for node in order:
        _refuse_unwrapped(node)
        if node.target is pair:
            flights.append(_InFlight.of(node, memory))
            continue
        for flight in flights:
            for part in flight.needed_by(node, memory):
                flight.mark_arrived(part)
                _wait(part, node, order)
            if node.target is WAIT:
                flight.mark_arrived(node.args[0])
        flights = [flight for flight in flights if flight.parts]


def _wait(part: Node, reader: Node, order: dict[Node, int]) -> None:
    """Wait for the part before the reader. The reader and all later users read the result of the wait."""
    graph = part.graph
    with graph.inserting_before(reader):
        arrived = graph.create_node("call_function", WAIT, (part,), name="wait_tensor")
    arrived.meta = dict(part.meta)
    for user in list(part.users):
        if user is not arrived and order.get(user, -1) >= order[reader]:
            user.replace_input_with(part, arrived)


@dataclass
class _InFlight:
    """A collective between launch and wait."""

    parts: list[Node]  # the outputs of `pair` that have not been waited for
    writes: bool  # whether the collective writes the parts; otherwise it only reads them
    reads: set[Node]  # the memory that it only reads
    arrived_once: bool = False  # whether one part has been waited for, so that the whole collective is done

    @classmethod
    def of(cls, node: Node, memory: _SharedMemory) -> _InFlight:
        launch = node.args[1]
        collective = collective_of(launch.target)
        parts = [user for user in node.users if user.target is operator.getitem]
        reads = {memory[x] for x in collective.read(launch.args)}
        return cls(parts, bool(collective.written(launch.args)), reads)

    def needed_by(self, node: Node, memory: _SharedMemory) -> list[Node]:
        """The parts that must arrive before the node runs."""
        if node.op == "output":
            return list(self.parts)
        needed = []
        if self.writes and not _leaves_data_alone(node):
            touched = {memory[x] for x in node.all_input_nodes}
            needed = [part for part in self.parts if memory[part] in touched]
        if not needed and not self.arrived_once and self.reads & {memory[x] for x in _written(node)}:
            needed = self.parts[:1]
        return needed

    def mark_arrived(self, part: Node) -> None:
        """Note that the part has been waited for."""
        if part in self.parts:
            self.parts.remove(part)
            self.arrived_once = True


def _leaves_data_alone(node: Node) -> bool:
    """Whether the node neither reads nor writes the data of its inputs."""
    target = node.target
    if target in (pair, operator.getitem, WAIT):
        return True
    if not isinstance(target, _torch.OpOverload):
        return False
    # reshape, contiguous and similar ops sometimes return a view and sometimes a copy.
    view = _torch.is_view(target) and not _torch.is_composite(target)
    name = _torch.qualified_name(target)
    return view or name in METADATA or name.endswith("_like") or name.startswith("aten::new_")


def _written(node: Node) -> list[Node]:
    """The inputs that the node writes; all inputs if the function is not known."""
    if node.op in ("placeholder", "get_attr", "output") or _leaves_data_alone(node):
        return []
    if (collective := collective_of(node.target)) is not None:
        return collective.written(node.args)
    if not isinstance(node.target, _torch.OpOverload):
        return node.all_input_nodes
    return _arguments_named(node, _torch.written(node.target))


def _arguments_named(node: Node, names: tuple[str, ...]) -> list[Node]:
    """The nodes among the arguments with these names."""
    given = dict(zip((a.name for a in _torch.arguments(node.target)), node.args, strict=False)) | node.kwargs
    return [x for x in leaves([given.get(name) for name in names]) if isinstance(x, Node)]


class _SharedMemory:
    """Which nodes share memory: `memory[x]` is the same node for all nodes that share memory with x."""

    def __init__(self, graph: Graph, aliases: Iterable[tuple[Node, ...]]) -> None:
        self._parent: dict[Node, Node] = {}
        for node in graph.nodes:
            for other in _aliased_inputs(node):
                self._join(node, other)
        for first, *others in aliases:
            for other in others:
                self._join(first, other)

    def __getitem__(self, node: Node) -> Node:
        while (parent := self._parent.get(node, node)) is not node:
            node = parent
        return node

    def _join(self, a: Node, b: Node) -> None:
        self._parent[self[b]] = self[a]


def _aliased_inputs(node: Node) -> list[Node]:
    """The inputs that the node's result shares memory with, or may share memory with."""
    if node.op in ("placeholder", "get_attr", "output") or node.target is pair:
        return []
    if collective_of(node.target) is not None:
        return []
    if isinstance(node.target, _torch.OpOverload):
        return _arguments_named(node, _torch.aliased(node.target))
    if node.target is operator.getitem:
        source, index = node.args
        if isinstance(source, Node) and source.target is pair:
            return [source.args[0][index]]
        return [source] if _aliased_inputs(source) else []
    return node.all_input_nodes


def _refuse_unwrapped(node: Node) -> None:
    if isinstance(node.target, _torch.OpOverload) and node.target.namespace == "c10d":
        name = _torch.qualified_name(node.target).removeprefix("c10d::").strip("_")
        raise RuntimeError(
            f"{name}: traced before the first CommTensor, it freezes this run's process group in the graph. Wrap what "
            f"it is given, {name}(CommTensor(x)), or any tensor before it."
        )
