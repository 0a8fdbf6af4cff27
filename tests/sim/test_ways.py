"""The same code on simulated ranks, on threads and on gloo processes gives the same bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from ways import WAYS, run, same
from workers import Pool

import spmd
from spmd import DeviceMesh, DTensor, Partial, Replicate, Shard, distribute_tensor
from spmd.comm import (
    all_gather_into_tensor_coalesced,
    all_gather_tensor,
    all_reduce,
    all_reduce_coalesced,
    all_to_all_single,
    broadcast,
    permute_tensor,
    reduce_scatter_tensor,
    reduce_scatter_tensor_coalesced,
    scatter,
)
from spmd.mesh import init_device_mesh, per_rank

NAMES = ("dp", "tp")
GROUPS = {
    "all": lambda mesh: [0, 1, 2, 3],
    "pairs": lambda mesh: [[0, 1], [2, 3]],
    "turned": lambda mesh: [[3, 1], [0, 2]],
    "axis": lambda mesh: (mesh, "dp"),
    "slice": lambda mesh: mesh["tp"],
    "name": lambda mesh: "ranks:3,0,2,1",
}


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=NAMES)


def data(*shape: int, seed: int = 0) -> torch.Tensor:
    """Small whole numbers: sums of them are exact in any order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).float()


def collectives(group: str) -> list:
    mesh = grid()
    to, x = GROUPS[group](mesh), data(4, 2) + mesh.get_rank()
    n = all_reduce(torch.ones((), dtype=torch.int64), "sum", to).item()
    ring, one_way = [(i + 1) % n for i in range(n)], [-1, 0, *[-1] * (n - 2)]
    return [
        *[all_reduce(x, op, to) for op in ("sum", "avg", "product", "min", "max")],
        all_reduce(x > 0, "min", to),
        *[all_gather_tensor(x, dim, to) for dim in (0, 1)],
        reduce_scatter_tensor(x, "sum", 0, to),
        reduce_scatter_tensor(x.repeat(1, 2), "max", 1, to),
        all_to_all_single(x, None, None, to),
        *[broadcast(x, src, to) for src in (0, 1)],
        scatter(x, 1, to),
        *[permute_tensor(x, pairs, to) for pairs in (ring, one_way)],
        *all_reduce_coalesced([x, x.long()], "sum", to),
        *all_gather_into_tensor_coalesced([x, x.long()], to),
        *reduce_scatter_tensor_coalesced([x, x.t().repeat(1, 2)], "sum", [0, 1], to),
    ]


def gradients(group: str) -> list:
    mesh = grid()
    to, x = GROUPS[group](mesh), (data(4, 2) + mesh.get_rank()).double().requires_grad_()
    y = broadcast(x, 1, to) * 2 + all_reduce(x, "max", to) + all_reduce(x, "product", to)
    z = reduce_scatter_tensor(all_gather_tensor(x, 0, to), "sum", 0, to)
    ((y + z) * (x.detach() + 1)).sum().backward()
    return [x.grad]


def mesh_collectives() -> list:
    mesh = grid()
    rank = mesh.get_rank()
    shard, whole = torch.zeros(3), torch.full((2,), 1.0) * rank
    spmd.mesh_scatter(shard, [data(3, seed=i) + rank for i in range(2)], mesh, "tp", group_src=1)
    spmd.mesh_broadcast(whole, mesh, "dp")
    uneven = data(5, 7)[rows(5, 2) :][: 3 - mesh.get_local_rank("dp")]
    return [shard, whole, spmd.shard_dim_alltoall(uneven, 0, 1, mesh, "dp")]


@per_rank
def rows(length: int, n: int) -> int:
    """The offset of this rank's rows along dp."""
    return -(-length // n) * grid().get_local_rank("dp")


def tensors(batch: int) -> list:
    """An MLP on DTensors, forward and backward: even, uneven and empty shards."""
    mesh = grid()
    x = distribute_tensor(data(batch, 4), mesh, [Shard(0), Replicate()])
    up = distribute_tensor(data(4, 6, seed=1).requires_grad_(), mesh, [Replicate(), Shard(1)])
    down = distribute_tensor(data(6, 3, seed=2).requires_grad_(), mesh, [Replicate(), Shard(0)])
    y = torch.relu(x @ up) @ down
    loss = y.sum()
    loss.backward()
    moved = y.redistribute(mesh, [Shard(1), Shard(0)])
    return [y.full_tensor(), loss.full_tensor(), up.grad, down.grad, moved, moved.full_tensor()]


def from_local() -> list:
    mesh = grid()
    mine = data(2, 3) + mesh.get_rank()
    terms = DTensor.from_local(mine, mesh, [Partial("max"), Shard(1)])
    return [terms.full_tensor(), (terms * 2).redistribute(mesh, [Shard(0), Replicate()])]


def made_by_torch() -> list:
    """Functions of torch in which plain tensors of its own meet DTensors, or shapes change in place."""
    mesh = grid()
    ids = distribute_tensor(torch.arange(7) % 3, mesh, [Shard(0), Replicate()])
    spectrum = torch.stft(data(64), 16, window=torch.ones(16), return_complex=True)
    spectrum = distribute_tensor(spectrum, mesh, [Replicate(), Shard(0)])
    return [x.full_tensor() for x in (F.one_hot(ids, 4), F.one_hot(ids), torch.istft(spectrum, 16))]


def uneven_from_local() -> list:
    mesh = grid()
    found = []
    for of in (data(3, 7), data(7, 3).mT):
        for options in ({"stride": of.stride()}, {}, {"run_check": True}):
            block = columns(of)
            x = DTensor.from_local(block, mesh, [Shard(1), Shard(1)], shape=(3, 7), **options)
            found += [x.full_tensor(), x.mT.redistribute(mesh, [Replicate(), Shard(0)]), str(x._spec)]
    return found


@per_rank
def columns(x: torch.Tensor) -> torch.Tensor:
    """The columns of this rank: 2, 2, 2 and 1."""
    at = grid().get_rank()
    return x[:, 2 * at : 2 * at + 2].clone()


def changed_in_place() -> list:
    mesh = grid()
    with torch.inference_mode():
        x = distribute_tensor(data(6, 5), mesh, [Shard(0), Shard(1)])
        outs = [x.detach_(), x.clone().t_(), x.clone().unsqueeze_(0)]
        return [out.full_tensor() for out in outs]


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).mT


