"""The time of one training step of a GPT: spmd's program, and the same step written in other ways.

    python benchmarks/step.py                   # 4 and 2 ranks on this machine, some minutes
    python benchmarks/step.py --short           # 4 ranks and small sizes, under 40 seconds on 2 free cores

Every mesh of 4 and of 2 gloo ranks runs

- spmd: the program that `spmd.compile` makes of the plain step in `examples/gpt.py`;
- c10d: Megatron's step written by hand (`peers/c10d.py`), with the faster of two ways to sum gradients;
- if tp has one rank: DistributedDataParallel, and torch's `fully_shard` beside spmd, ZeRO-3, which is the same step
  compiled with `fully_shard="dp"` (`peers/replicas.py`);
- DTensor, parallelize_module: torch's DTensor inside the Linears (`peers/dtensor.py`), if tp has more than one rank;
- DTensor, everywhere: torch's DTensor for every tensor (it needs minutes of warm-up to search for its plans).

Rank 0 also runs the plain step alone, with one thread and with all cores. All of them train a copy of one model on the
same batches, in the same processes. They take turns: each round runs all of them once, in a new order. The time of a
step is that of the slowest rank, from a barrier until the loss is a number there. The table has the medians over the
rounds. A step whose first five losses are not those of one device gets no ratios.

Left out: several machines (the network here is the loopback), GPUs, and ranks of several threads.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import os
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import date, timedelta
from itertools import groupby
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from _table import table
from peers import c10d, dtensor, replicas
from torch import Tensor
from torch.distributed import init_device_mesh

import spmd
from examples.gpt import GPT, GPTConfig, train_step
from examples.text import batches, load_text

LR = 1e-3
VERIFIED = 5  # steps whose losses are compared with one device; they also warm up
TOLERANCE = 1e-4
PATIENCE = timedelta(minutes=5)
SHORT = {"ranks": "4", "layers": 1, "width": 64, "heads": 4, "batch": 8, "block": 32, "reps": 5, "everywhere": False}

OURS, SHARDED = "spmd", "spmd, ZeRO-3"

Batch = tuple[Tensor, Tensor]
Step = Callable[[Tensor, Tensor], float]  # from the global batch to its mean loss, on every rank


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="4,2", help="numbers of ranks, all meshes of each (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="(default: %(default)s)")
    parser.add_argument("--width", type=int, default=256, help="(default: %(default)s)")
    parser.add_argument("--heads", type=int, default=8, help="(default: %(default)s)")
    parser.add_argument("--batch", type=int, default=8, help="windows of text a step (default: %(default)s)")
    parser.add_argument("--block", type=int, default=128, help="bytes in a window (default: %(default)s)")
    parser.add_argument("--reps", type=int, default=20, help="rounds that are timed (default: %(default)s)")
    everywhere = "whether the slowest peer to warm up takes part (default: it does)"
    parser.add_argument("--everywhere", action=argparse.BooleanOptionalAction, default=True, help=everywhere)
    parser.add_argument("--short", action="store_true", help="small sizes for CI; other options still count")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write all times there")
    if parser.parse_args().short:
        parser.set_defaults(**SHORT)
    args = parser.parse_args()
    try:
        args.ranks = [int(n) for n in args.ranks.split(",")]
        assert min(args.ranks) > 0
    except (ValueError, AssertionError):
        parser.error(f"--ranks {args.ranks}: give whole numbers from 1 on, such as 4,2.")
    if min(args.layers, args.width, args.heads, args.batch, args.block, args.reps) < 1:
        parser.error("sizes and repetitions are whole numbers from 1 on.")
    n = math.lcm(*args.ranks)
    if args.heads % n or args.batch % n or args.width % args.heads:
        parser.error(
            f"the peers cut evenly: --heads {args.heads} and --batch {args.batch} must be multiples of {n}, "
            f"--width {args.width} one of the heads. --heads {2 * n} --batch {2 * n} --width {64 * n} fits."
        )
    return args


def config(args: argparse.Namespace) -> GPTConfig:
    return GPTConfig(args.layers, args.heads, args.width, args.block)


class Job:
    """The training job of all runners: the same model, the same initial weights, the same batches."""

    def __init__(self, args: argparse.Namespace):
        torch.manual_seed(0)
        self.start = GPT(config(args))
        source = batches(load_text(), args.batch, args.block)
        self.batches = [next(source) for _ in range(VERIFIED)]

    def model(self) -> GPT:
        return copy.deepcopy(self.start)


@dataclass
class Runner:
    """One implementation on one mesh, and its measurements. One device has an empty mesh: only rank 0 runs it.

    beside: the name of ours that it is compared with.
    """

    name: str
    mesh: tuple[int, ...]
    step: Step | None = None
    beside: str = OURS
    difference: float = math.inf  # the largest relative one of a loss to one device
    start: float = math.nan  # seconds of the first two steps, with all that is compiled or cached in them
    seconds: list[float] = field(default_factory=list)  # of each timed step, on the slowest rank

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def agrees(self) -> bool:
        return self.difference <= TOLERANCE


def meshes(ranks: int) -> list[tuple[int, int]]:
    """All (dp, tp) of so many ranks.

    >>> meshes(4)
    [(1, 4), (2, 2), (4, 1)]
    """
    return [(dp, ranks // dp) for dp in range(1, ranks + 1) if ranks % dp == 0]


def runners(job: Job, ranks: int, everywhere: bool) -> Iterator[Runner]:
    for threads in thread_counts():
        yield Runner(f"one device, {threads} thread{'s' * (threads > 1)}", (), one_device(job, threads))
    for shape in meshes(ranks):
        yield Runner(OURS, shape, with_spmd(job, shape))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        dp, tp = shape
        yield Runner("c10d", shape, c10d.train_step(job.model(), LR, mesh, flat=False))
        if dp > 1:
            yield Runner("c10d, gradients in one buffer", shape, c10d.train_step(job.model(), LR, mesh, flat=True))
        if dp > 1 and tp == 1:
            yield Runner("DistributedDataParallel", shape, replicas.replicated(job.model(), LR, mesh))
            yield Runner(SHARDED, shape, with_spmd(job, shape, fully_shard="dp"))
            yield Runner("fully_shard (FSDP2)", shape, replicas.fully_sharded(job.model(), LR, mesh), SHARDED)
        if tp > 1:
            yield Runner("DTensor, parallelize_module", shape, dtensor.parallelized(job.model(), LR, mesh))
        if everywhere:
            yield Runner("DTensor, everywhere", shape, dtensor.everywhere(job.model(), LR, mesh))


def one_device(job: Job, threads: int) -> Step:
    model = job.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)

    def step(tokens: Tensor, targets: Tensor) -> float:
        torch.set_num_threads(threads)
        loss = train_step(model, optimizer, tokens, targets).item()
        torch.set_num_threads(1)
        return loss

    return step


def with_spmd(job: Job, shape: tuple[int, int], **said: str) -> Step:
    columns, rows = {"tp": spmd.Shard(0)}, {"tp": spmd.Shard(1)}
    step = spmd.compile(
        train_step,
        spmd.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")),
        params={
            "*.attn.[qkv].weight": columns,
            "*.attn.[qkv].bias": columns,
            "*.attn.out.weight": rows,
            "*.mlp.up.weight": columns,
            "*.mlp.up.bias": columns,
            "*.mlp.down.weight": rows,
        },
        inputs={"tokens": {"dp": spmd.Shard(0)}, "targets": {"dp": spmd.Shard(0)}},
        **said,
    )
    model = job.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    return lambda tokens, targets: step(model, optimizer, tokens, targets).item()


def play(rank: int, ranks: int, args: argparse.Namespace, folder: Path) -> None:
    """One rank of the benchmark. Rank 0 writes the measurements into ``folder``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet-{ranks}", PATIENCE, rank=rank, world_size=ranks)
    job = Job(args)
    found = list(runners(job, ranks, args.everywhere))
    verify(found, job.batches)
    measure(found, job.batches, args.reps)
    if rank == 0:
        (folder / f"{ranks}.json").write_text(json.dumps([dict(asdict(r), step=None) for r in found]))
    dist.barrier()
    dist.destroy_process_group()


