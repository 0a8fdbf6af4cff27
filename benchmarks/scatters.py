"""A reduce-scatter on CPUs by an exchange of terms, beside gloo's own, on ranks of this machine.

    python benchmarks/scatters.py                  # 2 and 4 ranks, under a minute
    python benchmarks/scatters.py --reps 100

Gloo's reduce-scatter is an all-reduce whose result is cut (`spmd/comm/added.py`). The calls take turns, in a new order
each round; a time is that of the slowest rank. The table has lower quartiles, as a calibration does. Exits 1 if the
exchange takes longer at the largest size.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _table import table

import spmd
from spmd.comm import all_reduce, reduce_scatter_tensor, transport

SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20)


def calls(mesh: spmd.DeviceMesh) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """What is timed, on a tensor of this rank."""
    t, n = transport(), mesh.size()
    group = t.group(mesh, 0)
    return {
        "all-reduce": lambda x: all_reduce(x, "sum", (mesh, 0)).wait(),
        "gloo's own": lambda x: t.wait_tensor(t.reduce_scatter_tensor(x, "sum", n, group)),
        "exchange": lambda x: reduce_scatter_tensor(x, "sum", 0, (mesh, 0)).wait(),
    }


def slowest(call: Callable, x: torch.Tensor) -> float:
    """Microseconds on the slowest rank."""
    dist.barrier()
    start = time.perf_counter()
    call(x)
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item() * 1e6


def on_rank(rank: int, ranks: int, port: int, reps: int) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(ranks)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    timed, order, rows = calls(spmd.init_device_mesh("cpu", (ranks,))), random.Random(0), []
    for nbytes in SIZES:
        x, times = torch.ones(nbytes // 4), {name: [] for name in timed}
        for _ in range(reps):
            for name in order.sample(list(timed), len(timed)):
                times[name].append(slowest(timed[name], x))
        us = [float(np.quantile(times[name], 0.25)) for name in timed]
        rows.append([str(ranks), f"{nbytes:,}", *(f"{each:,.0f}" for each in us), f"{us[1] / us[2]:.2f}"])
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print(table(["ranks", "bytes", *(f"{name}, us" for name in timed), "times faster"], rows, left=0), flush=True)
        sys.exit(int(float(rows[-1][-1]) < 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--reps", type=int, default=30, help="rounds (default: %(default)s)")
    args = parser.parse_args()
    worst = 0
    for ranks in args.ranks:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        try:
            mp.spawn(on_rank, (ranks, port, args.reps), ranks)
        except mp.ProcessExitedException as error:
            worst = max(worst, error.exit_code or 1)
    return worst


if __name__ == "__main__":
    sys.exit(main())
