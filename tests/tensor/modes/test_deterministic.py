"""Deterministic mode: every reduction gives the same bits, on any mesh and any transport."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from workers import Pool

import spmd
from spmd import DTensor, distribute_tensor
from spmd.mesh import DeviceMesh, init_device_mesh
from spmd.sim import ThreadWorld
from spmd.tensor.redistribute.collective_moves import AllReduce, ReduceInOrder, ReduceScatter
from spmd.tensor.redistribute.plan import steps_made
from tests.tensor.single import AVG, S0, SUM, R, on_ranks

MESHES = [(4,), (2, 2)]
DRAW = torch.Generator().manual_seed(0)
X, Y = torch.randn(16, 12, generator=DRAW) * 100, torch.randn(16, 3, generator=DRAW)
W = [torch.randn(8, 12, generator=DRAW), torch.randn(3, 8, generator=DRAW)]


def mlp() -> nn.Module:
    model = nn.Sequential(nn.Linear(12, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))
    with torch.no_grad():
        for layer, w in zip((model[0], model[2]), W, strict=True):
            layer.weight.copy_(w)
    return model


def train_step(model, optimizer, x, y):
    loss = ((model(x) - y) ** 2).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def placed(t: torch.Tensor, mesh: DeviceMesh, placement) -> DTensor:
    return distribute_tensor(t, mesh, [placement] * mesh.ndim, src_data_rank=None)


def trained(rank: int, mesh_shape, weights, compiled: bool, on: bool) -> list[torch.Tensor]:
    """Two losses and all parameters; the batch is sharded over all axes, the weights have this placement."""
    mesh, model, step = init_device_mesh("cpu", mesh_shape), mlp(), train_step
    if compiled:
        step = spmd.compile(train_step, mesh, params={"*weight": [weights] * mesh.ndim})
    else:
        for layer in (model[0], model[2]):
            layer.weight = nn.Parameter(placed(layer.weight.data, mesh, weights))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    with spmd.deterministic(on):
        losses = [step(model, optimizer, placed(X, mesh, S0), placed(Y, mesh, S0)) for _ in range(2)]
        return [t.detach().full_tensor() for t in (*losses, *model.parameters())]


def same_bits(found: list, wanted: list) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("weights", [R, S0], ids=["replicated", "sharded"])
def test_a_train_step_gives_the_same_bits_everywhere(gloo4: Pool, weights, compiled):
    """Forward, backward and optimiser, on gloo and simulated, on one axis and on two. Gloo's own sums differ; what is
    scattered is added in this order anyway (`comm/added.py`)."""
    wanted = ThreadWorld(4).run(lambda rank: trained(rank, (4,), weights, compiled, True))
    for shape in MESHES:
        assert all(same_bits(each, wanted[0]) for each in gloo4.run(trained, shape, weights, compiled, True))
    if weights is R:
        assert not same_bits(gloo4.run(trained, (4,), weights, compiled, False)[0], wanted[0])


def test_ops_add_in_rank_order_inside_the_block_only():
    """With terms whose sum depends on the order, for ops and for `redistribute`."""

    def rank(mesh):
        mine = torch.tensor([1e8, 1.0, -1e8, 1.0])[mesh.ranks.index(mesh.get_rank())].reshape(1)
        x = DTensor.from_local(mine, mesh, [SUM, AVG])
        found = []
        for on in (True, False):
            with spmd.deterministic(on), steps_made() as steps:
                moved = x.redistribute(placements=[R, R]).to_local(), x.redistribute(placements=[R, R], async_op=True)
                values = [torch.exp(x * 0).to_local().item(), *(float(t) for t in moved)]
            kinds = {type(step.move) for step in steps} & {AllReduce, ReduceInOrder, ReduceScatter}
            found.append((kinds == {ReduceInOrder}, values if on else None))
        return found

    assert on_ranks(rank) == [[(True, [1.0, 0.5, 0.5]), (False, None)]] * 4


def test_it_may_be_set_for_the_process():
    """Inside a block, the block counts."""
    spmd.set_deterministic(True)
    try:
        with spmd.deterministic(False):
            assert not on_ranks(lambda mesh: spmd.tensor.modes.deterministic.is_on())[0]
        assert on_ranks(lambda mesh: spmd.tensor.modes.deterministic.is_on()) == [True] * 4
    finally:
        spmd.set_deterministic(False)
