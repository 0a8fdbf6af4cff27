"""Random nets to be trained with values in host memory or computed again, beside the same training without."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
import ways
from torch import nn, optim

import spmd
from spmd import MeshTopoInfo, Shard
from spmd.expand.passes.memory_budget import BudgetError
from spmd.mesh.layout import HostGrid
from tests.expand.budgets import NEAR_HOST
from tests.expand.side_by_side import INPUTS, seeded, train_step

WIDTH, TIME = 8, 4


class Mix(nn.Module):
    """A layer of a random kind on values of [batch, TIME, WIDTH]."""

    KINDS = ("gelu", "gate", "norm", "dropout", "attention", "relu_", "softmax", "turned", "sum", "twice")

    def __init__(self, kind: str):
        super().__init__()
        self.kind, self.norm = kind, nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        kind, h = self.kind, self.up(x)
        if kind in ("gelu", "relu_"):
            return self.down(F.gelu(h) if kind == "gelu" else F.relu_(h))
        a, b = h.chunk(2, -1)
        if kind == "gate":
            return a * torch.sigmoid(b)
        if kind == "attention":
            q, k = (y.unflatten(-1, (2, -1)).transpose(1, 2) for y in (a, b))
            return F.scaled_dot_product_attention(q, k, k, is_causal=True).transpose(1, 2).flatten(2)
        if kind == "twice":
            y = torch.tanh(a)
            return y * y.exp() + y.t() if y.ndim == 2 else y * y.exp() + y.flip(-1)
        made = {"norm": self.norm, "dropout": lambda y: F.dropout(y, 0.3), "softmax": lambda y: y.softmax(-1)}
        made |= {
            "turned": lambda y: y.transpose(1, 2).cumsum(-1).transpose(1, 2),
            "sum": lambda y: y / (1 + y.sum(1, True) ** 2),
        }
        return made[kind](a) + b


class RandomNet(nn.Module):
    def __init__(self, kinds: tuple[str, ...], residual: tuple[bool, ...]):
        super().__init__()
        self.layers, self.residual = nn.ModuleList(map(Mix, kinds)), residual
        self.out = nn.Linear(WIDTH, 3)

    def forward(self, x):
        for layer, adds in zip(self.layers, self.residual, strict=True):
            x = x + layer(x) if adds else layer(x)
        return self.out(x)


SAID = {
    "dp": ((4, 1), {}),
    "zero3": ((4, 1), {"fully_shard": "dp"}),
    "tp": ((2, 2), {"params": {"layers.*.up.*": {"tp": Shard(0)}, "layers.*.down.weight": {"tp": Shard(1)}}}),
}


def differences(seed: int) -> list[str]:
    """What differs to the bit from the plain training of the net of this seed: all in host memory, and by a budget."""
    draw = random.Random(seed)
    kinds = tuple(draw.choices(Mix.KINDS, k=draw.randint(1, 4)))
    residual, batch = tuple(draw.random() < 0.6 for _ in kinds), draw.choice((8, 6, 5, 3))
    shape, said = SAID[draw.choice(sorted(SAID))]
    g = torch.Generator().manual_seed(seed)
    given = torch.randn(batch, TIME, WIDTH, generator=g), torch.randint(0, 3, (batch, TIME), generator=g)

    def trained(**more):
        spmd.manual_seed(0)
        mesh = spmd.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        mesh = mesh.with_topology(MeshTopoInfo(HostGrid(shape), NEAR_HOST))
        model = seeded(lambda: RandomNet(kinds, residual))
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        step = spmd.compile(train_step, mesh, inputs=INPUTS, **said, **more)
        losses = [step(model, optimizer, *given).detach() for _ in range(2)]
        return losses, list(model.parameters()), step.program

    def run(**more):
        return ways.on_ranks(lambda: trained(**more), 4)

    plain, found = run(), []
    peak = plain[0][-1].memory().peak
    tries = {"all": {"passes": ("offload", "numbers_late", "buckets", "schedule")}}
    for part in (0.97, 0.9):
        tries[f"budget {part}"] = {"memory_budget": int(peak * part), "offload": True}
    for name, more in tries.items():
        try:
            got = run(**more)
        except BudgetError:
            continue
        program = got[0][-1]
        if "budget" in name and program.memory().peak > more["memory_budget"]:
            found.append(f"{seed} {name} {kinds} {said}: above the budget")
        if not all(ways.same(a[:-1], b[:-1]) for a, b in zip(plain, got, strict=True)):
            found.append(f"{seed} {name} {kinds} {residual} {batch} {said}: other bits")
    return found
