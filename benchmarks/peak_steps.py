"""Kinds of train steps whose peaks are counted: what `peaks.py --steps` compares with what programs say.

    STEPS["checkpoint with dropout, reentrant"]      Step(made, (train_step,), ...)

A small net, so that what an op holds for a moment counts beside the parameters.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from step_models import autocast_step
from step_parts import accumulate, accumulate_and_update, train_step
from torch import nn, optim
from torch.utils.checkpoint import checkpoint

import spmd
from spmd import Shard
from tests.expand.test_memory import counted_beside

WIDTH, HIDDEN, CLASSES = 16, 48, 8


class Block(nn.Module):
    """Dropout before and after a layer; with checkpoints where asked."""

    def __init__(self, p: float, reentrant: bool | None):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.p, self.reentrant = p, reentrant

    def middle(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.down(F.gelu(self.up(F.dropout(self.norm(x), self.p)))), self.p)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.middle(x) if self.reentrant is None else self._again(x))

    def _again(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_() if self.reentrant and not x.requires_grad else x
        return checkpoint(self.middle, x, use_reentrant=self.reentrant)


def net(p: float = 0.0, reentrant: bool | None = None) -> nn.Module:
    return nn.Sequential(*(Block(p, reentrant) for _ in range(3)), nn.Linear(WIDTH, CLASSES))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.BatchNorm1d(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.head = nn.LSTM(4, HIDDEN, batch_first=True), nn.Linear(HIDDEN, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(x.unflatten(1, (-1, 4)))[0][:, -1])


# ---- steps ------------------------------------------------------------------------------------


def forward_step(model, optimizer, x, y):
    with torch.no_grad():
        return F.cross_entropy(model(x), y)


def clipping_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.detach()


def micro_batches(model, optimizer, x, y):
    """A loop over micro-batches, one update."""
    optimizer.zero_grad()
    losses = []
    for a, b in zip(x.chunk(4), y.chunk(4), strict=True):
        loss = F.cross_entropy(model(a), b) / 4
        loss.backward()
        losses.append(loss.detach())
    optimizer.step()
    return losses


@dataclass(frozen=True)
class Step:
    """Steps that are called in turn, the model that they train, and how many rows it gets."""

    steps: tuple[Callable, ...] = (train_step,)
    model: Callable[[], nn.Module] = net
    rows: int = 32
    optimizer: Callable[[Any], optim.Optimizer] = field(default=optim.AdamW)


UNEVEN = 27
"""Rows of 7, 7, 7 and 6."""

STEPS = {
    "plain": Step(),
    "plain, uneven": Step(rows=UNEVEN),
    "forward": Step((forward_step,)),
    "clip_grad_norm_": Step((clipping_step,)),
    "micro-batches": Step((micro_batches,)),
    "micro-batches, uneven": Step((micro_batches,), rows=UNEVEN),
    "accumulation over calls": Step((accumulate, accumulate_and_update)),
    "autocast": Step((autocast_step,)),
    "autocast, uneven": Step((autocast_step,), rows=UNEVEN),
    "dropout": Step(model=lambda: net(0.1)),
    "dropout in micro-batches": Step((micro_batches,), lambda: net(0.1)),
    "dropout, accumulation, uneven": Step((accumulate, accumulate_and_update), lambda: net(0.1), UNEVEN),
    "BatchNorm": Step(model=normed),
    "LSTM": Step(model=Recurrent),
    "SGD with momentum": Step(optimizer=lambda params: optim.SGD(params, momentum=0.9)),
    "AdamW, fused": Step(optimizer=lambda params: optim.AdamW(params, fused=True)),
    "Adafactor": Step(optimizer=optim.Adafactor),
    "checkpoint": Step(model=lambda: net(0.0, False)),
    "checkpoint with dropout": Step(model=lambda: net(0.1, False)),
    "checkpoint with dropout, reentrant": Step(model=lambda: net(0.1, True)),
}
SHARDED = {"*.up.weight": {"tp": Shard(0)}, "*.up.bias": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)}}


def peaks_of_step(name: str, shape: tuple[int, int], along_tp: bool, said: dict[str, Any]) -> list[tuple[int, int]]:
    """What later calls of the steps need at most on this rank: predicted, and counted while they run."""
    kind, mesh = STEPS[name], spmd.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = kind.model()
    optimizer = kind.optimizer(model.parameters())
    batch = torch.randn(kind.rows, WIDTH), torch.randint(0, CLASSES, (kind.rows,))
    names = dict(model.named_parameters())
    here = {pattern: place for pattern, place in SHARDED.items() if fnmatch.filter(names, pattern)}
    said = said | ({"params": here} if along_tp else {})
    inputs = {"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}}
    steps = [spmd.compile(step, mesh, inputs=inputs, **said) for step in kind.steps]

    def call() -> None:
        for step in steps:
            step(model, optimizer, *batch)

    return list(_each(steps, mesh, call))


def _each(steps: list, mesh: spmd.DeviceMesh, call: Callable[[], None]) -> Iterator[tuple[int, int]]:
    for _ in range(2):
        call()
    for step in steps:
        yield counted_beside(step, mesh, call)
