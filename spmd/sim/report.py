"""Reports the traffic of a simulation: bytes and modelled time, as a table and a timeline.

    >>> import torch, spmd
    >>> from spmd.comm import all_reduce
    >>> with spmd.LocalTensorMode(4) as mode:
    ...     mesh = spmd.init_device_mesh("cpu", (4,))
    ...     total = all_reduce(torch.ones(1000), "sum", mesh)
    >>> report = mode.report()
    >>> report.given(0), report.sent(0), round(report.us, 2)
    (4000, 6000, 10.27)

A collective has two numbers of bytes for each rank. *given*: the bytes of the tensor that the rank gives to it. *sent*:
the bytes that leave the rank, if rings are used; for an all-to-all the exact number. `spmd.mesh.cost` models the time:
a collective starts when the last of its ranks arrives, and ends for all ranks at once.

Left out: the time of computation between collectives, and the overlap of collectives.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from spmd.mesh import DeviceMesh, MeshTopoInfo, cost
from spmd.mesh.layout import HostGrid
from spmd.sim.local_transport import Sent

Ranks = tuple[int, ...]
Axes = tuple[int, ...]
Members = Sequence[Sent]  # one collective's parts, in the order of its group


@dataclass(frozen=True)
class Event:
    """One collective on one group. `given` and `sent`: bytes of each rank of the group; times in microseconds."""

    step: int
    kind: str
    group: Ranks
    where: str
    given: tuple[int, ...]
    sent: tuple[int, ...]
    start_us: float
    us: float


@dataclass(frozen=True)
class Line:
    """The collectives of one kind and one group shape that one line of code calls; bytes of the rank that has most."""

    where: str
    kind: str
    shape: str
    calls: int
    given: int
    sent: int
    us: float


@dataclass(frozen=True)
class Report:
    """The collectives of a simulation, in order. `str()` is a table; `unmodelled`: kinds whose bytes count once."""

    ranks: Ranks
    events: tuple[Event, ...]

    @property
    def us(self) -> float:
        """The modelled time when the last rank finishes."""
        return max((event.start_us + event.us for event in self.events), default=0.0)

    def given(self, rank: int) -> int:
        """Bytes that a rank gives to collectives."""
        return _most_bytes(self.events, "given", [rank])

    def sent(self, rank: int) -> int:
        """Bytes that leave a rank."""
        return _most_bytes(self.events, "sent", [rank])

    @property
    def unmodelled(self) -> tuple[str, ...]:
        """Kinds of collectives without a model: only the given bytes are known."""
        return tuple(sorted({event.kind for event in self.events} - set(MODELS)))

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """One line for each place in the code, kind and group shape, in the order of the first calls."""
        return self._lines(lambda event: event.where)

    @cached_property
    def totals(self) -> tuple[Line, ...]:
        """One line for each kind and group shape, over all places."""
        return self._lines(lambda event: "all")

    def _lines(self, place: Callable[[Event], str]) -> tuple[Line, ...]:
        shapes = _shapes(self.events)
        found: dict[tuple[str, str, str], list[Event]] = defaultdict(list)
        for event in self.events:
            found[place(event), event.kind, shapes[event.step, event.kind]].append(event)
        return tuple(self._line(key, events) for key, events in found.items())

    def _line(self, key: tuple[str, str, str], events: list[Event]) -> Line:
        slowest: dict[int, float] = defaultdict(float)
        for event in events:
            slowest[event.step] = max(slowest[event.step], event.us)
        given, sent = (_most_bytes(events, what, self.ranks) for what in ("given", "sent"))
        return Line(*key, len(slowest), given, sent, sum(slowest.values()))

    def __str__(self) -> str:
        rows = [("where", "collective", "groups", "calls", "given", "sent", "us"), *map(_cells, self.lines)]
        if len(self.lines) > len(self.totals):
            rows += map(_cells, self.totals)
        most = _bytes(max((self.sent(rank) for rank in self.ranks), default=0))
        last = f"{_count({e.step for e in self.events})}, at most {most} sent by a rank, {self.us:.1f} us modelled"
        unknown = [f"without a model, taken as sent once: {', '.join(self.unmodelled)}"] if self.unmodelled else []
        return "\n".join([*(_aligned(rows) if self.events else []), last, *unknown])

    def trace(self) -> dict[str, Any]:
        """The timeline as Chrome trace events: one track a rank, one complete event for each part of a collective."""
        names = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
            for rank in self.ranks
        ]
        return {"traceEvents": [*names, *(part for event in self.events for part in _trace_events(event))]}

    def save_trace(self, path: str | Path) -> None:
        """Write the timeline as a file for https://ui.perfetto.dev or chrome://tracing."""
        Path(path).write_text(json.dumps(self.trace()))


