"""What a memory budget is tried on: small programs of which all choices can be tried, and a net that draws."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations, product

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import spmd
from spmd import MeshTopoInfo, Shard
from spmd.expand.passes.memory_budget import BudgetError, Plan
from spmd.expand.passes.recompute.again import CannotRecompute
from spmd.expand.program import Program
from spmd.mesh import PRESETS, Link, Machine
from spmd.mesh.layout import HostGrid
from tests.expand.side_by_side import GPT_PLAN, INPUTS, Net, gpt, rows, seeded, tokens, train_step
from tests.expand.test_memory import counted_beside


class Dropped(nn.Module):
    """Residual blocks with a norm, a network and a dropout."""

    def __init__(self, layers: int = 3, width: int = 16, hidden: int = 64):
        super().__init__()
        self.norm = nn.ModuleList([nn.LayerNorm(width) for _ in range(layers)])
        self.up = nn.ModuleList([nn.Linear(width, hidden) for _ in range(layers)])
        self.down = nn.ModuleList([nn.Linear(hidden, width) for _ in range(layers)])
        self.out = nn.Linear(width, 3)

    def forward(self, x):
        for norm, up, down in zip(self.norm, self.up, self.down, strict=True):
            x = x + F.dropout(down(F.gelu(up(norm(x)))), 0.3)
        return self.out(x)


DROPPED = {"up.*": {"tp": Shard(0)}, "down.*.weight": {"tp": Shard(1)}}
SMALL = {
    "net": ((4, 1), lambda: Net(8, 32), lambda: rows(64, 1, 8)[0], {}),
    "block, zero3": ((2, 2), lambda: Dropped(1), lambda: rows(128, 1, 16)[0], {"fully_shard": "dp"}),
    "dropout": ((4, 1), lambda: Dropped(2), lambda: rows(128, 1, 16)[0], {}),
    "dropout, tp": ((2, 2), lambda: Dropped(2), lambda: rows(128, 1, 16)[0], {"params": DROPPED}),
    "dropout, zero3": ((4, 1), lambda: Dropped(2), lambda: rows(128, 1, 16)[0], {"fully_shard": "dp"}),
    "gpt": ((4, 1), lambda: gpt(n_embd=16, block_size=16), lambda: tokens(32, 1, 16)[0], {}),
    "gpt, zero3 x tp": (
        (2, 2), lambda: gpt(n_embd=16, block_size=16), lambda: tokens(32, 1, 16)[0],
        {"params": GPT_PLAN, "fully_shard": "dp"},
    ),
}  # fmt: skip
"""By name: the shape of the mesh, the model, a batch, and what is said to `compile`."""

NEAR_HOST = replace(PRESETS["hopper"], host=Link(hop_us=0.5, gb_per_s=400.0))
"""A Hopper whose host is so near that small values are worth a copy, as where the two share a package."""


def program_of(name: str, machine: Machine | str = "hopper") -> Program:
    """The program of a small model on a machine, before any pass."""
    shape, build, batch, said = SMALL[name]
    mesh = spmd.DeviceMesh("cpu", torch.arange(4).view(shape).tolist(), mesh_dim_names=("dp", "tp"))
    mesh = mesh.with_topology(MeshTopoInfo(HostGrid(shape), machine))
    model = build()
    step = spmd.compile(train_step, mesh, inputs=INPUTS, passes=(), **said)
    return step.program_for(model, optim.AdamW(model.parameters()), *batch())


def all_choices(plan: Plan, most: int) -> list[tuple[int, float]]:
    """The peak and the microseconds of all sets of units that may be freed, of the `most` largest ones."""
    values, choice = plan.lookup.values, plan.choice
    size = {u: sum(r.nbytes for r in values.units[u]) for part in plan.spans.units for u in part}
    units = sorted(size, key=lambda u: (-size[u], u))[:most]
    found = []
    for freed in chain.from_iterable(combinations(sorted(units), n) for n in range(len(units) + 1)):
        effect = plan.lookup.effect(values.forced.union(freed))
        found.append((choice.peak_with([effect]), effect.us))
    return found


def all_choices_with_host(plan: Plan, most: int) -> list[tuple[int, float]]:
    """The same of all choices to keep, to compute again or to send to host memory, of the `most` largest ones; copied
    beside the ops, or at once."""
    lookup, forced = plan.lookup, plan.lookup.values.forced
    every = [u for part in plan.spans.units for u in part]
    units, found = sorted(every, key=lambda u: (-lookup.nbytes(u), u))[:most], []
    windows = [plan.spans.window(len(plan.spans.units), at_once) for at_once in (False, True)]
    for choice in product(range(3), repeat=len(units)):
        freed, hosted = ({u for u, c in zip(units, choice, strict=True) if c == way} for way in (1, 2))
        for window in windows if hosted else windows[:1]:
            try:
                effect = lookup.effect(forced | freed, hosted, window)
            except CannotRecompute:
                continue
            found.append((plan.choice.peak_with([effect]), effect.us))
    return found


def measured(rank: int, name: str, budget: int | None, offload: bool = False) -> tuple[int, int]:
    """What a training step needs at most on this rank: predicted, and counted while it runs. With no budget: the
    smallest budget there is, and what the program needs as it comes. offload: where host memory is another one."""
    shape, build, batch, said = SMALL[name]
    mesh = spmd.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    if offload:
        mesh, said = mesh.with_topology(MeshTopoInfo(HostGrid(shape), NEAR_HOST)), {**said, "offload": True}
    model = seeded(build)
    optimizer, data = optim.AdamW(model.parameters()), batch()
    if budget is None:
        came = {k: v for k, v in said.items() if k != "offload"}
        plain = spmd.compile(train_step, mesh, inputs=INPUTS, **came).program_for(model, optimizer, *data)
        with pytest.raises(BudgetError) as e:
            spmd.compile(train_step, mesh, inputs=INPUTS, memory_budget=1, **said).program_for(model, optimizer, *data)
        return e.value.smallest, plain.memory().peak
    step = spmd.compile(train_step, mesh, inputs=INPUTS, memory_budget=budget, **said)
    return counted_beside(step, mesh, lambda: step(model, optimizer, *data))
