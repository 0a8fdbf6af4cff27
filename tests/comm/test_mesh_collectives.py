"""Collectives along a mesh axis give, on every group of the axis, the result of one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from workers import Pool

import spmd
from spmd import _torch
from spmd.comm import all_reduce, checked, members
from spmd.comm.chunk import chunk
from spmd.comm.mesh_collectives import chunks
from spmd.mesh import DeviceMesh, as_rank, init_device_mesh
from spmd.sim import run_ranks

LINE = init_device_mesh("cpu", (4,), mesh_dim_names=("x",))
GRID = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
TURNED = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("dp", "tp"))
MESHES = [(LINE, "x"), (GRID, "dp"), (GRID, "tp"), (TURNED, 0), (TURNED, -1), (init_device_mesh("cpu", (4, 1)), 1)]
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.int16, torch.complex64]


def data(seed: int, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def row(mesh: DeviceMesh, axis: int | str, rank: int) -> tuple[int, ...]:
    return mesh.ranks_along(axis, mesh.coordinate_of(rank))


# Each case: what a rank calls, and what it must get, from the inputs of all ranks.


def broadcast(rank: int, mesh: DeviceMesh, axis, src: int, dtype: torch.dtype, shape, turned: bool, later: bool):
    x = data(rank, shape, dtype)
    x = x.t() if turned else x
    work = spmd.mesh_broadcast(x, mesh, axis, async_op=later, group_src=src)
    assert (work is not None) == later
    if work:
        assert work.wait() and work.is_completed()
    return x


def broadcast_wanted(rank: int, mesh: DeviceMesh, axis, src: int, dtype: torch.dtype, shape, turned: bool, later: bool):
    x = data(row(mesh, axis, rank)[src], shape, dtype)
    return x.t() if turned else x


def scatter(rank: int, mesh: DeviceMesh, axis, src: int, dtype: torch.dtype, rows: int, later: bool):
    n, place = mesh.size(axis), mesh.get_local_rank(axis)
    whole = data(rank, (rows, 3), dtype)
    output = torch.full((chunk(rows, n, place)[1], 3), 7, dtype=dtype)
    parts = chunks(whole, 0, n) if place == src else None
    work = spmd.mesh_scatter(output, parts, mesh, axis, later, group_src=src)
    if work:
        work.wait()
    return output


def scatter_wanted(rank: int, mesh: DeviceMesh, axis, src: int, dtype: torch.dtype, rows: int, later: bool):
    ranks = row(mesh, axis, rank)
    return chunks(data(ranks[src], (rows, 3), dtype), 0, len(ranks))[ranks.index(rank)]


def turn(rank: int, mesh: DeviceMesh, axis, shape, gather_dim: int, shard_dim: int, dtype: torch.dtype, told: bool):
    n, place = mesh.size(axis), mesh.get_local_rank(axis)
    mine = chunks(data(99, shape, dtype), gather_dim, n)[place]
    sizes = [chunk(shape[gather_dim], n, i)[1] for i in range(n)] if told else None
    return spmd.shard_dim_alltoall(mine, gather_dim, shard_dim, mesh, axis, gather_sizes=sizes)


def turn_wanted(rank: int, mesh: DeviceMesh, axis, shape, gather_dim: int, shard_dim: int, dtype: torch.dtype, told):
    return chunks(data(99, shape, dtype), shard_dim, mesh.size(axis))[row(mesh, axis, rank).index(rank)]


CASES: list[tuple[Callable, Callable, tuple]] = [
    *[(broadcast, broadcast_wanted, (*along, 0, torch.float32, (2, 3), False, later))
      for along in MESHES for later in (0, 1)],
    *[(broadcast, broadcast_wanted, (LINE, 0, 2, dtype, (3, 2), turned, 0)) for dtype in DTYPES for turned in (0, 1)],
    *[(broadcast, broadcast_wanted, (GRID, 0, 1, torch.float32, shape, False, 0)) for shape in ((), (0,), (0, 3))],
    *[(scatter, scatter_wanted, (m, a, 0, torch.float32, 8, later)) for m, a in MESHES for later in (0, 1)],
    *[(scatter, scatter_wanted, (LINE, 0, 3, dtype, 5, 0)) for dtype in DTYPES],
    *[(scatter, scatter_wanted, (LINE, 0, 1, torch.float32, rows, 0)) for rows in (0, 1, 3, 6)],
    *[(turn, turn_wanted, (m, a, (8, 4), 0, 1, torch.float32, told)) for m, a in MESHES for told in (0, 1)],
    *[(turn, turn_wanted, (LINE, 0, shape, g, s, torch.float32, told))
      for shape in ((5, 7), (3, 2), (1, 1), (0, 4), (4, 0), (6, 9)) for g, s in ((0, 1), (1, 0)) for told in (0, 1)],
    *[(turn, turn_wanted, (LINE, 0, (5, 3, 6), g, s, torch.float32, 0))
      for g in range(3) for s in (-1, -2, -3) if g != s + 3],
    *[(turn, turn_wanted, (LINE, 0, (5, 7), 1, 0, dtype, 0)) for dtype in DTYPES],
]  # fmt: skip


def run_all(rank: int) -> list:
    return [fn(rank, *args) for fn, _, args in CASES]


def wrong_cases(found: list[list]) -> list[str]:
    return [
        f"{fn.__name__}{args} on rank {rank}: {found[rank][i]}, not {wanted(rank, *args)}"
        for i, (fn, wanted, args) in enumerate(CASES)
        for rank in range(4)
        if found[rank][i].dtype != wanted(rank, *args).dtype or not torch.equal(found[rank][i], wanted(rank, *args))
    ]


def test_every_case_on_gloo(gloo4: Pool) -> None:
    assert wrong_cases(gloo4.run(run_all)) == []


def test_every_case_on_simulated_ranks() -> None:
    assert wrong_cases(run_ranks(run_all, 4)) == []


# What is sent


class Counted(torch.distributed.ProcessGroup):
    """Forwards every collective to a group, and records its kind and the bytes that this rank sends to others."""

    def __init__(self, group: torch.distributed.ProcessGroup) -> None:
        super().__init__(group.rank(), group.size())
        self.of, self.calls = group, []

    def alltoall_base(self, out, x, out_splits, in_splits, options):
        row = x.numel() // x.shape[0] * x.element_size() if x.shape[0] else 0
        self.calls.append(("all_to_all", sum(n * row for i, n in enumerate(in_splits) if i != self.of.rank())))
        return self.of.alltoall_base(out, x, out_splits, in_splits, options)

    all_to_all_single = alltoall_base

    def _other(self, kind: str, *args):
        self.calls.append((kind, args))
        return getattr(self.of, kind)(*args)


for _kind in ("allreduce", "allgather", "_allgather_base", "allgather_into_tensor_coalesced", "broadcast", "scatter",
              "all_gather_single_coalesced", "all_gather_single", "alltoall"):  # fmt: skip
    if hasattr(torch.distributed.ProcessGroup, _kind):
        setattr(Counted, _kind, lambda self, *args, kind=_kind: self._other(kind, *args))


def counted_turn(rank: int, shape: tuple[int, int]) -> tuple[list, int]:
    name = members(LINE).name
    group = Counted(torch.distributed.group.WORLD)
    before = _torch.group_named(name)
    _torch.replace_group(name, group)
    mine = chunks(data(3, shape), 0, 4)[rank]
    sizes = [chunk(shape[0], 4, i)[1] for i in range(4)]
    spmd.shard_dim_alltoall(mine, 0, 1, LINE, 0, gather_sizes=sizes)
    _torch.replace_group(name, before)
    return group.calls, mine.numel() * 4


def test_a_turn_sends_all_but_what_a_rank_keeps_and_nothing_else(gloo4: Pool) -> None:
    """Counted at the process group: (n-1)/n of the local bytes in one all-to-all, where a gather would send all."""
    for calls, nbytes in gloo4.run(counted_turn, (16, 8)):
        assert calls == [("all_to_all", nbytes * 3 // 4)]


def test_so_does_an_uneven_turn(gloo4: Pool) -> None:
    for rank, (calls, nbytes) in enumerate(gloo4.run(counted_turn, (6, 10))):
        kept = chunk(10, 4, rank)[1] * nbytes // 10
        assert calls == [("all_to_all", nbytes - kept)]


# Gradients, tensors without data, mistakes


def turn_with_gradient(rank: int) -> bool:
    mine = chunks(data(5, (5, 7), torch.float64), 0, 4)[rank].requires_grad_()
    weight = chunks(data(6, (5, 7), torch.float64), 1, 4)[rank]
    (spmd.shard_dim_alltoall(mine, 0, 1, LINE, "x") * weight).sum().backward()
    return torch.equal(mine.grad, chunks(data(6, (5, 7), torch.float64), 0, 4)[rank])


def test_the_gradient_of_a_turn_is_the_turn_back(gloo4: Pool) -> None:
    assert gloo4.run(turn_with_gradient) == [True] * 4


def without_data(x: torch.Tensor) -> torch.Tensor:
    return spmd.shard_dim_alltoall(x, 0, 1, LINE, 0)


@pytest.mark.parametrize("make", ["meta", "fake"])
def test_a_tensor_without_data_gives_the_shape(make: str) -> None:
    fakes = _torch.FakeTensorMode() if make == "fake" else torch.device("meta")
    with as_rank(3, 4), fakes:
        assert without_data(torch.empty(3, 5)).shape == (12, 0)
        assert spmd.shard_dim_alltoall(torch.empty(0, 8), 0, 1, LINE, 0, gather_sizes=[2, 2, 1, 0]).shape == (5, 2)


def test_nothing_is_done_to_meta_tensors() -> None:
    x = torch.empty(2, device="meta")
    assert spmd.mesh_broadcast(x, LINE) is None and spmd.mesh_scatter(x, [x] * 4, LINE) is None


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda: spmd.shard_dim_alltoall(torch.ones(2, 2), 1, -1, LINE, 0), "are both dim 1"),
        (lambda: spmd.shard_dim_alltoall(torch.ones(2, 2), 2, 0, LINE, 0), r"dim 2 is not in a tensor of shape"),
        (lambda: spmd.shard_dim_alltoall(torch.ones(2, 2), 0, 1, LINE, 0, gather_sizes=[1, 2]), "do not fit dim 0"),
        (lambda: spmd.shard_dim_alltoall(torch.ones(2, 2), 0, 1, LINE, 0, gather_sizes=[1] * 4), "do not fit dim 0"),
        (lambda: spmd.mesh_broadcast(torch.ones(2), LINE, "y"), "no axis 'y'"),
        (lambda: spmd.mesh_broadcast(torch.ones(2), LINE, group_src=4), r"group_src 4 is not in 0\.\.3"),
        (lambda: spmd.mesh_scatter(torch.ones(2), None, LINE), "no list on the source"),
        (lambda: spmd.mesh_scatter(torch.ones(2), [torch.ones(2)], LINE), "a list of 1 tensors on the source"),
        (lambda: spmd.mesh_scatter(torch.ones(2), [torch.ones(3)] * 4, LINE), "does not fit the output"),
        (lambda: spmd.mesh_scatter(torch.ones(2), [torch.ones(2).int()] * 4, LINE), "int32"),
        (lambda: spmd.mesh_broadcast(torch.ones(2), DeviceMesh("cpu", [1, 2])), "rank 0 is not in"),
    ],
)  # fmt: skip
def test_a_mistake_is_an_error_before_anything_is_sent(wrong: Callable, message: str) -> None:
    with pytest.raises((ValueError, IndexError, RuntimeError), match=message):
        wrong()


def unlike_broadcast(rank: int) -> str:
    x = torch.ones(2 + (rank == 2))
    try:
        with checked():
            spmd.mesh_broadcast(x, LINE)
    except RuntimeError as error:
        return str(error) if all_reduce(torch.ones(1), "sum", LINE).item() == 4 else "the group is broken"
    return "no error"


def test_ranks_that_broadcast_other_shapes_learn_it_in_debug_mode(gloo4: Pool) -> None:
    for said in gloo4.run(unlike_broadcast):
        assert "rank 0 calls mesh_broadcast(0) of float32 [2] on cpu" in said
        assert "rank 2 calls mesh_broadcast(0) of float32 [3] on cpu" in said
