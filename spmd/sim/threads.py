"""One thread plays one rank; collectives meet in memory.

    >>> from spmd.comm import transport
    >>> from spmd.mesh import init_device_mesh
    >>> world = ThreadWorld(2)
    >>> world.run(lambda rank: transport().gather_objects(rank * 10, init_device_mesh("cpu", (2,))))
    [[0, 10], [0, 10]]

Every call of a collective is a *meeting*: the n-th call on a group meets the n-th calls of its other ranks. The last
to come plays the collective for all, so nobody can write into an input that is still being read. What would hang
on a real job is an error here: ranks that call different things, a rank that fails or ends while others wait for it,
ranks that wait in a circle.

A thread inherits the caller's grad mode and context variables, not its torch modes. The threads share torch's global
random generator: use a generator of your own for numbers that must not depend on scheduling.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from spmd.comm import use_transport
from spmd.mesh import DeviceMesh, as_rank, groups
from spmd.mesh.rank import own_place
from spmd.sim.collectives import Collective, complaint, disagreement, play
from spmd.sim.exchange import caller
from spmd.sim.report import Report, meetings, report

Ranks = tuple[int, ...]


class Call(NamedTuple):
    """One collective as a rank made it: its kind, its group such as "0,2", and the bytes of the tensor given to it."""

    kind: str
    group: str
    nbytes: int


class RankStopped(RuntimeError):
    """Another rank failed, so this one was stopped."""


def run_ranks(fn: Callable[[int], Any], world_size: int, timeout: float = 60.0) -> list:
    """Run `fn(rank)` for ranks 0..world_size-1, each in a thread that plays the rank; their results in rank order.

    When a rank raises, the others are stopped and its error is raised here with a note naming the rank; of several
    errors, the one of the lowest rank. TimeoutError after `timeout` seconds names the ranks that were still busy.

        >>> run_ranks(lambda rank: rank * rank, 3)
        [0, 1, 4]
    """
    return ThreadWorld(world_size).run(fn, timeout)


class ThreadWorld:
    """A number of simulated ranks. `calls[rank]` are the collectives of the last run, in order.

    >>> from spmd.comm import transport
    >>> from spmd.mesh import init_device_mesh
    >>> world = ThreadWorld(2)
    >>> mesh = init_device_mesh("cpu", (2,))
    >>> _ = world.run(lambda rank: transport().all_reduce(torch.ones(3), "sum", transport().group(mesh, 0)))
    >>> world.calls[1]
    [Call(kind='all_reduce', group='0,1', nbytes=12)]
    """

    def __init__(self, world_size: int) -> None:
        if world_size < 1:
            raise ValueError(f"world_size is {world_size}; it must be at least 1")
        self.world_size = world_size
        self.calls: list[list[Call]] = [[] for _ in range(world_size)]

    def report(self, mesh: DeviceMesh | None = None) -> Report:
        """What the last run sent, with bytes and modelled time, as a table and a timeline (`sim/report.py`)."""
        return report(meetings(self.calls), tuple(range(self.world_size)), mesh)

    def run(self, fn: Callable[[int], Any], timeout: float = 60.0) -> list:
        """See `run_ranks`."""
        board = _Board(self.world_size)
        self.calls = [[] for _ in range(self.world_size)]
        results: list[Any] = [None] * self.world_size
        threads = [self._thread(fn, rank, board, results) for rank in range(self.world_size)]
        for thread in threads:
            thread.start()
        _join_all(threads, board, timeout)
        error = board.error()
        if error is not None:
            raise error
        return results

    def _thread(self, fn: Callable[[int], Any], rank: int, board: _Board, results: list) -> threading.Thread:
        grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

        def play_rank() -> None:
            # Grad mode is a thread's own, and a new thread starts with the default.
            with (
                torch.inference_mode(inference),
                torch.set_grad_enabled(grad),
                as_rank(rank, self.world_size),
                own_place(),
                use_transport(ThreadTransport(board, rank, self.calls[rank])),
            ):
                results[rank] = fn(rank)

        context = copy_context()

        def guarded() -> None:
            try:
                context.run(play_rank)
            except BaseException as error:  # handed to the caller of run
                board.raised(rank, error)
            board.end(rank)

        return threading.Thread(target=guarded, name=f"spmd rank {rank}", daemon=True)


class ThreadTransport:
    """The collectives of one simulated rank, in the shape of `spmd.comm.Transport`."""

    def __init__(self, board: _Board, rank: int, calls: list[Call]) -> None:
        self.calls = calls
        self._board = board
        self._rank = rank

    def all_reduce(self, x: torch.Tensor, op: str, group: str) -> torch.Tensor:
        """See `spmd.comm.Transport`, here and below."""
        return self._meet(x, group, "all_reduce", op)

    def all_gather_into_tensor(self, x: torch.Tensor, n: int, group: str) -> torch.Tensor:
        return self._meet(x, group, "all_gather_into_tensor", n)

    def reduce_scatter_tensor(self, x: torch.Tensor, op: str, n: int, group: str) -> torch.Tensor:
        return self._meet(x, group, "reduce_scatter_tensor", op, n)

    def all_to_all_single(
        self, x: torch.Tensor, out_splits: list[int], in_splits: list[int], group: str
    ) -> torch.Tensor:
        return self._meet(x, group, "all_to_all_single", tuple(out_splits), tuple(in_splits))

    def broadcast(self, x: torch.Tensor, src: int, group: str) -> torch.Tensor:
        return self._meet(x, group, "broadcast", src)

    def broadcast_(self, x: torch.Tensor, src: int, group: str) -> torch.Tensor:
        came = self.broadcast(x, src, group)
        with torch.no_grad():
            return x.copy_(came)

    def all_reduce_coalesced(self, xs: list[torch.Tensor], op: str, group: str) -> list[torch.Tensor]:
        return [self.all_reduce(x, op, group) for x in xs]

    def all_gather_into_tensor_coalesced(self, xs: list[torch.Tensor], n: int, group: str) -> list[torch.Tensor]:
        return [self.all_gather_into_tensor(x, n, group) for x in xs]

    def reduce_scatter_tensor_coalesced(
        self, xs: list[torch.Tensor], op: str, n: int, group: str
    ) -> list[torch.Tensor]:
        return [self.reduce_scatter_tensor(x, op, n, group) for x in xs]

    def wait_tensor(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def step(self, start: Callable[..., Any], finish: Callable[[Any], Any], *args: Any) -> Any:
        return finish(start(*args))

    def bound(self, make: Callable[[], Any]) -> Any:
        return make()

    def group(self, mesh: DeviceMesh, axis: int | str | tuple[int, ...]) -> str:
        """The name that spells the group's ranks."""
        return groups.name_of(mesh.ranks_along(axis, mesh.coordinate_of(self._rank)))

    def gather_marks(self, mark: bytes, mesh: DeviceMesh) -> list[bytes]:
        return self.gather_objects(mark, mesh)

    def gather_objects(self, obj: object, mesh: DeviceMesh) -> list:
        """The objects themselves, not copies: do not write into what other ranks gave."""
        return self._board.meet(self._rank, mesh.ranks, "gather_objects", obj, _all_objects)

    def _meet(self, x: torch.Tensor, group: str, kind: str, *args: object) -> torch.Tensor:
        ranks = self._ranks(group)
        call = Collective.of(kind, x, *args)
        wrong = complaint(call, len(ranks))
        if wrong is not None:
            raise ValueError(f"{call} on group {_group_name(ranks)}: {wrong}")
        self.calls.append(Call(kind, _group_name(ranks), x.numel() * x.element_size()))
        where = caller()
        return self._board.meet(self._rank, ranks, f"{call} at {where}", (call, x.detach(), where), _all_tensors)

    def _ranks(self, group: str) -> Ranks:
        ranks = groups.ranks_in(group)
        if ranks is None:
            raise ValueError(f"group {group!r} is none of the simulated ranks; name it by its ranks")
        if self._rank not in ranks:
            raise ValueError(f"rank {self._rank} calls a collective on group {_group_name(ranks)}, which it is not in")
        return ranks