def verify(found: list[Runner], data: list[Batch]) -> None:
    """Run each runner's first steps, and compare the losses of all ranks with those of the first runner, one device."""
    truth: list[float] = []
    for runner in found:
        steps = [run(runner, batch) for batch in data]
        losses = gathered([loss for loss, _ in steps])[: None if runner.mesh else 1]
        truth = truth or losses[0]
        runner.difference = max(difference(of_rank, truth) for of_rank in losses)
        runner.start = max(gathered(sum(seconds for _, seconds in steps[:2])))
        say(f"{place(runner)} {runner.name}: ready, losses part by {runner.difference:.0e}")


def measure(found: list[Runner], data: list[Batch], rounds: int) -> None:
    """Time the runners in turns, each round in a new order."""
    gc.collect()
    gc.freeze()  # so that no runner's step pays for objects of the others
    for turn in range(rounds):
        for runner in random.Random(turn).sample(found, len(found)):
            _, seconds = run(runner, data[turn % len(data)])
            runner.seconds.append(seconds)
        say(f"round {turn + 1} of {rounds}")
    for runner in found:
        runner.seconds = [max(ranks) for ranks in zip(*gathered(runner.seconds), strict=True)]


def run(runner: Runner, batch: Batch) -> tuple[float, float]:
    """One step's loss, and its seconds on this rank; NaN and 0 on a rank that does not run it."""
    dist.barrier()
    if not runner.mesh and dist.get_rank():
        return math.nan, 0.0
    start = time.perf_counter()
    loss = runner.step(*batch)
    return loss, time.perf_counter() - start


