"""What does the first call of a step with a loop over micro-batches cost, as a loop and with its rounds one by one?

    python benchmarks/micro_batches.py                 # a GPT of 12 layers with AdamW on 2x4, 1 to 32 micro-batches
    python benchmarks/micro_batches.py --layers 2 --rounds 1 4 8
    python benchmarks/micro_batches.py --cuts --layers 2 --rounds 3 8    # how a batch is cut, and what that sends

The table has the least seconds of the process of two runs: of the capture, and of what is behind it until the program
is bound to a rank. The rows with "one by one" are those of the same program without a loop. It also has what the
program sends, and what a rank needs of memory. Exits 1 if a loop needs 1 % more of either than its rounds one by one.

The table of `--cuts` counts collectives for each way to cut the batch, with losses that are added up as tensors and as
numbers, and has the modelled time of all that is sent.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Sequence
from unittest import mock

import expand
import torch
import torch.nn.functional as F
from _table import table

import spmd
from spmd import Shard
from spmd.expand.loops import roll

AT_MOST = 1.01


CUTS = {
    "unflatten": lambda x, n: x.unflatten(0, (n, -1)),
    "chunk": lambda x, n: x.chunk(n),
    "split": lambda x, n: x.split(x.shape[0] // n),
    "slices": lambda x, n: [x[i * (x.shape[0] // n) : (i + 1) * (x.shape[0] // n)] for i in range(n)],
    "tensor_split": lambda x, n: x.tensor_split(n),
    "x[i::n]": lambda x, n: [x[i::n] for i in range(n)],
}
SEEN = {"tensor": lambda loss: loss.detach(), "number": lambda loss: loss.item()}


def in_rounds(n: int, cut: str = "unflatten", seen: str = "tensor") -> Callable:
    """A train step over so many micro-batches."""

    def step(model, optimizer, tokens, targets):
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(CUTS[cut](tokens, n), CUTS[cut](targets, n), strict=True):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / n
            loss.backward()
            total = total + SEEN[seen](loss)
        optimizer.step()
        return total

    return step


def sent(layers: int, n: int, cut: str, seen: str) -> tuple[int, float]:
    """How many collectives a step over n micro-batches has under data parallelism over 4 ranks, and their time."""
    mesh = spmd.DeviceMesh("cpu", range(4), mesh_dim_names=("dp",))
    model, optimizer, *_ = expand.Case("gpt", layers, expand.mesh_of("2x4")).arguments()
    tokens = torch.zeros(n * expand.BATCH, expand.TIME, dtype=torch.long)
    inputs = {"tokens": {"dp": Shard(0)}, "targets": {"dp": Shard(0)}}
    program = spmd.compile(in_rounds(n, cut, seen), mesh, inputs=inputs).program_for(model, optimizer, tokens, tokens)
    return len(program.collectives), program.comm_time()


def cuts(layers: int, rounds: Sequence[int]) -> str:
    """The table of `--cuts`."""
    rows = []
    for n in rounds:
        for cut in CUTS:
            (tensors, us), (numbers, more) = (sent(layers, n, cut, seen) for seen in SEEN)
            rows.append([str(n), cut, str(tensors), str(numbers), f"{us:.0f}", f"{more:.0f}"])
    return table(["micro-batches", "cut", "collectives", "with numbers", "sent us", "with numbers"], rows, 2)


def timed(layers: int, n: int) -> tuple[float, float, spmd.Program]:
    """The seconds of a capture, those of what follows, and the program."""
    case, found = expand.Case("gpt", layers, expand.mesh_of("2x4")), []
    model, optimizer, *_ = case.arguments()
    tokens = torch.zeros(n * expand.BATCH, expand.TIME, dtype=torch.long)
    step = spmd.compile(in_rounds(n), case.mesh, params=expand.GPT_PLAN, inputs=expand.INPUTS)

    def run() -> None:
        found.append(step.program_for(model, optimizer, tokens, tokens))
        expand.bound(found[-1])

    took = expand.seconds(run)
    return expand.Captures.took, took - expand.Captures.took, found[-1]


def measured(layers: int, n: int) -> tuple[list[str], int, int]:
    """A row, the bytes that are sent, and the peak of a rank."""
    runs = [timed(layers, n) for _ in range(2)]
    program = runs[0][2]
    sent, peak = sum(c.nbytes for c in program.collectives), program.memory().peak
    times = [min(run[i] for run in runs) for i in (0, 1)]
    return [*[f"{t:.2f}" for t in times], f"{len(program.graph.nodes):,}", f"{sent:,}", f"{peak:,}"], sent, peak


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--cuts", action="store_true", help="ways to cut a batch, and what these send")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    if args.cuts:
        print(cuts(args.layers, args.rounds))
        return 0
    expand.Captures.watch()
    rows, is_right = [], True
    for n in args.rounds:
        looped, *ours = measured(args.layers, n)
        with mock.patch.object(roll, "LEAST", n + 1):
            plain, *theirs = measured(args.layers, n)
        is_right &= all(a <= AT_MOST * b for a, b in zip(ours, theirs, strict=True))
        rows += [[str(n), "as a loop", *looped], [str(n), "one by one", *plain]]
    print(table(["micro-batches", "program", "capture s", "behind it s", "nodes", "bytes sent", "peak bytes"], rows, 2))
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
