"""Simulated beside measured: what a step is said to take, and what it takes on four gloo ranks.

    python benchmarks/simulated.py                     # six programs, and ten plans of one model: some minutes
    python benchmarks/simulated.py --rounds 5          # rougher
    python benchmarks/simulated.py --only plans        # one of the two tables

The ranks are calibrated: collectives, and local ops, with four ranks running at once. All steps run, too, after each
round of the calibration, so that both see the same machine; times are those of the slowest rank, and means over the
rounds without the slowest tenth.

Both sides have the same work, one call of a compiled step: the exchange in which the ranks compare what they are about
to run, and then the ops and moves of the program. The simulated side is the calibrated price of that exchange and
`program.timeline(topology)` on the machine that was found; the measured side is what the call takes on the slowest
rank. An all-reduce that ends the row of steps belongs to neither. The tables give the parts, and a line says what comes
out if one compares the program alone with steps and their part of such an all-reduce, which are not the same work.
Measured alone is what Python takes to begin a call.

Bars: a median error of 15% over the six programs, and Kendall's tau of 0.8 between the two orders of ten plans.

Left out: what other programs on the machine take; run it on a quiet one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import numpy as np
import torch
import torch.distributed as dist
from _table import table
from torch import nn, optim
from workers import Pool

import spmd
from spmd import Shard
from spmd.comm.measure import calibrate
from spmd.expand.program import Program
from spmd.mesh import all_gather_cost
from spmd.mesh.machine import Machine
from tests.expand.side_by_side import GPT_PLAN, INPUTS, gpt, seeded, tokens, train_step

MOST_ERROR, LEAST_TAU = 0.15, 0.8
"""The bars."""
MOST_BYTES = 4 << 20
"""The largest message of the calibration: more than these programs send."""
DIGEST = 32
"""Bytes of the digest of its call that each rank sends to all others before a step runs, and waits for."""
IN_A_ROW = 3
"""Steps that are timed together, as they follow each other in a training."""


def mlp(layers: int, width: int):
    """Linear layers with GELU between them, named by their place."""
    parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*parts, nn.Linear(width, 3))


def wide_gpt():
    return gpt(n_embd=128, n_head=4, block_size=64)


def batch(n: int, width: int):
    torch.manual_seed(0)
    return torch.randn(n, width), torch.randint(0, 3, (n,))


def words(n: int):
    return tokens(n, 1, 64)[0]


MLP_TP = {"0.*": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}, "4.*": {"tp": Shard(0)}, "6.weight": {"tp": Shard(1)}}
MODELS = {
    "mlp": (lambda: mlp(4, 256), lambda: batch(256, 256)),
    "wide mlp": (lambda: mlp(2, 768), lambda: batch(64, 768)),
    "gpt": (wide_gpt, lambda: words(16)),
}
PROGRAMS = {
    "mlp, dp 4": ("mlp", (4, 1), {}),
    "mlp, dp 2 x tp 2": ("mlp", (2, 2), {"params": MLP_TP}),
    "wide mlp, ZeRO-3": ("wide mlp", (4, 1), {"fully_shard": "dp"}),
    "gpt, dp 4": ("gpt", (4, 1), {}),
    "gpt, tp 4": ("gpt", (1, 4), {"params": GPT_PLAN}),
    "gpt, ZeRO-3": ("gpt", (4, 1), {"fully_shard": "dp"}),
}
PLANS = {
    "dp 4": ("gpt", (4, 1), {}),
    "dp 4, no buckets": ("gpt", (4, 1), {"passes": ()}),
    "dp 4, buckets of 0.1 MB": ("gpt", (4, 1), {"bucket_mb": 0.1}),
    "ZeRO-3": ("gpt", (4, 1), {"fully_shard": "dp"}),
    "ZeRO-3, no buckets": ("gpt", (4, 1), {"fully_shard": "dp", "passes": ()}),
    "tp 4": ("gpt", (1, 4), {"params": GPT_PLAN}),
    "dp 2 x tp 2": ("gpt", (2, 2), {"params": GPT_PLAN}),
    "dp 2 x tp 2, no buckets": ("gpt", (2, 2), {"params": GPT_PLAN, "passes": ()}),
    "ZeRO-3 x tp": ("gpt", (2, 2), {"params": GPT_PLAN, "fully_shard": "dp"}),
    "replicated": ("gpt", (4, 1), {"inputs": None}),
}
"""By name: the model, the shape of the mesh, and what is said to `compile`."""
TABLES = {"programs": ("six programs", PROGRAMS), "plans": ("ten plans of one model", PLANS)}


class Run:
    """A step of one program on this rank."""

    def __init__(self, name: str, shape: tuple[int, int], said: dict, machine: Machine) -> None:
        build, data = MODELS[name]
        mesh = spmd.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")).with_topology(machine)
        self.model, self.data = seeded(build), data()
        self.optimizer = optim.AdamW(self.model.parameters())
        self.step = spmd.compile(train_step, mesh, **{"inputs": INPUTS, **said})
        self()

    @property
    def program(self) -> Program:
        """What it runs."""
        return self.step.program

    def __call__(self) -> None:
        self.step(self.model, self.optimizer, *self.data)

    def seconds(self) -> tuple[float, float]:
        """What a step takes on this rank, of some in a row; and its part of an all-reduce that ends the row."""
        dist.all_reduce(torch.zeros(1))
        start = time.perf_counter()
        for _ in range(IN_A_ROW):
            self()
        done = time.perf_counter()
        dist.all_reduce(torch.zeros(1))
        return (done - start) / IN_A_ROW, (time.perf_counter() - start) / IN_A_ROW


class Beside(NamedTuple):
    """Milliseconds of a step: as simulated, in parts, and as measured, without and with an all-reduce behind it."""

    compared: float
    program: float
    computed: float
    measured: float
    closed: float

    @property
    def simulated(self) -> float:
        """The exchange before the program, and the program."""
        return self.compared + self.program


def beside(rank: int, asked: dict[str, tuple], rounds: int) -> dict[str, Beside]:
    """What each step takes, by name."""
    mesh, every = spmd.init_device_mesh("cpu", (2, 2)), []
    rough = calibrate(mesh, most_bytes=MOST_BYTES, rounds=3, typical=mean).machine  # steps are compiled for it
    runs = {name: Run(*each, rough) for name, each in asked.items()}

    def between() -> None:
        every.append([run.seconds() for run in runs.values()])

    machine = calibrate(mesh, most_bytes=MOST_BYTES, rounds=rounds, between=between, typical=mean).machine
    slowest = torch.tensor(every, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    measured = mean(slowest.numpy()) * 1e3
    found = {}
    for (name, run), ms in zip(runs.items(), measured.tolist(), strict=True):
        topology = run.program.mesh.with_topology(machine).topology
        line = run.program.timeline(topology)
        compared = all_gather_cost(DIGEST * mesh.size(), tuple(range(mesh.ndim)), topology)
        found[name] = Beside(compared / 1e3, line.us / 1e3, line.busy_us["compute"] / 1e3, *ms)
    return found


def mean(times: np.ndarray) -> np.ndarray:
    """The mean over the rounds, of all but the slowest tenth. A step is a sum of calls, and so is its mean."""
    return np.sort(times, axis=0)[: -(-len(times) * 9 // 10)].mean(0)


def kendall(pairs: list[tuple[float, float]]) -> float:
    """Kendall's tau: of all pairs the part that has one order, less the part that has two.

    >>> kendall([(1, 1), (2, 2), (3, 4), (4, 3)])
    0.6666666666666666
    """
    signs = [np.sign(a[0] - b[0]) * np.sign(a[1] - b[1]) for a, b in combinations(pairs, 2)]
    return float(sum(signs) / len(signs))


def judged(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """The median error, and Kendall's tau."""
    return statistics.median(abs(a / b - 1) for a, b in pairs), kendall(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--only", choices=list(TABLES), help="one of the two tables")
    args = parser.parse_args()
    pool, fine = Pool(4), True
    print(f"four gloo ranks, {os.cpu_count()} cores, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}")
    for title, asked in [TABLES[args.only]] if args.only else TABLES.values():
        found = pool.run(beside, asked, args.rounds, timeout=1800.0)[0]
        heads = [title, "comparing", "program", "computed", "simulated ms", "measured ms", "error", "with all-reduce"]
        print(table(heads, [row(name, each) for name, each in found.items()]))
        error, tau = judged([(each.simulated, each.measured) for each in found.values()])
        print(f"median error {error:.1%}, Kendall's tau {tau:.2f}")
        unlike = judged([(each.program, each.closed) for each in found.values()])
        print("not the same work, program beside steps with all-reduce: {:.1%}, {:.2f}\n".format(*unlike), flush=True)
        fine &= error <= MOST_ERROR if asked is PROGRAMS else tau >= LEAST_TAU
    pool.close()
    sys.exit(not fine)


def row(name: str, each: Beside) -> list[str]:
    """A row of the table."""
    parts = each.compared, each.program, each.computed, each.simulated, each.measured
    return [name, *(f"{ms:.1f}" for ms in parts), f"{each.simulated / each.measured - 1:+.0%}", f"{each.closed:.1f}"]


if __name__ == "__main__":
    main()
