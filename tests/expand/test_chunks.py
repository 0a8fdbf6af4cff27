"""Chunks: products and collectives in pieces give what they gave, and are made only where the replay says it pays."""

import functools

import pytest
import torch
import torch.nn.functional as F
import ways
from torch import nn, optim

import spmd
from spmd import MeshTopoInfo, Shard
from spmd._torch import pytree
from spmd.expand.passes.chunks import in_pieces
from spmd.expand.passes.passes import Chunks, with_passes
from spmd.mesh.layout import HostGrid
from tests.expand.side_by_side import INPUTS, seeded, train_step

PLAN = {"*.up.weight": {"tp": Shard(0)}, "*.down.weight": {"tp": Shard(1)}}
IN_SEQUENCE = {"x": {"dp": Shard(0), "tp": Shard(1)}, "y": {"dp": Shard(0)}}


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(width), nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Two blocks with a column-wise and a row-wise layer each, and the mean over time."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.blocks, self.head = nn.Sequential(Block(width), Block(width)), nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.blocks(x).mean(1))


def batch(rows: int, width: int = 8) -> tuple:
    g = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 4, width, generator=g), torch.randint(3, (rows,), generator=g)


def trained(rows, inputs, passes):
    """Losses and parameters of two steps on this rank, and how many collectives go over tp."""
    mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = seeded(Net)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    step = spmd.compile(train_step, mesh, inputs=inputs, params=PLAN, passes=passes, choose="op")
    losses = [step(model, optimizer, *batch(rows)).detach() for _ in range(2)]
    return losses, list(model.parameters()), sum(c.axis == "tp" for c in step.program.collectives)


def in_two(program):
    return in_pieces(program, 2)


def in_one(program):
    return in_pieces(program, 1)


@pytest.mark.parametrize(
    "rows, inputs", [(8, INPUTS), (8, IN_SEQUENCE), (2, INPUTS)], ids=["reduced", "gathered", "time"]
)
@pytest.mark.parametrize("cut", [in_one, in_two])
def test_pieces_give_what_the_whole_gives(rows, inputs, cut):
    """Forward and backward, on simulated ranks. With one sequence a rank, time is cut, here into pieces of two rows:
    products of so few have another kernel."""
    both = [ways.on_ranks(lambda p=p: trained(rows, inputs, p), 4) for p in ((), (cut,))]
    for (*alone, few), (*passed, many) in zip(*both, strict=True):
        assert ways.same(alone, passed) if rows > 2 or cut is in_one else close(alone, passed)
        assert many > few or cut is in_one


def close(a, b):
    pairs = zip(pytree.tree_leaves(a), pytree.tree_leaves(b), strict=True)
    return all(torch.allclose(x, y, rtol=1e-6, atol=1e-7) for x, y in pairs)


def test_pieces_give_what_the_whole_gives_on_gloo(gloo4):
    """Both ends of the products, on four processes."""
    for inputs in (INPUTS, IN_SEQUENCE):
        for (*alone, _), (*passed, _) in zip(
            gloo4.run(_on_rank, inputs, ()), gloo4.run(_on_rank, inputs, (in_two,)), strict=True
        ):
            assert ways.same(alone, passed)


def _on_rank(rank, inputs, passes):
    return ways._settled(trained(8, inputs, passes))


@functools.cache
def program_of(rows: int):
    """The program of a wide net on Hopper, in bfloat16."""
    mesh = spmd.DeviceMesh("cpu", torch.arange(8).view(2, 4).tolist(), mesh_dim_names=("dp", "tp"))
    mesh = mesh.with_topology(MeshTopoInfo(HostGrid((2, 4)), "hopper"))
    with torch.device("meta"):
        model = Net(4096)
    step = spmd.compile(
        train_step, mesh, inputs=INPUTS, params=PLAN, passes=(), choose="op",
        mixed_precision=spmd.MixedPrecision(torch.bfloat16, torch.float32),
    )  # fmt: skip
    x, y = torch.empty(rows, 2048, 4096), torch.empty(rows, dtype=torch.int64)
    return step.program_for(model, optim.SGD(model.parameters(), 0.1), x, y)


def test_products_are_cut_where_it_pays():
    """The step is shorter by the replay, no bigger, and less of it waits; the report says what was cut."""
    program = program_of(8)
    after = with_passes(program, (Chunks(),))
    (report,) = after.reports
    assert report.taken and not report.same_bits
    assert any("pieces" in line and "less" in line for line in report.did)
    before, now = program.timeline(), after.timeline()
    assert now.us < before.us and now.peak <= before.peak and now.exposed_us < 0.6 * before.exposed_us
    again = with_passes(after, (Chunks(),))
    assert again.timeline().us <= now.us
    assert after.memory().peak <= program.memory().peak


def test_uneven_shards_are_left_alone():
    """Seven rows on two ranks; the report says so."""
    program = program_of(7)
    (report,) = with_passes(program, (Chunks((2, 4)),)).reports
    assert not report.taken and all("not of one length" in line for line in report.left)
