"""``python -m spmd demo``: train a small GPT on a mesh of ranks by one program, and then again on one device.

The model and its training step are plain PyTorch (``examples/gpt.py``). Only ``PARAMS`` and ``INPUTS`` below concern
ranks. Both runs have the same text, the same initial model and the same learning rates. At the end the command prints
how much their losses differ.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import importlib.util
import math
import os
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

import spmd
from spmd import Shard
from spmd.cli.args import UsageError, mesh_shape, positive, positive_float, seed
from spmd.cli.launch import check_device, cores, join, launch, launched, run_launched

ABOUT = "train a small GPT on a mesh of ranks, and compare its losses with those of one device"

PARAMS = {  # Megatron's: attention by heads, the MLP by columns and then by rows; all else is replicated
    "*.attn.[qkv].weight": {"tp": Shard(0)},
    "*.attn.[qkv].bias": {"tp": Shard(0)},
    "*.attn.out.weight": {"tp": Shard(1)},
    "*.mlp.up.weight": {"tp": Shard(0)},
    "*.mlp.up.bias": {"tp": Shard(0)},
    "*.mlp.down.weight": {"tp": Shard(1)},
}
INPUTS = {"tokens": {"dp": Shard(0)}, "targets": {"dp": Shard(0)}}

PATIENCE = timedelta(minutes=30)
"""How long a rank waits for another. It must cover the run on one device. The launcher notices when a rank dies."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mesh", type=mesh_shape, default=(2, 2), metavar="DPxTP", help="the ranks (default: 2x2)")
    parser.add_argument("--steps", type=positive, default=50, help="training steps (default: %(default)s)")
    parser.add_argument("--text", metavar="FILE", help="what to learn (default: Python's standard library)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)")
    parser.add_argument("--batch", type=positive, default=16, help="windows of text a step (default: %(default)s)")
    parser.add_argument("--block", type=positive, default=64, help="bytes in a window (default: %(default)s)")
    parser.add_argument("--layers", type=positive, default=4, help="(default: %(default)s)")
    parser.add_argument("--heads", type=positive, default=4, help="(default: %(default)s)")
    parser.add_argument("--width", type=positive, default=128, help="(default: %(default)s)")
    tied = parser.add_mutually_exclusive_group()
    tied.add_argument("--tied", dest="tied", action="store_true", default=True, help="one weight embeds and predicts")
    tied.add_argument("--untied", dest="tied", action="store_false", help="a weight for each (default: tied)")
    parser.add_argument("--seed", type=seed, default=0, help="of the model and the batches (default: %(default)s)")
    parser.add_argument("--lr", type=positive_float, default=3e-3, help="highest learning rate (default: %(default)s)")
    parser.add_argument("--print-program", action="store_true", help="print the program that the ranks run")


def run(args: argparse.Namespace, argv: Sequence[str]) -> None:
    """Checks all input. Then runs one rank if a launcher started this process, else starts the ranks."""
    job = Job(args)
    if launched():
        run_launched(run_rank, job)
    else:
        launch(["-m", "spmd", *argv], ranks=math.prod(args.mesh))