def parametrized() -> list:
    mesh, net = grid(), nn.Linear(4, 4)
    net.weight.data = data(4, 4)
    net = spmd.distribute_module(net, mesh)
    nn.utils.parametrize.register_parametrization(net, "weight", Symmetric())
    net.weight.sum().backward()
    return [net.weight.detach().full_tensor(), net.parametrizations.weight.original.grad.full_tensor()]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 2)
        for i, p in enumerate(self.parameters()):
            p.data = data(*p.shape, seed=i) / 16

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.relu(self.up(x)))


def train_step(net: Net, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = net(x).sum()
    loss.backward()
    optimizer.step()
    return loss


def compiled(batch: int, dtype: torch.dtype) -> list:
    """A compiled training step, two times."""
    net = Net().to(dtype)
    optimizer = torch.optim.SGD(net.parameters(), lr=1 / 64)
    plan = {"up.*": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}}
    step = spmd.compile(train_step, grid(), params=plan, inputs={"x": {"dp": Shard(0)}})
    losses = [step(net, optimizer, data(batch, 4, seed=i).to(dtype)).full_tensor() for i in range(2)]
    return [*losses, *[p.full_tensor() for p in net.parameters()]]


def compiled_in_rank_order(batch: int) -> list:
    """The same where sums round: they are added in the order of the ranks."""
    with spmd.deterministic():
        return compiled(batch, torch.float32)


def on_a_slice(batch: int) -> list:
    """A module on the ranks' own slices of the mesh, eagerly and compiled; the slices are told apart and flattened."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))["dp", "tp"]
    net = spmd.distribute_module(Net(), mesh["tp"], params={"up.*": [Shard(0)], "down.weight": [Shard(1)]})
    net(distribute_tensor(data(batch, 4), mesh["tp"])).sum().backward()
    step = spmd.compile(lambda net, x: net(x), mesh["tp"], inputs={"x": [Shard(0)]})
    flat = mesh.flatten("all")
    found = [net.up.weight.grad, step(net, data(batch, 4)).full_tensor(), flat.mesh, flat.get_local_rank()]
    return [*found, mesh.get_rank() in flat, all_reduce(data(2), "sum", flat)]


def in_inference_mode() -> list:
    with torch.inference_mode():
        mesh = grid()
        x = distribute_tensor(data(6, 4), mesh, [Shard(0), Shard(1)])
        step = spmd.compile(lambda x, w, b: F.linear(x, w, b), mesh, inputs={"x": {"dp": Shard(0)}})
        return [mesh["tp"].mesh, (x @ x.mT).full_tensor(), step(data(3, 4), data(5, 4), data(5)).full_tensor()]


Cases = list[tuple[Callable, tuple]]

CASES: Cases = [
    *[(collectives, (group,)) for group in GROUPS],
    *[(gradients, (group,)) for group in GROUPS],
    (mesh_collectives, ()),
    *[(tensors, (batch,)) for batch in (4, 5, 1)],
    *[(fn, ()) for fn in (from_local, made_by_torch, uneven_from_local, changed_in_place, parametrized)],
    (compiled_in_rank_order, (3,)),
]

COMPILED: Cases = [
    *[(on_a_slice, (batch,)) for batch in (4, 1)],
    (in_inference_mode, ()),
    *[(compiled, (batch, torch.float64)) for batch in (4, 3, 1)],  # exact, whatever order gloo adds four ranks in
    *[(compiled_in_rank_order, (batch,)) for batch in (4, 1)],
]


def each(cases: Cases) -> list:
    return [fn(*args) for fn, args in cases]


def check(gloo4: Pool, cases: Cases) -> None:
    found = {way: run(way, gloo4, each, cases) for way in WAYS}
    wrong = [
        f"{fn.__name__}{args} on rank {rank}: {way} gives {found[way][rank][i]}, gloo {found['gloo'][rank][i]}"
        for i, (fn, args) in enumerate(cases)
        for way in WAYS[:2]
        for rank in range(4)
        if not same(found[way][rank][i], found["gloo"][rank][i])
    ]
    assert wrong == []


def test_cases_give_the_same_bits_three_ways(gloo4: Pool) -> None:
    check(gloo4, CASES)


def test_compiled_cases_give_the_same_bits_three_ways(gloo4: Pool) -> None:
    check(gloo4, COMPILED)


@pytest.mark.parametrize("batch", [4, 5, 1])
def test_the_simulated_tensors_are_those_of_one_device(batch: int) -> None:
    x, up, down = data(batch, 4), data(4, 6, seed=1).requires_grad_(), data(6, 3, seed=2).requires_grad_()
    y = torch.relu(x @ up) @ down
    y.sum().backward()
    for rank, (found, loss, *_, gathered) in enumerate(run("simulated", None, tensors, batch)):
        assert torch.equal(found, y) and torch.equal(gathered, y) and torch.equal(loss, y.sum()), rank
