"""Measure how long collectives take on the running ranks, and fit a machine model to the times.

    found = calibrate(mesh)                         # on all ranks; seconds to minutes
    mesh = mesh.with_topology(found.machine)        # plans use its costs; it is the same on all ranks
    spmd.mesh.calibration.save(found.machine, "machine.json")

Every collective is timed on every kind of group that the mesh has: along each axis, and along several axes as one
group. All groups of a kind run at once, as in a program. The ranks synchronize before each call. The time of a call is
that of its slowest rank, and the result is the lower quartile over all rounds. Other programs disturb the lower
quartile less than the median: beside ten busy programs half of the errors are below 8%; with medians they are below
14%. A round times everything once, in its own order, so that a temporary disturbance affects all measurements alike.

Local ops and copies are timed on all ranks at once, too (`comm/local_ops.py`): what a program computes is priced by
them. Many calls are timed as one row, until all ranks have done theirs, less what it takes to find out that nobody has
anything to do. Rows are long: ranks that share a core take turns of some milliseconds, and one that got the first turn
would see nothing of the other. Copies to host memory and back are timed one by one, on devices that have memory of
their own: the slower way counts.

Every other size is held out. The curves are fitted to the remaining sizes (`mesh/fit.py`), and their error is the
distance from the held-out sizes.

Left out: groups whose hosts have different numbers of ranks. They use the ring model, which is fitted to all others.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from math import prod

import numpy as np
import torch
import torch.distributed as dist

from spmd.comm import functional as comm
from spmd.comm.local_ops import LocalCase, local_cases
from spmd.mesh import PRESETS, Compute, DeviceMesh, Link, Machine, Measured, MeshTopoInfo
from spmd.mesh.fit import Sample, fit_curve, fit_ring, fit_sum
from spmd.mesh.layout import Ladder, group_shape
from spmd.mesh.machine import COLLECTIVES, COPY, LocalOp

SMALLEST = 1024  # bytes
ROUNDS = 25
QUANTILE = 0.25  # of the rounds
LONGEST_S, FEWEST_SIZES = 0.05, 5
LARGEST = 2**30
APART = frozenset({"cuda"})  # devices whose memory is not that of their host
HOST_SIZES = tuple([2**k for k in range(16, 29, 2)])  # bytes that are copied to host memory and back
ROW_S = 0.008  # how long a row of calls of a local op takes on a rank that computes alone
MOST_CALLS = 4_000

Signature = tuple[int, int, int]  # ranks a host, hosts, ranks that send through one network card
ALONE: Signature = (1, 1, 1)


@dataclass(frozen=True)
class Point:
    """The time of one collective. `nbytes`: the argument of its cost function; `predicted`: the value of its curve.

    `held_out`: the curve was not fitted to this point.
    """

    collective: str
    group: Signature
    nbytes: int
    us: float
    predicted: float
    held_out: bool

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted / self.us - 1


@dataclass(frozen=True)
class Calibration:
    """The fitted machine, and all measurements."""

    machine: Machine
    points: tuple[Point, ...]

    @property
    def held_out_errors(self) -> list[float]:
        """The absolute relative errors at the held-out sizes."""
        return [abs(point.error) for point in self.points if point.held_out]


@dataclass(frozen=True)
class TimedCollective:
    """A collective on one kind of group, timed along `axes` as one group."""

    collective: str
    group: Signature
    axes: tuple[int, ...] = ()
    ladder: Ladder = ()


Times = dict[TimedCollective, list[tuple[int, float]]]
"""(bytes, microseconds) of every timed collective, one entry a size."""
LocalTimes = dict[tuple[str, str], list[tuple[float, float, float]]]
"""(operations or bytes, bytes of a product, microseconds) of every kind of local op and dtype, one entry a size."""


def lower_quartile(times: np.ndarray) -> np.ndarray:
    """Of each column the lower quartile: near to what an idle machine takes, even while other programs run."""
    return np.quantile(times, QUANTILE, axis=0)


def calibrate(
    mesh: DeviceMesh,
    *,
    name: str = "measured",
    most_bytes: int | None = None,
    rounds: int = ROUNDS,
    nics_per_host: int | None = None,
    between: Callable[[], object] = lambda: None,
    typical: Callable[[np.ndarray], np.ndarray] = lower_quartile,
) -> Calibration:
    """Time the collectives of this mesh and fit a machine to the times; call it on all ranks of the job.

    The mesh must have all ranks. `most_bytes`: the largest message; None for as large as memory allows. In both cases
    sizes whose calls take longer than 50 ms are left out, but at least five sizes are timed. `nics_per_host`: as in
    `Machine`. `between`: called on all ranks behind each round, so that what is to be compared with the calibration can
    be timed while the machine does what else it does. `typical`: from times of shape [rounds, calls], what counts as
    the time of each call. All ranks get the machine that rank 0 fitted.
    """
    if mesh.size() != dist.get_world_size() or mesh.size() == 1:
        raise ValueError(
            f"calibrate: a mesh of {mesh.size()} ranks in a job of {dist.get_world_size()}; give a mesh of all ranks, "
            "of two or more"
        )
    if "cpu:" not in dist.get_backend_config():
        raise ValueError(
            f"calibrate: the backend is {dist.get_backend_config()}, and ranks meet on the CPU before each call; join "
            'with init_process_group("cpu:gloo,cuda:nccl")'
        )
    topology = MeshTopoInfo.from_mesh(mesh, machine=replace(PRESETS["textbook"], nics_per_host=nics_per_host))
    timer = _Timer(mesh, _largest(mesh) if most_bytes is None else most_bytes, typical)
    sizes = {kind: timer.sizes(kind) for kind in _what_to_time(topology)}
    times = timer.collectives(sizes, rounds, between)
    local = timer.local_ops(rounds, between)
    times[TimedCollective(COPY, ALONE)] = [(int(nbytes), us) for nbytes, _, us in local.pop((COPY, "float32"))]
    host = timer.host_copies(rounds, between) if mesh.device_type in APART else None
    found = [_calibration(times, local, host, topology, name) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, 0)
    return found[0]


def _what_to_time(topology: MeshTopoInfo) -> list[TimedCollective]:
    """Each collective on each kind of group, along the first axes that have such groups."""
    n, found = len(topology.sizes), {}
    for axes in (each for count in range(1, n + 1) for each in combinations(range(n), count)):
        ladders = topology.crossings(axes)
        if len(ladders) == 1 and ladders[0] and group_shape(ladders[0]):
            found.setdefault(group_shape(ladders[0]), (axes, ladders[0]))
    return [TimedCollective(collective, group, *where) for group, where in found.items() for collective in COLLECTIVES]


# ---- timing -----------------------------------------------------------------------------------


class _Timer:
    """Times calls on this rank together with all other ranks, which time the same calls in the same order."""

    def __init__(self, mesh: DeviceMesh, largest: int, typical: Callable[[np.ndarray], np.ndarray]) -> None:
        self.mesh, self.largest, self.typical = mesh, largest, typical
        self.input = torch.ones(0, device=mesh.device_type)

    def sizes(self, kind: TimedCollective) -> list[int]:
        """The sizes to time, from the smallest to where memory or time ends. Each is called once, as a warm-up."""
        sizes, step = [], 64 * self._size(kind)
        while True:
            nbytes = max(1, SMALLEST // step) * step * 2 ** len(sizes)
            enough = len(sizes) >= FEWEST_SIZES
            if enough and nbytes > self.largest:
                return sizes
            if self._fastest(kind, nbytes) > LONGEST_S and enough:
                return sizes
            sizes.append(nbytes)

    def collectives(self, sizes: dict[TimedCollective, list[int]], rounds: int, between: Callable[[], object]) -> Times:
        """(bytes, microseconds) of all sizes: what the slowest rank typically took."""
        asked = [(kind, nbytes) for kind, each in sizes.items() for nbytes in each]
        calls = [self._call(*each) for each in asked]
        order, shuffle = list(range(len(calls))), random.Random(0)  # the same order on all ranks
        every = np.empty((rounds, len(calls)))
        for row in every:
            shuffle.shuffle(order)
            for i in order:
                row[i] = self._seconds(calls[i])
            between()
        us = self.typical(self._slowest(every)) * 1e6
        found: Times = {kind: [] for kind in sizes}
        for (kind, nbytes), each in zip(asked, us.tolist(), strict=True):
            found[kind].append((nbytes, each))
        return found

    def local_ops(self, rounds: int, between: Callable[[], object]) -> LocalTimes:
        """By kind of op and dtype, what a call takes on the slowest rank, while all ranks compute."""
        cases = list(local_cases(self.mesh.device_type, self.largest))
        calls = self._calls_of(cases)
        rows = [lambda: None, *[partial(case.run, n) for case, n in zip(cases, calls, strict=True)]]
        every = np.empty((rounds, len(rows)))
        for times in every:
            times[:] = [self._seconds_together(row) for row in rows]
            between()
        seconds = self.typical(self._slowest(every))
        us = (seconds[1:] - seconds[0]).clip(1e-9) / calls * 1e6
        found: LocalTimes = {}
        for case, each in zip(cases, us.tolist(), strict=True):
            found.setdefault((case.kind, case.dtype), []).append((case.x, case.nbytes, each))
        return found

    def _calls_of(self, cases: Sequence[LocalCase]) -> list[int]:
        """How many calls of each make a row; the same on all ranks, which try them now."""
        fewest = [min(self._seconds(case.once) for _ in range(3)) for case in cases]
        alone = self._slowest(np.array(fewest))
        return (ROW_S / alone).round().clip(2, MOST_CALLS).astype(int).tolist()

    def host_copies(self, rounds: int, between: Callable[[], object]) -> list[tuple[int, float]]:
        """(bytes, microseconds) of a copy to pinned host memory or back, whichever is slower; all ranks copy."""
        sizes = [n for n in HOST_SIZES if n <= self.largest] or list(HOST_SIZES[:1])
        pairs = [self._host_pair(n) for n in sizes]
        ways = [(into, x) for host, own in pairs for into, x in ((host, own), (own, host))]
        every = np.empty((rounds + 1, len(ways)))
        for row in every:
            row[:] = [self._seconds(partial(into.copy_, x, non_blocking=True)) for into, x in ways]
            between()
        us = self.typical(self._slowest(every[1:])).reshape(-1, 2).max(1) * 1e6  # the first round warms up
        return list(zip(sizes, us.tolist(), strict=True))

    def _host_pair(self, nbytes: int) -> tuple[torch.Tensor, torch.Tensor]:
        own = self._ones(nbytes // 4)
        return torch.empty(len(own), pin_memory=own.is_cuda), own

    def _fastest(self, kind: TimedCollective, nbytes: int, times: int = 3) -> float:
        call = self._call(kind, nbytes)
        return self._slowest(np.array([min(self._seconds(call) for _ in range(times))])).item()

    def _seconds(self, call: Callable[[], object]) -> float:
        dist.all_reduce(torch.zeros(1))  # synchronizes all ranks, on the CPU, so that no device is busy with it
        self._synchronize()
        start = time.perf_counter()
        call()
        self._synchronize()
        return time.perf_counter() - start

    def _seconds_together(self, call: Callable[[], object]) -> float:
        """Until all ranks have done it: ranks that share a core may do it one after the other."""
        dist.all_reduce(torch.zeros(1))
        self._synchronize()
        start = time.perf_counter()
        call()
        self._synchronize()
        dist.all_reduce(torch.zeros(1))
        return time.perf_counter() - start

    def _slowest(self, seconds: np.ndarray) -> np.ndarray:
        every = torch.from_numpy(seconds)
        dist.all_reduce(every, dist.ReduceOp.MAX)
        return every.numpy()

    def _synchronize(self) -> None:
        if self.mesh.device_type == "cuda":
            torch.cuda.synchronize()

    def _size(self, kind: TimedCollective) -> int:
        return prod(self.mesh.shape[axis] for axis in kind.axes)

    def _call(self, kind: TimedCollective, nbytes: int) -> Callable[[], object]:
        x = self._ones(nbytes // 4)
        n, group = self._size(kind), (self.mesh.flatten(axes=kind.axes), kind.axes[0])
        part, ring = x[: len(x) // n], [(i + 1) % n for i in range(n)]
        return {
            "all_gather": lambda: comm.all_gather_tensor(part, 0, group).wait(),
            "all_reduce": lambda: comm.all_reduce(x, "sum", group).wait(),
            "all_to_all": lambda: comm.all_to_all_single(x, None, None, group).wait(),
            "broadcast": lambda: comm.broadcast(x, 0, group).wait(),
            "permute": lambda: comm.permute_tensor(x, ring, group).wait(),
            "reduce_scatter": lambda: comm.reduce_scatter_tensor(x, "sum", 0, group).wait(),
            "scatter": lambda: comm.scatter(x, 0, group).wait(),
        }[kind.collective]

    def _ones(self, n: int) -> torch.Tensor:
        if n > len(self.input):
            self.input = torch.ones(n, device=self.mesh.device_type)
        return self.input[:n]


def _largest(mesh: DeviceMesh) -> int:
    """A part of the free memory, of the rank that has least: a collective needs a few buffers on each rank."""
    if mesh.device_type == "cuda":
        free = torch.cuda.mem_get_info()[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    least = torch.tensor(free // int(os.environ.get("LOCAL_WORLD_SIZE", mesh.size())) // 8)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return min(LARGEST, max(SMALLEST, int(least)))


# ---- fitting ----------------------------------------------------------------------------------


def _calibration(
    times: Times, local: LocalTimes, host: Sequence[tuple[int, float]] | None, topology: MeshTopoInfo, name: str
) -> Calibration:
    curves = {kind: _curve(kind, found) for kind, found in times.items() if found}
    samples = [Sample(k.collective, k.ladder, *each) for k, found in times.items() if k.ladder for each in found]
    memory = _link([each for kind, found in times.items() if kind.collective == COPY for each in found])
    machine = Machine(
        name,
        (fit_ring(samples, topology.layout.levels),),
        topology.machine.nics_per_host,
        measured=tuple(curve for curve, _ in curves.values()),
        memory=memory,
        compute=Compute(2 * memory.gb_per_s, _rates(local)),  # a copy reads and writes each byte
        local_ops=tuple(_local_op(*kind, found) for kind, found in local.items()),
        host=_link(host) if host else None,
    )
    return Calibration(machine, tuple(point for _, points in curves.values() for point in points))


def _local_op(kind: str, dtype: str, found: Sequence[tuple[float, float, float]]) -> LocalOp:
    """The op fitted to its times. No call is quicker than the quickest timed, where noise leaves nothing for a call."""
    xs, nbytes, us = zip(*found, strict=True)
    quickest = min(us), 0.0
    if kind != "product":
        return LocalOp(kind, dtype, (quickest, *fit_curve(xs, us)))
    a_call, us_per_flop, us_per_byte = fit_sum([xs, nbytes], us)
    return LocalOp(kind, dtype, (quickest, (a_call, us_per_flop)), us_per_byte)


def _rates(local: LocalTimes) -> tuple[tuple[str, float], ...]:
    """For each dtype 1e9 operations a second of the largest product that was timed."""
    largest = {dtype: max(found) for (kind, dtype), found in local.items() if kind == "product"}
    return tuple((dtype, 1e-3 * flops / us) for dtype, (flops, _, us) in largest.items())


def _curve(kind: TimedCollective, found: Sequence[tuple[int, float]]) -> tuple[Measured, list[Point]]:
    """The curve fitted to every other size and the last one, and all points with their predictions."""
    seen = [i % 2 == 0 or i == len(found) - 1 for i in range(len(found))]
    lines = fit_curve(*zip(*(each for each, fitted in zip(found, seen, strict=True) if fitted), strict=True))
    predicted = [max(us + us_per_byte * nbytes for us, us_per_byte in lines) for nbytes, _ in found]
    points = [
        Point(kind.collective, kind.group, *each, us, not fitted)
        for each, us, fitted in zip(found, predicted, seen, strict=True)
    ]
    unseen = [point for point in points if point.held_out] or points
    ranks, hosts, sharing = kind.group
    residual = statistics.median(abs(point.error) for point in unseen)
    return Measured(kind.collective, ranks, hosts, lines, sharing, residual), points


def _link(copies: Sequence[tuple[int, float]]) -> Link:
    [(us, us_per_byte)] = fit_curve(*zip(*copies, strict=True), most=1)
    return Link(us, 1e-3 / max(us_per_byte, 1e-9))
