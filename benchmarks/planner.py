"""How good the plans of redistributions are, beside both of torch's planners, and how long planning takes.

    python benchmarks/planner.py            # the tables, some minutes
    python benchmarks/planner.py --short    # fewer pairs
    python benchmarks/planner.py --check    # no table: every size 1..40, brute force; says what is wrong

A pair is a layout with the axes of each dim in the mesh's order, partial sums among them, and a layout in any order
without partial sums, of a 64 MiB float32 tensor of two dims (three: `--dims 3`); `uneven` takes sizes that no axis
divides.

- bytes / bound: the sum, over the pairs, of what the busiest rank receives, over the sum of what some rank must receive
  whatever the plan (`tensor/redistribute/bounds.py`); then the worst pair.
- time: theirs over ours, summed, under one cost model, spmd's, with the preset named; and on how many pairs ours is
  strictly faster, or slower.
- planning: the CPU time of a pair that was not planned before, with everything forgotten between meshes, and of one
  that was.

torch's plans are priced as if all sizes were even, so where they are not nothing is said of single pairs; its `default`
planner cannot be asked for targets in another order of axes, there it takes the other. Left out: what torch saves by
merging axes where the user has flattened them.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from _table import table
from peers import planners

from spmd.mesh import DeviceMesh, MeshTopoInfo, cost, init_device_mesh
from spmd.tensor.redistribute import states
from spmd.tensor.redistribute.plan import Plan, forget, plan
from spmd.tensor.spec import Spec
from tests.tensor.brute import least_ps
from tests.tensor.planned import carried_out, cut_up, specs, wrong_blocks

MESHES = [(8,), (2, 4), (4, 2), (2, 2, 2), (2, 3), (4, 4)]
EVEN, UNEVEN = {2: (6144, 2688), 3: (768, 192, 96)}, {2: (4099, 4093), 3: (257, 255, 251)}


def mesh_of(shape: tuple[int, ...], preset: str, hosts: int) -> DeviceMesh:
    mesh = init_device_mesh("cpu", shape)
    return mesh.with_topology(MeshTopoInfo.from_mesh(mesh, ranks_per_host=mesh.size() // hosts, machine=preset))


def pairs_of(mesh: DeviceMesh, shape: tuple[int, ...], most: int) -> list[tuple[Spec, Spec]]:
    every = list(itertools.product(
        specs(mesh, shape, True, torch.float32, ordered=True), specs(mesh, shape, False, torch.float32)
    ))  # fmt: skip
    return every[:: max(1, len(every) // most)]


# ---- one row ----------------------------------------------------------------------------------


def ours(pairs: list[tuple[Spec, Spec]]) -> tuple[list[Plan], list[float], float]:
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
    for kept in (states._intervals, states._overlaps, states._first, states._blocks, states._subsets):
        kept.cache_clear()


PRICES: dict[str, Callable[..., float]] = {
    "all_gather": cost.all_gather_cost, "all_reduce": cost.all_reduce_cost,
    "reduce_scatter": cost.reduce_scatter_cost, "all_to_all": cost.all_to_all_cost,
}  # fmt: skip


def theirs(mesh: DeviceMesh, pairs: list[tuple[Spec, Spec]], min_cost: bool) -> tuple[list[float], list[float],
list[float]]:
    """Bytes, modelled microseconds, and milliseconds of planning of every pair."""
    nbytes, us, ms = [], [], []
    with planners.torch_mesh(mesh.shape) as there:
        for pair in pairs:
            src, dst = (planners.spec(there, s.shape, s.dims, s.partial) for s in pair)
            planners.forget()
            start = time.process_time()
            moves = planners.steps(src, dst, min_cost)
            ms.append((time.process_time() - start) * 1e3)
            nbytes.append(sum(planners.received(m, mesh.shape[m[1]]) for m in moves))
            us.append(sum(_price(mesh, *move) for move in moves))
    return nbytes, us, ms


def _price(mesh: DeviceMesh, kind: str, axis: int, local: float) -> float:
    return PRICES[kind](local * (mesh.shape[axis] if kind == "all_gather" else 1), axis, mesh.topology)


def row(mesh: DeviceMesh, shape: tuple[int, ...], most: int, even: bool) -> list[str]:
    pairs = pairs_of(mesh, shape, most)
    plans, cold, hot = ours(pairs)
    bounds = [p.lower_bound_bytes for p in plans]
    name = f"{mesh.shape} {'even' if even else 'uneven'}"
    cells = [name, str(len(pairs)), _ratio([p.bytes_per_rank for p in plans], bounds)]
    times = [p.modelled_us for p in plans]
    for min_cost in (False, True):
        nbytes, us, ms = theirs(mesh, pairs, min_cost)
        faster = sum(a < b * (1 - 1e-9) for a, b in zip(times, us, strict=True)) / len(pairs)
        slower = sum(a > b * (1 + 1e-9) for a, b in zip(times, us, strict=True))
        told = f" ({faster:.0%}, {slower})" if even else ""
        cells += [_ratio(nbytes, bounds), f"{sum(us) / sum(times):.2f}{told}"]
    cells.append(f"{statistics.mean(sum(s.sends for s in p.steps) for p in plans):.2f}")
    cells.append(f"{statistics.mean(p.peak_bytes / p.src.nbytes for p in plans):.2f}")
    p95 = sorted(cold)[int(0.95 * len(cold))]
    cells += [f"{statistics.median(cold):.2f} / {p95:.1f}", f"{statistics.median(ms):.1f}", f"{hot:.2f}"]
    return cells


def _ratio(found: list[float], bounds: list[int]) -> str:
    worst = max((f / b for f, b in zip(found, bounds, strict=True) if b), default=1.0)
    return f"{sum(found) / sum(bounds):.3f} ({worst:.1f})"


HEADER = [
    "mesh", "pairs", "bytes / bound (worst)", "default", "time (faster, slower)", "min-cost", "time (faster, slower)",
    "sends", "memory / B", "cold ms, median / p95", "min-cost ms", "hot us",
]  # fmt: skip


def tables(args: argparse.Namespace) -> None:
    most = args.pairs or (60 if args.short else 400)
    for preset, hosts in (("textbook", 1), ("textbook", 2), ("hopper", 1)):
        rows = []
        for shape in MESHES:
            mesh = mesh_of(shape, preset, hosts)
            rows.append(row(mesh, EVEN[args.dims], most, even=True))
            if hosts == 1:
                rows.append(row(mesh, UNEVEN[args.dims], most, even=False))
        print(f"\n{preset}, {hosts} host{'s' * (hosts > 1)}\n\n{table(HEADER, rows)}")


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