def _group_name(ranks: Ranks) -> str:
    return ",".join(map(str, ranks))


def _all_objects(ranks: Ranks, objects: list) -> list:
    return [list(objects) for _ in ranks]


def _all_tensors(ranks: Ranks, given: list) -> list:
    calls, xs, where = ([part[i] for part in given] for i in range(3))
    wrong = disagreement(calls, ranks)
    if wrong is not None:
        raise RuntimeError(f"group {_group_name(ranks)}: {wrong}; at {' and '.join(sorted(set(where)))}")
    return play(calls, xs)


@dataclass
class _Meeting:
    """The n-th call on a group, by all its ranks."""

    ranks: Ranks
    given: dict[int, Any] = field(default_factory=dict)
    what: dict[int, str] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)

    @property
    def full(self) -> bool:
        return len(self.given) == len(self.ranks)

    def play(self, how: Callable[[Ranks, list], list]) -> None:
        """Fill in every rank's result, or raise why there is none."""
        names = {text.split("(")[0] for text in self.what.values()}
        if len(names) > 1:
            first, other = self.ranks[0], next(r for r in self.ranks if self.what[r] != self.what[self.ranks[0]])
            raise RuntimeError(
                f"group {_group_name(self.ranks)}: rank {first} calls {self.what[first]}, "
                f"but rank {other} calls {self.what[other]}"
            )
        results = how(self.ranks, [self.given[rank] for rank in self.ranks])
        self.results = dict(zip(self.ranks, results, strict=True))


