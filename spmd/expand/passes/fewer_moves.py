"""Fewer moves: what is moved twice, back and forth, round about, or for nobody is left out.

    g = all_gather(x); h = all_gather(x); mm(g, w); mm(h, v)    ->    g = all_gather(x); mm(g, w); mm(g, v)
    y = slice(all_gather(x)), laid out as x; relu(y)            ->    relu(x)
    y = all_to_all(all_gather(x)); relu(y)                      ->    y = the cheapest plan from x; relu(y)
    g = all_gather(x), which nobody reads                       ->    (nothing)

Of a chain of moves the first value is moved by its cheapest plan, where that costs less than what is saved. So an
all-reduce whose readers want shards alone becomes a reduce-scatter; but that may add up in another order, and is done
only where `reductions` says so. Moves are equal if they move one value: the same node, or the same op of equal
operands, such as two casts of one parameter, with nothing written in between.

A value that is read later than it was stays alive for longer, so a move is left out only where that fits into the
memory that the program needs anyway. Left alone are pinned values, buckets, and the second gather of a parameter that
is to be freed behind the forward (`Places.reshard`).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from spmd import _torch
from spmd.expand.constraints import PINNED
from spmd.expand.nodes import described
from spmd.expand.passes.keep_gathered import copied, gathered_again, last_read
from spmd.expand.passes.report import Noted
from spmd.expand.passes.room import Room
from spmd.expand.program import Program
from spmd.tensor.redistribute.bucket import Bucket
from spmd.tensor.redistribute.plan import Plan, Step, plan
from spmd.tensor.spec import Spec

LEAST_US = 1e-9
"""Less than that is no difference of two prices."""


def fewer_moves(program: Program, reductions: bool = False) -> Noted:
    """The same program with fewer moves, and what was done. reductions: whether sums may be added in another order."""
    did, left = (), ()
    while True:
        program, new, left = _once(program, reductions)  # what was shortened may be equal to something else now
        did += new
        if not new:
            return Noted(program, did, left)


def _once(program: Program, reductions: bool) -> tuple[Program, tuple[str, ...], tuple[str, ...]]:
    alive = program.work.memory(range(len(program.work.tasks)))
    made = copied(program)
    places = {node: i for i, node in enumerate(made.graph.nodes)}
    tidier = _Tidier(made, reductions, places, Room(alive, max(alive, default=0)))
    tidier.drop_unread()
    tidier.join_equal()
    tidier.shorten()
    tidier.drop_unread()
    return made if tidier.did else program, tuple(tidier.did), tuple(tidier.left)


@dataclass
class _Tidier:
    """A graph that is being changed. places: of its nodes as they were. did, left: as in `Noted`."""

    program: Program
    reductions: bool
    places: dict[fx.Node, int]
    room: Room
    did: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    # ---- for nobody ---------------------------------------------------------------------------
    def drop_unread(self) -> None:
        """Remove the moves that nobody reads, and the ops that were computed for them alone."""
        for node in reversed(self.program.graph.nodes):
            if node.users or not _is_pure(node):
                continue
            if _sends(node):
                self.did.append(f"{node.name} is read by nobody: {node.target.nbytes:,} bytes less are sent")
            self.program.graph.erase_node(node)

    # ---- twice --------------------------------------------------------------------------------
    def join_equal(self) -> None:
        """Let the readers of a move read an equal one that was made before."""
        freed = gathered_again(self.program)
        for node, first in list(_equal(self.program.graph)):
            if not isinstance(node.target, Step) or not node.target.sends or not node.users:
                continue
            if node in freed:
                self.left.append(f"{node.name} equals {first.name}: its parameter is to be freed behind the forward")
            elif self._stays(first, node, node.target.after.local_nbytes):
                self.did.append(f"{node.name} equals {first.name}: {node.target.nbytes:,} bytes less are sent")
                node.replace_all_uses_with(first)

    def _stays(self, value: fx.Node, until: fx.Node, nbytes: int, gone: Sequence[fx.Node] = ()) -> bool:
        """Whether a value can be alive until another node reads it, if others are gone; if so, it is noted that it is.

        gone: values that nobody reads any more, each behind the one that read it.
        """
        start, stop = last_read(value, self.places), self.places[until]
        spans = [(self.places[n], self.places[next(iter(n.users))], -n.target.after.local_nbytes) for n in gone]
        for span in spans:
            self.room.take(*span)
        if self.room.has(start, stop, nbytes):
            self.room.take(start, stop, nbytes)
            return True
        for first, last, freed in spans:
            self.room.take(first, last, -freed)
        self.left.append(f"{until.name}: there is no memory to keep {value.name} for it, {nbytes:,} bytes")
        return False

    # ---- back and forth, and round about --------------------------------------------------------
    def shorten(self) -> None:
        """Move the first value of a chain of moves by its cheapest plan, where that saves time."""
        for node in [n for n in self.program.graph.nodes if _is_link(n) and n.users]:
            ways = sorted(self._ways(node), key=lambda way: -way.saved)
            best = next((way for way in ways if self.reductions or not way.changes_sums), None)
            if ways and best is not ways[0]:
                why = "sums may be added in another order; FewerMoves(reductions=True) allows it"
                self.left.append(f"{ways[0]}: {why}")
            if best is not None and self._stays(best.start, node, _kept_bytes(best.start), best.unread[1:]):
                self.did.append(str(best))
                node.replace_all_uses_with(self._written(best))

    def _ways(self, node: fx.Node) -> Iterator[_Way]:
        chain, value = [node], node.args[0]
        while _is_link(value):
            chain.append(value)
            value = value.args[0]
            spec, want = value.meta["spec"], node.meta["spec"]
            if spec.shape == want.shape and spec.dtype == want.dtype:
                way = _Way(tuple(chain), value, plan(spec, want))
                if way.saved > LEAST_US:
                    yield way

    def _written(self, way: _Way) -> fx.Node:
        """The value after the moves of a way, written in front of the end of its chain."""
        value, end = way.start, way.chain[0]
        for step in way.moves.effective.steps:
            made = next((n for n in value.users if n.target == step and n < end), None)  # nodes compare by places
            if made is None:
                with self.program.graph.inserting_before(end):
                    made = self.program.graph.create_node("call_function", step, (value,), {}, name=step.move.kind)
                made.meta |= {**end.meta, "spec": step.after}
                self.places[made] = self.places[end]
            value = made
        return value


@dataclass(frozen=True)
class _Way:
    """Another way to the end of a chain of moves. chain: its moves, the last one first. start: the value that is moved.
    moves: the plan for it."""

    chain: tuple[fx.Node, ...]
    start: fx.Node
    moves: Plan

    @property
    def unread(self) -> list[fx.Node]:
        """The moves that nobody reads any more, if this way is taken."""
        found = [self.chain[0]]
        for node in self.chain[1:]:
            if set(node.users) != {found[-1]}:
                break
            found.append(node)
        return found

    @property
    def saved(self) -> float:
        """The microseconds of the moves that nobody reads any more, less those of the plan."""
        return sum([n.target.cost for n in self.unread]) - sum([s.cost for s in self.moves.effective.steps])

    @property
    def changes_sums(self) -> bool:
        """Whether something is added up, in the chain or in the plan."""
        return any(s.reduces for s in (*[n.target for n in self.chain], *self.moves.effective.steps))

    def __str__(self):
        new = ", ".join(map(str, self.moves.effective.steps)) or "nothing"
        return f"{new} in place of {', '.join(str(n.target) for n in reversed(self.chain))}: {self.saved:,.1f} us less"


def _is_link(node: fx.Node) -> bool:
    """Whether a node is a move of a tensor to another layout that no user asked for."""
    step = node.target
    return isinstance(step, Step) and step.move.keeps_tensor and step.kind != "view" and PINNED not in node.meta


def _sends(node: fx.Node) -> bool:
    return isinstance(node.target, (Step, Bucket)) and node.target.sends


def _kept_bytes(node: fx.Node) -> int:
    """The bytes that are kept alive with a value; inputs are held in any case."""
    return 0 if node.op in ("placeholder", "get_attr") else node.meta["spec"].local_nbytes


def _is_pure(node: fx.Node) -> bool:
    """Whether all that a node does is to make its result, and an equal call would make an equal one."""
    op = node.target
    if node.op != "call_function" or PINNED in node.meta:
        return False
    if isinstance(op, _torch.OpOverload):
        return not _torch.written(op) and torch.Tag.nondeterministic_seeded not in op.tags
    return isinstance(op, (Step, Bucket)) or getattr(op, "__name__", "") == "getitem"


def _equal(graph: fx.Graph) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The nodes that have the value of one before them, with the first such one; nothing was written between."""
    first: dict[Hashable, fx.Node] = {}
    same: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        same[node] = node
        if isinstance(node.target, _torch.OpOverload) and _torch.written(node.target):
            first.clear()
        if not _is_pure(node) or not isinstance(node.meta.get("spec"), (Spec, tuple)):
            continue
        try:
            key = node.target, described(node.args, same.get), described(node.kwargs, same.get), node.meta["spec"]
            same[node] = first.setdefault(key, node)
        except TypeError:  # an argument that has no hash
            continue
        if same[node] is not node:
            yield node, same[node]
