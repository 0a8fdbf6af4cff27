"""What a simulation has sent: bytes, modelled time, a table and a timeline.

    >>> import torch, spmd
    >>> from spmd.comm import all_reduce
    >>> with spmd.LocalTensorMode(4) as mode:
    ...     mesh = spmd.init_device_mesh("cpu", (4,))
    ...     total = all_reduce(torch.ones(1000), "sum", mesh)
    >>> report = mode.report()
    >>> report.given(0), report.sent(0), round(report.us, 2)
    (4000, 6000, 10.27)

A collective has two numbers of bytes a rank: what it is *given*, and what it *sends*: what leaves the rank, by rings,
and to the byte for an all-to-all. The clock is modelled by `spmd.mesh.cost`: a collective starts when the last of its
ranks arrives and ends for all at once.

Left out: the time of computing between collectives, and collectives that overlap.
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
    """The collectives of one kind and group shape called at one place; bytes of the rank that has most."""

    where: str
    kind: str
    shape: str
    calls: int
    given: int
    sent: int
    us: float


@dataclass(frozen=True)
class Report:
    """The collectives of a simulation, in order. `str()` is a table; `unmodelled` are kinds taken as sent once."""

    ranks: Ranks
    events: tuple[Event, ...]

    @property
    def us(self) -> float:
        """When the last rank has done, on the modelled clock."""
        return max((event.start_us + event.us for event in self.events), default=0.0)

    def given(self, rank: int) -> int:
        """Bytes that a rank gave to collectives."""
        return _most(self.events, "given", [rank])

    def sent(self, rank: int) -> int:
        """Bytes that left a rank."""
        return _most(self.events, "sent", [rank])

    @property
    def unmodelled(self) -> tuple[str, ...]:
        """Kinds of which only the bytes given are known."""
        return tuple(sorted({event.kind for event in self.events} - set(KINDS)))

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """One for each place, kind and group shape, in the order they were first called."""
        return self._lines(lambda event: event.where)

    @cached_property
    def totals(self) -> tuple[Line, ...]:
        """One for each kind and group shape, wherever called."""
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
        given, sent = (_most(events, what, self.ranks) for what in ("given", "sent"))
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
        """The timeline as Chrome's trace events: one track a rank, one complete event for each part of a collective."""
        names = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": rank, "args": {"name": f"rank {rank}"}}
            for rank in self.ranks
        ]
        return {"traceEvents": [*names, *(part for event in self.events for part in _parts(event))]}

    def save_trace(self, path: str | Path) -> None:
        """Write the timeline as a file for https://ui.perfetto.dev or chrome://tracing."""
        Path(path).write_text(json.dumps(self.trace()))


def report(sent: Sequence[Sent], ranks: Ranks, mesh: DeviceMesh | None = None) -> Report:
    """What these parts of collectives are together.

    mesh: where the ranks stand and how fast their links are, for the modelled time; None: what the environment says
    of a mesh of all ranks (`spmd.mesh.topology`).
    """
    mesh = DeviceMesh("cpu", list(ranks)) if mesh is None else mesh
    steps: dict[int, dict[Ranks, dict[int, Sent]]] = defaultdict(lambda: defaultdict(dict))
    for part in sent:
        steps[part.step][_talking(part)][part.rank] = part
    clock = dict.fromkeys(ranks, 0.0)
    events = []
    for groups in steps.values():
        for group, parts in groups.items():
            links = _links(mesh, group, list(groups))
            event = _event(_members(parts, group), links, max(clock[rank] for rank in group))
            clock.update(dict.fromkeys(group, event.start_us + event.us))
            events.append(event)
    return Report(ranks, tuple(events))


MESSAGES = ("send", "send_object_list")


def _talking(part: Sent) -> Ranks:
    """Who takes part: the group, or of a message the two ranks it goes between."""
    return (part.rank, part.args[0]) if part.kind in MESSAGES and part.args else part.group


