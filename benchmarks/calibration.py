"""How well a calibration predicts the times of collectives, in its own run and in a later one.

    python benchmarks/calibration.py            # 3 calibrations of 4 gloo ranks on this machine, a few minutes
    python benchmarks/calibration.py --short    # 2 small ones, under 30 seconds

Each run does the same as `python -m spmd calibrate`. For each collective and kind of group the table has

- held out: the errors of a run's curves at sizes that the fit has not seen, over all runs;
- next run: the errors of a run's curves at all sizes of the next run;
- textbook: the errors of the preset, which was not fitted to this machine, at all sizes.

An error is |predicted - measured| / measured. If other programs use the machine, its speed changes between runs: the
first column is the error of the fit, the second is the error that a plan has in practice.
"""

from __future__ import annotations

import argparse
import os
import pickle
import socket
import sys
import tempfile
from datetime import date, timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _table import table

import spmd
from spmd.comm.measure import Calibration, Point, calibrate
from spmd.mesh import PRESETS, HostGrid, Machine, MeshTopoInfo, cost

Errors = dict[tuple[int, str], list[float]]  # by ranks of the group and collective


def play(rank: int, args: argparse.Namespace, folder: Path) -> None:
    """One rank of all runs. Rank 0 writes the results to a file."""
    torch.set_num_threads(1)
    meet = f"file://{folder}/meet"
    dist.init_process_group("gloo", meet, timeout=timedelta(minutes=5), rank=rank, world_size=args.ranks)
    mesh = spmd.init_device_mesh("cpu", (2, args.ranks // 2))
    found = [calibrate(mesh, most_bytes=args.bytes, rounds=args.rounds) for _ in range(args.runs)]
    if rank == 0:
        (folder / "found").write_bytes(pickle.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def predicted(point: Point, machine: Machine) -> float:
    """The time that the machine predicts for a collective on one host."""
    topology = MeshTopoInfo(HostGrid((point.group[0],)), machine)
    if point.collective == "copy":
        return cost.copy_cost(point.nbytes, topology)
    return getattr(cost, f"{point.collective}_cost")(point.nbytes, 0, topology)


def errors(runs: list[Calibration], machines: list[Machine], held_out: bool = False) -> Errors:
    """The errors of each machine against the run at the same position."""
    found: Errors = {}
    for run, machine in zip(runs, machines, strict=True):
        for point in run.points:
            if point.held_out or not held_out:
                error = abs(predicted(point, machine) / point.us - 1)
                found.setdefault((point.group[0], point.collective), []).append(error)
    return found


def report(runs: list[Calibration], head: str) -> str:
    machines = [run.machine for run in runs]
    columns = [
        errors(runs, machines, held_out=True),
        errors(runs[1:], machines[:-1]),
        errors(runs, [PRESETS["textbook"]] * len(runs)),
    ]
    rows = [[str(ranks), kind, *(_cell(column[ranks, kind]) for column in columns)] for ranks, kind in columns[0]]
    everything = [[error for found in column.values() for error in found] for column in columns]
    rows.append(["all", "", *map(_cell, everything)])
    each = ", ".join(f"{np.median(run.held_out_errors):.1%}" for run in runs)
    header = ["ranks", "collective", "held out", "next run", "textbook"]
    return "\n".join([head, "", table(header, rows, left=2), "", f"held out, median of each run: {each}"])


def _cell(found: list[float]) -> str:
    low, median, high = (f"{100 * part:.0f}" for part in np.quantile(found, [0.25, 0.5, 0.75]))
    return f"{median}% ({low} - {high})"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="an even number")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=25, help="of each run")
    parser.add_argument("--bytes", type=int, default=None, help="of the largest message (default: what 50 ms allow)")
    parser.add_argument("--short", action="store_true", help="for CI")
    args = parser.parse_args()
    if args.short:
        args.runs, args.rounds, args.bytes = 2, 5, 1 << 16
    return args


def main() -> None:
    args, busy = arguments(), os.getloadavg()[0]
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # gloo would look up the host's name instead
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(play, (args, Path(folder)), nprocs=args.ranks)
        runs = pickle.loads((Path(folder) / "found").read_bytes())
    head = (
        f"{date.today()}, torch {torch.__version__}, {len(os.sched_getaffinity(0))} cores (load {busy:.1f} before, "
        f"{os.getloadavg()[0]:.1f} after), gloo, {args.ranks} ranks; {args.runs} runs of {args.rounds} rounds; median "
        "error (quartiles)"
    )
    print(report(runs, head))


if __name__ == "__main__":
    main()
