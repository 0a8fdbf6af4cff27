"""Measured: a step whose placements are chosen for the program, beside the same step by op, on 4 gloo ranks.

    python benchmarks/chosen_steps.py                          # all models, some minutes
    python benchmarks/chosen_steps.py --only gpt llama --reps 40

The models and plans are those of `choose.py`, on 2x2 ranks of this machine; `all Shard(0)` is a Llama all of whose
parameters are sharded on the data axis of 4 ranks. Prices are those of `--machine`: gloo on one host in round figures,
or a calibration file. Both steps train a copy of one model in the same processes and take turns, in a new order each
round. The time of a step is that of the slowest rank, from a barrier until the loss is a number there. The table has
the lower quartiles, which other programs disturb least, and the ratios of these, of the medians and of the processor
time of all ranks. The losses of the two are compared. Where the choice for the program is the program by op there is
nothing to measure, and the ratio is 1.

"floor" is the time of the local ops of the program by op, if whatever its collectives send were there at once, over the
time of its step: with the same local work no choice comes below it. Exits 1 if a ratio is above its bar: 1.02, and 0.6
for `all Shard(0)`.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import socket
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _table import table
from choose import CASES, GLOO, Row, plans, step_of

import spmd
from spmd import MeshTopoInfo, Program, Shard
from spmd.comm import transport
from spmd.expand.choose.price import program_cost
from spmd.expand.code import code_for

RANKS = 4
CHOICES = ("op", "program")
ALL_SHARDED = "all Shard(0)"
SHARDS = {"params": {"*": {"dp": Shard(0)}}, "inputs": {k: {"dp": Shard(0)} for k in "xy"}}
BARS = {ALL_SHARDED: 0.6}


class Job:
    """A case under a plan on this rank: the two compiled steps, each with its own copy of the model."""

    def __init__(self, name: str, plan: str, machine: str) -> None:
        shape, said = asked(name, plan)
        mesh = spmd.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        mesh = mesh.with_topology(MeshTopoInfo.from_mesh(mesh, machine=GLOO if machine == "gloo" else machine))
        row = Row(CASES[name], mesh, said)
        self.batch, self.steps, self.given = (row.x, row.y), {}, {}
        for choose in CHOICES:
            self.given[choose] = copy.deepcopy((row.model, row.optimizer))
            self.steps[choose] = spmd.compile(step_of(CASES[name]), mesh, choose=choose, **row.said)

    def run(self, choose: str) -> tuple[float, float, float]:
        """Seconds of a step on the slowest rank, seconds of this rank's processor, and the loss."""
        dist.barrier()
        start, busy = time.perf_counter(), time.process_time()
        loss = self.steps[choose](*self.given[choose], *self.batch).full_tensor().item()
        return slowest(time.perf_counter() - start), time.process_time() - busy, loss


def slowest(seconds: float) -> float:
    """The most that a rank says."""
    most = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item()


