"""Both transports do the same: one body, run on simulated ranks and on four gloo processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from workers import Pool

from spmd.comm import C10dTransport, reduce_scatter_tensor, transport, use_transport
from spmd.mesh import DeviceMesh, init_device_mesh
from spmd.sim import run_ranks

LINE = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
GRID = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
TURNED = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("dp", "tp"))
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64]


def data(rank: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers: every order of summing gives the same bits."""
    source = torch.Generator().manual_seed(17 + rank)
    return torch.randint(-3, 4, shape, generator=source).to(dtype)


def reduce(rank: int, mesh: DeviceMesh, axis: str, op: str, dtype: torch.dtype, shape: tuple) -> torch.Tensor:
    t = transport()
    return t.wait_tensor(t.all_reduce(data(rank, *shape, dtype=dtype), op, t.group(mesh, axis)))


def gather(rank: int, mesh: DeviceMesh, axis: str, dtype: torch.dtype, shape: tuple) -> torch.Tensor:
    t = transport()
    return t.wait_tensor(
        t.all_gather_into_tensor(data(rank, *shape, dtype=dtype), mesh.size(axis), t.group(mesh, axis))
    )


def scatter(rank: int, mesh: DeviceMesh, axis: str, op: str, dtype: torch.dtype, shape: tuple) -> torch.Tensor:
    t = transport()
    x = data(rank, *shape, dtype=dtype)
    return t.wait_tensor(t.reduce_scatter_tensor(x, op, mesh.size(axis), t.group(mesh, axis)))


def exchange(rank: int, table: list[list[int]], columns: int) -> torch.Tensor:
    """`table[i][j]`: rows from rank i to rank j."""
    t = transport()
    x = data(rank, sum(table[rank]), columns)
    return t.wait_tensor(t.all_to_all_single(x, [row[rank] for row in table], table[rank], t.group(LINE, "dp")))


def send(rank: int, mesh: DeviceMesh, axis: str, src: int, shape: tuple) -> torch.Tensor:
    t = transport()
    return t.wait_tensor(t.broadcast(data(rank, *shape), src, t.group(mesh, axis)))


def objects(rank: int, mesh: DeviceMesh) -> list:
    return transport().gather_objects({"rank": rank}, mesh)


def objects_of_a_slice(rank: int, names: tuple[str, ...]) -> list:
    return transport().gather_objects(rank, GRID[names])


CASES = [
    *[(reduce, (mesh, "tp", op, torch.float32, (3, 2))) for mesh in (GRID, TURNED) for op in ("sum", "max")],
    *[(reduce, (LINE, "dp", op, torch.float32, (5,))) for op in ("product", "min")],
    *[(reduce, (LINE, "dp", "sum", dtype, (2, 3))) for dtype in DTYPES],
    *[(reduce, (LINE, "dp", "sum", torch.float32, shape)) for shape in ((), (0,), (2, 0))],
    *[(gather, (mesh, axis, torch.float32, (2, 3))) for mesh in (GRID, TURNED) for axis in ("dp", "tp")],
    *[(gather, (LINE, "dp", dtype, (1, 2))) for dtype in DTYPES],
    *[(gather, (LINE, "dp", torch.float32, shape)) for shape in ((0, 3), (2, 0))],
    *[(scatter, (mesh, axis, "sum", torch.float32, (4, 3))) for mesh in (GRID, TURNED) for axis in ("dp", "tp")],
    *[(scatter, (LINE, "dp", op, torch.float32, (8,))) for op in ("product", "min", "max")],
    *[(scatter, (LINE, "dp", "sum", dtype, (4, 2))) for dtype in DTYPES],
    *[(scatter, (LINE, "dp", "sum", torch.float32, shape)) for shape in ((0, 3), (4, 0))],
    (exchange, ([[1, 1, 1, 1]] * 4, 3)),
    (exchange, ([[2, 0, 1, 3], [0, 0, 0, 0], [1, 4, 0, 2], [0, 0, 5, 0]], 2)),
    (exchange, ([[0, 0, 0, 0]] * 4, 2)),
    (exchange, ([[1, 2, 0, 1]] * 4, 0)),
    *[(send, (mesh, "tp", src, (2, 3))) for mesh in (GRID, TURNED) for src in (0, 1)],
    (send, (LINE, "dp", 3, (0, 2))),
    (send, (LINE, "dp", 2, ())),
    *[(objects, (mesh,)) for mesh in (LINE, GRID, TURNED)],
    *[(objects_of_a_slice, (names,)) for names in (("tp",), ("dp",), ("tp", "dp"))],
]


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return a == b