def _members(parts: dict[int, Sent], group: Ranks) -> Members:
    """A part of each rank of the group; who only receives, as of a message, gives nothing."""
    some = next(iter(parts.values()))
    return [parts.get(rank) or replace(some, rank=rank, nbytes=0) for rank in group]


def _event(parts: Members, links: tuple[MeshTopoInfo, Axes], start_us: float) -> Event:
    first, group, kind = parts[0], tuple(part.rank for part in parts), KINDS.get(parts[0].kind, UNKNOWN)
    given, us = tuple(part.nbytes for part in parts), kind.us(parts, *links)
    return Event(first.step, first.kind, group, first.where, given, tuple(kind.sends(parts)), start_us, us)


# ---- what each kind of collective sends, and how long it takes ---------------------------------


@dataclass(frozen=True)
class Kind:
    """`sends`: bytes that leave each rank. `us`: modelled time over the group's axes of a topology."""

    sends: Callable[[Members], list[int]]
    us: Callable[[Members, MeshTopoInfo, Axes], float]


def _largest(parts: Members) -> int:
    return max(part.nbytes for part in parts)


def _around(rounds: int) -> Callable[[Members], list[int]]:
    """A ring: in each round a rank passes on n-1 of the n pieces of what it has."""
    return lambda parts: [rounds * (len(parts) - 1) * part.nbytes // len(parts) for part in parts]


def _gathers(parts: Members) -> list[int]:
    return [(len(parts) - 1) * part.nbytes for part in parts]


def _root(parts: Members) -> int:
    """The place of the rank that a collective starts from or ends at: the last argument of those that have one."""
    return parts[0].args[-1] if parts[0].args else 0


def _passes_on(parts: Members) -> list[int]:
    """A broadcast along the ring: all but the last, who stands before the source, pass everything on."""
    n, src = len(parts), _root(parts)
    return [0 if (place + 1) % n == src else part.nbytes for place, part in enumerate(parts)]


def _to_root(parts: Members) -> list[int]:
    """All but the root send, or pass on, as much as they were given."""
    return [0 if place == _root(parts) else part.nbytes for place, part in enumerate(parts)]


def _from_root(parts: Members) -> list[int]:
    """The root keeps an n-th of what it has."""
    n = len(parts)
    return [part.nbytes * (n - 1) // n if place == _root(parts) else 0 for place, part in enumerate(parts)]


def _to_peers(part: Sent) -> list[int]:
    """Bytes of an all-to-all for each rank of the group; even ones where the splits were not noted."""
    n = len(part.group)
    if not part.args:
        return [part.nbytes // n] * n
    rows = part.args[1]
    return [part.nbytes * r // max(1, sum(rows)) for r in rows]


def _to_others(parts: Members) -> list[int]:
    pieces = [_to_peers(part) for part in parts]
    return [sum(row) - row[place] for place, row in enumerate(pieces)]


def _exchange_us(parts: Members, topology: MeshTopoInfo, axes: Axes) -> float:
    pieces = [_to_peers(part) for part in parts]
    received = [sum(row[place] for row in pieces) - pieces[place][place] for place in range(len(parts))]
    busiest = [max(sent, came) for sent, came in zip(_to_others(parts), received, strict=True)]
    return cost.exchange_cost(busiest, axes, topology)


def _us(price: Callable[..., float], times_n: bool = False) -> Callable[[Members, MeshTopoInfo, Axes], float]:
    """The price of the largest rank's bytes, or of n times as many: what they are gathered to."""
    return lambda parts, topo, axes: price(_largest(parts) * (len(parts) if times_n else 1), axes, topo)


_ALL_GATHER = Kind(_gathers, _us(cost.all_gather_cost, times_n=True))
_REDUCE_SCATTER = Kind(_around(1), _us(cost.reduce_scatter_cost))
_ALL_TO_ALL = Kind(_to_others, _exchange_us)
_BROADCAST = Kind(_passes_on, _us(cost.broadcast_cost))
_SCATTER = Kind(_from_root, _us(cost.scatter_cost))
_GATHER = Kind(_to_root, _us(cost.scatter_cost, times_n=True))  # a scatter backwards
_MESSAGE = Kind(lambda parts: [part.nbytes for part in parts], _us(cost.permute_cost))

KINDS: dict[str, Kind] = {
    "all_reduce": Kind(_around(2), _us(cost.all_reduce_cost)),
    "reduce_scatter_tensor": _REDUCE_SCATTER, "reduce_scatter": _REDUCE_SCATTER,
    "all_gather_into_tensor": _ALL_GATHER, "all_gather": _ALL_GATHER, "all_gather_object": _ALL_GATHER,
    "all_to_all_single": _ALL_TO_ALL, "all_to_all": _ALL_TO_ALL,
    "broadcast": _BROADCAST, "broadcast_object_list": _BROADCAST,
    "reduce": Kind(_to_root, _us(cost.broadcast_cost)),  # a broadcast backwards
    "scatter": _SCATTER, "scatter_object_list": _SCATTER,
    "gather": _GATHER, "gather_object": _GATHER,
    "send": _MESSAGE, "send_object_list": _MESSAGE,
    "barrier": Kind(lambda parts: [0 for _ in parts], lambda parts, topo, axes: cost.all_reduce_cost(0, axes, topo)),
}  # fmt: skip

UNKNOWN = _MESSAGE
"""A kind that is not in the table: what a rank gives is sent once."""


def _links(mesh: DeviceMesh, group: Ranks, at_once: list[Ranks]) -> tuple[MeshTopoInfo, Axes]:
    """A topology, and the axes of it that a group lies along; groups that talk at once share their network cards."""
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
    """The axes along which a group lies."""
    columns = [set(column) for column in zip(*map(mesh.coordinate_of, group), strict=True)]
    axes = tuple(axis for axis, column in enumerate(columns) if len(column) > 1)
    if len(group) != prod(mesh.shape[axis] for axis in axes):
        raise ValueError(f"report: the links of {mesh!r} are known by axis, and group {list(group)} lies along none")
    return axes


# ---- printing ---------------------------------------------------------------------------------


def _most(events: Iterable[Event], what: str, ranks: Iterable[int]) -> int:
    """The most bytes that one of the ranks has."""
    total: dict[int, int] = defaultdict(int)
    for event in events:
        for rank, nbytes in zip(event.group, getattr(event, what), strict=True):
            total[rank] += nbytes
    return max((total[rank] for rank in ranks), default=0)


def _shapes(events: Iterable[Event]) -> dict[tuple[int, str], str]:
    """For each step and kind the groups that took part: `2 x 4` for two of four ranks."""
    groups: dict[tuple[int, str], list[int]] = defaultdict(list)
    for event in events:
        groups[event.step, event.kind].append(len(event.group))
    return {key: f"{len(sizes)} x {'/'.join(map(str, sorted(set(sizes))))}" for key, sizes in groups.items()}


def _count(steps: set[int]) -> str:
    return f"{len(steps)} collective{'s' if len(steps) != 1 else ''}"


def _bytes(nbytes: int) -> str:
    """Three digits and a unit.

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
    """Words to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    pads = [str.ljust] * 3 + [str.rjust] * (len(widths) - 3)
    return ["  ".join(pad(x, w) for pad, x, w in zip(pads, row, widths, strict=True)) for row in rows]


def _parts(event: Event) -> list[dict[str, Any]]:
    what = {"ph": "X", "name": event.kind, "cat": "collective", "pid": 0, "ts": event.start_us, "dur": event.us}
    return [
        {**what, "tid": rank, "args": {"where": event.where, "group": list(event.group), "given": given, "sent": sent}}
        for rank, given, sent in zip(event.group, event.given, event.sent, strict=True)
    ]


# ---- the thread simulator ---------------------------------------------------------------------


def meetings(calls: Sequence[Sequence[Any]]) -> list[Sent]:
    """The parts of collectives, step by step, from what each rank of a ThreadWorld called.

    Collectives that can run at once are one step. Their places in the code and splits were not noted.
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
