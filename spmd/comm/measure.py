"""Measuring what collectives take on the ranks that run, and the machine that follows from it.

    found = calibrate(mesh)                         # on all ranks; seconds to minutes
    mesh = mesh.with_topology(found.machine)        # plans are priced by it; it is the same on all ranks
    spmd.mesh.calibration.save(found.machine, "machine.json")

Every collective is timed on every kind of group that the mesh has: along each axis and along several as one, all
groups of a kind at once, as in a program. Before each call the ranks meet; what counts is the slowest of them, and of
all rounds the lower quartile, which other programs disturb less than the median: beside ten busy ones half of the
errors are below 8%, and with medians below 14%. A round times everything once, in an order of its own, so that whatever
else disturbs the machine for a while disturbs all of it alike.

Every other size is held out: curves are fitted to the rest (`mesh/fit.py`), and how far they are from sizes that they
have not seen is their error.

Left out: groups with unequally many ranks on their hosts, which go by the ring that is fitted to all others.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import prod

import numpy as np
import torch
import torch.distributed as dist

from spmd.comm import functional as comm
from spmd.mesh import PRESETS, DeviceMesh, Link, Machine, Measured, MeshTopoInfo
from spmd.mesh.fit import Sample, fit_curve, fit_ring
from spmd.mesh.layout import Ladder, evenly
from spmd.mesh.machine import COLLECTIVES, COPY

SMALLEST = 1024  # bytes
ROUNDS = 25
QUANTILE = 0.25  # of the rounds: what a call takes where little else runs, also while other programs do
LONGEST_S, FEWEST_SIZES = 0.05, 5
LARGEST = 2**30
PIECES = 4  # that a copy puts side by side, as a gather on dim 1 does

Signature = tuple[int, int, int]  # ranks a host, hosts, ranks that send through one network card
ALONE: Signature = (1, 1, 1)


@dataclass(frozen=True)
class Point:
    """What one collective took: `nbytes` is what its cost function takes, `predicted` what its curve says.

    `held_out`: the curve has not seen it.
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
    """The machine that was fitted, and all that was measured on it."""

    machine: Machine
    points: tuple[Point, ...]

    @property
    def held_out_errors(self) -> list[float]:
        """The absolute relative errors at sizes that no curve has seen."""
        return [abs(point.error) for point in self.points if point.held_out]


@dataclass(frozen=True)
class Kind:
    """A collective on one kind of group, timed along `axes` as one group."""

    collective: str
    group: Signature
    axes: tuple[int, ...] = ()
    ladder: Ladder = ()


