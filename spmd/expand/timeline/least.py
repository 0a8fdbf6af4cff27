"""What a step takes at least, in any order of its tasks: a bound that sees what must come before and behind.

    gather 500 us, then ops of 100 us that read it      at least 600: no op can start before 500
    an op, its reduction of 300 us, and the update      at least 300 and the update behind the last op

Each task has a *head*, before which it cannot start, and a *tail*, which must follow it. Heads are the longest chains
of tasks that read each other, and at the longest collectives also this: all that leads to one on a stream must have run
there, one after the other. A stream with heads and tails is a machine with one worker; how long that takes at least is
known exactly if work may be interrupted (Jackson's rule: of what can run, first what has the longest tail; J. Carlier,
"The one-machine sequencing problem", 1982), and an order without interruptions takes no less.

It is larger than the busiest stream where the first ops wait for the first gather, and the last reductions for the last
ops. It does not see the memory, nor that collectives of one group keep the order of their launches.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from spmd.expand.timeline.work import Task, Work

MOST_ANCHORS = 256
"""For how many of the longest collectives all that leads to them is added up."""


def least_us(work: Work) -> float:
    """What the step takes at least, in any order of its tasks, in microseconds."""
    heads, tails = Heads.of(work.tasks).found(), Heads.reversed(work.tasks).found()[::-1]
    busy: dict[str, list[tuple[float, float, float]]] = {}
    for i, task in enumerate(work.tasks):
        for stream, before, us, behind in runs_on(task):
            busy.setdefault(stream, []).append((heads[i] + before, us, tails[i] + behind))
    chains = [heads[i] + _whole_us(task) + tails[i] for i, task in enumerate(work.tasks)]
    return max([0.0, *chains, *map(one_worker_us, busy.values())])


def one_worker_us(jobs: Sequence[tuple[float, float, float]]) -> float:
    """How long one worker takes at least, who may interrupt jobs. Each has a head, a time, and a tail.

    >>> one_worker_us([(0.0, 2.0, 0.0), (1.0, 2.0, 5.0)])      # the second one interrupts the first
    8.0
    """
    waiting: list[list[float]] = []
    ordered = sorted(jobs)
    clock, most, at = 0.0, 0.0, 0
    while at < len(ordered) or waiting:
        if not waiting:
            clock = max(clock, ordered[at][0])
        while at < len(ordered) and ordered[at][0] <= clock:
            _, us, tail = ordered[at]
            heapq.heappush(waiting, [-tail, us])
            at += 1
        longest = waiting[0]
        until = ordered[at][0] if at < len(ordered) else float("inf")
        run = min(longest[1], until - clock)
        clock += run
        if run >= longest[1]:
            heapq.heappop(waiting)
            most = max(most, clock - longest[0])
        else:
            longest[1] -= run
    return most


def runs_on(task: Task) -> Iterator[tuple[str, float, float, float]]:
    """Where a task runs: the stream, what of the task comes before, its time there, and what comes behind."""
    sending = task.sends
    if sending is None:
        if task.us:
            yield "compute", 0.0, task.us, 0.0
        return
    if task.us:
        yield "compute", 0.0, task.us, sending.us + sending.joined_us
    yield f"stream {sending.stream}", task.us, sending.us, sending.joined_us
    for level, us in sending.links:
        yield f"links {level}", task.us, us, sending.joined_us
    if sending.joined_us:
        yield "compute", task.us + sending.us, sending.joined_us, 0.0


def _whole_us(task: Task) -> float:
    return task.us + (task.sends.us + task.sends.joined_us if task.sends else 0.0)


@dataclass(frozen=True)
class Heads:
    """Tasks in an order in which each comes behind what it reads. whole: the time of each. occupied: for each stream
    the parts of tasks there, of which a task has two where it packs and orders what it sends: what of each task comes
    before the part, and its time. anchors: where all that leads there is added up."""

    reads: Sequence[Sequence[int]]
    whole: np.ndarray
    occupied: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]]
    anchors: frozenset[int]

    @classmethod
    def of(cls, tasks: Sequence[Task]) -> Heads:
        """Of tasks in their order."""
        return cls._of(tasks, [task.reads for task in tasks], before=True)

    @classmethod
    def reversed(cls, tasks: Sequence[Task]) -> Heads:
        """Of tasks from the last to the first: their heads are the tails of the tasks."""
        n = len(tasks)
        readers: list[list[int]] = [[] for _ in tasks]
        for i, task in enumerate(tasks):
            for r in task.reads:
                readers[n - 1 - r].append(n - 1 - i)
        return cls._of(tasks[::-1], readers, before=False)

    @classmethod
    def _of(cls, tasks: Sequence[Task], reads: Sequence[Sequence[int]], before: bool) -> Heads:
        streams: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}
        for i, task in enumerate(tasks):
            met: dict[str, int] = {}
            for stream, ahead, us, behind in runs_on(task):
                parts, at = streams.setdefault(stream, []), met.setdefault(stream, 0)
                if at == len(parts):
                    parts.append((np.zeros(len(tasks)), np.zeros(len(tasks))))
                offsets, times = parts[at]
                offsets[i], times[i], met[stream] = ahead if before else behind, us, at + 1
        sent = sorted([i for i, t in enumerate(tasks) if t.sends], key=lambda i: -tasks[i].sends.us)
        return cls(reads, np.array([*map(_whole_us, tasks)]), [*streams.values()], frozenset(sent[:MOST_ANCHORS]))

    def found(self, released: Sequence[float] | None = None) -> np.ndarray:
        """The head of each task. released: for each, when it can start at the earliest for other reasons."""
        n = len(self.whole)
        heads, leading = np.zeros(n), [0] * n
        for i in range(n):
            reads = self.reads[i]
            heads[i] = max([heads[r] + self.whole[r] for r in reads], default=0.0)
            if released is not None:
                heads[i] = max(heads[i], released[i])
            for r in reads:
                leading[i] |= leading[r] | 1 << r
            if i in self.anchors and leading[i]:
                heads[i] = max(heads[i], self._added_up(heads, _places(leading[i])))
        return heads

    def _added_up(self, heads: np.ndarray, tasks: np.ndarray) -> float:
        """When the last of these tasks can be done at the earliest: of each stream, one behind the other."""
        most = 0.0
        for parts in self.occupied:
            us = np.concatenate([times[tasks] for _, times in parts])
            start = np.concatenate([heads[tasks] + offsets[tasks] for offsets, _ in parts])[us > 0]
            if len(start):
                order = np.argsort(-start, kind="stable")
                most = max(most, float((start[order] + np.cumsum(us[us > 0][order])).max()))
        return most


def _places(bits: int) -> np.ndarray:
    """The places of the ones in a number."""
    raw = np.frombuffer(bits.to_bytes((bits.bit_length() + 7) // 8, "little"), np.uint8)
    return np.nonzero(np.unpackbits(raw, bitorder="little"))[0]