def report(sent: Sequence[Sent], ranks: Ranks, mesh: DeviceMesh | None = None) -> Report:
    """The report of these parts of collectives.

    mesh: gives the hosts of the ranks and the speed of their links, for the modelled time. None: a mesh of all ranks
    with the topology that the environment gives (`spmd.mesh.topology`).
    """
    mesh = DeviceMesh("cpu", list(ranks)) if mesh is None else mesh
    steps: dict[int, dict[Ranks, dict[int, Sent]]] = defaultdict(lambda: defaultdict(dict))
    for part in sent:
        steps[part.step][_participants(part)][part.rank] = part
    clock = dict.fromkeys(ranks, 0.0)
    events = []
    for groups in steps.values():
        for group, parts in groups.items():
            links = _links(mesh, group, list(groups))
            event = _event(_parts_of_group(parts, group), links, max(clock[rank] for rank in group))
            clock.update(dict.fromkeys(group, event.start_us + event.us))
            events.append(event)
    return Report(ranks, tuple(events))


MESSAGES = ("send", "send_object_list")


def _participants(part: Sent) -> Ranks:
    """The ranks that take part: the group, or the sender and the receiver of a message."""
    return (part.rank, part.args[0]) if part.kind in MESSAGES and part.args else part.group


def _parts_of_group(parts: dict[int, Sent], group: Ranks) -> Members:
    """The part of each rank of the group. A rank that only receives, as of a message, gives 0 bytes."""
    some = next(iter(parts.values()))
    return [parts.get(rank) or replace(some, rank=rank, nbytes=0) for rank in group]


def _event(parts: Members, links: tuple[MeshTopoInfo, Axes], start_us: float) -> Event:
    first, group, model = parts[0], tuple(part.rank for part in parts), MODELS.get(parts[0].kind, UNMODELLED)
    given, us = tuple(part.nbytes for part in parts), model.us(parts, *links)
    return Event(first.step, first.kind, group, first.where, given, tuple(model.sends(parts)), start_us, us)


# ---- bytes and time of each kind of collective --------------------------------------------------


@dataclass(frozen=True)
class TrafficModel:
    """The model of a kind. `sends`: bytes that leave each rank; `us`: modelled time over a group's axes."""

    sends: Callable[[Members], list[int]]
    us: Callable[[Members, MeshTopoInfo, Axes], float]


def _largest_part(parts: Members) -> int:
    return max(part.nbytes for part in parts)


