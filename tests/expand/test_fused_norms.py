"""Norms of many gradients have their roots taken together, with the same bits, where nobody reads one of them alone."""

from math import inf

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import spmd
from spmd import LocalTensorMode, Shard

aten = torch.ops.aten


def step_of(order, foreach, alone):
    def step(model, optimizer, x):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), x[:, :3])
        loss.backward()
        first = model[0].weight.grad.norm() if alone else loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01, order, foreach=foreach)
        optimizer.step()
        return loss.detach(), norm, first

    return step


def trained(shape, order, dtype, said, foreach, alone, passes):
    """What two steps return, the parameters after them on each rank, how many roots there are, and the last report."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 3)).to(dtype)
    optimizer, x = optim.SGD(model.parameters(), 0.1), torch.randn(8, 6, dtype=dtype)
    with LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
        step = spmd.compile(step_of(order, foreach, alone), mesh, inputs={"x": {"dp": Shard(0)}}, passes=passes, **said)
        seen = [y for _ in range(2) for y in step(model, optimizer, x)]
        seen = [y.full_tensor().reconcile().detach().clone() for y in (*seen, *model.parameters())]
    roots = step.program.graph.find_nodes(op="call_function", target=aten.sqrt.default)
    return seen, len(roots), step.program


SHARDED = {"fully_shard": "dp"}  # rows that 4 ranks do not divide, and of the last bias, of 3, an empty shard
SPLIT = {"params": {"0.weight": {"tp": Shard(0)}, "0.bias": {"tp": Shard(0)}, "2.weight": {"tp": Shard(1)}}}
USUAL = ("numbers_late", "buckets")


@pytest.mark.parametrize(
    "shape, order, dtype, said, foreach, alone, roots",
    [
        ((4, 1), 2.0, torch.float32, SHARDED, None, False, (5, 2)),
        ((4, 1), 2.0, torch.float64, {}, True, False, (5, 2)),
        ((1, 4), 2.0, torch.bfloat16, SPLIT, False, False, (5, 2)),  # a root and a cast each
        ((2, 2), 2.0, torch.float32, SPLIT | SHARDED, None, True, (6, 3)),
        ((2, 2), inf, torch.float32, SPLIT | SHARDED, None, False, (0, 0)),
        ((4, 1), 3.0, torch.float32, SHARDED, None, False, (0, 0)),
    ],
    ids=["in shards", "foreach", "bf16", "one read alone, too", "inf", "of order 3"],
)
def test_roots_together_have_the_bits_of_roots_alone(shape, order, dtype, said, foreach, alone, roots):
    given = shape, order, dtype, said, foreach, alone
    want, before, without = trained(*given, USUAL)
    got, after, program = trained(*given, ("fused_norms", *USUAL))
    assert (before, after) == roots
    assert all(map(torch.equal, got, want))
    assert len(program.collectives) == len(without.collectives)
    assert program.memory().peak <= without.memory().peak


def test_a_report_says_what_was_joined_and_why_powers_were_not():
    *_, program = trained((4, 1), 2.0, torch.bfloat16, {}, None, False, ("fused_norms",))
    assert str(program.reports[-1]).splitlines()[1:] == [
        "  4 ops aten._to_copy.default on one number each are one op",
        "  4 ops aten.sqrt.default on one number each are one op",
    ]
    *_, program = trained((4, 1), 3.0, torch.float32, {}, None, False, ("fused_norms",))
    assert not program.reports[-1].taken
    assert program.reports[-1].left == ("4 roots of other orders than 2: bits of a power depend on its place",)
