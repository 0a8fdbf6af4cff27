"""Verify the graph that a rank runs: what it launches, waits for, writes into and returns.

    add_(w, u); mul(w, 2)             ProgramFault, "write": mul reads what add_ has overwritten
    y = all_reduce(x, ...); relu(y)   ProgramFault, "wait": the result is read before it is there

All ranks have one program, and each launches its collectives in the program's order, over the program's axes. So no
rank waits for a collective that another one launches later or on another group.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from spmd import _torch
from spmd.comm import Transport
from spmd.expand.passes.aliasing import Memory, is_loop, memories, written_into
from spmd.expand.verify import ProgramFault
from spmd.tensor.recipes.host import arrived, from_host, on_host, to_host
from spmd.tensor.recipes.updates import WRITTEN, adamw_
from spmd.tensor.redistribute.all_ranks import of_rank
from spmd.tensor.redistribute.bucket import Bucket
from spmd.tensor.redistribute.plan import Step

if TYPE_CHECKING:
    from spmd.expand.program import Program

COLLECTIVES = frozenset({
    "all_reduce", "all_reduce_", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast",
    "all_reduce_coalesced", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced",
})  # fmt: skip
SIZES = frozenset({"view", "reshape", "expand", "new_zeros", "new_ones", "new_empty", "new_full"})

_WAITS = {to_host: on_host, from_host: arrived}
"""For what begins a copy to or from host memory, what waits for it."""

Found = Iterator[tuple[str, fx.Node, str]]
"""Faults: the name of each, where it is, and what is wrong."""


def verify_bound(
    graph: fx.Graph,
    program: Program,
    coordinate: tuple[int, ...],
    transport: Transport,
    owned: Sequence[bool],
    homes: Sequence[int | None],
    written: frozenset[str] = frozenset(),
) -> None:
    """Raise a `ProgramFault` for the first thing in a rank's graph that is not right.

    owned, homes: as for the passes `reuse_memory` and `unshare_outputs`. written: the names of ops that wrote in place
    before any pass: their readers mean the new value.

    The names of faults: order, wait, host copy, launch, collective, group, size, write, home, shared memory.
    """
    bound = _Bound(graph, program, coordinate, transport, tuple(owned), tuple(homes), written)
    for fault, node, why in bound.faults():
        raise ProgramFault(fault, node, why)


@dataclass(frozen=True, eq=False)
class _Bound:
    graph: fx.Graph
    program: Program
    coordinate: tuple[int, ...]
    transport: Transport
    owned: tuple[bool, ...]
    homes: tuple[int | None, ...]
    written: frozenset[str]

    def faults(self) -> Found:
        checks = (
            self.order, self.waits, self.launches, self.collectives, self.groups, self.sizes, self.overwritten,
            self.outputs,
        )  # fmt: skip
        return itertools.chain.from_iterable(check() for check in checks)

    @cached_property
    def position(self) -> Mapping[fx.Node, int]:
        return {node: i for i, node in enumerate(self.graph.nodes)}

    @cached_property
    def launched(self) -> list[fx.Node]:
        return [node for node, name in self.names.items() if name in COLLECTIVES]

    @cached_property
    def names(self) -> Mapping[fx.Node, Any]:
        """The name of the function that each node calls."""
        return {node: _name(node) for node in self.graph.nodes}

    @cached_property
    def placeholders(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    # ---- order and waits ----------------------------------------------------------------------
    def order(self) -> Found:
        known: set[fx.Node] = set()
        for node in self.graph.nodes:
            if not known.issuperset(_torch.operands_of(node)):
                yield "order", node, "an operand is made after it is read"
            known.add(node)

    def waits(self) -> Found:
        for node in self.launched:
            results = [user for user in node.users if _name(user) == "getitem"] or [node]
            for result in results:
                waits = [user for user in result.users if _name(user) == "wait_tensor"]
                if len(waits) != 1:
                    yield "wait", node, f"its result is waited for {len(waits)} times"
                if others := [user for user in result.users if user not in waits]:
                    yield "wait", others[0], f"it reads {result.name}, which is not waited for"
        for node in self.graph.nodes:
            wait = _WAITS.get(node.target)
            if wait is not None and [user.target for user in node.users] != [wait]:
                yield "wait", node, f"one {wait.__name__} must wait for it: {', '.join(map(str, node.users))} do"
            if node.target is on_host and node.args[0].args != (node.args[1],):
                yield "host copy", node, f"it keeps {node.args[1].name} until another value was copied"
            if node.target is from_host and node.args[0].target is not on_host:
                yield "wait", node, f"{node.args[0].name} was not waited for"

    # ---- launches -----------------------------------------------------------------------------
    def launches(self) -> Found:
        """Whether the moves of the program are launched once each, in its order."""
        moves = {node.name: node.target for node, _ in self.program.steps()}
        mine = [node for node in self.launched if "move" in node.meta]
        names = [node.meta["move"] for node in mine]
        places = {name: i for i, name in enumerate(moves)}
        for node, before, after in zip(mine[1:], names, names[1:], strict=False):
            if places[before] >= places[after]:
                yield "launch", node, f"{after} is launched after {before}, which comes later in the program"
        for name in moves.keys() - set(names):
            if moves[name].sends and not self._is_empty(moves[name]):
                yield "launch", self.graph.output_node(), f"{name} of the program is not launched"

    def _is_empty(self, move: Step | Bucket) -> bool:
        """Whether no rank of this rank's group receives anything."""
        axes, mesh = move.axes, self.program.mesh
        group = itertools.product(*(range(n) if a in axes else (self.coordinate[a],) for a, n in enumerate(mesh.shape)))
        steps = move.steps if isinstance(move, Bucket) else (move,)
        return not any(of_rank(step.received_by_all, at) for at in group for step in steps)

    def collectives(self) -> Found:
        """Whether each launch is of the kind, the reduction and the sizes that its move has asked for."""
        for node in self.launched:
            want, have = node.meta.get("launched"), (_name(node).removesuffix("_"), *node.args[1:-1])
            if want not in (None, have):
                yield "collective", node, f"it launches {have}, and the program's move asks for {want}"

    def groups(self) -> Found:
        moves = {node.name: node.target for node, _ in self.program.steps()}
        for node in self.launched:
            if "move" in node.meta:
                axes = moves[node.meta["move"]].axes
                if node.args[-1] != self.transport.group(self.program.mesh, axes):
                    names = self.program.axes_text(axes)
                    yield "group", node, f"its group is {node.args[-1]!r}, and the program's move goes over {names}"

    # ---- sizes --------------------------------------------------------------------------------
    def sizes(self) -> Found:
        """Whether an op that is given the size of its result is given that of this rank's block."""
        for node, name in self.names.items():
            spec = node.meta.get("spec") if name in SIZES else None
            if spec is None or isinstance(spec, tuple):
                continue
            if isinstance(node.args[1], torch.dtype):  # a view of the same bytes as another dtype
                continue
            want, given = spec.local_shape(self.coordinate), tuple(node.args[1])
            if len(want) != len(given) or any(g not in (-1, w) for w, g in zip(want, given, strict=True)):
                yield "size", node, f"it makes a tensor of {list(given)}, and this rank's block has {list(want)}"

    # ---- memory -------------------------------------------------------------------------------
    def overwritten(self) -> Found:
        for node in self.graph.nodes:
            if node.name not in self.written:
                for operand in written_by(node):
                    yield from self._write(node, operand)

    def _write(self, node: fx.Node, target: fx.Node) -> Found:
        memory, position = self.memories[target], self.position
        at = position[node]
        if memory.base.op == "get_attr" or (memory.base in self._is_owned and not self._is_owned[memory.base]):
            yield "write", node, f"it writes into {memory.base.name}, which is not the program's to change"
        reads = self.reads.get(memory.base, ())
        for _, made, reader, operand in itertools.islice(reads, bisect.bisect(reads, (at, math.inf)), None):
            if made < at and not self._is_updated(operand, at):
                named = reader if reader.target is operator.getitem else operand  # an item is all that is read of it
                if self.memories[named].overlaps(memory):
                    yield "write", node, f"{reader.name} reads {operand.name} after it"
        for launch, sent, wait in self.under_way.get(memory.base, ()):
            if position[launch] < at < position[wait] and self.memories[sent].overlaps(memory):
                yield "write", node, f"{launch.name} still sends {memory.base.name}"

    def _is_updated(self, node: fx.Node, at: int) -> bool:
        """Whether a fused update at this place has written into the node: its readers mean the new value."""
        return (node, at) in self._updates

    @cached_property
    def _updates(self) -> frozenset[tuple[fx.Node, int]]:
        """The operands that fused updates write into, each with the place of the update."""
        updates = [n for n in self.graph.nodes if n.target is adamw_]
        return frozenset((n.args[i], self.position[n]) for n in updates for i in WRITTEN)

    @cached_property
    def _is_owned(self) -> Mapping[fx.Node, bool]:
        return dict(zip(self.placeholders, self.owned, strict=True))

    @cached_property
    def memories(self) -> Mapping[fx.Node, Memory]:
        """The memory that each node may share. To be asked once operands are known to be made before they are read."""
        return memories(self.graph)

    @cached_property
    def reads(self) -> Mapping[fx.Node, list[tuple[int, int, fx.Node, fx.Node]]]:
        """For each node with memory of its own: the reads of this memory, in order, as (place of the reader, place of
        the operand, reader, operand)."""
        found: dict[fx.Node, list[tuple[int, int, fx.Node, fx.Node]]] = {}
        memories, position = self.memories, self.position
        for at, node in enumerate(self.graph.nodes):
            for operand in _torch.operands_of(node):
                found.setdefault(memories[operand].base, []).append((at, position[operand], node, operand))
        return found

    @cached_property
    def under_way(self) -> Mapping[fx.Node, list[tuple[fx.Node, fx.Node, fx.Node]]]:
        """For each node with memory of its own: the collectives that send it, as (launch, operand, wait)."""
        found: dict[fx.Node, list[tuple[fx.Node, fx.Node, fx.Node]]] = {}
        for node in self.launched:
            for operand in _torch.operands_of(node):
                found.setdefault(self.memories[operand].base, []).extend((node, operand, wait) for wait in node.users)
        return found

    def outputs(self) -> Found:
        """Whether each output is a block of its home, and no two outputs share memory."""
        output = self.graph.output_node()
        taken: dict[fx.Node, dict[Memory, None]] = {n: {Memory(n): None} for n in self.placeholders}
        for value, home in zip(output.args[0], self.homes, strict=True):
            if not isinstance(value, fx.Node) or value.meta.get("spec") is None:
                continue
            spec, into = value.meta["spec"], None if home is None else self.placeholders[home]
            place = spec if into is None else into.meta["spec"]
            if spec.shape != place.shape or not spec.same_layout(place):
                yield "home", output, f"{value.name} is {spec}, and its home {into.name} is {place}"
            if into is not None and written_into(value) is into:
                continue
            mine = self.memories[value]
            others = taken.setdefault(mine.base, {})
            # Those that are taken are pieces of one split, or one alone: a bucket has a thousand.
            if mine in others or any(map(mine.overlaps, itertools.islice(others, 1))):
                yield "shared memory", output, f"{value.name} shares memory with another output or an input"
            others[mine] = None


def _name(node: fx.Node) -> Any:
    """The name of the function that a node calls."""
    target = node.target
    if isinstance(target, _torch.OpOverload):
        return _name_of(target)
    return getattr(target, "__name__", None) if node.op == "call_function" else None


@lru_cache(maxsize=4096)
def _name_of(op: _torch.OpOverload) -> str:
    return _torch.qualified_name(op).split("::")[1]


def written_by(node: fx.Node) -> tuple[fx.Node, ...]:
    """The operands that a node writes into; those that a loop may write into."""
    if is_loop(node):
        return tuple([node.args[i] for i in node.target.overwritten])
    if node.target is adamw_:
        return tuple([node.args[i] for i in WRITTEN])
    return (node.args[0],) if writes(node) else ()


def writes(node: fx.Node) -> bool:
    """Whether the node is an op that writes into its first operand."""
    if isinstance(node.target, _torch.OpOverload):
        return bool(node.args) and _torch.writes_first(node.target)
    return _name(node) == "all_reduce_"
