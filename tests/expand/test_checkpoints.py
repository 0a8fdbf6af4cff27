"""Activation checkpoints of all kinds draw again what they drew, and compute again what they are told to."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import spmd
from spmd import Shard

aten = torch.ops.aten
LAYERS = 3


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return x + F.dropout(self.down(F.dropout(torch.tanh(self.up(x)), 0.3)), 0.2)


save_products = functools.partial(create_selective_checkpoint_contexts, [aten.mm.default, aten.addmm.default])
again = functools.partial(checkpoint, use_reentrant=False)

KINDS: dict[str, Callable] = {
    "not reentrant": again,
    "reentrant": lambda block, x: checkpoint(block, x, use_reentrant=True),
    "one in another": lambda block, x: again(lambda z: again(block, z) * 1.0, x),
    "selective": functools.partial(again, context_fn=save_products),
    "as of DTensors": functools.partial(again, context_fn=spmd.recompute),
}


def stack() -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList([Block().double() for _ in range(LAYERS)])


def train_step(call: Callable) -> Callable:
    """A step that calls each block so."""

    def step(model, x):
        h = F.dropout(x, 0.1).requires_grad_()
        for block in model:
            h = call(block, h)
        loss = F.dropout(h, 0.1).square().sum()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(0.1 * p.grad)
        return loss.detach()

    return step


def trained(call: Callable, ranks: int) -> list[torch.Tensor]:
    """The losses of two steps, and the parameters after them."""
    with spmd.LocalTensorMode(ranks):
        spmd.manual_seed(5)
        mesh, model = spmd.init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",)), stack()
        step = spmd.compile(train_step(call), mesh, inputs={"x": {"dp": Shard(0)}})
        x = torch.arange(24.0, dtype=torch.float64).view(6, 4) / 24
        found = [step(model, x).full_tensor() for _ in range(2)] + [p.full_tensor() for p in model.parameters()]
        return [x.reconcile() if isinstance(x, spmd.LocalTensor) else x for x in found]


@pytest.fixture(scope="module")
def without() -> list[torch.Tensor]:
    """The truth: one rank, and no checkpoint."""
    return trained(lambda block, x: block(x), 1)


@pytest.mark.parametrize("kind", KINDS)
def test_the_numbers_are_those_without(kind, without):
    for got, want in zip(trained(KINDS[kind], 2), without, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_a_selective_checkpoint_computes_again_what_it_does_not_save():
    """The products are there once, and twice where nothing is saved; what is between them is there twice in both."""
    mesh = spmd.DeviceMesh("cpu", [0], mesh_dim_names=("dp",))

    def ops(call: Callable) -> tuple[int, int]:
        step = spmd.compile(train_step(call), mesh)
        nodes = step.program_for(stack(), torch.ones(6, 4, dtype=torch.float64)).graph.nodes
        return tuple(sum(n.target is op for n in nodes) for op in (aten.mm.default, aten.tanh.default))

    plain, selective, full = ops(lambda block, x: block(x)), ops(KINDS["selective"]), ops(again)
    assert selective == (plain[0], 2 * LAYERS) and full[1] == 2 * LAYERS and plain[1] == LAYERS
    assert full[0] > plain[0]
