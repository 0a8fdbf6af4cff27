"""``python -m spmd calibrate``: measure how long collectives take on these ranks, and write a calibration file.

Plans are priced by the file that ``$SPMD_TOPOLOGY`` names. At the end the command prints predicted beside measured
times, for sizes that the fit has not seen (``comm/measure.py``).
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import spmd
from spmd.cli.args import UsageError, axis_sizes, byte_count, positive
from spmd.cli.launch import check_device, join, launch, launched, run_launched
from spmd.comm.measure import ROUNDS, Calibration, Point, Signature, calibrate
from spmd.mesh.calibration import VARIABLE, save

ABOUT = "measure how long collectives take on these ranks, and write the file by which plans are priced"

PATIENCE = timedelta(minutes=5)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nproc", type=positive, default=4, help="ranks to start here, without torchrun (default: 4)")
    parser.add_argument("--mesh", type=axis_sizes, metavar="AxB..", help="the groups: its axes (default: all divisors)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="gloo or NCCL (default: %(default)s)")
    parser.add_argument("--out", default="spmd-topology.json", metavar="FILE", help="(default: %(default)s)")
    parser.add_argument("--max-bytes", type=byte_count, metavar="SIZE", help="such as 16M (default: as memory allows)")
    parser.add_argument("--rounds", type=positive, default=ROUNDS, help="calls of each size (default: %(default)s)")
    parser.add_argument("--nics-per-host", type=positive, metavar="N", help="(default: a network card for each rank)")
    parser.add_argument("--name", default="measured", help="of the machine, in the file (default: %(default)s)")


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Checks all input. Then runs one rank if a launcher started this process, else starts the ranks."""
    check_device(args.device)
    if not Path(args.out).absolute().parent.is_dir():
        raise UsageError(f"--out {args.out}: there is no folder {Path(args.out).absolute().parent}")
    if args.max_bytes is not None and args.max_bytes < 64 << 10:
        raise UsageError(f"--max-bytes {args.max_bytes}: a bandwidth needs messages of 64K and more")
    ranks = int(os.environ["WORLD_SIZE"]) if launched() else args.nproc
    if ranks < 2:
        raise UsageError("one rank has no other to send to; start two or more, with --nproc or torchrun")
    shape = args.mesh or divisors_mesh(ranks, int(os.environ.get("LOCAL_WORLD_SIZE", ranks)))
    if np.prod(shape) != ranks:
        raise UsageError(f"a mesh of {'x'.join(map(str, shape))} has {np.prod(shape)} ranks, and there are {ranks}")
    if launched():
        run_launched(run_rank, args, shape)
    else:
        launch(["-m", "spmd", *argv], ranks=ranks)


def divisors_mesh(ranks: int, per_host: int) -> tuple[int, ...]:
    """A mesh whose axes, alone or together, make groups of each size that divides the hosts or the ranks of a host.

    >>> divisors_mesh(12, per_host=4), divisors_mesh(4, per_host=4)
    ((3, 2, 2), (2, 2))
    """
    per_host = per_host if ranks % per_host == 0 else ranks
    return (*_primes(ranks // per_host), *_primes(per_host))


def _primes(n: int) -> list[int]:
    least = next((d for d in range(2, n + 1) if n % d == 0), None)
    return [] if least is None else [least, *_primes(n // least)]


def run_rank(args: argparse.Namespace, shape: tuple[int, ...]) -> None:
    """Runs one rank. The first rank of each host writes the file, and rank 0 prints the report."""
    device = join(args.device, PATIENCE)
    mesh = spmd.init_device_mesh(device.type, shape)
    load = os.getloadavg()[0]
    found = calibrate(
        mesh, name=args.name, most_bytes=args.max_bytes, rounds=args.rounds, nics_per_host=args.nics_per_host
    )
    if int(os.environ["LOCAL_RANK"]) == 0:
        save(found.machine, args.out)
    if dist.get_rank() == 0:
        ranks = f"{'x'.join(map(str, shape))} ranks, {dist.get_backend()}, {args.rounds} rounds, load {load:.1f} before"
        report(found, ranks, args.out)
    dist.all_reduce(torch.zeros(1))  # the others wait here, on the CPU, for the report
    dist.destroy_process_group()


def report(found: Calibration, ranks: str, path: str) -> None:
    """Prints predicted beside measured times for sizes that no curve has seen, their errors, and the file's path."""
    out = Console(highlight=False)
    out.print(held_out_table([point for point in found.points if point.held_out]))
    out.print(
        f"{ranks}; {len(found.machine.measured)} curves",
        error_summary(found.held_out_errors),
        f"wrote {path}; plans are priced by it where {VARIABLE}={Path(path).absolute()}",
        sep="\n",
        soft_wrap=True,
    )


def held_out_table(points: Sequence[Point]) -> Table:
    table = Table(title="sizes that the fit has not seen", title_justify="left")
    for name in ("group", "collective"):
        table.add_column(name)
    for name in ("bytes", "measured us", "predicted us", "error"):
        table.add_column(name, justify="right")
    for point in points:
        times = f"{point.us:,.1f}", f"{point.predicted:,.1f}"
        table.add_row(group_text(point.group), point.collective, f"{point.nbytes:,}", *times, f"{point.error:+.0%}")
    return table


def group_text(group: Signature) -> str:
    """A kind of group in words.

    >>> group_text((4, 1, 1)), group_text((4, 2, 1)), group_text((4, 2, 4))
    ('4', '4 on each of 2 hosts', '4 on each of 2 hosts, 4 a card')
    """
    ranks, hosts, sharing = group
    return f"{ranks}{f' on each of {hosts} hosts' * (hosts > 1)}{f', {sharing} a card' * (sharing > 1)}"


def error_summary(held_out: Sequence[float]) -> str:
    """The median and the quantiles of the errors, in words.

    >>> error_summary([0.02, 0.04, 0.06, 0.08, 0.5])
    'held-out error: median 6.0%, half of them 4.0% to 8.0%, nine in ten below 33.2%, largest 50.0% (5 sizes)'
    """
    low, median, high, most = (f"{100 * part:.1f}%" for part in np.quantile(held_out, [0.25, 0.5, 0.75, 0.9]))
    return (
        f"held-out error: median {median}, half of them {low} to {high}, nine in ten below {most}, "
        f"largest {max(held_out):.1%} ({len(held_out)} sizes)"
    )
