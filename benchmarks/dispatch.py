"""The overhead of an op on DTensors: spmd and torch's DTensor, in one run.

    python benchmarks/dispatch.py               # hot ops, a training step, and first calls; about a minute
    python benchmarks/dispatch.py --short       # fewer rounds

One process is rank 0 of a mesh of 4, on a process group that sends nothing. The tensors have a few elements, so that
only the time of the framework remains. Both run the same ops on the same placements and take turns, in a new order each
round. Times are CPU time of the calling thread, which other programs disturb less than the wall clock. The table has
medians over the rounds, in microseconds, and the medians of each round's ratio.

A first call is the first `add` on a mesh, a shape and placements that were not used before, in milliseconds.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
import torch.distributed as dist
import torch.distributed.tensor as theirs
import torch.nn.functional as F
from _table import table
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import spmd as ours

RANKS = 4


class Operands:
    """The same tensors for either framework: sharded by rows, by columns, and replicated."""

    def __init__(self, lib: ModuleType) -> None:
        self.lib = lib
        self.mesh = lib.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
        self.local = torch.randn(4, 16)
        rows, columns, replicated = [lib.Shard(0)], [lib.Shard(1)], [lib.Replicate()]
        self.rows, self.columns, self.replicated = rows, columns, replicated
        self.x, self.y = self.make((16, 16), rows), self.make((16, 16), rows)
        self.b, self.v = self.make((4, 8, 16), rows), self.make((16,), replicated)
        self.w, self.r = self.make((16, 16), columns), self.make((16, 16), replicated)
        self.ids = self.make((16,), rows, torch.randint(0, 16, (16,)))
        self.mask = self.x > 0

    def make(self, shape: tuple[int, ...], placements: list, data: Tensor | None = None) -> Tensor:
        data = torch.randn(shape) if data is None else data
        local = data
        for p in placements:
            local = local.chunk(RANKS, p.dim)[0].contiguous() if p.is_shard() else local
        return self.lib.DTensor.from_local(local, self.mesh, placements, run_check=False)


OPS: dict[str, Callable[[Operands], object]] = {
    "x + y": lambda o: o.x + o.y,
    "x * y": lambda o: o.x * o.y,
    "x * 2.0": lambda o: o.x * 2.0,
    "x + 1": lambda o: o.x + 1,
    "x + v": lambda o: o.x + o.v,
    "relu(x)": lambda o: o.x.relu(),
    "gelu(x)": lambda o: F.gelu(o.x),
    "exp(x)": lambda o: o.x.exp(),
    "x > 0": lambda o: o.x > 0,
    "where": lambda o: torch.where(o.mask, o.x, o.y),
    "x @ r": lambda o: o.x @ o.r,
    "r @ w": lambda o: o.r @ o.w,
    "b @ r": lambda o: o.b @ o.r,
    "linear(b, r)": lambda o: F.linear(o.b, o.r),
    "view": lambda o: o.x.view(-1, 4, 4),
    "flatten(b)": lambda o: o.b.flatten(1),
    "t": lambda o: o.x.t(),
    "transpose(b)": lambda o: o.b.transpose(1, 2),
    "unsqueeze": lambda o: o.x.unsqueeze(1),
    "x[:, :8]": lambda o: o.x[:, :8],
    "split": lambda o: o.x.split(8, 1),
    "cat": lambda o: torch.cat([o.x, o.y], 1),
    "sum(1)": lambda o: o.x.sum(1),
    "softmax": lambda o: o.x.softmax(-1),
    "layer_norm": lambda o: F.layer_norm(o.b, (16,), o.v, o.v),
    "embedding": lambda o: F.embedding(o.ids, o.r),
    "clone": lambda o: o.x.clone(),
    "detach": lambda o: o.x.detach(),
    "to(float64)": lambda o: o.x.to(torch.float64),
    "add_": lambda o: o.x.add_(o.y),
    "mul_(1.0)": lambda o: o.x.mul_(1.0),
    "foreach_add": lambda o: torch._foreach_add([o.x] * 4, [o.y] * 4),
    "from_local": lambda o: o.lib.DTensor.from_local(o.local, o.mesh, o.rows, run_check=False),
    "to_local": lambda o: o.x.to_local(),
    "redistribute R -> S": lambda o: o.r.redistribute(o.mesh, o.rows),
}


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


def train_step(lib: ModuleType, **options: bool) -> Callable[[], object]:
    """Forward, backward and AdamW of a two-layer MLP, tensor-parallel; the input replicated. options: of AdamW."""
    mesh = lib.init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    net = MLP()
    plan = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    for name, p in list(net.named_parameters()):
        placement = lib.Shard(plan[name]) if name in plan else lib.Replicate()
        module, leaf = net.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
        setattr(module, leaf, nn.Parameter(lib.distribute_tensor(p.detach(), mesh, [placement])))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, **options)
    x = lib.distribute_tensor(torch.randn(8, 16), mesh, [lib.Replicate()])

    def step() -> None:
        optimizer.zero_grad()
        net(x).pow(2).sum().backward()
        optimizer.step()

    return step


STEPS = {
    "MLP step, AdamW as it comes": {},  # a loop over tensors: torch's choice for DTensors on any device
    "MLP step, AdamW foreach": {"foreach": True},
    "MLP step, AdamW fused": {"fused": True},
}


def hot(calls: dict[str, Callable[[], object]], rounds: int, each: int) -> tuple[dict[str, float], float]:
    """Medians in microseconds a call, and of the ratio."""
    times: dict[str, list[float]] = {who: [] for who in calls}
    order, shuffle = sorted(calls), random.Random(0)
    for who in order:
        for _ in range(5):
            calls[who]()
    for _ in range(rounds):
        shuffle.shuffle(order)
        for who in order:
            start = time.thread_time()
            for _ in range(each):
                calls[who]()
            times[who].append((time.thread_time() - start) / each * 1e6)
    ratio = statistics.median(a / b for a, b in zip(times["spmd"], times["torch"], strict=True))
    return {who: statistics.median(found) for who, found in times.items()}, ratio


def cold(lib: ModuleType, ndim: int, size: int) -> float:
    """Milliseconds of a first add on a mesh of ndim axes, with tensors of a new shape."""
    shape = (RANKS, *[1] * (ndim - 1)) if ndim == 1 else (*[1] * (ndim - 2), 2, 2)
    mesh = lib.init_device_mesh("cpu", shape, mesh_dim_names=tuple("abcd"[:ndim]))
    placements = [lib.Shard(i % 2) if n > 1 else lib.Replicate() for i, n in enumerate(shape)]
    x, y = (lib.DTensor.from_local(torch.randn(size, 8), mesh, placements, run_check=False) for _ in range(2))
    start = time.thread_time()
    x + y
    return (time.thread_time() - start) * 1e3


def report(args: argparse.Namespace) -> str:
    operands = {"spmd": Operands(ours), "torch": Operands(theirs)}
    rows, ratios = [], {}
    for name, op in OPS.items():
        us, ratios[name] = hot({who: lambda op=op, o=o: op(o) for who, o in operands.items()}, args.rounds, args.calls)
        rows.append([name, f"{us['torch']:.1f}", f"{us['spmd']:.1f}", f"{ratios[name]:.2f}"])
    for name, options in STEPS.items():
        steps = {"spmd": train_step(ours, **options), "torch": train_step(theirs, **options)}
        us, ratio = hot(steps, args.rounds, max(1, args.calls // 20))
        rows.append([name, f"{us['torch']:.0f}", f"{us['spmd']:.0f}", f"{ratio:.2f}"])
    first = []
    for n in (1, 2, 3, 4):
        ms = [statistics.median(cold(lib, n, size) for size in range(3, 8)) for lib in (theirs, ours)]
        first.append([f"first add on {n} axes, ms", *[f"{x:.2f}" for x in ms], ""])
    return "\n".join([
        table(["op", "torch", "spmd", "spmd / torch"], [*rows, *first]),
        "",
        f"{len(ratios)} ops: median {statistics.median(ratios.values()):.2f}, largest {max(ratios.values()):.2f} "
        f"({max(ratios, key=ratios.__getitem__)}); {sum(r > 1.2 for r in ratios.values())} over 1.2",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--short", action="store_true", help="for CI")
    args = parser.parse_args()
    if args.short:
        args.rounds, args.calls = 7, 30
    busy = os.getloadavg()[0]
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    print(f"{date.today()}, torch {torch.__version__}, load {busy:.1f} before; CPU microseconds a call\n")
    print(report(args))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
