"""The timeline of a program: what runs when on the streams of a rank, and what is alive.

    print(program.timeline())

    step          812.4 us, of which 210.0 wait for what is sent
    compute       602.4 us busy
    dp            310.1 us busy
    bound         640.2 us: the critical path; the step is 26.9% above it
    memory  4,194,304 bytes at most

Nothing is run, and no process group is needed. `save` writes a file for https://ui.perfetto.dev.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmd.expand.loops.unroll import unrolled
from spmd.expand.timeline.least import least_us
from spmd.expand.timeline.least_within import least_us_within
from spmd.expand.timeline.replay import COMPUTE, START, Ran, busy_us, critical_us, replay
from spmd.expand.timeline.work import Work
from spmd.mesh import MeshTopoInfo

if TYPE_CHECKING:
    from spmd.expand.program import Program


@dataclass(frozen=True)
class Event:
    """Something that ran on a stream. Times in microseconds. nbytes: what was sent. line: the user's line, if known."""

    name: str
    stream: str
    start: float
    us: float
    nbytes: int = 0
    line: str = ""

    @property
    def end(self) -> float:
        return self.start + self.us

    def __str__(self):
        where = f" at {self.line}" if self.line else ""
        return f"{self.start:>12,.1f} {self.us:>10,.1f} us  {self.stream:<8} {self.name}{where}"


@dataclass(frozen=True)
class Timeline:
    """A replayed program, on the rank with the largest blocks.

    events: in the order in which they were issued. memory: the bytes that are alive, with the time from which on.
    critical_path: the events that the end waited for, one after the other, in order. critical_us: the longest chain of
    events that read each other. busy_us: for each stream, and each level of links, how long it is busy at least.
    work: what was replayed.
    """

    events: tuple[Event, ...]
    memory: tuple[tuple[float, int], ...]
    critical_path: tuple[Event, ...]
    critical_us: float
    busy_us: Mapping[str, float]
    work: Work = field(default=Work((), 0), repr=False, compare=False)

    @property
    def us(self) -> float:
        """The time of the step."""
        return max([event.end for event in self.events], default=0.0)

    @property
    def exposed_us(self) -> float:
        """How long nothing is computed, because what is sent is waited for."""
        return self.us - self.busy_us[COMPUTE]

    @property
    def peak(self) -> int:
        """The most bytes that are alive at one time."""
        return max([nbytes for _, nbytes in self.memory], default=0)

    @property
    def streams(self) -> tuple[str, ...]:
        """The streams on which something ran, computing first."""
        return tuple(dict.fromkeys([COMPUTE, *[event.stream for event in self.events]]))

    @property
    def busiest(self) -> str:
        """The stream, or level of links, that is busy longest."""
        return max(self.busy_us, key=self.busy_us.__getitem__)

    @cached_property
    def bound_us(self) -> float:
        """What the step takes at least, in whatever order: the larger of critical path and busiest stream, or what must
        come before and behind what the busiest stream does (`least.py`)."""
        return max(self._simple_bound_us, least_us(self.work))

    def bound_within(self, nbytes: int | None = None) -> float:
        """What the step takes at least in any order with no more bytes alive (`least_within.py`); by default, than are
        alive in this one. It takes seconds for a deep program."""
        return max(self.bound_us, least_us_within(self.work, self.peak if nbytes is None else nbytes))

    @property
    def _simple_bound_us(self) -> float:
        return max(self.critical_us, self.busy_us[self.busiest])

    @property
    def gap(self) -> float:
        """How much longer the step is than the bound, as a part of the bound."""
        return self.us / self.bound_us - 1 if self.bound_us else 0.0

    def __str__(self):
        why = "the critical path" if self.critical_us >= self.busy_us[self.busiest] else f"{self.busiest} is busy"
        if self.bound_us > self._simple_bound_us * (1 + 1e-9):
            why = "a stream, with what must come before and behind it"
        lines = [("step", f"{self.us:,.1f} us, of which {self.exposed_us:,.1f} wait for what is sent")]
        lines += [(name, f"{us:,.1f} us busy") for name, us in self.busy_us.items()]
        lines += [("bound", f"{self.bound_us:,.1f} us: {why}; the step is {self.gap:.1%} above it")]
        lines += [("memory", f"{self.peak:,} bytes at most")]
        return "\n".join(f"{name:<20} {text}" for name, text in lines)

    def trace(self) -> dict[str, Any]:
        """The timeline as Chrome trace events: a track a stream, one for the user's lines, and a counter of memory."""
        return {"traceEvents": list(_trace_events(self))}

    def save(self, path: str | Path) -> None:
        """Write the timeline as a file for https://ui.perfetto.dev or chrome://tracing."""
        Path(path).write_text(json.dumps(self.trace()))


def timeline_of(program: Program, topology: MeshTopoInfo | None = None) -> Timeline:
    """The timeline of a program on the topology of its mesh, or on another one. Rounds of a loop are one behind the
    other."""
    program = unrolled(program)
    work = program.work if topology is None else Work.of(program, topology)
    ran = replay(work)
    events = [_event(work, each) for each in ran]
    path = tuple(events[i] for i in _path(ran))
    return Timeline(tuple(events), tuple(_memory(work, ran)), path, critical_us(work), busy_us(work), work)


def _event(work: Work, ran: Ran) -> Event:
    task = work.tasks[ran.task]
    sent = task.sends.nbytes if task.sends and ran.stream != COMPUTE else 0
    return Event(task.name, ran.stream, ran.start, ran.us, sent, task.line)


def _path(ran: list[Ran]) -> list[int]:
    """The places of the events that the last one waited for, in order."""
    if not ran:
        return []
    done: dict[int, list[int]] = {}
    for at, each in enumerate(ran):
        done.setdefault(each.task, []).append(at)
    at, found = max(range(len(ran)), key=lambda i: ran[i].end), []
    while True:
        found.append(at)
        before = [i for i in done.get(ran[at].after, ()) if i < at]
        if ran[at].after == START or not before:
            return found[::-1]
        at = max(before, key=lambda i: (ran[i].end <= ran[at].start + 1e-9, i))


def _memory(work: Work, ran: list[Ran]) -> Iterator[tuple[float, int]]:
    """The bytes that are alive, where they change, with the times at which the tasks are issued."""
    issued = {each.task: each.start for each in ran if each.stream == COMPUTE}
    clock, last = 0.0, -1
    for i, nbytes in enumerate(work.memory(range(len(work.tasks)))):
        clock = max(clock, issued.get(i, clock))
        if nbytes != last:
            yield clock, nbytes
            last = nbytes


# ---- as a trace -------------------------------------------------------------------------------


def _trace_events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    tracks = {name: i for i, name in enumerate(timeline.streams)}
    for name, i in (*tracks.items(), ("lines", len(tracks))):
        yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": i, "args": {"name": name}}
    for event in timeline.events:
        known = {"bytes": event.nbytes, "line": event.line}
        yield _complete(event.name, tracks[event.stream], event.start, event.us, {k: v for k, v in known.items() if v})
    computed = [event for event in timeline.events if event.stream == COMPUTE]
    for line, group in groupby(computed, key=lambda event: event.line):
        events = list(group)
        if line:
            yield _complete(line, len(tracks), events[0].start, events[-1].end - events[0].start, {})
    for us, nbytes in timeline.memory:
        yield {"ph": "C", "name": "memory", "pid": 0, "ts": us, "args": {"bytes": nbytes}}


def _complete(name: str, track: int, start: float, us: float, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "X", "name": name, "pid": 0, "tid": track, "ts": start, "dur": us, "args": args}