def gathered(mine: object) -> list:
    """The values of all ranks."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def difference(losses: list[float], truth: list[float]) -> float:
    """The largest relative difference; infinite where a loss is NaN.

    >>> difference([1.0, 2.5], [1.0, 2.0])
    0.25
    """
    parts = [abs(a - b) / abs(b) for a, b in zip(losses, truth, strict=True)]
    return math.inf if any(map(math.isnan, parts)) else max(parts)


def report(args: argparse.Namespace, busy: float, found: dict[int, list[Runner]]) -> str:
    size = sum(p.numel() for p in GPT(config(args)).parameters())
    return "\n".join([
        f"{date.today()}, torch {torch.__version__}, {cores()} cores (load {busy:.1f} before), gloo, 1 thread a rank",
        f"GPT of {args.layers} layers, width {args.width}, {args.heads} heads: {size:,} parameters, float32, AdamW; "
        f"{args.batch} x {args.block} tokens a step; medians of {args.reps} rounds",
        "",
        table(header(), [row for ranks, group in found.items() for row in rows(group, ranks)], left=3),
    ])  # fmt: skip


def header() -> list[str]:
    alone = [f"/ 1 device, {n} thread{'s' * (n > 1)}" for n in thread_counts()]
    return ["ranks", "mesh", "step by", "ms", "quartiles", *alone, "spmd / this", "losses part by", "first two, s"]


def rows(found: list[Runner], ranks: int) -> Iterator[list[str]]:
    """A row for each runner; of the two c10d runners only the faster one."""
    alone = [runner for runner in found if not runner.mesh]
    for mesh, group in groupby(found, key=lambda runner: runner.mesh):
        group = faster_c10d(list(group))
        ours = {runner.name: runner for runner in group if runner.name in (OURS, SHARDED)}
        for runner in group:
            low, _, high = (
                statistics.quantiles(runner.seconds, n=4, method="inclusive")
                if len(runner.seconds) > 1
                else runner.seconds * 3
            )
            yield [
                str(ranks),
                "x".join(map(str, mesh)) or "-",
                runner.name,
                ms(runner.median),
                f"{ms(low)} - {ms(high)}",
                *(ratio(runner, one) for one in alone),
                ratio(ours[runner.beside], runner) if ours and runner.name not in ours else "",
                f"{runner.difference:.0e}",
                f"{runner.start:.1f}",
            ]


def faster_c10d(group: list[Runner]) -> list[Runner]:
    ways = [runner for runner in group if runner.name.startswith("c10d")]
    slower = sorted(ways, key=lambda runner: (not runner.agrees, runner.median))[1:]
    return [runner for runner in group if runner not in slower]


def ratio(a: Runner, b: Runner) -> str:
    """The time of a's step divided by that of b's, if both compute the same losses."""
    return f"{a.median / b.median:.2f}" if a.agrees and b.agrees else "losses part"


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def thread_counts() -> list[int]:
    return sorted({1, cores()})


def place(runner: Runner) -> str:
    return "x".join(map(str, runner.mesh)) or "rank 0"


def say(text: str) -> None:
    """Print progress to stderr, on rank 0."""
    if dist.get_rank() == 0:
        print(text, file=sys.stderr, flush=True)


def main() -> int:
    args = arguments()
    busy = os.getloadavg()[0]  # other programs slow some runners more than others
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # gloo would look up the host's name instead
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in args.ranks:
            mp.spawn(play, (ranks, args, Path(folder)), nprocs=ranks)
            found[ranks] = [Runner(**r) for r in json.loads((Path(folder) / f"{ranks}.json").read_text())]
    print(report(args, busy, found))
    if args.json:
        sizes = {key: value for key, value in vars(args).items() if key != "json"}
        results = {ranks: [asdict(runner) for runner in group] for ranks, group in found.items()}
        args.json.write_text(json.dumps({"torch": torch.__version__, "cores": cores(), **sizes, "results": results}))
    return not all(runner.agrees for group in found.values() for runner in group)


if __name__ == "__main__":
    sys.exit(main())
