"""What does the first call of a step with a loop over micro-batches cost, as a loop and with its rounds one by one?

    python benchmarks/micro_batches.py                 # a GPT of 12 layers with AdamW on 2x4, 1 to 32 micro-batches
    python benchmarks/micro_batches.py --layers 2 --rounds 1 4 8

The table has the least seconds of the process of two runs: of the capture, and of what is behind it until the program
is bound to a rank. The rows with "one by one" are those of the same program without a loop. It also has what the
program sends, and what a rank needs of memory. Exits 1 if a loop needs 1 % more of either than its rounds one by one.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from unittest import mock

import expand
import torch
import torch.nn.functional as F
from _table import table

import spmd
from spmd.expand.loops import roll

AT_MOST = 1.01


def in_rounds(n: int) -> Callable:
    """A train step over so many micro-batches."""

    def step(model, optimizer, tokens, targets):
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(tokens.unflatten(0, (n, -1)), targets.unflatten(0, (n, -1)), strict=True):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) / n
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        return total

    return step


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
    args = parser.parse_args()
    warnings.simplefilter("ignore")
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
