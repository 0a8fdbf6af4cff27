"""Stages of torch's pipelines with modules of spmd inside, on gloo, beside one device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import spmd
from spmd import DTensor
from spmd.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module

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


def trained(rank: int, name: str, how: str) -> tuple[int, dict[str, torch.Tensor], list[float]]:
    """This rank's stage, its parameters after two steps of four micro-batches, and the losses at the last stage."""
    mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "inner"))
    parts, x, y = made()
    at = mesh.get_local_rank("pp")
    part = parts[at]
    if how == "tensor parallel":
        parallelize_module(part, mesh["inner"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    else:
        fully_shard(part, mesh=mesh["inner"])
        x, y = (t.chunk(2)[mesh.get_local_rank("inner")] for t in (x, y))
    optimizer = torch.optim.AdamW(part.parameters(), 0.1)
    stage = PipelineStage(part, at, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = SCHEDULES[name](stage, n_microbatches=4, loss_fn=F.mse_loss)
    found: list[torch.Tensor] = []
    for _ in range(2):
        optimizer.zero_grad()
        schedule.step(*([x] if at == 0 else []), **({"target": y, "losses": found} if at else {}))
        optimizer.step()
    return at, {k: _whole(p) for k, p in part.state_dict().items()}, [x.item() for x in found]


def _whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


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


@pytest.mark.parametrize("how", ["tensor parallel", "fully sharded"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_stage_of_a_pipeline_is_parallel_inside(name, how, gloo4):
    want, loss = alone()
    results = gloo4.run(trained, name, how)
    for at, got, _ in results:
        assert got.keys() == want[at].keys()
        for key, p in got.items():
            torch.testing.assert_close(p, want[at][key], rtol=1e-10, atol=1e-10)
    last = [losses[-4:] for at, _, losses in results if at == 1]
    assert len(last) == 2 and all(len(each) == 4 for each in last)
    assert sum(map(sum, last)) / 8 == pytest.approx(loss, rel=1e-10)
