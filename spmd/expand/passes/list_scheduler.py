"""The list scheduler: one order of tasks in which what is sent runs beside what is computed.

    gather(w2), mm(x, w1)        not    mm(x, w1), gather(w2)          prefetch: its stream is idle
    dx, reduce(dx), dw, relu(dx) not    dx, dw, reduce(dx), relu(dx)   early launch: others wait for it

Tasks are those of `spmd.expand.timeline.work`. One loop keeps the time of every stream. Before each op it launches, of
what may be sent on a stream that would be idle, what is needed first; then it runs the first op of the program that
would not wait, if the memory allows. Gathers of what is there from the start, such as parameters in shards, are
launched as late as they can be and still be there in time. All others are launched when they are ready and their stream
is free.

Everything follows from the tasks alone, so all ranks find the same order. Nothing is known of layers or names.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import inf

from spmd.expand.passes.room import Room
from spmd.expand.timeline.work import Task, Work

MOST_BEFORE_LAUNCH = 8
"""The most ops, such as casts, that may be run early so that what follows them can be sent, for each tensor of it."""
WINDOW = 64
"""How many ops in front of a launch are looked at, whether they can run behind it."""
LITTLE = 1e-4
"""The part of the memory that an op that fills a wait may leave alive for long."""


@dataclass(frozen=True)
class Ways:
    """What a schedule may do. fill: run later ops while the next one would wait. sink: move ops behind a launch that
    others wait for. margin: how early a gather is launched, in times of the longest collective of its stream. ahead:
    from how many steps ahead an op may fill a wait that leaves more alive. If that is finite, none does from behind
    the place where most is alive: its memory would be there, and gathers that are read behind find none."""

    fill: bool = True
    sink: bool = True
    margin: float = 2.0
    ahead: float = inf


def listed(start: Start, ways: Ways) -> list[int]:
    """An order of all tasks. The caller checks whether it keeps within the memory."""
    return _Scheduler(start, ways).run()


# ---- what depends on what ---------------------------------------------------------------------


@dataclass(frozen=True)
class Graph:
    """The tasks that take time, are sent or free memory, with what they come behind. The others run where they are
    needed.

    steps: these tasks, in the order of the program. before: for each task the tasks that it
    comes behind, directly. needs: the same among steps. waits: the sent tasks that a step waits for.
    """

    work: Work
    steps: tuple[int, ...]
    before: tuple[tuple[int, ...], ...]
    needs: dict[int, tuple[int, ...]]
    waits: dict[int, tuple[int, ...]]

    @classmethod
    def of(cls, work: Work) -> Graph:
        """The dependencies of tasks."""
        tasks = work.tasks
        before = tuple([(*t.reads, *t.follows) for t in tasks])
        needed: list[tuple[int, ...]] = []
        waited: list[tuple[int, ...]] = []
        steps = []
        for i, task in enumerate(tasks):
            needs = dict.fromkeys([x for b in before[i] for x in ((b,) if _is_step(tasks[b]) else needed[b])])
            waits = [x for b in before[i] if not _is_step(tasks[b]) for x in waited[b]]
            needed.append(tuple(needs))
            waited.append(tuple(dict.fromkeys([*task.waits, *waits])))
            if _is_step(task):
                steps.append(i)
        return cls(work, tuple(steps), before, {i: needed[i] for i in steps}, {i: waited[i] for i in steps})

    def launches(self) -> list[int]:
        """The steps that are sent."""
        return [i for i in self.steps if self.work.tasks[i].sends]

    def preludes(self) -> dict[int, tuple[int, ...]]:
        """The launches that may stand anywhere, as they depend on inputs alone: the few ops that must come before."""
        found: dict[int, tuple[int, ...] | None] = {}
        for i in self.steps:
            parts = [found[n] for n in self.needs[i]]
            known = dict.fromkeys([x for n, p in zip(self.needs[i], parts, strict=True) for x in (*(p or ()), n)])
            most = MOST_BEFORE_LAUNCH * max(1, len(self.work.tasks[i].reads))
            blocked = None in parts or len(known) > most or any(map(self._is_sent, known))
            found[i] = None if blocked else tuple(sorted(known))
        return {i: found[i] for i in self.launches() if found[i] is not None}

    def _is_sent(self, i: int) -> bool:
        return self.work.tasks[i].sends is not None


def _is_step(task: Task) -> bool:
    return bool(task.us or task.sends or task.frees)


def computed_before(graph: Graph, order: Sequence[int]) -> dict[int, float]:
    """For each step, in this order, the time that is computed before it, if nothing waits."""
    clock, found = 0.0, {}
    for i in order:
        found[i] = clock
        task = graph.work.tasks[i]
        clock += task.us + (task.sends.joined_us if task.sends else 0.0)
    return found


def first_waits(graph: Graph, order: Sequence[int]) -> dict[int, int]:
    """For each launch that is waited for, the first step in this order that waits."""
    found: dict[int, int] = {}
    for i in order:
        for w in graph.waits[i]:
            found.setdefault(w, i)
    return found


@dataclass(frozen=True)
class Start:
    """What all schedules of the same tasks begin with. limit: bytes that should be alive at most."""

    work: Work
    limit: float

    @cached_property
    def graph(self) -> Graph:
        """What depends on what."""
        return Graph.of(self.work)

    @cached_property
    def preludes(self) -> dict[int, tuple[int, ...]]:
        """The launches that may stand anywhere."""
        return self.graph.preludes()

    @cached_property
    def alive(self) -> list[int]:
        """The bytes that are alive in the order of the program."""
        return self.work.memory(range(len(self.work.tasks)))

    @cached_property
    def early(self) -> list[int]:
        """The steps with launches before what is not needed for them, as far as there is memory."""
        return launched_early(self.graph, [self.limit - nbytes for nbytes in self.alive])

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """By step, the steps that come behind it."""
        found: dict[int, list[int]] = {}
        for i in self.graph.steps:
            for n in self.graph.needs[i]:
                found.setdefault(n, []).append(i)
        return found

    @cached_property
    def touched(self) -> dict[int, tuple[int, ...]]:
        """By op, the values whose memory it reads."""
        tasks = self.work.tasks
        read = {i: {tasks[r].shows for r in tasks[i].reads} for i in self.graph.steps}
        return {i: tuple([v for v in values if tasks[v].makes]) for i, values in read.items()}

    @cached_property
    def uses(self) -> list[int]:
        """How many steps read the memory of each value. What is sent is read by whoever waits for it, too."""
        found = [0] * len(self.work.tasks)
        for i, values in self.touched.items():
            for v in values:
                found[v] += 2 if self.work.tasks[i].sends else 1
        for i, task in enumerate(self.work.tasks):  # outputs, say, are read behind all steps
            if task.shows == i and i not in self.touched:
                for r in task.reads:
                    found[self.work.tasks[r].shows] += 1
        return found


# ---- ops behind launches ----------------------------------------------------------------------


def launched_early(graph: Graph, room: Sequence[float]) -> list[int]:
    """The steps, with those moved behind a launch that stand before it, are not needed for it, and fill its time.

    room: bytes that may come to what is alive at each task.
    """
    at, first = computed_before(graph, graph.steps), first_waits(graph, graph.steps)
    order = list(graph.steps)
    for c in graph.launches():
        if c in first and graph.needs[c]:
            hidden = at[first[c]] - at[c] - graph.work.tasks[c].us
            lacks = graph.work.tasks[c].sends.us - hidden
            if lacks > 0 and hidden < lacks:
                _sink(graph, order, c, lacks, room)
    return order


def _sink(graph: Graph, order: list[int], c: int, lacks: float, room: Sequence[float]) -> None:
    """Move ops in front of a launch, that it does not need, behind it, until they fill this time."""
    task = graph.work.tasks[c]
    brings = task.makes + task.sends.packed
    at, needed, moved = order.index(c), set(graph.needs[c]), []
    for j in range(at - 1, max(at - WINDOW, -1), -1):
        i = order[j]
        if i in needed:
            needed.update(graph.needs[i])
        elif graph.work.tasks[i].sends or graph.waits[i] or room[i] < brings:
            break
        else:
            moved.append(i)
            lacks -= graph.work.tasks[i].us
        if lacks <= 0:
            break
    if moved:
        gone = set(moved)
        start = at - WINDOW if at > WINDOW else 0
        kept = [i for i in order[start:at] if i not in gone]
        order[start : at + 1] = [*kept, c, *reversed(moved)]


# ---- the loop ---------------------------------------------------------------------------------


@dataclass
class _Stream:
    """A stream of a group.

    free: when it is idle. ready: what can be sent, in the order in which it is needed. early: gathers that can stand
    anywhere, by when they must start; the next one is at `next`.
    """

    free: float = 0.0
    ready: list[tuple[float, int]] = field(default_factory=list)
    early: list[tuple[float, int]] = field(default_factory=list)
    next: int = 0


class _Scheduler:
    def __init__(self, start: Start, ways: Ways) -> None:
        graph = start.graph
        self.graph, self.tasks, self.ways = graph, graph.work.tasks, ways
        self.order = start.early if ways.sink else graph.steps
        self.rank = {i: at for at, i in enumerate(self.order)}
        self.ideal = computed_before(graph, self.order)
        self.first = first_waits(graph, self.order)
        self.preludes, self.readers = start.preludes, start.readers
        self.clock, self.links, self.arrives = 0.0, {}, {}
        self.streams: dict[str, _Stream] = {}
        self.done: list[int] = []
        self.is_done = bytearray(len(self.tasks))
        self.left = {i: len(graph.needs[i]) for i in graph.steps}
        self.pieces: dict[int, list[int]] = {}  # what names the results of a task
        for i, task in enumerate(self.tasks):
            if not task.is_op and task.makes:
                self.pieces.setdefault(task.reads[0], []).append(i)
        self.ready: list[tuple[int, int]] = []
        self.waiting: list[tuple[float, int, int]] = []
        self.room = Room([start.alive[i] for i in self.order], start.limit)
        self.touched, self.uses = start.touched, list(start.uses)
        self.fullest = self.room.fullest
        self.at = 0

    def run(self) -> list[int]:
        for i, task in enumerate(self.tasks):
            if not task.is_op and not task.reads:  # inputs and constants
                self._emit(i)
        for i in self.order:
            if self.tasks[i].sends:
                self.streams.setdefault(self.tasks[i].sends.stream, _Stream())
        self._plan_early()
        for i in self.order:
            if not self.left[i] and i not in self.preludes:
                self._offer(i)
        while self._advance():
            pass
        for i in self.order:
            if not self.is_done[i]:
                self._launch(i)
        for i in range(len(self.tasks)):
            self._emit(i)
        return self.done

    def _advance(self) -> bool:
        """Take the next step, whatever it is. False if none is left."""
        while self.at < len(self.order) and (self.is_done[self.order[self.at]] or self._can_wait(self.order[self.at])):
            self.at += 1
        if self.at == len(self.order):
            return False
        due = self.order[self.at]
        if self.tasks[due].sends:
            self._launch(due)
            return True
        i = self._next_op(due)
        self._launch_beside(max(self.clock, self._arrival(i)) + self.tasks[i].us)
        if not self.is_done[i]:
            self._run(i)
        return True

    def _can_wait(self, i: int) -> bool:
        """Whether it is something to send that would stand in a queue, and is not needed soon."""
        if not self.tasks[i].sends:
            return False
        sending = self.tasks[i].sends
        stands = max(self.streams[sending.stream].free, self._arrival(i)) > self.clock
        return stands and self._needed(i) > self.ideal[i] + 2 * sending.us

    # ---- ops ----------------------------------------------------------------------------------
    def _next_op(self, due: int) -> int:
        """The first op that would not wait, or else the one that is due."""
        while self.waiting and self.waiting[0][0] <= self.clock:
            _, rank, i = heapq.heappop(self.waiting)
            heapq.heappush(self.ready, (rank, i))
        kept, found = [], due
        while self.ready:
            rank, i = heapq.heappop(self.ready)
            if self.is_done[i]:
                continue
            arrival = self._arrival(i)
            if arrival > self.clock:
                heapq.heappush(self.waiting, (arrival, rank, i))
                if i == due and not self.ways.fill:
                    break
            elif i == due or self._can_fill(i, rank):
                found = i
                break
            else:
                kept.append((rank, i))
                if len(kept) > WINDOW:
                    break
        for each in kept:
            heapq.heappush(self.ready, each)
        return found

    def _can_fill(self, i: int, rank: int) -> bool:
        """Whether an op that is not due may run now: what it leaves alive fits, and is little or not for long."""
        adds = self._adds(i)
        if adds <= 0:
            return True
        is_near = self._is_near(rank) or adds <= LITTLE * self.room.limit
        return is_near and self.room.has(self.at, rank, adds)

    def _is_near(self, rank: int) -> bool:
        if self.ways.ahead == inf:
            return True
        return rank - self.at <= self.ways.ahead and not self.at <= self.fullest <= rank

    def _adds(self, i: int) -> int:
        """The bytes that an op makes, less those that nothing reads behind it."""
        adds = self.tasks[i].makes
        for v in self.touched[i]:
            if self.uses[v] == 1:
                adds -= self.tasks[v].makes
        return adds

    def _arrival(self, i: int) -> float:
        waits = self.graph.waits[i]  # mostly none
        return max([self.arrives.get(w, 0.0) for w in waits]) if waits else 0.0

    def _run(self, i: int) -> None:
        for n in self.graph.needs[i]:  # what is due may need what was held back
            if not self.is_done[n]:
                self._launch(n) if self.tasks[n].sends else self._run(n)
        self._wait(i)
        self.clock += self.tasks[i].us
        if self.rank[i] > self.at:
            self.room.take(self.at, self.rank[i], self._adds(i))
        self._emit(i)

    def _wait(self, i: int) -> None:
        for w in self.graph.waits[i]:
            if (arrival := self.arrives.pop(w, None)) is not None:
                self.clock = max(self.clock, arrival) + self.tasks[w].sends.joined_us

    # ---- launches -----------------------------------------------------------------------------
    def _plan_early(self) -> None:
        """For gathers that may stand anywhere: until when they must start, so that all of a stream are in time."""
        by_stream: dict[str, list[int]] = {}
        for c in sorted(self.preludes, key=lambda c: (self._needed(c), self.rank[c])):
            by_stream.setdefault(self.tasks[c].sends.stream, []).append(c)
        for name, launches in by_stream.items():
            longest = max(self.tasks[i].sends.us for i in self.graph.launches() if self.tasks[i].sends.stream == name)
            until, starts = float("inf"), []
            for c in reversed(launches):
                until = min(until, self._needed(c)) - self.tasks[c].sends.us
                starts.append((until - self.ways.margin * longest, c))
            self.streams[name].early = starts[::-1]

    def _needed(self, c: int) -> float:
        return self.ideal[self.first[c]] if c in self.first else float("inf")

    def _launch_beside(self, until: float) -> None:
        """Launch what should run while something is waited for and computed, until this time."""
        late = self.clock - self.ideal[self.order[self.at]]
        for stream in self.streams.values():
            while True:
                c = self._first_of(stream, until, late)
                if c is None:
                    break
                self._launch(c)

    def _first_of(self, stream: _Stream, until: float, late: float) -> int | None:
        """What to launch on a stream, or None: of what is needed soon, what is needed first."""
        while stream.ready and self.is_done[stream.ready[0][1]]:
            del stream.ready[0]
        while stream.next < len(stream.early) and self.is_done[stream.early[stream.next][1]]:
            stream.next += 1
        c = self._ready_on(stream)
        gather = self._gather_due(stream, until, late, c)
        if c is None or (gather is not None and self._needed(gather) < self._needed(c)):
            return gather
        soon = self._needed(c) + late <= until + self.tasks[c].sends.us
        return c if soon or stream.free < until else None

    def _ready_on(self, stream: _Stream) -> int | None:
        """What is ready to be sent, needed first, and fits into the memory if it is launched earlier than it was."""
        for _, c in stream.ready[:MOST_BEFORE_LAUNCH]:
            if self.is_done[c] or self._arrival(c) > self.clock:  # what it reads is still on its way
                continue
            if self.room.has(self.at, self.rank[c], self.tasks[c].makes):
                return c
        return None

    def _gather_due(self, stream: _Stream, until: float, late: float, ready: int | None) -> int | None:
        """The next gather, if it is time for it: or if it would be late behind what is ready to be sent."""
        if stream.next == len(stream.early) or stream.free >= until:
            return None
        start, c = stream.early[stream.next]
        behind = until if ready is None else max(self.clock, stream.free) + self.tasks[ready].sends.us
        if start + late > max(until, behind):
            return None
        makes = self.tasks[c].makes + sum([self.tasks[i].makes for i in self.preludes[c] if not self.is_done[i]])
        return c if self.room.has(self.at, self.rank[c], makes) else None

    def _launch(self, c: int) -> None:
        if self.is_done[c]:
            return
        for n in self.graph.needs[c]:
            if not self.is_done[n]:
                self._launch(n) if self.tasks[n].sends else self._run(n)
        self._wait(c)
        task = self.tasks[c]
        if self.rank[c] > self.at:
            self.room.take(self.at, self.rank[c], self.tasks[c].makes)
        self.clock += task.us
        stream = self.streams[task.sends.stream]
        start = max(self.clock, stream.free)
        end = start + task.sends.us
        for level, us in task.sends.links:
            self.links[level] = max(self.links.get(level, 0.0), start) + us
            end = max(end, self.links[level])
        stream.free = self.arrives[c] = end
        self._emit(c)

    # ---- what is emitted ----------------------------------------------------------------------
    def _offer(self, i: int) -> None:
        """Note that a step can be taken."""
        if self.tasks[i].sends:
            insort(self.streams[self.tasks[i].sends.stream].ready, (self._needed(i), i))
        else:
            heapq.heappush(self.ready, (self.rank[i], i))

    def _emit(self, i: int) -> None:
        """Put a task into the order, and before it what it needs that takes no time."""
        stack = [i]
        while stack:
            i = stack[-1]
            missing = () if self.is_done[i] else [b for b in self.graph.before[i] if not self.is_done[b]]
            if missing:
                stack += missing
                continue
            stack.pop()
            if not self.is_done[i]:
                self.is_done[i] = 1
                self.done.append(i)
                for v in self.touched.get(i, ()):
                    self.uses[v] -= 1
                stack += self.pieces.get(i, ())
                for reader in self.readers.get(i, ()):
                    self.left[reader] -= 1
                    if not self.left[reader] and reader not in self.preludes:
                        self._offer(reader)
