"""The time of a simulated rank: spmd's LocalTensorMode and torch's own, in one run.

    python benchmarks/simulator.py              # 1, 8 and 64 ranks, about a minute
    python benchmarks/simulator.py --short      # fewer rounds, under 20 seconds

Each op runs on LocalTensors of 4 x 4 elements per rank. They are small, so that only the simulator is measured. The two
simulators take turns: a round runs each of them for a while, in a new order. The table has medians over the rounds, in
microseconds per op and rank, beside the same op on one plain tensor. The last rows are compiled training steps of a GPT
(examples/gpt.py) on 8 and 64 ranks, in milliseconds per step. torch's simulator does not run it.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from _table import table
from torch.distributed import _local_tensor as torch_local

import spmd
from examples.gpt import GPT, GPTConfig, train_step
from spmd import Shard

OPS: dict[str, Callable] = {
    "x + y": lambda x, y: x + y,
    "x * 2.0": lambda x, y: x * 2.0,
    "relu(x)": lambda x, y: x.relu(),
    "x @ y": lambda x, y: x @ y,
    "x.view(-1)": lambda x, y: x.view(-1),
    "x.add_(y)": lambda x, y: x.add_(y),
    "cat([x, y])": lambda x, y: torch.cat([x, y]),
}

PLAN = {
    "*.attn.[qkv].*": {"tp": Shard(0)},
    "*.attn.out.weight": {"tp": Shard(1)},
    "*.mlp.up.*": {"tp": Shard(0)},
    "*.mlp.down.weight": {"tp": Shard(1)},
}


def seconds(fn: Callable[[], object], calls: int) -> float:
    """The seconds of one call."""
    start = time.perf_counter()
    for _ in range(calls):
        fn()
    return (time.perf_counter() - start) / calls


def op_rows(ranks: int, args: argparse.Namespace) -> list[list[str]]:
    """A row for each op: both simulators and the plain op."""
    torch.manual_seed(0)
    tensors = [{r: torch.randn(4, 4) for r in range(ranks)} for _ in range(2)]
    ours, theirs = (spmd.LocalTensorMode(ranks), torch_local.LocalTensorMode(ranks))
    operands = {
        "spmd": (ours, [spmd.LocalTensor(t) for t in tensors]),
        "torch": (theirs, [torch_local.LocalTensor(t) for t in tensors]),
    }
    rows, shuffle = [], random.Random(0)
    for name, op in OPS.items():
        times: dict[str, list[float]] = {"spmd": [], "torch": [], "plain": []}
        for each in range(args.rounds + 1):
            for way in shuffle.sample(sorted(operands), 2):
                mode, (x, y) = operands[way]
                with mode:
                    took = seconds(lambda op=op, x=x, y=y: op(x, y), max(4, args.calls // ranks))
                times[way].append(took / ranks * 1e6)
            times["plain"].append(seconds(lambda op=op: op(tensors[0][0], tensors[1][0]), args.calls) * 1e6)
            if each == 0:  # the first round warms up
                times = {way: [] for way in times}
        us = {way: statistics.median(found) for way, found in times.items()}
        cells = [f"{us[way]:.2f}" for way in ("plain", "torch", "spmd")]
        rows.append([str(ranks), name, *cells, f"{us['spmd'] / us['torch']:.2f}"])
    return rows


def step_row(mesh_shape: tuple[int, int], args: argparse.Namespace) -> list[str]:
    """A compiled training step of a GPT on all ranks of a mesh."""
    config = GPTConfig(n_layer=2, n_head=8, n_embd=64, block_size=16)
    torch.manual_seed(0)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens, targets = torch.randint(0, config.vocab, (2, 16, 16))
    ranks = mesh_shape[0] * mesh_shape[1]
    with spmd.LocalTensorMode(ranks):
        mesh = spmd.init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp"))
        inputs = {name: {"dp": Shard(0)} for name in ("tokens", "targets")}
        step = spmd.compile(train_step, mesh, params=PLAN, inputs=inputs)
        took = [seconds(lambda: step(model, optimizer, tokens, targets), 1) * 1e3 for _ in range(args.steps + 2)]
    shown = "x".join(map(str, mesh_shape))
    return [str(ranks), f"GPT step on {shown}, ms", "", "", f"{statistics.median(took[2:]):.0f}", ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--short", action="store_true", help="for CI")
    args = parser.parse_args()
    if args.short:
        args.rounds, args.calls, args.steps = 3, 400, 2
    busy = os.getloadavg()[0]
    torch.set_num_threads(1)
    rows = [row for ranks in ((8,) if args.short else (1, 8, 64)) for row in op_rows(ranks, args)]
    rows += [step_row(shape, args) for shape in ([(2, 4)] if args.short else [(2, 4), (8, 8)])]
    print(f"{date.today()}, torch {torch.__version__}, load {busy:.1f} before; microseconds an op and rank\n")
    print(table(["ranks", "op", "plain", "torch", "spmd", "spmd / torch"], rows, left=2))


if __name__ == "__main__":
    main()
