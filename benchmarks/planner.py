"""The quality of redistribution plans and the time of planning, for spmd and for both of torch's planners.

    python benchmarks/planner.py            # the tables, all pairs: some minutes
    python benchmarks/planner.py --short    # fewer pairs
    python benchmarks/planner.py --check    # no table: every size 1..40, and brute force; prints wrong plans

A pair is a source and a target spec of a 64 MiB float32 tensor of two dims (three: `--dims 3`). The source may be
partial, and the axes of each of its dims are in the mesh's order. The target is not partial, and its axes may be in any
order. `uneven` has sizes that no axis divides.

The first table of a machine is about spmd alone:

- bytes / bound: the bytes that the busiest rank receives, summed over the pairs, divided by the sum of the bytes that
  some rank must receive in any plan (`tensor/redistribute/bounds.py`); in brackets, the worst pair.
- sends: the mean number of collectives of a plan, and the largest. memory / B: bytes of memory on the rank with most,
  divided by the bytes of the global tensor; the mean, and the largest.
- planning: the CPU time for a pair that was not planned before (all caches are cleared between meshes), and for one
  that was.

The second table compares spmd with torch's planners, `default` and `min-cost`: their bytes over the bound, and their
times divided by ours, summed, under two cost models: spmd's, for the machine named, and torch's own. Then on how many
pairs our plan is strictly faster, and on how many it is slower.

- spmd's model: torch's moves are priced as ours are. If copies have a price, the copies that spmd would make for these
  moves are included.
- torch's model: torch's formulas; `peers/planners.py` applies them to moves that torch does not have. Our plans here
  are the cheapest ones under spmd's model, not under torch's, so some may be slower.
- torch's model, planned for: our planner gets torch's model as its topology.

The last table has smaller tensors. torch's model prices torch's plans as if all sizes were even, so for uneven sizes it
says nothing about single pairs. The `default` planner does not support targets with another order of axes; there
`min-cost` is used. torch knows how many ranks a host has. Left out: the time that torch saves by merging axes that the
user has flattened.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from _table import table
from peers import planners

from spmd.mesh import DeviceMesh, MeshTopoInfo, init_device_mesh
from spmd.tensor.redistribute import graph, states
from spmd.tensor.redistribute.collective_moves import AllGather, AllReduce, AllToAll, ReduceScatter
from spmd.tensor.redistribute.moves import Slice
from spmd.tensor.redistribute.plan import Plan, Step, forget, plan
from spmd.tensor.spec import Spec
from tests.tensor.brute import least_ps
from tests.tensor.planned import carried_out, cut_up, specs, wrong_blocks

Pair = tuple[Spec, Spec]

MESHES = [(8,), (2, 4), (4, 2), (2, 2, 2), (2, 3), (4, 4)]
SMALLER = {2: [(48, 48), (192, 192), (768, 384)], 3: [(48, 48, 48), (96, 96, 48)]}
EVEN, UNEVEN = {2: (6144, 2688), 3: (768, 192, 96)}, {2: (4099, 4093), 3: (257, 255, 251)}


def mesh_of(shape: tuple[int, ...], preset: str, hosts: int) -> DeviceMesh:
    mesh = init_device_mesh("cpu", shape)
    return mesh.with_topology(MeshTopoInfo.from_mesh(mesh, ranks_per_host=mesh.size() // hosts, machine=preset))


def pairs_of(mesh: DeviceMesh, shape: tuple[int, ...], most: int) -> list[Pair]:
    every = list(itertools.product(
        specs(mesh, shape, True, torch.float32, ordered=True), specs(mesh, shape, False, torch.float32)
    ))  # fmt: skip
    return every[:: max(1, len(every) // most)]


# ---- plans --------------------------------------------------------------------------------------


def timed(pairs: list[Pair]) -> tuple[list[Plan], list[float], float]:
    """The plans, milliseconds for each, and microseconds to find it again."""
    forget_all()
    cold, plans = [], []
    for pair in pairs:
        start = time.process_time()
        plans.append(plan(*pair))
        cold.append((time.process_time() - start) * 1e3)
    start = time.process_time()
    for _ in range(10):
        for pair in pairs:
            plan(*pair)
    return plans, cold, (time.process_time() - start) / (10 * len(pairs)) * 1e6


def forget_all() -> None:
    forget()
    kept = [each for module in (graph, states) for each in vars(module).values() if hasattr(each, "cache_clear")]
    for each in kept:
        each.cache_clear()


def over(pair: Pair, topology: MeshTopoInfo) -> Plan:
    """The plan of a pair on another topology."""
    mesh = pair[0].mesh.with_topology(topology)
    return plan(*(Spec.of(mesh, s.shape, s.dtype, dims=s.dims, partial=s.partial) for s in pair))


class Beside:
    """Plans of one mesh beside torch's, in bytes and under both cost models."""

    def __init__(self, mesh: DeviceMesh, hosts: int, pairs: list[Pair], plans: list[Plan]) -> None:
        self.mesh, self.shape = mesh, pairs[0][0].shape
        self.bounds = [p.lower_bound_bytes for p in plans]
        with planners.torch_mesh(mesh.shape, ranks_per_host=mesh.size() // hosts) as self.there:
            known = planners.topology(mesh, self.there)
            self.theirs = {name: [self._their_moves(pair, name == "min-cost") for pair in pairs] for name in TORCH}
            self.ours = [p.modelled_us for p in plans]
            self.ours_by_torch = [sum(map(self._by_torch, p.steps)) for p in plans]
            self.ours_for_torch = [sum(map(self._by_torch, over(pair, known).steps)) for pair in pairs]
            self.us = {name: self._summed(self._by_spmd, each) for name, each in self.theirs.items()}
            self.us_by_torch = {name: self._summed(self._their_us, each) for name, each in self.theirs.items()}

    def _their_moves(self, pair: Pair, min_cost: bool) -> tuple[list[planners.Move], float]:
        """The moves of torch's plan, and the milliseconds that planning took."""
        src, dst = (planners.spec(self.there, s.shape, s.dims, s.partial) for s in pair)
        planners.forget()
        start = time.process_time()
        moves = planners.steps(src, dst, min_cost)
        return moves, (time.process_time() - start) * 1e3

    @staticmethod
    def _summed(us: Callable[[planners.Move], float], plans: list[tuple[list[planners.Move], float]]) -> list[float]:
        return [sum(map(us, moves)) for moves, _ in plans]

    def _by_spmd(self, move: planners.Move) -> float:
        specs = (
            Spec.of(self.mesh, self.shape, torch.float32, dims=dims, partial=[(a, "sum") for a in partial])
            for dims, partial in (move.before, move.after)
        )
        return MOVES[move.kind](move.axes).cost(*specs, self.mesh.topology)

    def _by_torch(self, step: Step) -> float:
        most = max(map(step.received, self.mesh.coordinates()))
        return planners.us(self.there, step.kind, step.axes, most)

    def _their_us(self, move: planners.Move) -> float:
        return planners.us(self.there, move.kind, move.axes, planners.received(self.there, move))

    def bytes_over_bound(self, name: str) -> str:
        return _ratio([sum(planners.received(self.there, m) for m in moves) for moves, _ in self.theirs[name]],
                      self.bounds)

    def times(self, name: str) -> Iterator[tuple[list[float], list[float]]]:
        """Ours and theirs: under spmd's model, under torch's, and planned for torch's."""
        yield self.ours, self.us[name]
        yield self.ours_by_torch, self.us_by_torch[name]
        yield self.ours_for_torch, self.us_by_torch[name]

    def median_ms(self, name: str) -> float:
        return statistics.median(ms for _, ms in self.theirs[name])


MOVES = {kind.kind: kind for kind in (AllGather, AllReduce, AllToAll, ReduceScatter, Slice)}
TORCH = ("default", "min-cost")


def faster(ours: list[float], theirs: list[float]) -> float:
    """The share of the pairs on which ours is strictly faster."""
    return sum(a < b * (1 - 1e-9) for a, b in zip(ours, theirs, strict=True)) / len(ours)


def slower(ours: list[float], theirs: list[float]) -> int:
    return sum(a > b * (1 + 1e-9) for a, b in zip(ours, theirs, strict=True))


# ---- the tables -------------------------------------------------------------------------------

ALONE = [
    "mesh", "pairs", "bytes / bound (worst)", "sends (most)", "memory / B (most)", "cold ms, median", "95 %", "hot us",
]  # fmt: skip
PEERS = [
    "mesh", "torch's", "bytes / bound (worst)", "spmd's model: time", "faster", "slower",
    "torch's: time", "faster", "slower", "planned for torch's: time", "faster", "slower", "planning ms, median",
]  # fmt: skip
SIZES = ["mesh", "MiB", "pairs", *PEERS[1:2], *PEERS[3:-1]]


def alone(name: str, plans: list[Plan], cold: list[float], hot: float) -> list[str]:
    sends = [sum(step.sends for step in p.steps) for p in plans]
    memory = [p.peak_bytes / p.src.nbytes for p in plans]
    return [
        name, str(len(plans)), _ratio([p.bytes_per_rank for p in plans], [p.lower_bound_bytes for p in plans]),
        f"{statistics.mean(sends):.2f} ({max(sends)})", f"{statistics.mean(memory):.2f} ({max(memory):.2f})",
        f"{statistics.median(cold):.2f}", f"{sorted(cold)[int(0.95 * len(cold))]:.1f}", f"{hot:.2f}",
    ]  # fmt: skip


def beside(found: Beside, name: str, even: bool) -> list[str]:
    cells = []
    for i, (ours, theirs) in enumerate(found.times(name)):
        singly = [f"{faster(ours, theirs):.0%}", str(slower(ours, theirs))] if even or not i else ["", ""]
        cells += [f"{sum(theirs) / sum(ours):.2f}", *singly]
    return cells


def _ratio(found: list[float], bounds: list[int]) -> str:
    worst = max((f / b for f, b in zip(found, bounds, strict=True) if b), default=1.0)
    return f"{sum(found) / sum(bounds):.3f} ({worst:.1f})"


def tables(args: argparse.Namespace) -> None:
    most = args.pairs or (60 if args.short else 4000)
    print(f"{date.today()}, torch {torch.__version__}, {os.cpu_count()} cores (load {os.getloadavg()[0]:.1f} before)")
    for preset, hosts in (("textbook", 1), ("textbook", 2), ("hopper", 1)):
        own, peers = [], []
        for shape, even in itertools.product(MESHES, (True, False)):
            mesh, name = mesh_of(shape, preset, hosts), f"{shape} {'even' if even else 'uneven'}"
            pairs = pairs_of(mesh, (EVEN if even else UNEVEN)[args.dims], most)
            plans, cold, hot = timed(pairs)
            own.append(alone(name, plans, cold, hot))
            found = Beside(mesh, hosts, pairs, plans)
            for who in TORCH:
                told = [name, who, found.bytes_over_bound(who), *beside(found, who, even)]
                peers.append([*told, f"{found.median_ms(who):.2f}"])
        print(f"\n{preset}, {hosts} host{'s' * (hosts > 1)}\n\n{table(ALONE, own)}\n\n{table(PEERS, peers, left=2)}")
    print(f"\ntextbook, other sizes\n\n{table(SIZES, sizes(args, min(most, 100)))}")


def sizes(args: argparse.Namespace, most: int) -> list[list[str]]:
    rows = []
    for shape, hosts in itertools.product(MESHES, (1, 2)):
        mesh = mesh_of(shape, "textbook", hosts)
        for tensor in SMALLER[args.dims]:
            pairs = pairs_of(mesh, tensor, most)
            found = Beside(mesh, hosts, pairs, [plan(*pair) for pair in pairs])
            name, mib = f"{shape}, {hosts} host{'s' * (hosts > 1)}", pairs[0][0].nbytes / 2**20
            rows += [[name, f"{mib:.2g}", str(len(pairs)), who, *beside(found, who, True)] for who in TORCH]
    return rows


# ---- checks -----------------------------------------------------------------------------------


def check(args: argparse.Namespace) -> int:
    wrong = 0
    for shape in [(2, 2), (2, 3), (3, 2), (4,), (2, 2, 2)]:
        mesh, done = init_device_mesh("cpu", shape), 0
        for size in range(1, 41):
            x = torch.arange(1.0, 1 + size * 3, dtype=torch.float64).reshape(size, 3)
            pairs = list(itertools.product(specs(mesh, x.shape, True), specs(mesh, x.shape, False)))
            for src, dst in pairs if mesh.ndim < 3 and not args.short else pairs[size % 7 :: max(1, len(pairs) // 60)]:
                done += 1
                if wrong_blocks(carried_out(plan(src, dst), cut_up(x, src)), x, dst):
                    wrong += 1
                    print(f"wrong values: {plan(src, dst)}")
        print(f"{shape}: {done} pairs of sizes 1..40 keep their values")
    for shape, dims in (((2, 4), 2), ((2, 2, 2), 2), ((2, 3, 2), 3)):
        for hosts in (1, 2):
            mesh, done = mesh_of(shape, "textbook", hosts), 0
            for tensor in (EVEN[dims], tuple(n // 64 for n in EVEN[dims]), UNEVEN[dims]):
                for src, dst in pairs_of(mesh, tensor, 20 if args.short else 100):
                    done += 1
                    spent = sum(int(s.cost * 1e6) for s in plan(src, dst).steps)
                    if abs(spent - least_ps(src, dst)) > len(plan(src, dst).steps):
                        wrong += 1
                        print(f"not the cheapest: {plan(src, dst)}")
            print(f"{shape}, {dims} dims, {hosts} hosts: {done} plans as cheap as brute force")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="fewer pairs")
    parser.add_argument("--check", action="store_true", help="every size and brute force, no table")
    parser.add_argument("--pairs", type=int, help="at most about so many pairs a row")
    parser.add_argument("--dims", type=int, default=2, choices=(2, 3), help="dims of the tensor")
    args = parser.parse_args()
    if args.check:
        return 1 if check(args) else 0
    tables(args)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
