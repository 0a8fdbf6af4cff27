"""What does a call of a compiled step cost beside its ops? The step, and the ops that it runs, called by hand.

    python benchmarks/overhead.py                # a GPT of 2 layers, width 32, AdamW: tiny sizes, one rank

The ops are those of the bound program, one after the other in a plain function. The two run in turns, and each
round counts the processor's seconds of both. What the step does besides: it finds the state in its arguments,
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

import spmd
from examples.gpt import GPT, GPTConfig, train_step

Run = Callable[[], object]


def compiled(layers: int, width: int, batch: int, length: int) -> tuple[Run, Run, int]:
    """A call of the step, the same ops by hand, and how many there are."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=layers, n_head=4, n_embd=width, block_size=length, vocab=64))
    optimizer = torch.optim.AdamW(model.parameters())
    mesh = spmd.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    step = spmd.compile(train_step, mesh, inputs={"*": {"dp": spmd.Shard(0)}})
    tokens, targets = (torch.randint(64, (batch, length)) for _ in "xy")
    for _ in range(3):
        step(model, optimizer, tokens, targets)
    bound = step._last
    call = step._call((model, optimizer, tokens, targets), {}, False)
    leaves = call.placed_leaves()
    flat = [bound._input_value(i, call.tensors, leaves, call.numbers) for i in bound.captured.inputs]

    def by_hand() -> object:
        with torch.no_grad():
            return bound.module(*flat)

    nodes = sum(node.op == "call_function" for node in bound.module.graph.nodes)
    return lambda: step(model, optimizer, tokens, targets), by_hand, nodes


def seconds(run: Run, calls: int) -> float:
    begin = time.process_time()
    for _ in range(calls):
        run()
    return (time.process_time() - begin) / calls


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, nargs="*", default=[2, 6], help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, help="(default: %(default)s)")
    parser.add_argument("--calls", type=int, default=10, help="of each in a round (default: %(default)s)")
    args = parser.parse_args()
    rows = []
    for layers in args.layers:
        step, by_hand, nodes = compiled(layers, 32, 4, 16)
        pairs = [(seconds(step, args.calls), seconds(by_hand, args.calls)) for _ in range(args.rounds)]
        ratio = statistics.median(a / b for a, b in pairs)
        ms = [1e3 * statistics.median(column) for column in zip(*pairs, strict=True)]
        rows.append([str(layers), str(nodes), *(f"{x:.2f}" for x in ms), f"{ratio:.3f}"])
    print(table(["layers", "ops", "step, ms", "by hand, ms", "ratio"], rows))
    return int(any(float(row[-1]) > 1.05 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
