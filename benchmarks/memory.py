"""Does memory stay constant? Eager ops on DTensors whose shapes keep changing.

    python benchmarks/memory.py                 # a million ops, 40 minutes
    python benchmarks/memory.py --short         # 20,000 ops

There are two simulated ranks. Each round takes a shape that has not occurred for a long time and runs ten ops on it -
arithmetic, a dropout, a product, views, a write, a reduction, a redistribution - and their backward. So the caches fill
and must drop entries. Printed over time: the memory of the process, the live DTensors, and the entries of all caches
(`spmd.debug.caches`). At the end: the slope of the memory over the second half, by least squares.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from _table import table

import spmd
from spmd import DTensor, LocalTensorMode, Replicate, Shard

OPS = 10  # of a round, forward
ROWS, COLUMNS = 1009, 61  # primes: as many shapes as their product


def round_of_ops(i: int, mesh: spmd.DeviceMesh) -> None:
    """Ten ops forward, and their backward, on the i-th shape."""
    rows, columns = 2 + i * 37 % ROWS, 2 + i % COLUMNS
    x = DTensor.from_local(torch.ones(rows, columns), mesh, [Shard(0)]).requires_grad_()
    y = F.dropout(x * 2.0 + x, 0.25)
    z = y.t() @ y
    w = z.redistribute(placements=[Replicate()]).view(-1)
    w.detach().add_(1.0)
    w.sum().backward()


def samples(ops: int, every: int) -> Iterator[tuple[int, float, int, int]]:
    """After every `every` ops: the ops run so far, MB of the process, live DTensors, and entries of all caches."""
    for i in range(ops // OPS):
        if i % (every // OPS) == 0:
            yield i * OPS, *state()
            mode = LocalTensorMode(2)  # which remembers what was sent
            mesh = spmd.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        with mode:
            round_of_ops(i, mesh)
    yield ops, *state()


def state() -> tuple[float, int, int]:
    gc.collect()
    alive = sum(type(x) is DTensor for x in gc.get_objects())
    return resident_mb(), alive, spmd.debug.caches().entries


def resident_mb() -> float:
    """Memory of this process that is in use, in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def slope(ops: Sequence[int], mb: Sequence[float]) -> float:
    """Bytes an op, by least squares.

    >>> round(slope([0, 10, 20], [1.0, 1.1, 1.2]))
    10000
    """
    return statistics.linear_regression(ops, mb).slope * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", type=int, default=1_000_000)
    parser.add_argument("--short", action="store_true", help="20,000 ops")
    args = parser.parse_args()
    ops = 20_000 if args.short else args.ops
    spmd.manual_seed(0)
    seen: list[tuple[int, float]] = []
    rows = []
    for done, mb, alive, entries in samples(ops, max(OPS, ops // 100)):
        spent = time.process_time()
        print(f"{done:>9,} ops  {mb:8.1f} MB  {alive} DTensors  {entries:,} entries  {spent:.0f} s CPU", flush=True)
        seen.append((done, mb))
        rows.append([f"{done:,}", f"{mb:.1f}", str(alive), f"{entries:,}", f"{spent:.0f}"])
    print(table(["ops", "MB", "DTensors", "entries", "CPU s"], rows[:: max(1, len(rows) // 20)], left=0))
    late = seen[len(seen) // 2 :]
    print(f"from {late[0][0]:,} ops on: {slope(*zip(*late, strict=True)):+.2f} bytes an op")
    print(spmd.debug.caches())


if __name__ == "__main__":
    main()