def calibrate(
    mesh: DeviceMesh,
    *,
    name: str = "measured",
    most_bytes: int | None = None,
    rounds: int = ROUNDS,
    nics_per_host: int | None = None,
) -> Calibration:
    """Time the collectives of this mesh and fit a machine to them; to be called on all ranks of the job.

    The mesh has all ranks. `most_bytes`: no message is larger; None goes as far as memory allows. In both cases no
    size is timed whose calls take longer than 50 ms; but five sizes always are. `nics_per_host` as in `Machine`. All
    ranks get rank 0's fit.
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
    timer = _Timer(mesh, _largest(mesh) if most_bytes is None else most_bytes)
    sizes = {kind: timer.sizes(kind) for kind in _kinds(topology)}
    times = timer.quartiles(sizes, rounds)
    found = [_calibration(times, topology, name) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found, 0)
    return found[0]


def _kinds(topology: MeshTopoInfo) -> list[Kind]:
    """Each collective on each kind of group, along the first axes that have such groups; and the copy."""
    n, found = len(topology.sizes), {}
    for axes in (each for count in range(1, n + 1) for each in combinations(range(n), count)):
        ladders = topology.crossings(axes)
        if len(ladders) == 1 and ladders[0] and evenly(ladders[0]):
            found.setdefault(evenly(ladders[0]), (axes, ladders[0]))
    kinds = [Kind(collective, group, *where) for group, where in found.items() for collective in COLLECTIVES]
    return [*kinds, Kind(COPY, ALONE)]


# ---- timing -----------------------------------------------------------------------------------


class _Timer:
    """Times calls on this rank together with all others, who ask for the same in the same order."""

    def __init__(self, mesh: DeviceMesh, largest: int) -> None:
        self.mesh, self.largest = mesh, largest
        self.input = torch.ones(0, device=mesh.device_type)

    def sizes(self, kind: Kind) -> list[int]:
        """What to time, from the smallest up to where memory or patience ends. Each is called, and so is warm."""
        sizes, step = [], 4 * PIECES**2 * self._size(kind)
        while True:
            nbytes = max(1, SMALLEST // step) * step * 2 ** len(sizes)
            enough = len(sizes) >= FEWEST_SIZES
            if enough and nbytes > self.largest:
                return sizes
            if self._fastest(kind, nbytes) > LONGEST_S and enough:
                return sizes
            sizes.append(nbytes)

    def quartiles(self, sizes: dict[Kind, list[int]], rounds: int) -> dict[Kind, list[tuple[int, float]]]:
        """(bytes, microseconds) of all sizes: the lower quartile over the rounds of what the slowest rank took."""
        asked = [(kind, nbytes) for kind, each in sizes.items() for nbytes in each]
        calls = [self._call(*each) for each in asked]
        order, shuffle = list(range(len(calls))), random.Random(0)  # the same order on all ranks
        every = np.empty((rounds, len(calls)))
        for row in every:
            shuffle.shuffle(order)
            for i in order:
                row[i] = self._seconds(calls[i])
        us = np.quantile(self._slowest(every), QUANTILE, axis=0) * 1e6
        found: dict[Kind, list[tuple[int, float]]] = {kind: [] for kind in sizes}
        for (kind, nbytes), each in zip(asked, us.tolist(), strict=True):
            found[kind].append((nbytes, each))
        return found

    def _fastest(self, kind: Kind, nbytes: int, times: int = 3) -> float:
        call = self._call(kind, nbytes)
        return self._slowest(np.array([min(self._seconds(call) for _ in range(times))])).item()

    def _seconds(self, call: Callable[[], object]) -> float:
        dist.all_reduce(torch.zeros(1))  # all are here; on the CPU, so that no device is kept busy
        self._synchronize()
        start = time.perf_counter()
        call()
        self._synchronize()
        return time.perf_counter() - start

    def _slowest(self, seconds: np.ndarray) -> np.ndarray:
        every = torch.from_numpy(seconds)
        dist.all_reduce(every, dist.ReduceOp.MAX)
        return every.numpy()

    def _synchronize(self) -> None:
        if self.mesh.device_type == "cuda":
            torch.cuda.synchronize()

    def _size(self, kind: Kind) -> int:
        return prod(self.mesh.shape[axis] for axis in kind.axes)

    def _call(self, kind: Kind, nbytes: int) -> Callable[[], object]:
        x = self._ones(nbytes // 4)
        if kind.collective == COPY:
            pieces = x.view(PIECES, -1, PIECES).unbind(0)
            return lambda: torch.cat(pieces, 1)
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
    """A share of the free memory of the rank that has least: a collective needs a few buffers on each rank."""
    if mesh.device_type == "cuda":
        free = torch.cuda.mem_get_info()[0]
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    least = torch.tensor(free // int(os.environ.get("LOCAL_WORLD_SIZE", mesh.size())) // 8)
    dist.all_reduce(least, dist.ReduceOp.MIN)
    return min(LARGEST, max(SMALLEST, int(least)))


# ---- fitting ----------------------------------------------------------------------------------


def _calibration(times: dict[Kind, list[tuple[int, float]]], topology: MeshTopoInfo, name: str) -> Calibration:
    curves = {kind: _curve(kind, found) for kind, found in times.items() if found}
    samples = [Sample(k.collective, k.ladder, *each) for k, found in times.items() if k.ladder for each in found]
    copies = [each for kind, found in times.items() if kind.collective == COPY for each in found]
    machine = Machine(
        name,
        (fit_ring(samples, topology.layout.levels),),
        topology.machine.nics_per_host,
        measured=tuple(curve for curve, _ in curves.values()),
        memory=_memory(copies),
    )
    return Calibration(machine, tuple(point for _, points in curves.values() for point in points))


def _curve(kind: Kind, found: Sequence[tuple[int, float]]) -> tuple[Measured, list[Point]]:
    """The curve through every other size, and the last; and how far from it all of them are."""
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


def _memory(copies: Sequence[tuple[int, float]]) -> Link:
    [(us, us_per_byte)] = fit_curve(*zip(*copies, strict=True), most=1)
    return Link(us, 1e-3 / max(us_per_byte, 1e-9))
