"""A program as tasks: what each node reads, takes, makes and sends. Tasks can be replayed in any order that they allow.

    x = mm(a, b)            Task("x", reads (0, 1), 12.0 us, makes 4,096 bytes)
    y = all_reduce(x)       Task("y", reads (2,), sends on "dp")
    z = relu(y)             Task("z", reads (3,), waits for (3,))

A value that was sent is waited for by its first reader, as `spmd.expand.bind` writes it. Memory is that of the values:
a view has that of its operand, and so has an op that will be made to write into an input (`passes/in_place.py`). Such
an op follows all that read what it overwrites. An op that will write into what another op made counts as new memory
here, so a run may need less than is said; `program.memory()` tells how much. What is in host memory takes none of the
device's, where the two are apart; the wait for a copy to there follows all that read what is freed behind it.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import fx

from spmd import _torch
from spmd.expand.local_ops import SAFE_LOCALLY
from spmd.expand.loops.loop import Loop
from spmd.expand.nodes import line_of
from spmd.expand.timeline.prices import Prices, Sending, is_cut
from spmd.mesh import MeshTopoInfo
from spmd.tensor.recipes.host import HOST_COPIES, ON_HOST, on_host
from spmd.tensor.recipes.updates import WRITTEN, adamw
from spmd.tensor.redistribute.bucket import Bucket
from spmd.tensor.redistribute.plan import Step
from spmd.tensor.spec import Spec

if TYPE_CHECKING:
    from spmd.expand.program import Program


Life = tuple[tuple[int, ...], tuple[int, ...], int, int, "Sending | None", bool, int]
"""What memory asks of a task: its `reads`, `waits`, `makes`, `shows`, `sends`, `is_op` and `beside`."""


class Task(NamedTuple):
    """A node of a program. Other tasks are named by their places in the program.

    reads: whose results it reads. waits: which of the sent values it waits for. follows: what it must come behind,
    though it does not read it. us: its time on the compute stream; of what is sent, the time to pack it. makes: bytes
    of new memory. shows: whose memory its result is, itself or another. is_op: whether it runs at all; inputs, outputs
    and what names one of several results do not. beside: bytes that it needs besides while it runs: a loop for what its
    rounds make. frees: whether memory is freed behind it that others must not read later.
    """

    name: str
    reads: tuple[int, ...]
    waits: tuple[int, ...]
    follows: tuple[int, ...]
    us: float
    makes: int
    shows: int
    sends: Sending | None
    line: str
    is_op: bool
    beside: int = 0
    frees: bool = False


class Lives(NamedTuple):
    """What memory asks of the tasks of a program, each in a list by their places: the fields of `Task`."""

    reads: list[tuple[int, ...]]
    waits: list[tuple[int, ...]]
    makes: list[int]
    shows: list[int]
    sends: list[Sending | None]
    is_op: list[bool]
    beside: list[int]

    @classmethod
    def of(cls, tasks: Sequence[Life]) -> Lives:
        """Those of tasks, in the order of their places."""
        return cls(*map(list, zip(*tasks, strict=True))) if tasks else cls(*[[] for _ in cls._fields])

    def alive(self, order: Sequence[int], held: int, keeps_sent: bool) -> list[int]:
        """For each task, in this order, the bytes that are alive while it runs; the last two as `Work` has them."""
        _, waits, makes, _, sends, _, beside = self
        dying = self._dying(order, keeps_sent)
        now, found, flying = held, [], {}
        for i, dead in zip(order, dying, strict=True):
            now += makes[i]
            if not waits[i] and sends[i] is None:  # most tasks
                found.append(now + beside[i])
                now -= dead
                continue
            arrived = 0
            for w in waits[i]:
                if w in flying:
                    arrived += sends[w].joined + sends[w].terms
                    now -= flying.pop(w)
            if sent := sends[i]:
                kept = sent.packed if keeps_sent else 0
                come = max(0, sent.terms - makes[i])  # the sum is there when it was waited for
                gone = min(come, dead) if sent.packed else 0  # what was packed is freed before terms come
                arrived = max(arrived - come, sent.packed - kept - gone)  # one is behind the other
                flying[i] = kept + come
                now += flying[i]
            found.append(now + arrived + beside[i])
            now -= dead
        return found

    def _dying(self, order: Sequence[int], keeps_sent: bool) -> list[int]:
        """For each place in the order, the bytes that are read there for the last time."""
        reads, waits, makes, shows, sends, is_op, _ = self
        last, sent = [-1] * len(reads), {}
        for at, i in enumerate(order):
            last[shows[i]] = at
            if is_op[i] or not makes[i]:  # what names one of several results keeps no other alive
                for r in reads[i]:
                    last[shows[r]] = at
            if keeps_sent:
                if sends[i] is not None:
                    sent[i] = reads[i]
                for w in waits[i]:
                    for r in sent.pop(w, ()):
                        last[shows[r]] = at
        dying = [0] * len(order)
        for nbytes, at in zip(makes, last, strict=True):
            if at >= 0:
                dying[at] += nbytes
        return dying


@dataclass(frozen=True)
class Work:
    """The tasks of a program, in its order.

    held: bytes of its inputs and constants, which are there all the time. keeps_sent: whether what is sent is kept
    until it was waited for, as on a device that runs behind its program.
    """

    tasks: tuple[Task, ...]
    held: int
    keeps_sent: bool = True

    @classmethod
    def of(cls, program: Program, topology: MeshTopoInfo | None = None) -> Work:
        """The tasks of a program, priced on the topology of its mesh or on another one."""
        return Reader(program).work(topology)

    @cached_property
    def lives(self) -> Lives:
        """What memory asks of its tasks."""
        return Lives.of([(t.reads, t.waits, t.makes, t.shows, t.sends, t.is_op, t.beside) for t in self.tasks])

    def memory(self, order: Sequence[int]) -> list[int]:
        """For each task, in this order, the bytes that are alive while it runs."""
        return self.lives.alive(order, self.held, self.keeps_sent)


def given_back(program: Program) -> tuple[int, ...]:
    """The outputs of the body of a loop that are in the memory of the carried values before, into which it writes."""
    reader = Reader(program)
    nodes = reader.read(Prices(program.mesh))
    reader.find_overwriting(nodes)
    inputs = {name: node for node, (name, _) in zip(nodes, program.inputs, strict=False)}
    outputs = zip(nodes[-1].args[0], program.outputs, strict=True)
    values = enumerate((value, inputs.get(name)) for value, (name, _) in outputs)
    return tuple([i for i, (value, home) in values if home is not None and reader.shows[value] is home])


def keeps_sent(program: Program) -> bool:
    """Whether what a program sends is kept until it was waited for."""
    return program.mesh.device_type != "cpu"


@dataclass
class Reader:
    """Reads the tasks of a program. host_is_apart: whether host memory is another one than the device's. writable: what
    may be overwritten. given_back: for a loop, the bytes of operands in whose memory it gives results. sent: of what is
    sent and of the pieces of buckets, where it is sent. scattered: the last bucket of reduce-scatters."""

    program: Program
    host_is_apart: bool = False
    writable: set[fx.Node] = field(default_factory=set)
    places: dict[fx.Node, int] = field(default_factory=dict)
    shows: dict[fx.Node, fx.Node] = field(default_factory=dict)
    sent: dict[fx.Node, int] = field(default_factory=dict)
    overwrites: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    given_back: dict[fx.Node, int] = field(default_factory=dict)
    scattered: tuple[int, ...] = ()

    def work(self, topology: MeshTopoInfo | None) -> Work:
        prices = Prices(self.program.mesh, topology)
        nodes = self.read(prices)
        self.find_overwriting(nodes)
        ways = zip(nodes, self.lives(nodes, prices), self._barriers(nodes), strict=True)
        tasks = tuple([self._task(node, prices, of_memory, barrier) for node, of_memory, barrier in ways])
        return Work(tasks, self.held(nodes), keeps_sent(self.program))

    def read(self, prices: Prices) -> list[fx.Node]:
        """The nodes, of which is found what is shown and sent."""
        nodes = list(self.program.graph.nodes)
        self.host_is_apart = prices.topology.machine.host is not None
        self.places = {node: i for i, node in enumerate(nodes)}
        self.writable = self._owned(nodes)
        for node in nodes:
            if isinstance(node.target, _torch.OpOverload):  # most nodes: they send nothing
                self.shows[node] = self.shows[node.args[0]] if _shows_first(node.target) else node
                continue
            self.shows[node] = self.shows[node.args[0]] if _shows_operand(node) else node
            if _sends(node):
                self.sent[node] = self.places[node]
            elif _is_piece(node) and not is_cut(node):
                self.sent[node] = self.places[node.args[0]]
        return nodes

    def lives(self, nodes: Sequence[fx.Node], prices: Prices) -> list[Life]:
        """What memory asks of the tasks of these nodes, which come next."""
        places, shows, waits_for_nothing = self.places, self.shows, self.sent.keys().isdisjoint
        found = []
        for node in nodes:
            operands, shown = _torch.operands_of(node), shows[node]
            if node.op == "placeholder":
                found.append(((), (), 0, places[shown], None, False, 0))
                continue
            reads = tuple([places[n] for n in operands])
            if isinstance(node.target, _torch.OpOverload):  # most nodes
                waits = () if waits_for_nothing(operands) else self._waits(node, prices.exchanges_terms)
                makes = made(node) if shown is node else 0
                found.append((reads, waits, makes, places[shown], None, True, 0))
                continue
            is_called = node.op.startswith("call")
            is_op = is_called and (node.target is not operator.getitem or is_cut(node))
            waits = self._waits(node, prices.exchanges_terms) if is_op or node.op == "output" else ()
            makes = made(node) if is_called and shown is node and not self._is_away(node) else 0
            makes -= self.given_back.get(node, 0)
            beside = max(0, node.target.body.beside_inputs - makes) if isinstance(node.target, Loop) else 0
            found.append((reads, waits, makes, places[shown], prices.sending(node), is_op, beside))
        return found

    def held(self, nodes: Sequence[fx.Node]) -> int:
        """Bytes of the inputs and constants."""
        return sum([made(n) for n in self._held(nodes)])

    def _held(self, nodes: Sequence[fx.Node]) -> Iterator[fx.Node]:
        """The inputs and constants. Old gradients that nothing reads are freed before the program runs."""
        kinds = iter(self.program.kinds or ("argument",) * len(self.program.inputs))
        for node in nodes:
            kind = next(kinds) if node.op == "placeholder" else node.op
            if node.op in ("placeholder", "get_attr") and (kind != "grad" or node.users):
                yield node

    def _task(self, node: fx.Node, prices: Prices, of_memory: Life, barrier: tuple[int, ...]) -> Task:
        reads, waits, makes, shows, sends, is_op, beside = of_memory
        places = self.places
        follows = (*[places[n] for n in self.overwrites.get(node, ())], *barrier, *self._read_before(node))
        us = prices.compute_us(node) if is_op else 0.0
        frees = node.target is on_host
        return Task(node.name, reads, waits, follows, us, makes, shows, sends, line_of(node), is_op, beside, frees)

    def _is_away(self, node: fx.Node) -> bool:
        """Whether the value takes none of the device's memory."""
        return self.host_is_apart and not isinstance(node.target, (Step, Bucket)) and node.target in ON_HOST

    def _read_before(self, node: fx.Node) -> list[int]:
        """The other readers of what is freed behind the wait for a copy to host memory."""
        if node.target is not on_host:
            return []
        readers = [self.places[n] for n in self._readers(node.args[1]) if n is not node]
        return [at for at in readers if at < self.places[node]]

    def _waits(self, node: fx.Node, exchanges_terms: bool) -> tuple[int, ...]:
        """The sent values that a node waits for; a piece of a bucket stands for the bucket.

        Where terms are exchanged, a bucket of reduce-scatters waits for the one before.
        """
        operands, earlier = _torch.operands_of(node), ()
        if exchanges_terms and isinstance(node.target, Bucket) and node.target.kind == "reduce_scatter":
            earlier, self.scattered = self.scattered, (self.places[node],)
        if self.sent.keys().isdisjoint(operands):  # most nodes
            return earlier
        return tuple(dict.fromkeys([*earlier, *[self.sent[n] for n in operands if n in self.sent]]))

    # ---- what is written in place -------------------------------------------------------------
    def find_overwriting(self, nodes: Sequence[fx.Node]) -> None:
        """Find which of these nodes, which come next, will write into their first operand, and the readers that they
        must come behind."""
        writable = self.writable
        for node in nodes:
            if node.target is adamw:
                self._find_update(node, writable)
            elif isinstance(node.target, Loop):
                self._find_given_back(node, writable)
            if writable.isdisjoint(_torch.operands_of(node)) or (target := self._overwritten(node, writable)) is None:
                continue
            # most are read by nothing else
            readers = [r for r in self._readers(target) if r is not node] if len(target.users) > 1 else []
            if all([self.places[r] < self.places[node] for r in readers]):
                self.overwrites[node] = tuple(readers)
                self.shows[node] = self.shows[target]
                writable.add(node)

    def _find_update(self, node: fx.Node, writable: set[fx.Node]) -> None:
        """Find whether a fused update will write into its operands."""
        targets = [node.args[i] for i in WRITTEN]
        readers = [r for target in targets for r in self._readers(target) if r is not node]
        if writable.issuperset(targets) and all(self.places[r] < self.places[node] for r in readers):
            self.overwrites[node], self.shows[node] = tuple(readers), self.shows[targets[0]]
            for result in node.users:
                self.shows[result] = self.shows[targets[result.args[1]]]
                writable.add(result)

    def _find_given_back(self, node: fx.Node, writable: set[fx.Node]) -> None:
        """Find which results of a loop will be in the memory of its operands."""
        loop, results = node.target, {n.args[1]: n for n in node.users}
        for i in loop.body.given_back:
            operand = node.args[loop.invariants + i]
            readers = [r for r in self._readers(operand) if r is not node]
            if operand in writable and all(self.places[r] < self.places[node] for r in readers):
                self.overwrites[node] = (*self.overwrites.get(node, ()), *readers)
                self.given_back[node] = self.given_back.get(node, 0) + made(operand)
                if i in results:
                    self.shows[results[i]] = self.shows[operand]
                    writable.add(results[i])

    def _owned(self, nodes: Sequence[fx.Node]) -> set[fx.Node]:
        """The inputs that the program may overwrite: state that has a new value among the outputs."""
        program, homes = self.program, {name for name, _ in self.program.outputs}
        kinds = program.kinds or ("argument",) * len(program.inputs)
        given = zip([n for n in nodes if n.op == "placeholder"], program.inputs, kinds, strict=True)
        return {n for n, (name, _), kind in given if name in homes and kind not in ("argument", "grad")}

    def _overwritten(self, node: fx.Node, writable: set[fx.Node]) -> fx.Node | None:
        """The operand that an op can write into."""
        op = node.target
        if not isinstance(op, _torch.OpOverload) or not (args := node.args) or (target := args[0]) not in writable:
            return None
        if target.meta.get("spec") is not node.meta.get("spec") or not _may_overwrite(op):
            return None
        operands, shows = _torch.operands_of(node), self.shows
        shown = shows[target]
        if len(operands) > 1 and any([shows[n] is shown and n is not target for n in operands]):
            return None
        return target

    def _readers(self, node: fx.Node) -> Iterator[fx.Node]:
        """The readers of a value and of its views; of what is sent, those that wait for it, too."""
        for user in node.users:
            yield user
            if _sends(user):
                waiting = [n for u in user.users for n in (u.users if _is_piece(u) and not is_cut(u) else (u,))]
                yield from sorted(waiting, key=self.places.__getitem__)[:1]
            elif _shows_operand(user):
                yield from self._readers(user)

    def _barriers(self, nodes: Sequence[fx.Node]) -> Iterator[tuple[int, ...]]:
        """For each node what it must come behind because one of the two writes into memory that others may share."""
        last, since = None, []
        for i, node in enumerate(nodes):
            if isinstance(node.target, _torch.OpOverload) and _torch.written(node.target):
                yield tuple(since) if last is None else (last, *since)
                last, since = i, []
            else:
                yield () if last is None else (last,)
                since.append(i)


