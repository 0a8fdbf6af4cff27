"""What each plan sends, counted eagerly and compiled, beside the formula of its paper.

    python benchmarks/counted.py

Four blocks, x + down(gelu(up(norm(x)))), of width d and hidden size 4 d, on 4 simulated ranks; T tokens of a rank, P
the bytes of all parameters. The table has kinds, how many, and the bytes that a rank gives, of one step of SGD.
Single numbers, such as the loss, are left out. Behind the gradients of data-parallel ranks is a number for each
parameter, which says whether it was used: the formula is without. Attention and experts are layers of their own
(`counted_parts.py`), with the gradients of all that they are given. `tests/parallel/test_counted.py` compares formula
and eager steps, and both with the table of `docs/design/counted.md`.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import counted_parts
import torch
import torch.nn.functional as F
from _table import table
from torch import nn

import spmd
from spmd import FullyShard, LocalTensorMode, Shard, init_device_mesh
from spmd.debug import CommDebugMode
from spmd.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    data_parallel,
    fully_shard,
    parallelize_module,
    placements_of,
)

RANKS, BLOCKS, WIDTH, BATCH, TIME, ITEM = 4, 4, 8, 4, 8, 4
TWO_D = "Megatron and ZeRO-3"
AXES = {"hybrid": {"r": 2, "a": 2}, "hybrid, state over all": {"r": 2, "a": 2}, TWO_D: {"a": 2, "tp": 2}}
"""Of other plans, one of all ranks."""
SHORT = {"all_gather_into_tensor": "all_gather", "reduce_scatter_tensor": "reduce_scatter"}
Sent = dict[str, tuple[int, int]]
"""For each kind of collective how many, and the bytes that a rank gives to all of them."""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[Block() for _ in range(BLOCKS)])


def step(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()  # which reads all gradients, also those that are owed
    return loss


MEGATRON = {"*.up": ColwiseParallel(), "*.down": RowwiseParallel()}
SEQUENCE = {
    "*.norm": SequenceParallel(), "*.up": ColwiseParallel(input_layouts=Shard(1)),
    "*.down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
}  # fmt: skip


def groups(net: nn.Module, mesh, **said) -> nn.Module:
    for block in net:
        fully_shard(block, mesh=mesh, reshard_after_forward=True, **said)
    return net


TENSOR_PARALLEL = ("Megatron", "sequence parallel")
EAGER = {
    "Megatron": lambda net, mesh: parallelize_module(net, mesh, MEGATRON),
    "sequence parallel": lambda net, mesh: parallelize_module(net, mesh, SEQUENCE),
    "ZeRO-3": groups,
    "hybrid": groups,
    "hybrid, state over all": functools.partial(groups, state=("r", "a")),
    "data parallel": lambda net, mesh: data_parallel(net, mesh),
    TWO_D: lambda net, mesh: groups(parallelize_module(net, mesh["tp"], MEGATRON), mesh["a"]),
}
COMPILED = {
    "Megatron": lambda mesh: placements_of(model(), mesh, MEGATRON),
    "sequence parallel": lambda mesh: placements_of(model(), mesh, SEQUENCE) | {"inputs": {"x": {"a": Shard(1)}}},
    "ZeRO-3": lambda mesh: {"fully_shard": "a", "inputs": {"x": {"a": Shard(0)}}},
    "hybrid": lambda mesh: {"fully_shard": "a", "inputs": {"x": {"r": Shard(0), "a": Shard(0)}}},
    "hybrid, state over all": lambda mesh: {"fully_shard": FullyShard("a", state=("r", "a")),
                                            "inputs": {"x": {"r": Shard(0), "a": Shard(0)}}},
    "data parallel": lambda mesh: {"inputs": {"x": {"a": Shard(0)}}},
    TWO_D: lambda mesh: placements_of(model(), mesh, MEGATRON) | {
        "fully_shard": "a", "inputs": {"x": {"a": Shard(0)}}},
}  # fmt: skip


def formula(plan: str) -> Sent:
    if plan in counted_parts.PARTS:
        return counted_parts.formula(plan)
    tokens = BATCH * TIME * WIDTH * ITEM  # bytes of activations of the whole batch
    parameters = sum(p.numel() for p in model().parameters()) * ITEM
    if plan == "Megatron":
        return {"all_reduce": (2 * BLOCKS, 2 * BLOCKS * tokens)}
    if plan == "sequence parallel":
        n = whole = 2 * BLOCKS  # weights and biases of norms see a part of the sequence
        return {"all_gather": (n, n * tokens // RANKS), "all_reduce": (whole, whole * WIDTH * ITEM),
                "reduce_scatter": (n, n * tokens)}  # fmt: skip
    if plan == "ZeRO-3":
        return {"all_gather": (2 * BLOCKS, 2 * parameters // RANKS), "reduce_scatter": (BLOCKS, parameters)}
    if plan == "hybrid":
        return {"all_gather": (2 * BLOCKS, 2 * parameters // 2), "all_reduce": (BLOCKS, parameters // 2),
                "reduce_scatter": (BLOCKS, parameters)}  # fmt: skip
    if plan == "hybrid, state over all":  # instead of each all-reduce a gather and a reduce-scatter
        return {"all_gather": (3 * BLOCKS, parameters // RANKS + 2 * parameters // 2),
                "reduce_scatter": (2 * BLOCKS, parameters + parameters // 2)}  # fmt: skip
    if plan == TWO_D:  # Megatron's of half of the batch, and ZeRO-3's of the blocks of a rank of tp
        split = BLOCKS * (2 * 4 * WIDTH * WIDTH + 4 * WIDTH) * ITEM // 2  # without norms and the biases of `down`
        own = parameters - split
        return {"all_gather": (2 * BLOCKS, 2 * own // 2), "all_reduce": (2 * BLOCKS, 2 * BLOCKS * tokens // 2),
                "reduce_scatter": (BLOCKS, own)}  # fmt: skip
    return {"all_reduce": (1, parameters)}


def eager(plan: str) -> Sent:
    if plan in counted_parts.PARTS:
        return total(counted_parts.sent(plan, compiled=False))
    with LocalTensorMode(RANKS):
        axes, x = AXES.get(plan, {"a": RANKS}), torch.ones(BATCH, TIME, WIDTH)
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        net = EAGER[plan](model(), mesh)
        if plan == "sequence parallel":
            x = spmd.distribute_tensor(x, mesh, [Shard(1)])
        own = x if plan in TENSOR_PARALLEL else x.chunk(2 if plan == TWO_D else RANKS)[0]
        with CommDebugMode() as comm:
            step(net, torch.optim.SGD(net.parameters(), 0.1), own)
    return total((c.kind, c.nbytes) for c in comm.counted)


def compiled(plan: str) -> Sent:
    if plan in counted_parts.PARTS:
        return total(counted_parts.sent(plan, compiled=True))
    axes = AXES.get(plan, {"a": RANKS})
    mesh = spmd.DeviceMesh("cpu", torch.arange(RANKS).view(*axes.values()), mesh_dim_names=tuple(axes))
    made = spmd.compile(step, mesh, **COMPILED[plan](mesh))
    net = model()
    program = made.program_for(net, torch.optim.SGD(net.parameters(), 0.1), torch.ones(BATCH, TIME, WIDTH))
    return total((c.kind, c.nbytes) for c in program.collectives)


def total(found) -> Sent:
    count, nbytes = Counter(), Counter()
    for kind, n in found:
        kind = SHORT.get(kind, kind)
        count[kind] += n > 2 * ITEM
        nbytes[kind] += n if n > 2 * ITEM else 0
    return {kind: (count[kind], nbytes[kind]) for kind in sorted(count) if count[kind]}


def said(sent: Sent) -> str:
    return ", ".join(f"{n} {kind} {nbytes:,}" for kind, (n, nbytes) in sent.items())


def rows() -> list[list[str]]:
    plans = (*EAGER, *counted_parts.PARTS)
    return [[plan, said(formula(plan)), said(eager(plan)), said(compiled(plan))] for plan in plans]


if __name__ == "__main__":
    print(table(["plan", "formula", "eager", "compiled"], rows(), left=4))