class Job:
    """The model, the text and the options of a run. Making a Job checks all input and raises UsageError."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.gpt, self.text = example("gpt"), example("text")
        try:
            self.config = self.gpt.GPTConfig(
                args.layers, args.heads, args.width, args.block, vocab=256, tied=args.tied
            )
            self.data = self.text.load_text(args.text)
            self.batches()
        except ValueError as error:
            raise UsageError(error) from error
        check_device(args.device)

    def batches(self):
        """The batches of a run. Each call gives the same ones."""
        return self.text.batches(self.data, self.args.batch, self.args.block, self.args.seed)

    def start(self, device: torch.device):
        """The model before the first step, and its optimizer."""
        torch.manual_seed(self.args.seed)
        model = self.gpt.GPT(self.config).to(device)
        return model, torch.optim.AdamW(model.parameters(), lr=self.args.lr)

    def rate(self, step: int) -> float:
        """The learning rate at a step as a fraction of the highest: up in a tenth of the run, then a cosine to 0.1."""
        done = step / self.args.steps
        return min(10 * done + 1 / self.args.steps, 1.0) * (0.55 + 0.45 * math.cos(math.pi * done))


@dataclass
class Run:
    """The result of a training run: the loss of each step, and the seconds that it took."""

    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    def typical(self) -> float:
        """The median time of a step, without the first two, which warm up (if there are others)."""
        return statistics.median(self.seconds[2:] or self.seconds)


def run_rank(job: Job) -> None:
    """Runs one rank: the run on the mesh, and on rank 0 also the run on one device and the report."""
    mesh_size, world = math.prod(job.args.mesh), int(os.environ["WORLD_SIZE"])
    if mesh_size != world:
        dp, tp = job.args.mesh
        raise UsageError(
            f"a mesh of {dp}x{tp} has {mesh_size} ranks, and the launcher started {world}. Start {mesh_size} ranks, "
            f"or give a mesh of {world}, such as --mesh {world}x1."
        )
    device = join(job.args.device, PATIENCE)
    agree_on_text(job.data)

    mesh = spmd.init_device_mesh(device.type, job.args.mesh, mesh_dim_names=("dp", "tp"))
    step = spmd.compile(job.gpt.train_step, mesh, params=PARAMS, inputs=INPUTS)
    first = dist.get_rank() == 0
    out = Console(quiet=not first, highlight=False)
    ranks = train(step, job, device, out, f"{mesh_size} rank{'s' * (mesh_size > 1)}")
    if first:
        torch.set_num_threads(cores())
        one_device = train(job.gpt.train_step, job, device, out, "1 device")
        report(step.program, ranks, one_device, out, job.args.print_program)
    dist.all_reduce(torch.zeros(1))  # the others wait here, on the CPU, for rank 0
    dist.destroy_process_group()


def agree_on_text(data: torch.Tensor) -> None:
    """Raises UsageError on all ranks if two have read different texts: one path may name two files on two machines."""
    digests = [""] * dist.get_world_size()
    dist.all_gather_object(digests, hashlib.sha256(data.numpy()).hexdigest())
    other = next((rank for rank, digest in enumerate(digests) if digest != digests[0]), None)
    if other is not None:
        raise UsageError(
            f"ranks 0 and {other} have read different texts. Give --text a file that is the same on all machines."
        )


def train(step: Callable, job: Job, device: torch.device, out: Console, who: str) -> Run:
    """Trains a new model with this step: a plain one, or one that spmd.compile made."""
    model, optimizer = job.start(device)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, job.rate)
    run = Run()
    with ProgressReport(out, who, job.args.steps) as bar:
        for _, (tokens, targets) in zip(range(job.args.steps), job.batches(), strict=False):
            start = time.perf_counter()
            loss = step(model, optimizer, tokens.to(device), targets.to(device)).item()
            run.seconds.append(time.perf_counter() - start)
            run.losses.append(loss)
            schedule.step()
            bar.show(loss, tokens.numel() / run.seconds[-1])
    return run


class ProgressReport:
    """The progress of a run: a bar on a terminal, elsewhere a line every ten steps."""

    def __init__(self, out: Console, who: str, steps: int):
        self.out, self.who, self.steps, self.done = out, who, steps, 0
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[now]}")
        self.progress = Progress(*columns, console=out, disable=not out.is_terminal)
        self.task = self.progress.add_task(who, total=steps, now="")

    def __enter__(self) -> ProgressReport:
        self.progress.start()
        return self

    def __exit__(self, *_) -> None:
        self.progress.stop()

    def show(self, loss: float, speed: float) -> None:
        self.done += 1
        now = f"loss {loss:.4f}  {speed:,.0f} tokens/s"
        self.progress.update(self.task, advance=1, now=now)
        if not self.out.is_terminal and (self.done % 10 == 1 or self.done == self.steps):
            self.out.print(f"{self.who}: step {self.done}/{self.steps}  {now}", soft_wrap=True)


def report(program, ranks: Run, one_device: Run, out: Console, show_program: bool) -> None:
    """Prints the collectives of the program, the times of a step, and how much the losses differ."""
    if show_program:
        print(program)
    out.print(collectives_table(program.collectives))
    lines = [
        f"modelled communication time: {program.comm_time():,.0f} us a step",
        f"step: {ms(ranks.typical())} (the first, with its compilation: {ms(ranks.seconds[0])}); "
        f"on one device: {ms(one_device.typical())}",
        f"largest relative loss difference to one device: {largest_difference(ranks.losses, one_device.losses):.1e}",
    ]
    out.print(*lines, sep="\n", soft_wrap=True)


def collectives_table(collectives) -> Table:
    """The collectives of a program by kind and axis: their count, and the bytes that a rank puts in."""
    sizes = defaultdict(list)
    for one in collectives:
        sizes[one.kind, one.axis].append(one.nbytes)
    table = Table(title="collectives of one step", title_justify="left")
    for name, justify in (("kind", "left"), ("axis", "left"), ("count", "right"), ("bytes", "right")):
        table.add_column(name, justify=justify)
    for (kind, axis), nbytes in sorted(sizes.items()):
        table.add_row(kind, axis, str(len(nbytes)), f"{sum(nbytes):,}")
    return table


def largest_difference(losses: Sequence[float], truth: Sequence[float]) -> float:
    """The largest relative difference; NaN if any loss is NaN.

    >>> largest_difference([1.0, 2.2], [1.0, 2.0])
    0.10000000000000009
    """
    differences = [abs(a - b) / abs(b) for a, b in zip(losses, truth, strict=True)]
    return math.nan if any(map(math.isnan, differences)) else max(differences)


def ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"


def example(name: str) -> ModuleType:
    """A module of ``examples/``, which is part of an installed spmd, and a folder beside the package in a checkout."""
    full = f"spmd.examples.{name}"
    try:
        return importlib.import_module(full)
    except ModuleNotFoundError:
        source = Path(__file__).parents[2] / "examples" / f"{name}.py"
    if not source.is_file():
        raise UsageError(
            f"the demo's model is missing: it is neither installed as {full} nor at {source}. "
            "Install spmd again, or run the demo from a whole checkout."
        )
    spec = importlib.util.spec_from_file_location(full, source)
    module = importlib.util.module_from_spec(spec)
    sys.modules[full] = module  # dataclasses look it up here, and so does the next call
    spec.loader.exec_module(module)
    return module
