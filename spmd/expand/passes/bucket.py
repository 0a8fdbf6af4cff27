"""Send small collectives together: one bucket for many gradients, or for many parameters.

    all_reduce(g1), all_reduce(g2), ...    ->  one bucket, where the last of them is sent: one all-reduce of all of them
    mm(x, all_gather(w1)), mm(y, all_gather(w2))  ->  one bucket, where the first of them is read

A bucket collects moves of one kind, over one axis, of one reduction and dtype (`bucket_key`). Reductions and
all-to-alls are delayed: their bucket is sent when it is full or when one of the results is read. Gathers of what is
there from the start, such as parameters in shards, are made earlier: with the first of the bucket, and each is cut out
of it where it is read. The first bucket of reductions is small, so that sending begins early in the backward.

Blocks of which many ranks have none are gathered by an exchange, which pads nothing. Alone it takes its latency; so it
joins the gathers as an all-gather where the bucket, padding and all, takes no longer than its members by themselves.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import inf

import numpy as np
from torch import fx

from spmd import _torch
from spmd.expand.nodes import added, read_instead
from spmd.expand.passes.keep_gathered import copied
from spmd.expand.passes.room import Room
from spmd.expand.program import Program
from spmd.expand.timeline.alive import alive_until
from spmd.tensor.redistribute import legal
from spmd.tensor.redistribute.bucket import Bucket, bucket_key
from spmd.tensor.redistribute.collective_moves import AllGather, Exchange
from spmd.tensor.redistribute.plan import Step

MB = 1 << 20
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
LATENCY_SHARE = 0.1
"""By default, of the time of a full bucket the part that is latency."""
FIRST_SHARE = 0.125
"""By default, the first bucket of reductions as a part of the others."""
MOST_BEFORE_GATHER = 4
"""The most ops, such as casts, that are moved so that what follows them can be gathered earlier."""


def bucketed(
    program: Program, mb: float | None = None, first_mb: float | None = None, kinds: Sequence[str] = KINDS,
    keeps_memory: bool = False, own: bool = False,
) -> Program:  # fmt: skip
    """The same program with moves of these kinds in buckets.

    mb: megabytes of a bucket, of what the collective gives to a rank; by default those at which a tenth of the time is
    latency, and no more than leave the most bytes that are alive what they are. first_mb: of the first bucket of
    reductions. keeps_memory: whether that holds for megabytes by hand, too. own: whether the given program is not
    needed any more, so that its graph can be changed.

    What is read at once, such as the all-reduce of a tensor-parallel layer, stays alone. Sums are bitwise the same if
    the transport reduces an element in the same way wherever it is in the buffer.
    """
    sent = (*kinds, Exchange.kind) if "all_gather" in kinds else kinds
    sending = [n for n in program.graph.nodes if isinstance(n.target, Step) and n.target.kind in sent]
    if not sending:
        return program
    room, terms = _room(program, sending) if mb is None or keeps_memory else (Room([], inf), {})
    program, sizes = replace(program) if own else copied(program), _Sizes(mb, first_mb)
    places = {node: i for i, node in enumerate(program.graph.nodes)}
    _Packer(program.graph, sizes, frozenset(kinds) - {"all_gather"}, places, room, terms).pack()
    if "all_gather" in kinds:
        _join_gathers(program.graph, sizes, places, room)
    return program


def _room(program: Program, sending: Sequence[fx.Node]) -> tuple[Room, dict[int, int]]:
    """Room for what leaves the most bytes that are alive what they are; and by place the bytes of the terms that come
    for a reduction, which are there until it is read. Of places behind those where these nodes are sent, and where what
    is gathered is read first, nothing is asked.
    """
    gathers = [node for node in sending if node.target.kind in (AllGather.kind, Exchange.kind)]
    read = [min(node.users) for node in gathers if node.users]  # nodes compare by their places
    nbytes, most, sends = alive_until(program, [*sending, *read])
    most += program.spare
    terms = {i: each.terms for i, each in enumerate(sends) if each and each.terms}
    return Room(np.minimum(nbytes, most), most), terms


@dataclass(frozen=True)
class _Sizes:
    """How many bytes a bucket has, as `bucketed` is given them."""

    mb: float | None
    first_mb: float | None

    def limit(self, step: Step, is_first: bool) -> float:
        """The bytes of a bucket that begins with this step."""
        full = _modelled_bytes(step) if self.mb is None else self.mb * MB
        if not is_first:
            return full
        return full * FIRST_SHARE if self.first_mb is None else min(self.first_mb * MB, full)


def _modelled_bytes(step: Step) -> float:
    """The bytes at which the latency of a collective is a tenth of its time."""
    topology, many = step.before.mesh.topology, 1 << 30
    per_byte = (step.move.collective_us(many, topology) - step.latency_us) / many
    received = step.latency_us * (1 / LATENCY_SHARE - 1) / per_byte if per_byte > 0 else float("inf")
    return received * step.nbytes / max(1, step.received((0,) * step.before.mesh.ndim))


# ---- reductions, delayed ------------------------------------------------------------------------


@dataclass
class _OpenBucket:
    """A bucket that is being filled. It is sent when it has `limit` bytes. held: bytes of what waits to be sent, less
    those of the terms that would have come for it. behind: the buckets whose members its own read, which must be sent
    before it."""

    limit: float
    members: list[fx.Node] = field(default_factory=list)
    behind: set[Hashable] = field(default_factory=set)
    nbytes: int = 0
    held: int = 0

    def add(self, node: fx.Node, terms: int) -> None:
        self.members.append(node)
        self.nbytes += node.target.nbytes
        self.held += node.target.before.local_nbytes - terms


@dataclass
class _Packer:
    """terms: as `_room` finds them. arrived: those that are there since the last bucket of them was sent, with the
    place where each would be read first."""

    graph: fx.Graph
    sizes: _Sizes
    kinds: frozenset[str]
    places: dict[fx.Node, int]
    room: Room
    terms: dict[int, int]
    arrived: list[tuple[int, int]] = field(default_factory=list)
    open: dict[Hashable, _OpenBucket] = field(default_factory=dict)
    waiting: dict[fx.Node, Hashable] = field(default_factory=dict)

    def pack(self) -> None:
        for node in list(self.graph.nodes):
            key = self._key(node) if isinstance(node.target, Step) else None
            if self.waiting and (key is None or any(self._is_behind(read, key) for read in self._read(node))):
                self._close_read(node)
            if key is not None:  # what it reads may wait as long as it does
                self._add(key, node)
        for key in list(self.open):
            self._close(key)

    def _key(self, node: fx.Node) -> Hashable | None:
        """What a move must have in common with others to wait for them; None if it cannot wait."""
        return bucket_key(node.target) if node.target.kind in self.kinds else None

    def _is_behind(self, key: Hashable, other: Hashable) -> bool:
        return key == other or any(self._is_behind(each, other) for each in self.open[key].behind)

    def _read(self, node: fx.Node) -> dict[Hashable, None]:
        operands = _torch.operands_of(node)
        if self.waiting.keys().isdisjoint(operands):  # most nodes
            return {}
        return {self.waiting[n]: None for n in operands if n in self.waiting}

    def _close_read(self, node: fx.Node) -> None:
        """Send what a node reads and what is still waiting."""
        for key in self._read(node):
            self._close(key)

    def _add(self, key: Hashable, node: fx.Node) -> None:
        if key not in self.open:
            self.open[key] = _OpenBucket(self.sizes.limit(node.target, True))
        if self.open[key].members and not self._fits(self.open[key], node):
            self._close(key)
        bucket = self.open[key]
        if bucket.members:
            self.room.take(self.places[bucket.members[-1]], self.places[node], bucket.held)
        bucket.add(node, self.terms.get(self.places[node], 0))
        bucket.behind.update(self._read(node))
        self.waiting[node] = key
        if bucket.nbytes >= bucket.limit:
            self._close(key)

    def _fits(self, bucket: _OpenBucket, node: fx.Node) -> bool:
        """Whether what was to be sent can wait for a further member, and all can be put into one buffer then."""
        last, now = self.places[bucket.members[-1]], self.places[node]
        filled = bucket.held + bucket.nbytes + node.target.nbytes
        return self.room.has(last, now, bucket.held) and self.room.has(now, now + 1, filled)

    def _close(self, key: Hashable) -> None:
        bucket = self.open[key]
        if members := bucket.members:
            for node in members:
                del self.waiting[node]
            self.open[key] = _OpenBucket(self.sizes.limit(members[0].target, False))
            for each in self.open.values():
                each.behind.discard(key)
            for node in members:
                self._close_read(node)
            last = max(members[-1], *[node.args[0] for node in members])  # nodes compare by their places
            if len(members) > 1:
                self._note_sent(bucket)
                _join(self.graph, members, Bucket(tuple([n.target for n in members])), after=last)
            elif last is not members[0]:
                last.append(members[0])

    def _note_sent(self, bucket: _OpenBucket) -> None:
        """Note that a bucket is filled, and that it waits for the terms of the one before, which are gone then."""
        sent = self.places[bucket.members[-1]]
        self.room.take(sent, sent + 1, bucket.held + bucket.nbytes)
        came = [n for n in bucket.members if self.places[n] in self.terms]
        if came:
            for nbytes, read in self.arrived:
                self.room.take(sent + 1, read, -nbytes)
            self.arrived = [self._terms_of(n) for n in came]

    def _terms_of(self, node: fx.Node) -> tuple[int, int]:
        """What comes for a reduction more than its result, and where it would be read first."""
        read = min([self.places[n] for n in node.users if n in self.places], default=self.places[node])
        return self.terms[self.places[node]] - node.target.after.local_nbytes, read


def _join(graph: fx.Graph, members: Sequence[fx.Node], bucket: Bucket, after: fx.Node) -> None:
    """Write a bucket behind a node, and let the readers of its members read from it."""
    with graph.inserting_after(after):
        sent = added(graph, "call_function", bucket, ([n.args[0] for n in members],), {}, "bucket")
    sent.meta["spec"] = bucket.after
    last, items = sent, {}
    for i, member in enumerate(members):
        with _place_of(member, bucket, last):
            last = added(graph, "call_function", operator.getitem, (sent, i), {}, f"{member.name}_of")
        last.meta |= member.meta
        items[member] = last
    read_instead(items)
    for member in members:
        graph.erase_node(member)


def _place_of(member: fx.Node, bucket: Bucket, last: fx.Node) -> AbstractContextManager:
    """Where a tensor of a bucket is named: where it is read first, if it has memory of its own from there on."""
    if bucket.copies_out and member.users:
        return member.graph.inserting_before(min(member.users))  # nodes compare by their places
    return member.graph.inserting_after(last)


# ---- gathers, made earlier ----------------------------------------------------------------------


@dataclass
class _Gathers:
    """Gathers that are to be made together, where the first of them stands: `since`. steps: each as an all-gather. What
    comes for all is there until the last is cut out of it: `until`. cut: where the first is. come: bytes of that, of
    blocks that are padded to the largest. sent: of what they send."""

    limit: float
    since: int
    cut: int
    until: int = 0
    members: list[fx.Node] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    moved: list[fx.Node] = field(default_factory=list)
    nbytes: int = 0
    come: int = 0
    sent: int = 0

    def add(self, node: fx.Node, step: Step, before: Sequence[fx.Node], until: int, room: Room) -> None:
        """Add a gather whose result is read first at `until`."""
        come = _arriving(step)
        if self.members:
            room.take(self.since, self.until, self._more(come))
            room.take(self.until, until, self.come + come)
        self.members.append(node)
        self.steps.append(step)
        self.moved += [n for n in before if n not in self.moved]
        self.nbytes += step.after.local_nbytes
        self.come += come
        self.sent += step.before.local_nbytes
        self.until = max(self.until, until)

    def fits(self, step: Step, until: int, room: Room) -> bool:
        """Whether a further gather can be made with them."""
        come, sent = _arriving(step), self.sent + step.before.local_nbytes
        more, since = self._more(come), self.since
        is_room = room.has(since, self.cut, more + sent) and room.has(since, self.until, more)
        return is_room and room.has(self.until, until, self.come + come)

    def _more(self, come: int) -> int:
        """How much more is there with a further gather. Of one alone no more is there than came with it."""
        return come + (self.come if len(self.members) == 1 else 0)

    @property
    def bucket(self) -> Bucket | None:
        """All of them in one; None for one alone, and where exchanges take no longer by themselves."""
        if len(self.members) < 2:
            return None
        bucket, alone = Bucket(tuple(self.steps)), [node.target for node in self.members]
        is_quick = alone == self.steps or bucket.cost <= sum([step.cost for step in alone])
        return bucket if is_quick else None


def _arriving(gather: Step) -> int:
    return Bucket((gather,)).arriving


def _join_gathers(graph: fx.Graph, sizes: _Sizes, places: dict[fx.Node, int], room: Room) -> None:
    """Join gathers that need only what is there where the first of them stands."""
    for gathers in list(_gathers(graph, sizes, places, room)):
        if (bucket := gathers.bucket) is None:
            continue
        first = gathers.members[0]
        for node in gathers.moved:
            if first < node:  # nodes compare by their places
                first.prepend(node)
        _join(graph, gathers.members, bucket, after=first)


def _gathers(graph: fx.Graph, sizes: _Sizes, places: dict[fx.Node, int], room: Room) -> Iterator[_Gathers]:
    open_: dict[Hashable, _Gathers] = {}
    for node in graph.nodes:
        step = _gathering(node.target) if isinstance(node.target, Step) else None
        if step is None or (key := bucket_key(step)) is None:
            continue
        before = _before(node)
        if before is None:
            continue
        read = min([places[n] for n in node.users if n in places], default=places[node] + 1)
        if key in open_ and (open_[key].nbytes >= open_[key].limit or not open_[key].fits(step, read, room)):
            yield open_.pop(key)
        if key not in open_:
            given = step.after.local_nbytes / max(1, step.nbytes)
            limit = sizes.limit(step, False) * (given if sizes.mb is None else 1.0)
            open_[key] = _Gathers(limit, places[node], read)
        open_[key].add(node, step, before, read, room)
    yield from open_.values()


@lru_cache(maxsize=4096)
def _gathering(step: Step) -> Step | None:
    """A step as an all-gather: one itself, or an exchange behind which the axes shard nothing. None for others."""
    if isinstance(step.move, AllGather):
        return step
    gather = Step(AllGather(step.axes), step.before, step.after) if type(step.move) is Exchange else None
    return gather if gather is not None and not legal.fault(gather) else None


def _before(node: fx.Node) -> list[fx.Node] | None:
    """The ops between inputs and a gather, in order: a few that send nothing. None if there are others."""
    found: dict[fx.Node, None] = {}
    stack = [node.args[0]]
    while stack:
        n = stack.pop()
        if n.op in ("placeholder", "get_attr") or n in found:
            continue
        is_sent = isinstance(n.target, (Step, Bucket)) and n.target.sends
        if is_sent or len(found) == MOST_BEFORE_GATHER:
            return None
        found[n] = None
        stack += n.all_input_nodes
    return sorted(found)
