"""Train a small model on simulated ranks and on one device, for tests of places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import spmd
from spmd import CompiledStep, DTensor, LocalTensorMode, Shard
from tests.expand.side_by_side import seeded

TP = {"up.*": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}}


class Odd(nn.Module):
    """What a sharded group meets: sizes that do not divide, tied, frozen and unused parameters, a number, a buffer."""

    def __init__(self, width: int = 6, hidden: int = 10, words: int = 7):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm = nn.LayerNorm(width)
        self.frozen = nn.Linear(width, width, bias=False).requires_grad_(False)
        self.unused, self.scale = nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x):
        x = self.words(x)
        x = x + self.down(F.gelu(self.up(self.norm(x)))) * self.scale
        with torch.no_grad():
            self.total += x.mean()
        return self.head(self.frozen(x))


def train_step(model, optimizer, x, y):
    """Two micro-batches, clipping, and an update."""
    optimizer.zero_grad()
    for part, wanted in zip(x.chunk(2), y.chunk(2), strict=True):
        loss = F.cross_entropy(model(part).flatten(0, 1), wanted.flatten()) / 2
        loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return loss.detach(), norm


def plain_step(model, optimizer, x, y):
    """One batch, and no clipping. No gradient is left."""
    loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


class Trained(NamedTuple):
    """Everything a user can see of a training, by name, and what trained it."""

    seen: dict[str, torch.Tensor]
    step: CompiledStep | Callable
    model: nn.Module
    optimizer: torch.optim.Optimizer


def batches(n: int = 3) -> list[tuple]:
    g = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(0, 7, (6, 4), generator=g) for _ in range(2)) for _ in range(n)]


def whole(x: Any) -> torch.Tensor:
    """The global value, where all ranks have the same."""
    return x.detach().full_tensor().reconcile() if isinstance(x, DTensor) else x.detach().clone()


def seen(returned: list, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {f"returned {i}": x for i, x in enumerate(returned)}
    found |= {name: whole(x) for name, x in [*model.named_parameters(), *model.named_buffers()]}
    for name, p in model.named_parameters():
        if p.grad is not None:
            found[f"{name}.grad"] = whole(p.grad)
        for key, x in optimizer.state.get(p, {}).items():
            if isinstance(x, torch.Tensor):
                found[f"{key}[{name}]"] = whole(x)
    return found


def steps(step: Callable, model: nn.Module, optimizer: torch.optim.Optimizer, n: int) -> dict[str, torch.Tensor]:
    found = [step(model, optimizer, *batch) for batch in batches(n)]
    returned = [whole(x) for each in found for x in (each if isinstance(each, tuple) else (each,))]
    return seen(returned, model, optimizer)


def alone(make: Callable, fn: Callable = train_step, n: int = 3) -> dict[str, torch.Tensor]:
    """The training on one device, in float64. make: an optimiser of parameters."""
    model = seeded(Odd).double()
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    return steps(fn, model, optimizer, n)


def on_ranks(axes: dict[str, int], make: Callable, fn: Callable = train_step, n: int = 3, **said: Any) -> Trained:
    """The same compiled, on simulated ranks. said: where parameters are."""
    size = torch.Size(axes.values())
    with LocalTensorMode(size.numel()):
        model = seeded(Odd).double()
        optimizer = make([p for p in model.parameters() if p.requires_grad])
        mesh = spmd.init_device_mesh("cpu", tuple(size), mesh_dim_names=tuple(axes))
        over = {axis: Shard(0) for axis in axes if axis != "tp"}
        step = spmd.compile(fn, mesh, inputs={"x": over, "y": over}, **said)
        return Trained(steps(step, model, optimizer, n), step, model, optimizer)


def check(axes: dict[str, int], make: Callable, fn: Callable = train_step, n: int = 3, **said: Any) -> Trained:
    """Assert that the ranks see what one device sees, within 1e-10."""
    want, got = alone(make, fn, n), on_ranks(axes, make, fn, n, **said)
    assert set(got.seen) == set(want)
    for name, x in want.items():
        torch.testing.assert_close(got.seen[name], x, rtol=0, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}")
    return got


def planned(fn: Callable, model: nn.Module, optimizer: torch.optim.Optimizer, axes: dict[str, int], batch, **said: Any):
    """The program of a step for ranks that do not exist."""
    size = torch.Size(axes.values())
    mesh = spmd.DeviceMesh("cpu", torch.arange(size.numel()).view(size).tolist(), mesh_dim_names=tuple(axes))
    over = {axis: Shard(0) for axis in axes if axis != "tp"}
    return spmd.compile(fn, mesh, inputs={"x": over, "y": over}, **said).program_for(model, optimizer, *batch)
