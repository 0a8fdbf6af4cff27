"""One thread plays one rank; collectives meet in memory.

    >>> from spmd.comm import transport
    >>> from spmd.mesh import init_device_mesh
    >>> world = ThreadWorld(2)
    >>> world.run(lambda rank: transport().gather_objects(rank * 10, init_device_mesh("cpu", (2,))))
    [[0, 10], [0, 10]]

Every call of a collective is a *meeting*: the n-th call of a rank on a group meets the n-th calls of the group's other
ranks. The last rank to arrive computes the collective for all, so no rank can write into an input that is still being
read. Everything that would hang in a real job is an error here: ranks that call different collectives, a rank that
fails or ends while others wait for it, ranks that wait for each other in a circle.

A thread inherits the caller's grad mode and context variables, but not its torch modes. The threads share torch's
global random generator; use your own generator for plain numbers that must not depend on scheduling. The random numbers
of DTensors do not depend on it: what a rank does to torch's generator counts for its own stream.
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

from spmd import _torch
from spmd.comm import use_transport
from spmd.comm.listen import refuse_torchs_mode, tell
from spmd.comm.user_line import caller
from spmd.mesh import DeviceMesh, as_rank, groups
from spmd.mesh.rank import own_rank_state
from spmd.sim.collectives import Collective, call_error, mismatch, run_collective
from spmd.sim.report import Report, report, sent_by_threads
from spmd.sim.simulated_transport import SimulatedTransport

Ranks = tuple[int, ...]


class Call(NamedTuple):
    """One call of a collective by a rank: its kind, its group such as "0,2", and the bytes of its tensor."""

    kind: str
    group: str
    nbytes: int


class RankStopped(RuntimeError):
    """Another rank failed, so this one was stopped."""


def run_ranks(fn: Callable[[int], Any], world_size: int, timeout: float = 60.0) -> list:
    """Run `fn(rank)` for ranks 0..world_size-1, each in its own thread; return their results in rank order.

    If a rank raises an error, the other ranks are stopped, and the error is raised here with a note that names the
    rank; of several errors the one of the lowest rank. After `timeout` seconds a TimeoutError names the ranks that are
    still running.

        >>> run_ranks(lambda rank: rank * rank, 3)
        [0, 1, 4]
    """
    return ThreadWorld(world_size).run(fn, timeout)


class ThreadWorld:
    """Simulated ranks, each in a thread. `calls[rank]` lists the rank's collectives of the last run, in order.

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
        """Bytes and modelled time of the last run, as a table and a timeline (`sim/report.py`)."""
        return report(sent_by_threads(self.calls), tuple(range(self.world_size)), mesh)

    def run(self, fn: Callable[[int], Any], timeout: float = 60.0) -> list:
        """See `run_ranks`."""
        board = _Board(self.world_size)
        self.calls = [[] for _ in range(self.world_size)]
        results: list[Any] = [None] * self.world_size
        with _torch.own_seeds():
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
        seed = _torch.kept_seed()

        def play_rank() -> None:
            # Each thread has its own grad mode, and a new thread starts with the default.
            with (
                torch.inference_mode(inference),
                torch.set_grad_enabled(grad),
                as_rank(rank, self.world_size),
                own_rank_state(),
                _torch.own_seed(seed),
                use_transport(ThreadTransport(board, rank, self.calls[rank])),
            ):
                results[rank] = fn(rank)

        context = copy_context()

        def guarded() -> None:
            try:
                context.run(play_rank)
            except BaseException as error:  # raised again by the caller of run
                board.raised(rank, error)
            board.end(rank)

        return threading.Thread(target=guarded, name=f"spmd rank {rank}", daemon=True)


class ThreadTransport(SimulatedTransport):
    """The collectives of one simulated rank, with the interface of `spmd.comm.Transport`."""

    def __init__(self, board: _Board, rank: int, calls: list[Call]) -> None:
        self.calls = calls
        self._board = board
        self._rank = rank

    def step(self, start: Callable[..., Any], finish: Callable[[Any], Any], *args: Any) -> Any:
        return finish(start(*args))

    def bound(self, make: Callable[[], Any]) -> Any:
        return make()

    def group(self, mesh: DeviceMesh, axis: int | str | tuple[int, ...]) -> str:
        """The name that lists the group's ranks."""
        return groups.name_of(mesh.ranks_along(axis, mesh.coordinate_of(self._rank)))

    def gather_objects(self, obj: object, mesh: DeviceMesh) -> list:
        """The objects of all ranks themselves, not copies: do not write into those of other ranks."""
        return self._board.meet(self._rank, mesh.ranks, "gather_objects", obj, _all_objects)

    def _call(self, kind: str, x: torch.Tensor, args: tuple, group: str) -> torch.Tensor:
        ranks = self._ranks(group)
        call = Collective.with_tensor(kind, x, *args)
        wrong = call_error(call, len(ranks))
        if wrong is not None:
            raise ValueError(f"{call} on group {_group_name(ranks)}: {wrong}")
        self.calls.append(Call(kind, _group_name(ranks), x.numel() * x.element_size()))
        refuse_torchs_mode(simulated=True)
        tell(kind, x.nbytes, group, self._rank)
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
    wrong = mismatch(calls, ranks)
    if wrong is not None:
        raise RuntimeError(f"group {_group_name(ranks)}: {wrong}; at {' and '.join(sorted(set(where)))}")
    return run_collective(calls, xs)


