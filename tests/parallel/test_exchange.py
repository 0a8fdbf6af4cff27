"""DTensors and meshes go to torch's and back without a copy, with their gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed import tensor as theirs
from torch.distributed.tensor import parallel as styles

from spmd import DTensor, Partial, Replicate, Shard, init_device_mesh
from spmd.parallel import from_torch, to_torch

R, S0, S1 = Replicate(), Shard(0), Shard(1)
THEIRS = {R: theirs.Replicate(), S0: theirs.Shard(0), S1: theirs.Shard(1), Partial(): theirs.Partial()}
PLACED = [[S0, R], [S0, S1], [S1, S0], [S0, S0], [R, R], [Partial(), S1]]
X = torch.arange(35.0, dtype=torch.float64).view(7, 5)
W = torch.linspace(1, 2, 35, dtype=torch.float64).view(7, 5)


def there_and_back(rank: int) -> list[str]:
    """What was wrong."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    other = theirs.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    wrong = []

    def check(right: bool, what: str) -> None:
        if not right:
            wrong.append(what)

    check(from_torch(other) == mesh and to_torch(mesh) == other, "meshes")
    check(from_torch(other).get_group("tp") is other.get_group("tp"), "groups")
    check(from_torch(other["tp"]) == mesh["tp"], "part of a mesh")
    for placed in PLACED:
        x = DTensor.from_local(X, mesh).redistribute(placements=[p if p.is_shard() else R for p in placed])
        local = x.to_local().clone()
        ours = DTensor.from_local(local, mesh, placed, shape=(7, 5))
        y = to_torch(ours)
        back = from_torch(y)
        check(list(y.placements) == [THEIRS[p] for p in placed], f"placements of {placed}")
        check(back._spec is ours._spec, f"spec of {placed}")
        check(back.to_local().data_ptr() == local.data_ptr() == y.to_local().data_ptr(), f"memory of {placed}")
        check(torch.equal(y.full_tensor(), ours.full_tensor()), f"values of {placed}")
        for made in (to_torch, from_torch):
            leaf = (ours if made is to_torch else y).detach().requires_grad_()
            (made(leaf).full_tensor() * W).sum().backward()
            check(torch.equal(leaf.grad.full_tensor(), W), f"gradient by {made.__name__} of {placed}")
    strided(other, check)
    return wrong


def strided(other, check) -> None:
    """Parameters of FSDP2 beside tensor parallelism are sharded by tp first."""
    torch.manual_seed(0)
    net = nn.Linear(8, 8, bias=False)
    whole = copy.deepcopy(net).weight.detach()
    styles.parallelize_module(net, other["tp"], styles.ColwiseParallel())
    fsdp.fully_shard(net, mesh=other["dp"])
    mine = from_torch(net.weight.detach())
    check(torch.equal(mine.full_tensor(), whole), "values of FSDP2 beside tp")
    try:
        to_torch(mine)
    except ValueError as error:
        check("order of axes" in str(error), str(error))


def test_there_and_back(gloo4):
    assert gloo4.run(there_and_back) == [[]] * 4


@pytest.mark.parametrize("convert", [from_torch, to_torch])
def test_other_things_are_an_error(convert):
    with pytest.raises(TypeError, match="takes a mesh or a DTensor of"):
        convert(torch.ones(2))