class _Board:
    """Where ranks meet, guarded by one lock: the open meetings, who waits in which, and the first failure."""

    def __init__(self, world_size: int) -> None:
        self.failure: BaseException | None = None
        self._failed: str = ""
        self._errors: dict[int, BaseException] = {}
        self._changed = threading.Condition()
        self._counts: dict[tuple[int, Ranks], int] = defaultdict(int)
        self._open: dict[tuple[Ranks, int], _Meeting] = {}
        self._size = world_size
        self._busy = set(range(world_size))
        self._waiting: dict[int, _Meeting] = {}

    def meet(self, rank: int, ranks: Ranks, what: str, given: Any, how: Callable[[Ranks, list], list]) -> Any:
        """Hand in `given`, wait for the other ranks, and return this rank's share of `how(ranks, all given)`."""
        with self._changed:
            self._stop_if_failed()
            meeting = self._join(rank, ranks)
            meeting.given[rank], meeting.what[rank] = given, what
            if meeting.full:
                self._close(meeting, how, rank)
            else:
                self._wait(rank, meeting)
            return meeting.results[rank]

    def fail(self, error: BaseException, who: str) -> None:
        """Write down the first failure and wake everybody. `who` failed, for the messages."""
        with self._changed:
            if self.failure is None:
                _note(error, who)
                self.failure, self._failed = error, who
            self._changed.notify_all()

    def raised(self, rank: int, error: BaseException) -> None:
        """A rank's function raised: its own error, or because it was stopped."""
        with self._changed:
            self._errors[rank] = error
            if self.failure is None:
                self.fail(error, f"raised on simulated rank {rank}")
            elif not _is_echo(error) and error is not self.failure:
                _note(error, f"raised on simulated rank {rank}")

    def error(self) -> BaseException | None:
        """What to tell the caller: an error that is not the echo of another one, of the lowest rank."""
        with self._changed:
            own = [rank for rank in sorted(self._errors) if not _is_echo(self._errors[rank])]
            return self._errors[own[0]] if own else self.failure

    def end(self, rank: int) -> None:
        """A rank has returned: whoever waits for it now waits for ever."""
        with self._changed:
            self._busy.discard(rank)
            self._fail_if_stuck()

    def state(self) -> str:
        """What every rank that has not ended is doing."""
        with self._changed:
            return "; ".join(self._doing(rank) for rank in sorted(self._busy))

    def _join(self, rank: int, ranks: Ranks) -> _Meeting:
        count = self._counts[rank, ranks]
        self._counts[rank, ranks] += 1
        return self._open.setdefault((ranks, count), _Meeting(ranks))

    def _close(self, meeting: _Meeting, how: Callable[[Ranks, list], list], rank: int) -> None:
        del self._open[meeting.ranks, self._counts[rank, meeting.ranks] - 1]
        for member in meeting.ranks:
            self._waiting.pop(member, None)
        try:
            meeting.play(how)
        except Exception as error:
            self.fail(error, f"raised on simulated ranks {_group_name(meeting.ranks)}")
            raise
        self._changed.notify_all()

    def _wait(self, rank: int, meeting: _Meeting) -> None:
        self._waiting[rank] = meeting
        self._fail_if_stuck()
        self._changed.wait_for(lambda: bool(meeting.results) or self.failure is not None)
        if not meeting.results:
            self._stop_if_failed()

    def _stop_if_failed(self) -> None:
        if self.failure is not None:
            raise RankStopped(f"stopped by an error {self._failed}: {self.failure}") from self.failure

    def _fail_if_stuck(self) -> None:
        """When every rank that has not ended waits, nobody can wake them."""
        if self.failure is None and self._busy and self._busy == set(self._waiting):
            ended = "the others have ended" if len(self._busy) < self._size else "all ranks wait"
            stuck = RuntimeError(f"the ranks cannot go on, {ended}: {self.state()}")
            self.fail(stuck, "found by the simulator; a real job would hang")

    def _doing(self, rank: int) -> str:
        meeting = self._waiting.get(rank)
        if meeting is None:
            return f"rank {rank} is computing"
        missing = ", ".join(str(r) for r in meeting.ranks if r not in meeting.given)
        return f"rank {rank} waits in {meeting.what[rank]} on group {_group_name(meeting.ranks)} for rank {missing}"


def _note(error: BaseException, text: str) -> None:
    """Add to what is printed with the error; before Python 3.11 nobody prints notes, but they can be read."""
    error.__notes__ = [*getattr(error, "__notes__", []), f"({text})"]


def _is_echo(error: BaseException | None) -> bool:
    """Whether it, or what it was raised from, says only that the rank was stopped."""
    while error is not None and not isinstance(error, RankStopped):
        error = error.__cause__ or error.__context__
    return error is not None


def _join_all(threads: list[threading.Thread], board: _Board, timeout: float) -> None:
    end = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if any(thread.is_alive() for thread in threads):
        late = TimeoutError(f"the simulated ranks did not end within {timeout} s: {board.state()}")
        board.fail(late, "out of time")