@dataclass
class _Meeting:
    """The n-th call on a group by all its ranks. given: what each rank hands in; what: its call as text."""

    ranks: Ranks
    given: dict[int, Any] = field(default_factory=dict)
    what: dict[int, str] = field(default_factory=dict)
    results: dict[int, Any] = field(default_factory=dict)

    @property
    def full(self) -> bool:
        return len(self.given) == len(self.ranks)

    def fill(self, compute: Callable[[Ranks, list], list]) -> None:
        """Compute every rank's result with `compute`, or raise the error why there is none."""
        names = {text.split("(")[0] for text in self.what.values()}
        if len(names) > 1:
            first, other = self.ranks[0], next(r for r in self.ranks if self.what[r] != self.what[self.ranks[0]])
            raise RuntimeError(
                f"group {_group_name(self.ranks)}: rank {first} calls {self.what[first]}, "
                f"but rank {other} calls {self.what[other]}"
            )
        results = compute(self.ranks, [self.given[rank] for rank in self.ranks])
        self.results = dict(zip(self.ranks, results, strict=True))


class _Board:
    """Where ranks meet, guarded by one lock: the open meetings, the ranks that wait in them, and the first failure."""

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

    def meet(self, rank: int, ranks: Ranks, what: str, given: Any, compute: Callable[[Ranks, list], list]) -> Any:
        """Hand in `given`, wait for the other ranks, and return this rank's entry of `compute(ranks, all given)`."""
        with self._changed:
            self._stop_if_failed()
            meeting = self._join(rank, ranks)
            meeting.given[rank], meeting.what[rank] = given, what
            if meeting.full:
                self._close(meeting, compute, rank)
            else:
                self._wait(rank, meeting)
            return meeting.results[rank]

    def fail(self, error: BaseException, who: str) -> None:
        """Record the first failure and wake all ranks. `who` failed, for the messages."""
        with self._changed:
            if self.failure is None:
                _add_note(error, who)
                self.failure, self._failed = error, who
            self._changed.notify_all()

    def raised(self, rank: int, error: BaseException) -> None:
        """Record the error of a rank's function: its own error, or that it was stopped."""
        with self._changed:
            self._errors[rank] = error
            if self.failure is None:
                self.fail(error, f"raised on simulated rank {rank}")
            elif not _is_consequence(error) and error is not self.failure:
                _add_note(error, f"raised on simulated rank {rank}")

    def error(self) -> BaseException | None:
        """The error for the caller: that of the lowest rank whose error is not a mere consequence of another one."""
        with self._changed:
            own = [rank for rank in sorted(self._errors) if not _is_consequence(self._errors[rank])]
            return self._errors[own[0]] if own else self.failure

    def end(self, rank: int) -> None:
        """Note that a rank has returned: a rank that waits for it now would wait forever."""
        with self._changed:
            self._busy.discard(rank)
            self._fail_if_stuck()

    def state(self) -> str:
        """Describe what every rank that has not ended is doing."""
        with self._changed:
            return "; ".join(self._doing(rank) for rank in sorted(self._busy))

    def _join(self, rank: int, ranks: Ranks) -> _Meeting:
        count = self._counts[rank, ranks]
        self._counts[rank, ranks] += 1
        return self._open.setdefault((ranks, count), _Meeting(ranks))

    def _close(self, meeting: _Meeting, compute: Callable[[Ranks, list], list], rank: int) -> None:
        del self._open[meeting.ranks, self._counts[rank, meeting.ranks] - 1]
        for member in meeting.ranks:
            self._waiting.pop(member, None)
        try:
            meeting.fill(compute)
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
        """Fail if every rank that has not ended waits: no rank can wake them."""
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


def _add_note(error: BaseException, text: str) -> None:
    """Add a note to the error. Python prints notes since 3.11; before that they can only be read."""
    error.__notes__ = [*getattr(error, "__notes__", []), f"({text})"]


def _is_consequence(error: BaseException | None) -> bool:
    """Whether the error, or an error it was raised from, only says that the rank was stopped."""
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
