"""Replay tasks over streams: when each starts, how long it takes, and what it waited for.

One loop over the tasks in their order, with the time of each stream and of each level of links. It is the judge of
passes, so it is made to be fast: 5,000 tasks take some milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from spmd.expand.timeline.work import Work

COMPUTE = "compute"
START = -1
"""In the place of a task: nothing was waited for."""


@dataclass(frozen=True)
class Ran:
    """A task that ran on a stream. after: the task that it waited for, or that was before it on its stream."""

    task: int
    stream: str
    start: float
    us: float
    after: int

    @property
    def end(self) -> float:
        return self.start + self.us


def replay(work: Work, order: Sequence[int] | None = None) -> list[Ran]:
    """What runs when, if the tasks are issued in this order; by default in that of the program."""
    tasks = work.tasks
    clock, latest = 0.0, START
    streams: dict[str, tuple[float, int]] = {}
    links: dict[int, float] = {}
    flying: dict[int, float] = {}
    ran: list[Ran] = []
    for i in range(len(tasks)) if order is None else order:
        task = tasks[i]
        for w in task.waits:
            if w in flying:
                end, sending = flying.pop(w), tasks[w].sends
                if end > clock:
                    clock, latest = end, w
                if sending.joined_us:
                    ran.append(Ran(w, COMPUTE, clock, sending.joined_us, latest))
                    clock += sending.joined_us
        if task.us:
            ran.append(Ran(i, COMPUTE, clock, task.us, latest))
            clock, latest = clock + task.us, i
        if task.sends:
            sending = task.sends
            free, before = streams.get(sending.stream, (0.0, START))
            start = max(clock, free)
            end = start + sending.us
            for level, us in sending.links:
                links[level] = max(links.get(level, 0.0), start) + us
                end = max(end, links[level])
            ran.append(Ran(i, sending.stream, start, end - start, before if free > clock else latest))
            streams[sending.stream] = end, i
            flying[i] = end
    return ran


def step_us(work: Work, order: Sequence[int] | None = None) -> float:
    """The time from the first start to the last end."""
    return max([each.end for each in replay(work, order)], default=0.0)


def critical_us(work: Work) -> float:
    """How long the tasks take at least, on any number of streams: the longest chain of tasks that read each other."""
    tasks, ends = work.tasks, [0.0] * len(work.tasks)
    for i, task in enumerate(tasks):
        start = max([ends[r] for r in task.reads], default=0.0)
        sent = task.sends.us + task.sends.joined_us if task.sends else 0.0
        ends[i] = start + task.us + sent
    return max(ends, default=0.0)


def bound_us(work: Work) -> float:
    """What the step takes at least, in any order: the larger of the critical path and of the busiest stream."""
    return max(critical_us(work), *busy_us(work).values())


def busy_us(work: Work) -> dict[str, float]:
    """For each stream and each level of links, how long it is busy at least, in any order."""
    found = {COMPUTE: 0.0}
    for task in work.tasks:
        found[COMPUTE] += task.us
        if sending := task.sends:
            found[COMPUTE] += sending.joined_us
            found[sending.stream] = found.get(sending.stream, 0.0) + sending.us
            for level, us in sending.links:
                name = f"links of level {level}"
                found[name] = found.get(name, 0.0) + us
    return found
