"""The time of ops that draw random numbers, on DTensors and on plain tensors.

    python benchmarks/random_ops.py             # 4 simulated ranks, of which rank 1 is timed; two minutes
    python benchmarks/random_ops.py --short     # up to 1e5 elements

Each op fills a tensor with n elements on each rank, 4 n in all: in plain torch (a tensor of n elements), in spmd on 4
ranks with rows or columns sharded, and in spmd on one rank. Nothing is sent, so it is enough to time one rank. All take
turns. The table has medians, and their ratios to plain torch's time. torch's own DTensor supports random ops on CUDA
only (its OffsetBasedRNGTracker knows no other generator: on CPU every rank draws from its own, so shards are equal, or
unrelated to the numbers of one device). So there is no peer to compare with.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from math import isqrt
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.nn.functional as F
from _table import table

import spmd
from spmd.mesh import DeviceMesh, as_rank

RANKS = 4
OPS: dict[str, Callable[[torch.Tensor], object]] = {
    "uniform_": lambda x: x.uniform_(),
    "normal_": lambda x: x.normal_(),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "exponential_": lambda x: x.exponential_(),
    "random_": lambda x: x.random_(100),
    "dropout": lambda x: F.dropout(x, 0.1),
    "randn_like": torch.randn_like,
}


def contestants(n: int) -> dict[str, torch.Tensor]:
    """Tensors with n elements on this rank, whose global shapes are as near to square as possible."""
    side = isqrt(n * RANKS) // RANKS * RANKS
    mesh, one = DeviceMesh("cpu", list(range(RANKS))), DeviceMesh("cpu", [1])
    return {
        "plain": torch.zeros(side, side // RANKS),
        "rows": spmd.zeros(side, side, device_mesh=mesh, placements=[spmd.Shard(0)]),
        "columns": spmd.zeros(side, side, device_mesh=mesh, placements=[spmd.Shard(1)]),
        "one rank": spmd.zeros(side, side // RANKS, device_mesh=one),
    }


def measured(op: Callable, tensors: dict[str, torch.Tensor], seconds: float) -> dict[str, float]:
    """Median microseconds of each. They take turns for this many seconds, and for at least five rounds."""
    times: dict[str, list[float]] = {name: [] for name in tensors}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times["plain"]) < 6:
        for name, x in tensors.items():
            start = time.thread_time()  # of this thread alone, for other programs may run
            op(x)
            times[name].append(time.thread_time() - start)
    return {name: statistics.median(found[1:]) * 1e6 for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="up to 1e5 elements")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each line of the table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    spmd.manual_seed(0)
    lines = []
    with as_rank(1, RANKS):
        for n in [10**k for k in range(3, 6 if options.short else 8)]:
            tensors = contestants(n)
            for name, op in OPS.items():
                us = measured(op, tensors, options.seconds)
                ratios = [f"{us[who] / us['plain']:.2f}" for who in ("rows", "columns", "one rank")]
                lines.append([name, f"{n:.0e}", *(f"{us[who]:.1f}" for who in us), *ratios])
                print(lines[-1], file=sys.stderr)
    names = ["plain us", "rows us", "columns us", "one rank us", "rows / plain", "columns / plain", "one rank / plain"]
    print(table(["op", "elements a rank", *names], lines))


if __name__ == "__main__":
    main()
