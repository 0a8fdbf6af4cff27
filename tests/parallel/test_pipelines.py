"""Stages of torch's pipelines with modules of spmd inside, on gloo, beside one device."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)  # fmt: skip

import spmd
from spmd import LocalTensorMode, init_device_mesh
from spmd.parallel import ColwiseParallel, RowwiseParallel, data_parallel, fully_shard, parallelize_module
from spmd.parallel import PipelineStage as OwnStage
from spmd.parallel.data_parallel import _Gradients
from spmd.parallel.fully_sharded.bucket import Bucket
from spmd.parallel.micro_batches import share_out
from tests.tensor.single import whole

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


class Part(nn.Module):
    """What a stage has: two layers with a sum around them."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def made() -> tuple[list[Part], torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    parts = [Part().double() for _ in range(2)]
    return parts, torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)


SENDERS = {"fully sharded": (Bucket, "reduced"), "data parallel": (_Gradients, "_send")}
REDUCTIONS = {"fully sharded": (4, 1), "data parallel": (4, 1), "tensor parallel": (0, 0)}
"""Of parameters' gradients in a step of four micro-batches: with torch's stage, and with ours."""


def trained(
    rank: int, schedule_name: str, how: str, is_own: bool
) -> tuple[int, dict[str, torch.Tensor], list[float], int]:
    """This rank's stage, its parameters after two steps of four micro-batches, the losses at the last stage, and how
    many reductions of gradients a step had."""
    mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "inner"))
    parts, x, y = made()
    at = mesh.get_local_rank("pp")
    part = parts[at]
    if how == "tensor parallel":
        parallelize_module(part, mesh["inner"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    else:
        data_parallel(part, mesh["inner"]) if how == "data parallel" else fully_shard(part, mesh=mesh["inner"])
        x, y = (t.chunk(2)[mesh.get_local_rank("inner")] for t in (x, y))
    optimizer = torch.optim.AdamW(part.parameters(), 0.1)
    stage = (OwnStage if is_own else PipelineStage)(part, at, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = SCHEDULES[schedule_name](stage, n_microbatches=4, loss_fn=F.mse_loss)
    found: list[torch.Tensor] = []
    for _ in range(2):
        optimizer.zero_grad()
        kind, name = SENDERS.get(how, (Bucket, "reduced"))
        with mock.patch.object(kind, name, autospec=True, side_effect=getattr(kind, name)) as sent:
            schedule.step(*([x] if at == 0 else []), **({"target": y, "losses": found} if at else {}))
        optimizer.step()
    return at, {k: whole(p) for k, p in part.state_dict().items()}, [x.item() for x in found], sent.call_count


def alone() -> tuple[list[dict[str, torch.Tensor]], float]:
    """The parameters of each stage after the same steps of one device, and the loss of the last step."""
    parts, x, y = made()
    model = nn.Sequential(*parts)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
    return [part.state_dict() for part in parts], loss.item()


CASES = [
    ("gpipe", "tensor parallel", False), ("1f1b", "tensor parallel", False), ("gpipe", "fully sharded", False),
    ("1f1b", "fully sharded", True), ("gpipe", "fully sharded", True), ("1f1b", "data parallel", True),
]  # fmt: skip


@pytest.mark.parametrize("name, how, is_own", CASES)
def test_a_stage_of_a_pipeline_is_parallel_inside(name, how, is_own, gloo4):
    want, loss = alone()
    results = gloo4.run(trained, name, how, is_own)
    for at, got, _, sent in results:
        assert sent == REDUCTIONS[how][is_own]
        assert got.keys() == want[at].keys()
        for key, p in got.items():
            torch.testing.assert_close(p, want[at][key], rtol=1e-10, atol=1e-10)
    last = [losses[-4:] for at, _, losses, _ in results if at == 1]
    assert len(last) == 2 and all(len(each) == 4 for each in last)
    assert sum(map(sum, last)) / 8 == pytest.approx(loss, rel=1e-10)


# ---- whole micro-batches, which a stage's ranks share out ---------------------------------------

SHARED = {
    "gpipe": (ScheduleGPipe, 1), "1f1b": (Schedule1F1B, 1), "interleaved": (ScheduleInterleaved1F1B, 2),
}  # fmt: skip
"""A schedule, and how many stages each rank has."""


def chain(stages: int) -> tuple[list[Part], torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    parts = [Part().double() for _ in range(stages)]
    return parts, torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)


def loss_on_ranks(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with spmd.implicit_replication():
        return F.mse_loss(out, y)


def shared_out(rank: int, name: str, how: str) -> tuple[dict[int, dict[str, torch.Tensor]], list[float]]:
    """The parameters of this rank's stages and their gradients after two steps of two micro-batches, and the losses."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    kind, each = SHARED[name]
    parts, x, y = chain(2 * each)
    at = mesh.get_local_rank("pp")
    mine = {i: parts[i] for i in range(at, 2 * each, 2)}
    for part in mine.values():
        WRAPS[how](part, mesh["dp"])
    stages = [
        OwnStage(part, i, 2 * each, torch.device("cpu"), group=mesh.get_group("pp"), mesh=mesh["dp"])
        for i, part in mine.items()
    ]
    schedule = kind(stages if each > 1 else stages[0], n_microbatches=2, loss_fn=loss_on_ranks)
    optimizer = torch.optim.AdamW([p for part in mine.values() for p in part.parameters()], 0.1)
    found: list[torch.Tensor] = []
    for _ in range(2):
        optimizer.zero_grad()
        last = 2 * each - 1 in mine
        schedule.step(*([x] if 0 in mine else []), **({"target": y, "losses": found} if last else {}))
        optimizer.step()
    return {i: _state(part) for i, part in mine.items()}, [whole(loss).item() for loss in found[-2:]]


WRAPS = {
    "DTensors": spmd.distribute_module, "fully sharded": lambda part, mesh: fully_shard(part, mesh=mesh),
    "data parallel": data_parallel,
}  # fmt: skip


def _state(part: nn.Module) -> dict[str, torch.Tensor]:
    found = {name: whole(p).detach() for name, p in part.named_parameters()}
    return found | {f"{name}.grad": whole(p.grad) for name, p in part.named_parameters()}


def unshared(stages: int) -> tuple[list[dict[str, torch.Tensor]], float]:
    parts, x, y = chain(stages)
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss = F.mse_loss(nn.Sequential(*parts)(x), y)
        loss.backward()
        optimizer.step()
    return [_state(part) for part in parts], loss.item()


@pytest.mark.parametrize("name, how", [
    ("gpipe", "DTensors"), ("1f1b", "fully sharded"), ("1f1b", "DTensors"), ("interleaved", "DTensors"),
    ("interleaved", "fully sharded"), ("interleaved", "data parallel"), ("gpipe", "data parallel"),
])  # fmt: skip
def test_the_ranks_of_a_stage_share_out_its_micro_batches(name, how, gloo4):
    """All ranks give the whole batch; losses and gradients are those of one device."""
    want, loss = unshared(2 * SHARED[name][1])
    losses = []
    for mine, found in gloo4.run(shared_out, name, how, timeout=90.0):
        losses += [sum(found) / 2] * bool(found)
        for i, got in mine.items():
            assert got.keys() == want[i].keys()
            for key, x in got.items():
                torch.testing.assert_close(x, want[i][key], rtol=1e-10, atol=1e-10)
    assert losses == [pytest.approx(loss, rel=1e-10)] * 2


def test_ranks_that_do_not_divide_a_micro_batch_are_an_error():
    with LocalTensorMode(2):
        part = Part()
        share_out(part, init_device_mesh("cpu", (2,)), is_first=True, is_last=True)
        with pytest.raises(ValueError, match=r"a micro-batch of \[3, 8\] for 2 ranks"):
            part(torch.ones(3, 8))