def _ring_rounds(rounds: int) -> Callable[[Members], list[int]]:
    """A ring: in each round a rank sends n-1 of the n pieces of its tensor."""
    return lambda parts: [rounds * (len(parts) - 1) * part.nbytes // len(parts) for part in parts]


def _ring_gather(parts: Members) -> list[int]:
    return [(len(parts) - 1) * part.nbytes for part in parts]


def _root_place(parts: Members) -> int:
    """The place of the root of a collective: its last argument if it has one."""
    return parts[0].args[-1] if parts[0].args else 0


def _ring_broadcast(parts: Members) -> list[int]:
    """A broadcast along the ring: every rank sends everything on, except the last one, which precedes the source."""
    n, src = len(parts), _root_place(parts)
    return [0 if (place + 1) % n == src else part.nbytes for place, part in enumerate(parts)]


def _to_root(parts: Members) -> list[int]:
    """All ranks but the root send (or forward) as many bytes as they were given."""
    return [0 if place == _root_place(parts) else part.nbytes for place, part in enumerate(parts)]


def _from_root(parts: Members) -> list[int]:
    """The root sends all but the n-th of its tensor that it keeps."""
    n = len(parts)
    return [part.nbytes * (n - 1) // n if place == _root_place(parts) else 0 for place, part in enumerate(parts)]


def _bytes_to_each(part: Sent) -> list[int]:
    """Bytes of an all-to-all to each rank of the group; equal ones if the splits were not recorded."""
    n = len(part.group)
    if not part.args:
        return [part.nbytes // n] * n
    rows = part.args[1]
    return [part.nbytes * r // max(1, sum(rows)) for r in rows]


def _bytes_to_others(parts: Members) -> list[int]:
    pieces = [_bytes_to_each(part) for part in parts]
    return [sum(row) - row[place] for place, row in enumerate(pieces)]


def _exchange_us(parts: Members, topology: MeshTopoInfo, axes: Axes) -> float:
    pieces = [_bytes_to_each(part) for part in parts]
    received = [sum(row[place] for row in pieces) - pieces[place][place] for place in range(len(parts))]
    busiest = [max(sent, came) for sent, came in zip(_bytes_to_others(parts), received, strict=True)]
    return cost.exchange_cost(busiest, axes, topology)


def _time_of(price: Callable[..., float], times_n: bool = False) -> Callable[[Members, MeshTopoInfo, Axes], float]:
    """The modelled time for the bytes of the rank that has most. times_n: for n times as many, the size gathered."""
    return lambda parts, topo, axes: price(_largest_part(parts) * (len(parts) if times_n else 1), axes, topo)


_ALL_GATHER = TrafficModel(_ring_gather, _time_of(cost.all_gather_cost, times_n=True))
_REDUCE_SCATTER = TrafficModel(_ring_rounds(1), _time_of(cost.reduce_scatter_cost))
_ALL_TO_ALL = TrafficModel(_bytes_to_others, _exchange_us)
_BROADCAST = TrafficModel(_ring_broadcast, _time_of(cost.broadcast_cost))
_SCATTER = TrafficModel(_from_root, _time_of(cost.scatter_cost))
_GATHER = TrafficModel(_to_root, _time_of(cost.scatter_cost, times_n=True))  # a scatter backwards
_BARRIER = TrafficModel(lambda parts: [0 for _ in parts], lambda _, topo, axes: cost.all_reduce_cost(0, axes, topo))
_MESSAGE = TrafficModel(lambda parts: [part.nbytes for part in parts], _time_of(cost.permute_cost))

MODELS: dict[str, TrafficModel] = {
    "all_reduce": TrafficModel(_ring_rounds(2), _time_of(cost.all_reduce_cost)),
    "reduce_scatter_tensor": _REDUCE_SCATTER, "reduce_scatter": _REDUCE_SCATTER,
    "all_gather_into_tensor": _ALL_GATHER, "all_gather": _ALL_GATHER, "all_gather_object": _ALL_GATHER,
    "all_to_all_single": _ALL_TO_ALL, "all_to_all": _ALL_TO_ALL,
    "broadcast": _BROADCAST, "broadcast_object_list": _BROADCAST,
    "reduce": TrafficModel(_to_root, _time_of(cost.broadcast_cost)),  # a broadcast backwards
    "scatter": _SCATTER, "scatter_object_list": _SCATTER,
    "gather": _GATHER, "gather_object": _GATHER,
    "send": _MESSAGE, "send_object_list": _MESSAGE,
    "barrier": _BARRIER,
}  # fmt: skip

UNMODELLED = _MESSAGE
"""The model of a kind that is not in the table: each rank sends the bytes it is given once."""


def _links(mesh: DeviceMesh, group: Ranks, at_once: list[Ranks]) -> tuple[MeshTopoInfo, Axes]:
    """A topology, and the axes of it that a group spans. Groups that communicate at once share their network cards."""
    topology = mesh.topology
    if not set(group) <= set(mesh.ranks):
        raise ValueError(f"report: group {list(group)} is not among the ranks of {mesh!r}; give a mesh of all ranks")
    if not isinstance(topology.layout, HostGrid) or len(topology.layout.places) > 1:  # by axis, or part of a mesh
        return topology, _axes(mesh, group)
    if not topology.layout.places:
        return MeshTopoInfo(HostGrid((len(group),)), topology.machine), (0,)
    places = dict(zip(mesh.ranks, topology.layout.places[0], strict=True))
    rows = tuple(tuple(places[rank] for rank in ranks) for ranks in at_once if len(ranks) == len(group))
    return MeshTopoInfo(HostGrid((len(group),), rows), topology.machine), (0,)


def _axes(mesh: DeviceMesh, group: Ranks) -> Axes:
    """The axes that a group spans."""
    columns = [set(column) for column in zip(*map(mesh.coordinate_of, group), strict=True)]
    axes = tuple(axis for axis, column in enumerate(columns) if len(column) > 1)
    if len(group) != prod(mesh.shape[axis] for axis in axes):
        raise ValueError(f"report: the links of {mesh!r} are known by axis, and group {list(group)} spans none")
    return axes


# ---- printing ---------------------------------------------------------------------------------


def _most_bytes(events: Iterable[Event], what: str, ranks: Iterable[int]) -> int:
    """The largest number of bytes of one of the ranks. what: "given" or "sent"."""
    total: dict[int, int] = defaultdict(int)
    for event in events:
        for rank, nbytes in zip(event.group, getattr(event, what), strict=True):
            total[rank] += nbytes
    return max((total[rank] for rank in ranks), default=0)


def _shapes(events: Iterable[Event]) -> dict[tuple[int, str], str]:
    """The groups that took part in each step and kind, as text: `2 x 4` for two groups of four ranks."""
    groups: dict[tuple[int, str], list[int]] = defaultdict(list)
    for event in events:
        groups[event.step, event.kind].append(len(event.group))
    return {key: f"{len(sizes)} x {'/'.join(map(str, sorted(set(sizes))))}" for key, sizes in groups.items()}


def _count(steps: set[int]) -> str:
    return f"{len(steps)} collective{'s' if len(steps) != 1 else ''}"


def _bytes(nbytes: int) -> str:
    """A number of bytes as text, with three digits and a unit.

    >>> _bytes(12), _bytes(12_345), _bytes(3_000_000_000)
    ('12 B', '12.3 kB', '3 GB')
    """
    size, unit = float(nbytes), iter(("B", "kB", "MB", "GB", "TB"))
    name = next(unit)
    while size >= 999.5 and name != "TB":
        size, name = size / 1000, next(unit)
    return f"{size:.3g} {name}"


def _cells(line: Line) -> tuple[str, ...]:
    calls, given, sent = str(line.calls), _bytes(line.given), _bytes(line.sent)
    return line.where, line.kind, line.shape, calls, given, sent, f"{line.us:.1f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines of text: words are left-aligned, numbers right-aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pads = [str.ljust] * 3 + [str.rjust] * (len(widths) - 3)
    return ["  ".join(pad(x, w) for pad, x, w in zip(pads, row, widths, strict=True)) for row in rows]


def _trace_events(event: Event) -> list[dict[str, Any]]:
    what = {"ph": "X", "name": event.kind, "cat": "collective", "pid": 0, "ts": event.start_us, "dur": event.us}
    return [
        {**what, "tid": rank, "args": {"where": event.where, "group": list(event.group), "given": given, "sent": sent}}
        for rank, given, sent in zip(event.group, event.given, event.sent, strict=True)
    ]


# ---- the thread simulator ---------------------------------------------------------------------


def sent_by_threads(calls: Sequence[Sequence[Any]]) -> list[Sent]:
    """The parts of collectives, step by step, from the calls of each rank of a ThreadWorld.

    Collectives that can run at once are one step. The calls have no line in the code and no splits.
    """
    todo = [list(reversed([(call, tuple(map(int, call.group.split(",")))) for call in mine])) for mine in calls]
    sent: list[Sent] = []
    step = 0
    while any(todo):
        heads = {rank: mine[-1] for rank, mine in enumerate(todo) if mine}
        ready = [rank for rank, (_, group) in heads.items() if all(heads.get(r, (0, ()))[1] == group for r in group)]
        if not ready:
            raise ValueError("the ranks' calls do not meet: the run did not end well")
        for rank in ready:
            call, group = todo[rank].pop()
            sent.append(Sent(step, rank, call.kind, group, call.nbytes, ""))
        step += 1
    return sent