ALONE = {
    "all_reduce": lambda x, op, group: x,
    "all_reduce_": lambda x, op, group: x,
    "all_gather_into_tensor": lambda x, n, group: x.new_zeros(n * len(x)),
    "reduce_scatter_tensor": lambda x, op, n, group: x[: len(x) // n],
    "all_to_all_single": lambda x, out_splits, in_splits, group: x.new_zeros(sum(out_splits)),
    "wait_tensor": lambda x: x,
}
"""Collectives to which whatever others send is there at once; its values are any."""


def local_work(program: Program) -> Callable[[], object]:
    """The local ops of a program on this rank, on numbers that stand for its inputs."""
    at = program.mesh.get_coordinate()
    module = code_for(program, at, transport()).module
    for node in module.graph.nodes:
        if getattr(node.target, "namespace", "") == "_c10d_functional":
            node.target = ALONE[node.target.overloadpacket.__name__]
    module.recompile()
    given = [0.5 if spec is None else torch.ones(spec.local_shape(at), dtype=spec.dtype) for _, spec in program.inputs]
    return lambda: module(*given)


def asked(name: str, plan: str) -> tuple[tuple[int, ...], dict]:
    """The mesh, and what is said to the compiler."""
    if plan == ALL_SHARDED:
        return (RANKS, 1), SHARDS
    found = dict(plans(CASES[name]))
    if plan not in found:
        raise ValueError(f"{name} has no plan {plan!r}; it has {', '.join(found)}, and llama {ALL_SHARDED!r}")
    return (2, 2), found[plan]


def measured(name: str, plan: str, args: argparse.Namespace) -> list[str] | None:
    """A row of the table, on rank 0."""
    job, order = Job(name, plan, args.machine), random.Random(0)
    losses = {c: [job.run(c)[2] for _ in range(3)] for c in CHOICES}
    programs = [job.steps[c].program for c in CHOICES]
    same, reps = str(programs[0]) == str(programs[1]), args.reps
    if same:
        reps = min(5, reps)
    alone = local_work(programs[0])
    times: dict[str, list[tuple[float, float]]] = {c: [] for c in (*CHOICES, "alone")}
    for _ in range(reps):
        for c in order.sample(list(times), len(times)):
            times[c].append(job.run(c)[:2] if c in CHOICES else timed(alone))
    every = torch.tensor([times[c] for c in times], dtype=torch.float64)  # [choice, round, wall and processor]
    busy = every[:, :, 1].contiguous()
    dist.all_reduce(busy)
    if dist.get_rank() != 0:
        return None
    wall = every[:, :, 0].numpy() * 1e3
    low, median, processor = np.quantile(wall, 0.25, axis=1), np.median(wall, axis=1), np.median(busy.numpy(), axis=1)
    modelled = [program_cost(p).us for p in programs]
    apart = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    ratios = ["1 (same)"] * 3 if same else [f"{x[1] / x[0]:.3f}" for x in (low, median, processor)]
    return [name, plan, *(f"{m:.0f}" for m in low[:2]), *ratios, f"{modelled[1] / modelled[0]:.3f}",
            f"{low[2] / low[0]:.2f}", *(str(len(p.collectives)) for p in programs),
            *(f"{sum(c.nbytes for c in p.collectives) / 1e6:.2f}" for p in programs), f"{apart:.0e}"]  # fmt: skip


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds of a call on the slowest rank, and of this rank's processor."""
    dist.barrier()
    start, busy = time.perf_counter(), time.process_time()
    call()
    return slowest(time.perf_counter() - start), time.process_time() - busy


HEADER = ["model", "plan", "by op, ms", "program, ms", "ratio", "of medians", "of processor time", "modelled", "floor",
          "collectives", "of program", "MB", "of program", "losses apart"]  # fmt: skip


def on_rank(rank: int, port: int, args: argparse.Namespace) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = []
    for name in args.only:
        for plan in [*args.plans, *([ALL_SHARDED] if name == "llama" else [])]:
            row = measured(name, plan, args)
            if row:
                rows.append(row)
                print(*row, sep="  ", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        print(table(HEADER, rows, left=2))
        above = [r for r in rows if float(r[4].split()[0]) > BARS.get(r[1], 1.02)]
        print(f"\n{len(rows)} rows, {len(above)} above their bar; torch {torch.__version__}")
        sys.exit(int(bool(above)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="these models")
    parser.add_argument("--plans", nargs="*", default=["dp x tp"], help="plans of choose.py (default: dp x tp)")
    parser.add_argument("--machine", default="gloo", help="gloo, a preset, or a calibration file (default: gloo)")
    parser.add_argument("--reps", type=int, default=20, help="rounds that are timed (default: %(default)s)")
    args = parser.parse_args()
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    try:
        mp.spawn(on_rank, (port, args), RANKS)
    except mp.ProcessExitedException as error:
        return error.exit_code or 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
