"""What does a call of a compiled step cost beside its ops? The step, and the ops that it runs, called by hand.

    python benchmarks/overhead.py                # a GPT with AdamW and an MLP with SGD: tiny sizes, one rank

By hand are the ops of the bound program as `torch.ops` calls, one after the other in a plain function, with the same
frees. Alone is the function that the step runs for them, whose ops are called in less time. The three run in turns, and
each round counts the processor's seconds of each. What the step does besides: it finds the state in its arguments,
compares what it took for granted, tells the other ranks what it is about to run, and stores the results. Bar: 1.05.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from _table import table
from torch import nn

import spmd
from examples.gpt import GPT, GPTConfig, train_step

Run = Callable[[], object]


def gpt(layers: int) -> tuple[Callable, tuple]:
    """A train step of a GPT with AdamW, and its arguments."""
    model = GPT(GPTConfig(n_layer=layers, n_head=4, n_embd=32, block_size=16, vocab=64))
    tokens, targets = (torch.randint(64, (4, 16)) for _ in "xy")
    return train_step, (model, torch.optim.AdamW(model.parameters()), tokens, targets)


def mlp(layers: int) -> tuple[Callable, tuple]:
    """A train step of an MLP with SGD and momentum, and its arguments."""
    model = nn.Sequential(*[each for _ in range(layers) for each in (nn.Linear(32, 32), nn.Tanh())])
    return mlp_step, (model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), torch.rand(16, 32))


def mlp_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = (model(x) - x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def compiled(fn: Callable, given: tuple) -> tuple[Run, Run, Run, int]:
    """A call of the step, the same ops by hand and alone, and how many there are."""
    mesh = spmd.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    step = spmd.compile(fn, mesh, inputs={"*": {"dp": spmd.Shard(0)}})
    for _ in range(3):
        step(*given)
    bound = step._last
    call = step._call(given, {}, False)
    leaves = call.placed_leaves()
    flat = [bound._input_value(i, call.tensors, leaves, call.numbers) for i in bound.captured.inputs]

    def by_hand() -> object:
        with torch.no_grad():
            return bound.module(*flat)

    nodes = sum(node.op == "call_function" for node in bound.module.graph.nodes)
    return lambda: step(*given), by_hand, lambda: bound.execute(flat), nodes


KINDS = {"gpt": gpt, "mlp": mlp}


def seconds(run: Run, calls: int) -> float:
    begin = time.process_time()
    for _ in range(calls):
        run()
    return (time.process_time() - begin) / calls


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    steps = ["gpt 2", "gpt 6", "mlp 8"]
    parser.add_argument("--steps", nargs="*", default=steps, help="kinds, with their layers (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="(default: %(default)s)")
    parser.add_argument("--calls", type=int, default=10, help="of each in a round (default: %(default)s)")
    args = parser.parse_args()
    rows = []
    for name in args.steps:
        kind, layers = name.split()
        torch.manual_seed(0)
        *runs, nodes = compiled(*KINDS[kind](int(layers)))
        turns = [[seconds(run, args.calls) for run in runs] for _ in range(args.rounds)]
        ratios = [statistics.median(turn[0] / turn[i] for turn in turns) for i in (1, 2)]
        ms = [1e3 * statistics.median(column) for column in zip(*turns, strict=True)]
        rows.append([f"{name} layers", str(nodes), *(f"{x:.2f}" for x in ms), *(f"{x:.3f}" for x in ratios)])
    print(table(["step", "ops", "step, ms", "by hand, ms", "alone, ms", "of by hand", "of alone"], rows))
    return int(any(float(row[-2]) > 1.05 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
