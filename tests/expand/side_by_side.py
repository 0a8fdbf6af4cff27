"""Compare a training on simulated ranks with the same training on one device.

    case = Case(build=lambda: (Net(), ...), step=train_step, batches=batches(7))
    case.check((2, 2))

The truth is one device: the same step, not compiled. Everything that a user can see is compared: the return value of
each step, and after the last step every parameter, buffer, gradient and tensor of the optimiser.

The ranks share their programs here, to save time. That each rank makes the same program is tested elsewhere.
"""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

import spmd
from examples.gpt import GPT, GPTConfig
from spmd import CompiledStep, DTensor, LocalTensorMode, Shard
from spmd.expand.state import State
from spmd.sim import run_ranks
from tests.tensor.single import every_rank, outcome, placed
from tests.tensor.single import same as alike

MESHES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]

Pair = tuple[nn.Module, torch.optim.Optimizer]

INPUTS = {"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}}


class Net(nn.Module):
    """The smallest network with both kinds of tensor-parallel linear and a norm."""

    def __init__(self, width: int = 4, hidden: int = 8, classes: int = 3):
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.down = nn.Linear(hidden, classes)

    def forward(self, x):
        return self.down(self.norm(F.gelu(self.up(x))))


NET = {"up.*": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}}

GPT_PLAN = {
    "*.attn.[qkv].weight": {"tp": Shard(0)},
    "*.attn.[qkv].bias": {"tp": Shard(0)},
    "*.attn.out.weight": {"tp": Shard(1)},
    "*.mlp.up.*": {"tp": Shard(0)},
    "*.mlp.down.weight": {"tp": Shard(1)},
}


def gpt(**config) -> GPT:
    return GPT(GPTConfig(**{"n_layer": 1, "n_head": 4, "n_embd": 8, "block_size": 6, "vocab": 11, **config}))


def train_step(model, optimizer, x, y):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
    loss.backward()
    optimizer.step()
    return loss


def rows(batch: int, n: int = 3, width: int = 4, classes: int = 3) -> list[tuple]:
    """n batches for a `Net`."""
    g = torch.Generator().manual_seed(1)
    return [
        (torch.randn(batch, width, generator=g), torch.randint(0, classes, (batch,), generator=g)) for _ in range(n)
    ]


def tokens(batch: int, n: int = 2, time: int = 6, vocab: int = 11) -> list[tuple]:
    """n batches for a `gpt`."""
    g = torch.Generator().manual_seed(1)
    return [tuple(torch.randint(0, vocab, (batch, time), generator=g) for _ in range(2)) for _ in range(n)]


_SEEDING = threading.Lock()


def seeded(build: Callable[[], Any]) -> Any:
    """The result of `build`, with the same random numbers each time, also where several ranks are threads. The caller's
    random state is unchanged."""
    with _SEEDING, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build()


def copied(pair: Pair) -> Pair:
    """A deep copy, gradients too."""
    new = copy.deepcopy(pair)
    for p, q in zip(pair[0].parameters(), new[0].parameters(), strict=True):
        q.grad = None if p.grad is None else p.grad.clone()
    return new


@contextmanager
def shared_programs() -> Iterator[None]:
    """Inside, a program is made by one rank, and the others take it over if their calls have the same key."""
    real, made, lock = CompiledStep._capture_and_expand, {}, threading.Lock()

    def expanded(self, call):
        key = self.fn, self.mesh, self.settings.bucket_mb, call.key, tuple(call.numbers.items())
        with lock:
            if key not in made:
                made[key] = real(self, call), self._counted
            found, counted = made[key]
        if counted != self._counted:  # what the capture has found out, each rank has to know
            self.count(counted)
            call.count(self._counted, self._attributes.unread)
        return found

    with mock.patch.object(CompiledStep, "_capture_and_expand", expanded):
        yield


# ---- a case -----------------------------------------------------------------------------------


