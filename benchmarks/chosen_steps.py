"""Measured: a step whose placements are chosen for the program, beside the same step by op, on 4 gloo ranks.

    python benchmarks/chosen_steps.py                          # all models, some minutes
    python benchmarks/chosen_steps.py --only gpt llama --reps 40

The models and plans are those of `choose.py`, on 2x2 ranks of this machine; `all Shard(0)` is a Llama all of whose
parameters are sharded on the data axis of 4 ranks. Prices are those of `--machine`: gloo on one host in round figures,
or a calibration file. Both steps train a copy of one model in the same processes and take turns, in a new order each
round. The time of a step is that of the slowest rank, from a barrier until the loss is a number there; the table has
the medians, and their ratio. The losses of the two are compared. Exits 1 if a ratio is above its bar: 1.02, and 0.6
for `all Shard(0)`.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import socket
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _table import table
from choose import BATCH, CASES, GLOO, Row, plans

import spmd
from spmd import MeshTopoInfo, Shard
from spmd.expand.choose.price import program_cost

RANKS = 4
CHOICES = ("op", "program")
ALL_SHARDED = "all Shard(0)"
DATA = {k: {"dp": Shard(0)} for k in "xy"}
BARS = {ALL_SHARDED: 0.6}


class Job:
    """A case under a plan on this rank: the two compiled steps, each with its own copy of the model."""

    def __init__(self, name: str, plan: str, machine: str) -> None:
        shape, params, inputs = said(name, plan)
        mesh = spmd.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        mesh = mesh.with_topology(MeshTopoInfo.from_mesh(mesh, machine=GLOO if machine == "gloo" else machine))
        row = Row(CASES[name], mesh, params, inputs)
        self.batch, loss_of = (row.x, row.y), row.loss

        def train_step(model, optimizer, x, y):
            optimizer.zero_grad()
            loss = loss_of(model, x, y)
            loss.backward()
            optimizer.step()
            return loss.detach()

        self.steps, self.given = {}, {}
        for choose in CHOICES:
            model = copy.deepcopy(row.model)
            self.given[choose] = model, torch.optim.AdamW(model.parameters(), foreach=False)
            self.steps[choose] = spmd.compile(train_step, mesh, choose=choose, **row.said)

    def run(self, choose: str) -> tuple[float, float]:
        """Seconds of a step on the slowest rank, and its loss."""
        dist.barrier()
        start = time.perf_counter()
        loss = self.steps[choose](*self.given[choose], *self.batch).full_tensor().item()
        seconds = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        return seconds.item(), loss


def said(name: str, plan: str) -> tuple[tuple[int, ...], dict, dict]:
    """The mesh, and what is said of parameters and inputs."""
    if plan == ALL_SHARDED:
        return (RANKS, 1), {"*": {"dp": Shard(0)}}, DATA
    for found, params, inputs in plans(CASES[name]):
        if found == plan:
            return (2, 2), params, inputs
    raise ValueError(f"{name} has no plan {plan!r}")


def measured(name: str, plan: str, args: argparse.Namespace) -> list[str] | None:
    """A row of the table, on rank 0."""
    job, order = Job(name, plan, args.machine), random.Random(0)
    losses = {c: [job.run(c)[1] for _ in range(3)] for c in CHOICES}
    times: dict[str, list[float]] = {c: [] for c in CHOICES}
    for _ in range(args.reps):
        for c in order.sample(CHOICES, 2):
            times[c].append(job.run(c)[0] * 1e3)
    if dist.get_rank() != 0:
        return None
    programs = [job.steps[c].program for c in CHOICES]
    medians = [statistics.median(times[c]) for c in CHOICES]
    modelled = [program_cost(p).us for p in programs]
    apart = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    return [name, plan, *(f"{m:.1f}" for m in medians), f"{medians[1] / medians[0]:.3f}",
            f"{modelled[1] / modelled[0]:.3f}", *(str(len(p.collectives)) for p in programs),
            *(f"{sum(c.nbytes for c in p.collectives) / 1e6:.2f}" for p in programs), f"{apart:.0e}"]  # fmt: skip


HEADER = ["model", "plan", "by op, ms", "program, ms", "ratio", "modelled", "collectives", "of program", "MB",
          "of program", "losses apart"]  # fmt: skip


def on_rank(rank: int, port: int, args: argparse.Namespace) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(RANKS)}
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
        above = [r for r in rows if float(r[4]) > BARS.get(r[1], 1.02)]
        print(f"\n{len(rows)} rows, {len(above)} above their bar; batch {BATCH}; torch {torch.__version__}")
        sys.exit(int(bool(above)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), help="these models")
    parser.add_argument("--plans", nargs="+", default=["dp x tp"], help="plans of choose.py (default: dp x tp)")
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