def _sends(node: fx.Node) -> bool:
    target = node.target
    if isinstance(target, _torch.OpOverload):  # most nodes
        return False
    return target.sends if isinstance(target, (Step, Bucket)) else target in HOST_COPIES  # it takes long to hash a move


def _is_piece(node: fx.Node) -> bool:
    """Whether a node only names one of the tensors of a bucket."""
    return node.target is operator.getitem and isinstance(node.args[0].target, Bucket)


def _shows_operand(node: fx.Node) -> bool:
    """Whether the result has the memory of its first operand."""
    op = node.target
    if isinstance(op, _torch.OpOverload):  # most nodes
        return _shows_first(op)
    if op is operator.getitem:
        return not is_cut(node) if _is_piece(node) else _shows_operand(node.args[0])
    if isinstance(op, Step):
        return op.move.kind == "view"
    return op is on_host


@lru_cache(maxsize=4096)
def _may_overwrite(op: _torch.OpOverload) -> bool:
    return torch.Tag.pointwise in op.tags and _torch.in_place_variant(op) is not None


@lru_cache(maxsize=4096)
def _shows_first(op: _torch.OpOverload) -> bool:
    return _torch.is_view(op) or op in SAFE_LOCALLY.values()


def made(node: fx.Node) -> int:
    """The bytes of the results of a node on the first rank."""
    specs = node.meta.get("spec")
    if isinstance(specs, Spec):
        return specs.local_nbytes
    if isinstance(node.target, Bucket):
        return node.target.arriving
    return sum([s.local_nbytes for s in specs if isinstance(s, Spec)]) if isinstance(specs, tuple) else 0