@dataclass
class Case:
    """A training: its model, optimiser and step, and the batch of each step.

    model, optimizer: functions that make them. between: called with (i, model, optimizer) before the i-th step. wanted:
    gives the parameters for the optimiser. share: whether the ranks share programs.
    """

    model: Callable[[], nn.Module] = Net
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda params: torch.optim.AdamW(params, lr=1e-2)
    step: Callable = train_step
    batches: Sequence[tuple] = field(default_factory=lambda: rows(8))
    params: dict = field(default_factory=lambda: NET)
    inputs: dict = field(default_factory=lambda: INPUTS)
    between: Callable[[int, nn.Module, torch.optim.Optimizer], None] | None = None
    wanted: Callable[[nn.Module], Any] = lambda model: model.parameters()
    share: bool = True

    def begin(self) -> Pair:
        model = seeded(self.model)
        return model, self.optimizer(self.wanted(model))

    def on_one_device(self) -> tuple[list, dict[str, torch.Tensor]]:
        model, optimizer = self.begin()
        returned = self.steps(self.step, model, optimizer)
        return returned, tensors(model, optimizer)

    def steps(self, step: Callable, model: nn.Module, optimizer: torch.optim.Optimizer) -> list:
        returned = []
        for i, batch in enumerate(self.batches):
            if self.between:
                self.between(i, model, optimizer)
            returned.append(values(step(model, optimizer, *copy.deepcopy(batch))))
        return returned

    def compiled(self, mesh) -> CompiledStep:
        return spmd.compile(self.step, mesh, params=self.params, inputs=self.inputs)

    def on_ranks(self, shape: Sequence[int], probe: Callable[..., Any] | None = None, timeout: float = 120.0) -> list:
        """By rank: the steps' results, all tensors at the end, and the result of `probe(step, model, optimizer)`."""
        pair = self.begin()

        def rank(r: int) -> tuple:
            mesh = spmd.init_device_mesh("cpu", tuple(shape), mesh_dim_names=("dp", "tp")[: len(shape)])
            model, optimizer = copied(pair)
            step = self.compiled(mesh)
            returned = self.steps(step, model, optimizer)
            return returned, tensors(model, optimizer), probe and probe(step, model, optimizer)

        with shared_programs() if self.share else nullcontext():
            return run_ranks(rank, torch.Size(shape).numel(), timeout)

    def check(self, shape: Sequence[int], probe: Callable[..., Any] | None = None, **close) -> Any:
        """Every rank has the values of one device. Returns the result of `probe` on rank 0."""
        returned, state = self.on_one_device()
        ranks = self.on_ranks(shape, probe)
        for theirs, their_state, _ in ranks:
            same(theirs, returned, "returned", **close)
            same(their_state, state, "state", **close)
        return ranks[0][2]


def values(x: Any) -> Any:
    """A step's return value with global tensors, in memory of their own."""
    if isinstance(x, (tuple, list)):
        return [values(v) for v in x]
    if isinstance(x, dict):
        return {k: values(v) for k, v in x.items()}
    if isinstance(x, DTensor):
        x = x.detach().full_tensor()
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """All tensors of the training's state, by name, as global tensors."""
    return {str(slot): values(t) for slot, t in State.of({"model": model, "optimizer": optimizer}).tensors().items()}


def same(theirs: Any, ours: Any, where: str, rtol: float = 1e-4, atol: float = 1e-6) -> None:
    """Assert that two nests of tensors and numbers are close; the message names the first that is not."""
    if isinstance(ours, dict):
        assert set(theirs) == set(ours), where
        for k in ours:
            same(theirs[k], ours[k], f"{where} {k}", rtol, atol)
    elif isinstance(ours, list):
        assert len(theirs) == len(ours), where
        for i, (a, b) in enumerate(zip(theirs, ours, strict=True)):
            same(a, b, f"{where}.{i}", rtol, atol)
    elif ours is None or isinstance(ours, str):
        assert theirs == ours, where
    else:
        torch.testing.assert_close(theirs, ours, rtol=rtol, atol=atol, equal_nan=True, msg=lambda m: f"{where}: {m}")


# ---- a function -------------------------------------------------------------------------------


def step_of(fn):
    """fn of up to three tensors with the gradients of a weighted sum of its results, as one step."""

    def step(x, y=None, z=None):
        given = [t.detach().requires_grad_(t.is_floating_point()) for t in (x, y, z) if t is not None]
        return outcome(fn, given)

    return step


def agree(fn, tensors, *placings, mesh_shape=(2, 2), single=None) -> None:
    """The compiled function and its gradients are on every rank what they are on one device, for any input placements.

    single: the function for one device, if it is written differently.
    """
    step, tensors = step_of(fn), [t.detach() for t in tensors]
    want = step_of(single or fn)(*tensors)
    with LocalTensorMode(math.prod(mesh_shape)):
        mesh = spmd.init_device_mesh("cpu", mesh_shape, mesh_dim_names=("dp", "tp")[-len(mesh_shape) :])
        compiled = spmd.compile(step, mesh)  # for all placings, so that the function is captured once
        for placing in placings:
            given = [placed(t, p, mesh) for t, p in zip(tensors, placing, strict=True)]
            got = [every_rank(x) for x in compiled(*given)]
            assert len(got) == len(want), placing
            for i, (ranks, b) in enumerate(zip(got, want, strict=True)):
                assert all(alike(a, b) for a in ranks), f"{placing}: result {i} is\n{ranks[0]}, not\n{b}"