def run_all(rank: int) -> list:
    return [fn(rank, *args) for fn, args in CASES]


def test_simulated_ranks_and_gloo_agree_on_every_case(gloo4: Pool) -> None:
    """One round trip for all cases; the results are compared bit by bit."""
    real, simulated = gloo4.run(run_all), run_ranks(run_all, 4)
    wrong = [
        f"{fn.__name__}{args} on rank {rank}: gloo {real[rank][i]}, threads {simulated[rank][i]}"
        for i, (fn, args) in enumerate(CASES)
        for rank in range(4)
        if not same(real[rank][i], simulated[rank][i])
    ]
    assert wrong == []


@pytest.mark.parametrize(
    "fn, args, results",
    [
        (objects, (TURNED,), [[{"rank": r} for r in (3, 1, 0, 2)]] * 4),
        (objects_of_a_slice, (("tp",),), [[0, 1], [0, 1], [2, 3], [2, 3]]),
        (objects_of_a_slice, (("tp", "dp"),), [[0, 2, 1, 3]] * 4),
    ],
)
def test_objects_come_in_the_order_of_the_mesh(fn: Callable, args: tuple, results: list) -> None:
    assert run_ranks(lambda rank: fn(rank, *args), 4) == results


def test_a_gather_puts_the_parts_in_the_order_of_the_axis() -> None:
    parts = [data(rank, 1, 2) for rank in range(4)]
    found = run_ranks(lambda rank: gather(rank, TURNED, "dp", torch.float32, (1, 2)), 4)
    assert torch.equal(found[0], torch.cat([parts[3], parts[0]])) and torch.equal(found[0], found[3])
    assert torch.equal(found[1], torch.cat([parts[1], parts[2]]))


def test_the_default_is_torch_distributed_and_overrides_nest() -> None:
    default, mine = transport(), C10dTransport()
    assert isinstance(default, C10dTransport)
    with use_transport(mine):
        assert transport() is mine
    assert transport() is default


@pytest.mark.parametrize(
    "name, args",
    [
        ("all_reduce", ("sum", "tp")),
        ("all_gather_into_tensor", (2, "tp")),
        ("reduce_scatter_tensor", ("sum", 2, "tp")),
        ("all_to_all_single", ([1, 3], [2, 2], "tp")),
        ("broadcast", (0, "tp")),
    ],
)
def test_a_collective_is_an_op_that_traces_to_plain_data_without_a_process_group(name: str, args: tuple) -> None:
    t = transport()
    op = getattr(t, name)
    graph = make_fx(lambda x: t.wait_tensor(op(x, *args)), tracing_mode="fake")(torch.ones(4, 2)).graph
    calls = [node for node in graph.nodes if node.op == "call_function"]
    assert [node.target for node in calls] == [op, t.wait_tensor]
    assert calls[0].args[1:] == args


def test_one_rank_gathers_its_own_object_without_a_process_group() -> None:
    assert transport().gather_objects("mine", init_device_mesh("cpu", (1, 1))) == ["mine"]


def scattered(rank: int) -> torch.Tensor:
    return reduce_scatter_tensor(random_terms()[rank], "sum", 0, (LINE, "dp")).wait()


def random_terms() -> torch.Tensor:
    """Of four ranks. In other orders they have other sums."""
    return torch.randn(4, 64, generator=torch.Generator().manual_seed(3)) * 100


def test_on_cpus_scattered_terms_are_added_in_the_order_of_the_ranks(gloo4: Pool):
    """What gloo adds by itself has other bits."""
    a, b, c, d = random_terms()
    found = torch.cat(gloo4.run(scattered))
    assert torch.equal(found, a + b + c + d)
    assert not torch.equal(found, d + c + b + a)
