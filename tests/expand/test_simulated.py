"""A compiled step on all ranks in one process trains as on one device."""

from __future__ import annotations

import pytest
import torch

import spmd
from examples.gpt import GPT, GPTConfig, train_step
from spmd import LocalTensorMode, Shard
from tests.expand.side_by_side import GPT_PLAN

INPUTS = {name: {"dp": Shard(0)} for name in ("tokens", "targets")}
CONFIG = GPTConfig(n_layer=1, n_head=8, n_embd=32, block_size=8, vocab=32)


def start() -> tuple[GPT, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = GPT(CONFIG)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)  # Adam would blow up rounding errors


def batches(rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [tuple(torch.randint(0, 32, (2, rows, 8), generator=generator)) for _ in range(3)]


@pytest.mark.parametrize("shape, rows, inside", [((2, 2), 4, True), ((4, 1), 3, False), ((2, 3), 5, True)])
def test_even_uneven_and_empty_shards(shape: tuple[int, int], rows: int, inside: bool) -> None:
    """With a model that is made inside or outside of the mode."""
    check(shape, rows, inside)


def test_64_ranks() -> None:
    check((8, 8), 16, inside=False)


def check(shape: tuple[int, int], rows: int, inside: bool) -> None:
    model, optimizer = start()
    wanted = [train_step(model, optimizer, *batch).item() for batch in batches(rows)]
    given = start()
    with LocalTensorMode(shape[0] * shape[1]) as mode:
        ours, our_optimizer = start() if inside else given
        mesh = spmd.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        step = spmd.compile(train_step, mesh, params=GPT_PLAN, inputs=INPUTS)
        found = [step(ours, our_optimizer, *batch).full_tensor().reconcile().item() for batch in batches(rows)]
        after = {name: p.full_tensor().reconcile() for name, p in ours.named_parameters()}
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=0)
    for name, p in model.named_parameters():
        torch.testing.assert_close(after[name], p.detach(), rtol=1e-4, atol=1e-5)
    assert {sent.kind for sent in mode.sent} >= {"all_reduce"}
