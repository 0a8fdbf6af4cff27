"""torch.distributed's own API in one process that plays four ranks gives the results of four processes on gloo."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree
from versions import (
    GLOO_HAS_ALL_TO_ALL_OF_LISTS,
    NEW_GROUPS_KEEP_ORDER,
    all_gather_autograd,
    all_gather_single,
    reduce_scatter_single,
)
from workers import Pool

from spmd import init_device_mesh
from spmd.comm import CommTensor, all_reduce, comm_tensors
from spmd.mesh import DeviceMesh, current_rank, per_rank
from spmd.sim import LocalTensor, LocalTensorMode, PerRank
from spmd.sim.local_int import pick

N = 4
Op = dist.ReduceOp


@per_rank
def data(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers of each rank's own: every order of summing gives the same bits."""
    source = torch.Generator().manual_seed(1000 * seed + current_rank())
    return torch.randint(-3, 4, shape, generator=source).to(dtype)


@per_rank
def only_on(rank: int, value: Any) -> Any:
    return value if current_rank() == rank else None


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def done(work: dist.Work) -> None:
    work.wait()
    assert isinstance(work, dist.Work)


# ---- what an ordinary program does ------------------------------------------------------------


def reduces(op: Any, dtype: torch.dtype = torch.float32) -> Callable:
    def case() -> torch.Tensor:
        x = data(3, 2, dtype=dtype)
        dist.all_reduce(x, op)
        return x

    return case


def all_reduces_later() -> Any:
    x, y = data(3), data(2, 2, seed=1)
    works = [dist.all_reduce(x, async_op=True), dist.all_reduce(y, Op.MAX, async_op=True)]
    for work in works:
        done(work)
    return x, y


def all_reduces_rows() -> Any:
    x, y = data(3), data(3)
    row, column = mesh().get_all_groups()
    dist.all_reduce(x, group=row)
    dist.all_reduce(y, group=column)
    return x, y


def all_reduces_complex() -> torch.Tensor:
    x = data(2, dtype=torch.complex64)
    dist.all_reduce(x)
    return x


def all_reduces_part() -> torch.Tensor:
    x = data(3, 4)
    dist.all_reduce(x[1])
    dist.all_reduce(x[2].view(2, 2))
    return x


def all_reduces_several() -> Any:
    x, y = data(2), data(3, seed=1)
    dist.all_reduce_coalesced([x, y])
    with dist._coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(y)
    return x, y


def broadcasts() -> Any:
    x, y, z = data(2), data(2, seed=1), data(2, dtype=torch.int64)
    dist.broadcast(x, 3)
    dist.broadcast(y, group_src=1, group=mesh().get_group("tp"))
    done(dist.broadcast(z, src=2, async_op=True))
    return x, y, z


def broadcasts_from_the_first_of_each_row() -> torch.Tensor:
    group, x = mesh().get_group("tp"), data(2)
    dist.broadcast(x, dist.get_global_rank(group, 0), group)
    return x


def reduce() -> Any:
    x, y = data(3), data(3, seed=1)
    dist.reduce(x, 2)
    dist.reduce(y, 0, Op.PRODUCT)
    return only_on(2, x), only_on(0, y)


def all_gathers() -> Any:
    x, outs, rows = data(2, 3), [torch.zeros(2, 3) for _ in range(N)], [torch.zeros(2, 3) for _ in range(2)]
    dist.all_gather(outs, x)
    dist.all_gather(rows, x, mesh().get_group("tp"))
    scalars = [torch.zeros(()) for _ in range(N)]
    done(dist.all_gather(scalars, x[0, 0].clone(), async_op=True))
    return outs, rows, scalars


def all_gathers_into_tensor() -> Any:
    x, joined, row = data(2, 3), torch.zeros(8, 3), torch.zeros(4, 3)
    dist.all_gather_into_tensor(joined, x)
    done(dist.all_gather_into_tensor(row, x, mesh().get_group("tp"), async_op=True))
    return joined, row


def all_gathers_several() -> Any:
    x, y = data(2), data(3, seed=1)
    lists = [[torch.zeros(2), torch.zeros(3)] for _ in range(N)]
    dist.all_gather_coalesced(lists, [x, y])
    return lists


def reduce_scatters() -> Any:
    x, out = data(N, 3), torch.zeros(3)
    dist.reduce_scatter(out, list(x.unbind()), Op.MAX)
    return out


def reduce_scatters_tensor() -> Any:
    x, out, half = data(8, 3), torch.zeros(2, 3), torch.zeros(4, 3)
    dist.reduce_scatter_tensor(out, x)
    done(dist.reduce_scatter_tensor(half, x, Op.MIN, mesh().get_group("dp"), async_op=True))
    return out, half


def all_to_alls() -> Any:
    x = data(N, 3)
    outs = [torch.zeros(3) for _ in range(N)]
    dist.all_to_all(outs, list(x.unbind()))
    return outs


def all_to_alls_single() -> Any:
    x, out = data(8, 3), torch.zeros(8, 3)
    dist.all_to_all_single(out, x)
    rank = dist.get_rank()
    uneven = torch.zeros(N * rank, 3)  # every rank sends j rows to rank j
    dist.all_to_all_single(uneven, x[:6], [rank] * N, [0, 1, 2, 3])
    own = torch.zeros(2 + rank, 3)  # rank r keeps r rows, and sends two rows to the next
    splits = own_splits()
    dist.all_to_all_single(own, x[: 2 + rank], splits[0], splits[1])
    return out, uneven, own


@per_rank
def own_splits() -> tuple[list[int], list[int]]:
    rank = current_rank()
    return [[{rank: rank, (rank + step) % N: 2}.get(i, 0) for i in range(N)] for step in (-1, 1)]


def gathers() -> Any:
    x, y = data(2), data(3, seed=1)
    outs = only_on(1, [torch.zeros(2) for _ in range(N)])
    dist.gather(x, outs, 1)
    pairs = first_of_each_row([torch.zeros(3) for _ in range(2)])
    done(dist.gather(y, pairs, group=mesh().get_group("tp"), group_dst=0, async_op=True))
    return outs, pairs


@per_rank
def first_of_each_row(value: Any) -> Any:
    return value if current_rank() % 2 == 0 else None


def scatters() -> Any:
    x, out, other = data(N, 3), torch.zeros(3), torch.zeros(3)
    dist.scatter(out, only_on(3, list(x.unbind())), 3)
    parts = first_of_each_row(list(x[:2].unbind()))
    done(dist.scatter(other, parts, group=mesh().get_group("tp"), group_src=0, async_op=True))
    return out, other


def objects() -> Any:
    rank = dist.get_rank()
    every, row, chosen, mine = [None] * N, [None] * 2, [f"of {3}", own_object()], [None]
    dist.all_gather_object(every, own_object())
    dist.all_gather_object(row, rank, mesh().get_group("tp"))
    dist.broadcast_object_list(chosen, 2)
    dist.scatter_object_list(mine, only_on(1, [{"to": i} for i in range(N)]), 1)
    found = only_on(2, [None] * N)
    dist.gather_object(own_object(), found, 2)
    return every, row, chosen, mine, found


@per_rank
def own_object() -> Any:
    return {"rank": current_rank(), "name": "x" * current_rank()}


def ring() -> Any:
    rank, x, out = dist.get_rank(), data(2), torch.zeros(2)
    works = [dist.isend(x, (rank + 1) % N), dist.irecv(out, (rank - 1) % N)]
    for work in works:
        done(work)
    return out


def batched_ring() -> Any:
    rank, x, out, other = dist.get_rank(), data(2), torch.zeros(2), torch.zeros(2)
    ops = [
        dist.P2POp(dist.irecv, out, (rank - 1) % N),
        dist.P2POp(dist.isend, x, (rank + 1) % N),
        dist.P2POp(dist.irecv, other, (rank + 1) % N, tag=7),
        dist.P2POp(dist.isend, x * 2, (rank - 1) % N, tag=7),
    ]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    return out, other


def messages_in_order() -> Any:
    rank, first, second = dist.get_rank(), torch.zeros(2), torch.zeros(2)
    receives = [dist.irecv(x, (rank + 2) % N) for x in (first, second)]
    sends = [dist.isend(data(2, seed=seed), (rank + 2) % N) for seed in (1, 2)]
    for work in [*reversed(receives), *sends]:
        work.wait()
    return first, second


def from_a_neighbour() -> Any:
    group, x, out = mesh().get_group("tp"), data(2), torch.zeros(2)
    other = 1 - dist.get_rank(group)
    work = dist.isend(x, group=group, group_dst=other)
    dist.recv(out, group=group, group_src=other)
    work.wait()
    return out


def groups_of_ones_own() -> Any:
    world, group = dist.group.WORLD, mesh().get_group("tp")
    dist.barrier()
    dist.barrier(group)
    return [
        dist.is_initialized(), dist.get_rank(), dist.get_world_size(), dist.get_backend(), dist.get_rank(world),
        dist.get_rank(group), dist.get_world_size(group), dist.get_process_group_ranks(group),
        dist.get_process_group_ranks(None), dist.get_global_rank(group, 1), dist.get_backend(group),
        dist.get_group_rank(group, dist.get_rank()), mesh().get_group("tp") is group, dist.get_rank(None),
    ]  # fmt: skip


def permuted() -> Any:
    group, x, outs = dist.new_group([2, 0, 3, 1]), data(2), [torch.zeros(2) for _ in range(N)]
    dist.all_gather(outs, x, group)
    dist.broadcast(x, group_src=1, group=group)
    return outs, x, dist.get_rank(group), dist.get_process_group_ranks(group)


def subgroups() -> Any:
    mine, every = dist.new_subgroups(2)
    x = data(2)
    dist.all_reduce(x, group=mine)
    return x, len(every), dist.get_process_group_ranks(mine)


def mesh_from_a_group() -> Any:
    group, x = mesh().get_group("dp"), data(2)
    made = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("dp",))
    dist.all_reduce(x, group=made.get_group())
    return x, made.get_group() is group, made.get_local_rank()


def spmd_functional() -> Any:
    group = mesh().get_group("tp")
    return all_reduce(data(2), "sum", group) + all_reduce(data(2), "max", dist.group.WORLD)


def torch_functional() -> Any:
    group, x = mesh().get_group("tp"), data(4, 2)
    return (
        funcol.all_reduce(x, "sum", group) + 0,
        funcol.all_gather_tensor(x, 1, group) + 0,
        funcol.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD) + 0,
        funcol.all_to_all_single(x, None, None, group) + 0,
        funcol.broadcast(x, 2, dist.group.WORLD) + 0,
    )


def torch_gradients() -> Any:
    x = data(2).requires_grad_()
    y = all_gather_autograd(x, 0, mesh().get_group("tp"))
    (y * data(4, seed=1)).sum().backward()
    return x.grad


CASES: dict[str, Callable] = {
    **{f"all_reduce {op}": reduces(getattr(Op, op)) for op in "SUM MIN MAX PRODUCT".split()},
    **{f"all_reduce {op} of ints": reduces(getattr(Op, op), torch.int32) for op in "SUM BAND BOR BXOR".split()},
    **{
        case.__name__: case
        for case in (
            all_reduces_later, all_reduces_rows, all_reduces_complex, all_reduces_part, all_reduces_several, broadcasts,
            broadcasts_from_the_first_of_each_row, reduce, all_gathers, all_gathers_into_tensor, all_gathers_several,
            reduce_scatters, reduce_scatters_tensor, all_to_alls, all_to_alls_single, gathers, scatters, objects, ring,
            batched_ring, messages_in_order, from_a_neighbour, groups_of_ones_own, permuted, subgroups,
            mesh_from_a_group, spmd_functional, torch_functional, torch_gradients,
        )
    },
}  # fmt: skip
if not GLOO_HAS_ALL_TO_ALL_OF_LISTS:
    del CASES["all_to_alls"]


def played(name: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch's, of names that it wants to be rid of
        return CASES[name]()


def on_rank(rank: int, names: list[str]) -> dict[str, Any]:
    return {name: pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, played(name)) for name in names}


@functools.cache
def _on_gloo(pool: Pool) -> list[dict[str, Any]]:
    return pool.run(on_rank, list(CASES))


def of_rank(tree: Any, rank: int) -> Any:
    """One rank's part of a result for all ranks."""

    def own(x: Any) -> Any:
        return x.local[rank] if isinstance(x, LocalTensor) else pick(x, rank)

    return pytree.tree_map(own, pytree.tree_map(own, tree))


def same(a: Any, b: Any) -> bool:
    (xs, of_a), (ys, of_b) = pytree.tree_flatten(a), pytree.tree_flatten(b)
    return of_a == of_b and all(
        (x.dtype == y.dtype and torch.equal(x, y)) if isinstance(x, torch.Tensor) else type(x) is type(y) and x == y
        for x, y in zip(xs, ys, strict=True)
    )


@pytest.mark.parametrize("name", CASES)
def test_a_program_gives_what_it_gives_on_gloo(gloo4: Pool, name: str) -> None:
    with LocalTensorMode(N):
        found = played(name)
    for rank, expected in enumerate(_on_gloo(gloo4)):
        assert same(of_rank(found, rank), expected[name]), (rank, of_rank(found, rank), expected[name])


# ---- what gloo does not do --------------------------------------------------------------------


@pytest.fixture
def four() -> Iterator[LocalTensorMode]:
    with LocalTensorMode(N) as mode:
        yield mode


def test_an_average_is_the_sum_divided(four: LocalTensorMode) -> None:
    x = torch.ones(2) * dist.get_rank()
    dist.all_reduce(x, Op.AVG)
    assert x.reconcile().tolist() == [1.5, 1.5]


def test_gathered_tensors_may_be_stacked(four: LocalTensorMode) -> None:
    """As on NCCL."""
    x, stacked, out = torch.ones(3) * dist.get_rank(), torch.zeros(4, 3), torch.zeros(1, 3)
    all_gather_single(stacked, x)
    assert stacked.reconcile()[:, 0].tolist() == [0, 1, 2, 3]
    reduce_scatter_single(out, stacked)
    assert [y[0, 0].item() for y in out.local.values()] == [0, 4, 8, 12]


def test_a_message_from_anyone_says_who_sent_it(four: LocalTensorMode) -> None:
    rank, out = dist.get_rank(), torch.zeros(1)
    dist.send(torch.ones(1) * rank, (rank + 1) % N)
    assert of_rank(dist.recv(out), 2) == 1 and out.local[2].item() == 1
    given = [None, None]
    dist.send_object_list([rank, "same"], (rank + 1) % N)
    dist.recv_object_list(given, (rank - 1) % N)
    assert of_rank(given, 0) == [3, "same"]


def test_ranks_that_go_ways_of_their_own_are_played_apart(four: LocalTensorMode) -> None:
    x, out = torch.ones(2) * dist.get_rank(), torch.zeros(2)
    with LocalTensorMode({1}):
        dist.send(x, 3)
    with LocalTensorMode({3}):
        dist.recv(out, 1)
    assert [t.tolist() for t in out.local.values()] == [[0, 0], [0, 0], [0, 0], [1, 1]]


def test_a_part_of_the_ranks_has_a_group(four: LocalTensorMode) -> None:
    unsorted = {"sort_ranks": False} if NEW_GROUPS_KEEP_ORDER else {}
    x, pair = torch.ones(1), dist.new_group([3, 1], **unsorted)
    with LocalTensorMode({1, 3}):
        dist.all_reduce(x, group=pair)
        assert of_rank(dist.get_rank(pair), 3) == (0 if unsorted else 1)
        assert dist.new_group([0, 2]) == dist.GroupMember.NON_GROUP_MEMBER
    assert [t.item() for t in x.local.values()] == [1, 2, 1, 2]
    assert of_rank(dist.get_rank(pair), 0) == -1


def test_a_plain_tensor_is_the_same_on_all_ranks() -> None:
    x = torch.ones(2)
    with LocalTensorMode(N):
        dist.all_reduce(x)
    assert type(x) is torch.Tensor and x.tolist() == [4, 4]


def test_a_list_for_all_ranks_is_written_on_the_root_alone(four: LocalTensorMode) -> None:
    outs = [torch.zeros(1) for _ in range(N)]
    dist.gather(torch.ones(1) * dist.get_rank(), outs, 2)
    assert [out.local[2].item() for out in outs] == [0, 1, 2, 3] and outs[3].local[1].item() == 0


def test_what_is_sent_is_written_down(four: LocalTensorMode) -> None:
    rank, x, out = dist.get_rank(), torch.zeros(2), torch.zeros(2)
    dist.all_gather([torch.zeros(2) for _ in range(N)], x)
    dist.scatter(out, only_on(1, [torch.zeros(2) for _ in range(N)]), 1)
    dist.send(x, (rank + 1) % N)
    dist.recv(out, (rank - 1) % N)
    assert [(s.step, s.kind, s.nbytes) for s in four.sent if s.rank == 1] == [
        (0, "all_gather", 8), (1, "scatter", 32), (2, "send", 8)
    ]  # fmt: skip
    assert [s.nbytes for s in four.sent if s.kind == "scatter"] == [0, 32, 0, 0]
    assert {s.where.split(":")[0] for s in four.sent} == {"test_local_c10d.py"}


# ---- traced programs --------------------------------------------------------------------------


def step(x: torch.Tensor, group: Any = None) -> torch.Tensor:
    outs = [torch.empty_like(x), torch.empty_like(x)]
    dist.all_reduce(CommTensor(x), group=group, async_op=True)
    dist.all_gather(comm_tensors(outs), x, group=group)
    return outs[0] + 2 * outs[1]


def traced_for_gloo(rank: int, program: Any) -> torch.Tensor:
    return program(torch.ones(2) * rank)


@pytest.mark.parametrize("tracing", ["fake", "symbolic"])
def test_a_comm_tensor_program_runs_where_it_was_traced(four: LocalTensorMode, tracing: str) -> None:
    group = mesh().get_group("tp")
    program = make_fx(lambda x: step(x, group), tracing_mode=tracing)(torch.ones(2))
    assert {n.args[-1] for n in program.graph.nodes if n.name.startswith("all_")} == {"ranks:0,1|2,3"}
    out = program(torch.ones(2) * dist.get_rank())
    assert [x.tolist() for x in out.local.values()] == [[3, 3], [3, 3], [15, 15], [15, 15]]


def test_functional_collectives_are_traced_with_plain_names(four: LocalTensorMode) -> None:
    group, x = mesh().get_group("tp"), torch.ones(1) * dist.get_rank()
    for fn in (lambda x: all_reduce(x, "sum", group), lambda x: funcol.all_reduce(x, "sum", group)):
        program = make_fx(fn, tracing_mode="fake")(x)
        assert [n.args[1:] for n in program.graph.nodes if n.name == "all_reduce"] == [("sum", "ranks:0,1|2,3")]
        assert [y.item() for y in program(x).local.values()] == [1, 1, 5, 5]


def from_spelled_rows(rank: int) -> float:
    """A name that lists several groups, on real ranks."""
    return all_reduce(torch.ones(1) * rank, "sum", "ranks:0,1|2,3").item()


def test_a_name_that_spells_several_groups_works_on_gloo(gloo4: Pool) -> None:
    assert gloo4.run(from_spelled_rows) == [1, 1, 5, 5]


# ---- errors -----------------------------------------------------------------------------------


def not_all_come() -> None:
    x = torch.ones(1)
    with LocalTensorMode({0, 1}):
        dist.all_reduce(x)


def other_shapes() -> None:
    dist.all_reduce(torch.ones(2 + dist.get_rank() // 3))


def other_places() -> None:
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(1), group=group)


def nobody_sends() -> None:
    dist.recv(torch.zeros(1), (dist.get_rank() + 1) % N)


def other_tag() -> None:
    dist.send(torch.ones(1), (dist.get_rank() + 1) % N, tag=1)
    dist.irecv(torch.zeros(1), (dist.get_rank() - 1) % N, tag=2).wait()


def nobody_receives() -> None:
    dist.send(torch.ones(1), (dist.get_rank() + 1) % N)


def never_arrives() -> None:
    dist.irecv(torch.zeros(1), (dist.get_rank() + 1) % N)


def other_size() -> None:
    dist.send(torch.ones(1), (dist.get_rank() + 1) % N)
    dist.recv(torch.zeros(2), (dist.get_rank() - 1) % N)


def once_a_rank() -> None:
    per_rank(lambda: dist.all_reduce(torch.ones(1)))()


def into_plain() -> None:
    dist.all_to_all_single(OUTSIDE, torch.arange(4.0) + dist.get_rank())


def received_into_plain() -> None:
    dist.send(torch.ones(4), (dist.get_rank() + 1) % N)
    dist.recv(OUTSIDE, (dist.get_rank() - 1) % N)


OUTSIDE = torch.zeros(4)

ERRORS: dict[str, tuple[Callable, type[Exception], str]] = {
    "not_all_come": (
        not_all_come, RuntimeError,
        r"rank 0 calls all_reduce\(torch.float32 \[1\], sum\) on group \[0, 1, 2, 3\] at test_local_c10d.py:\d+, "
        r"but rank 2 is not among the simulated ranks \[0, 1\]",
    ),
    "other_shapes": (
        other_shapes, RuntimeError,
        r"rank 0 calls all_reduce\(torch.float32 \[2\], sum\), but rank 3 calls all_reduce\(torch.float32 \[3\], sum\)"
        r"; at test_local_c10d.py",
    ),
    "other_places": (
        other_places, ValueError,
        r"rank 2 calls all_reduce on group \[0, 1\] at .*, which it is not in. .*Mode\(\{0, 1\}\)",
    ),
    "nobody_sends": (
        nobody_sends, RuntimeError,
        r"rank 0 calls recv from rank 1 at test_local_c10d.py:\d+, but no such message was sent; a real job would hang",
    ),
    "other_tag": (
        other_tag, RuntimeError,
        r"rank 0 calls recv from rank 3 .*What waits for rank 0: rank 3 calls send\(.*, 0, 1\)",
    ),
    "nobody_receives": (
        nobody_receives, RuntimeError,
        r"rank 0 calls send\(torch.float32 \[1\], 1, 0\) .*, but it is never received",
    ),
    "never_arrives": (
        never_arrives, RuntimeError,
        r"rank 0 calls recv from rank 1 .*, but no such message was sent",
    ),
    "other_size": (
        other_size, ValueError,
        r"recv: a tensor that is torch.float32 \[2\]; it receives what rank 3 calls send\(.* \[1\]",
    ),
    "once_a_rank": (
        once_a_rank, RuntimeError,
        r"rank 0 calls all_reduce at test_local_c10d.py:\d+, in a function that runs once a rank",
    ),
    "into_plain": (
        into_plain, RuntimeError,
        r"all_to_all_single writes what differs between ranks into a plain tensor.*localize",
    ),
    "received_into_plain": (
        received_into_plain, RuntimeError,
        "recv writes what differs between ranks into a plain tensor",
    ),
    "premul": (
        lambda: dist.all_reduce(torch.ones(1), dist._make_nccl_premul_sum(2.0)), NotImplementedError,
        r"x.mul_\(factor\)",
    ),
    "root_out_of_range": (
        lambda: dist.broadcast(torch.ones(1), 7), ValueError,
        "src 7 is not in 0..3",
    ),
    "no_gather_list": (
        lambda: dist.gather(torch.ones(1), None, 1), ValueError,
        "rank 1 is the destination and has no gather_list",
    ),
    "no_scatter_list": (
        lambda: dist.scatter(torch.ones(1), PerRank(dict.fromkeys(range(N))), 1), ValueError,
        "rank 1 is the source",
    ),
    "scatter_sizes": (
        lambda: dist.scatter(torch.ones(1), [torch.ones(2)] * N, 1), ValueError,
        r"rank 1 gives .* \[2\] for .* \[1\]",
    ),
    "too_few_outputs": (
        lambda: dist.all_gather([torch.ones(1)] * 3, torch.ones(1)), ValueError,
        "tensor_list has 3 tensors for a group of 4",
    ),
    "small_output": (
        lambda: all_gather_single(torch.ones(5), torch.ones(1)), ValueError,
        r"\[5\] on rank 0 cannot hold .* \[4\]",
    ),
    "other_dtype": (
        lambda: all_gather_single(torch.ones(4).int(), torch.ones(1)), ValueError,
        "torch.int32 .* cannot hold",
    ),
    "no_such_rank": (
        lambda: dist.new_group([1, 4]), ValueError,
        r"\[1, 4\] are not ranks in 0..3",
    ),
    "other_world_size": (
        lambda: dist.init_process_group("gloo", world_size=3), ValueError,
        "world_size is 3, but 4 ranks are played",
    ),
}  # fmt: skip


@pytest.mark.parametrize("body, error, message", [pytest.param(*row, id=name) for name, row in ERRORS.items()])
def test_wrong_use_is_an_error_that_shows_both_sides(body: Callable, error: type, message: str) -> None:
    with pytest.raises(error, match=message), LocalTensorMode(N):
        body()
    assert not dist.is_initialized() and OUTSIDE.tolist() == [0] * 4


def test_a_group_of_the_simulation_ends_with_it() -> None:
    with LocalTensorMode(N):
        group = mesh().get_group("tp")
    with pytest.raises(RuntimeError, match="of a LocalTensorMode that has ended"):
        group.allreduce([torch.ones(1)])


# ---- outside ----------------------------------------------------------------------------------


def looks() -> tuple:
    """How torch.distributed presents itself."""
    d = dist.distributed_c10d
    functions = tuple(getattr(m, name) for m in (d, dist) for name in vars(d) if callable(getattr(m, name, None)))
    return dist.group.WORLD, d._world, functions, dist.is_initialized(), dict(d._world.pg_map)


def test_before_and_after_torch_is_as_it_was() -> None:
    before = looks()
    with pytest.raises(KeyError), LocalTensorMode(N), LocalTensorMode({0}):
        raise KeyError
    assert looks() == before and not dist.is_initialized()


def test_a_real_process_group_is_left_alone(alone: None) -> None:
    before, real = looks(), dist.group.WORLD
    with LocalTensorMode(N):
        assert dist.get_world_size() == N and dist.group.WORLD is not real
        with pytest.raises(RuntimeError, match="made outside of LocalTensorMode, which knows nothing of the simulated"):
            dist.all_reduce(torch.ones(1), group=real)
        dist.destroy_process_group()
        assert not dist.is_initialized()
        dist.init_process_group("gloo")
        dist.all_reduce(x := torch.ones(1))
        assert x.reconcile().item() == 4
    assert looks() == before
    dist.all_reduce(y := torch.ones(1))
    assert y.item() == 1


def test_other_threads_see_nothing_of_it(alone: None) -> None:
    found: list[Any] = []

    def look() -> None:
        outs = [torch.zeros(1)]
        dist.gather(torch.ones(1), outs, 0)
        found.extend([dist.get_world_size(), dist.get_rank(), outs[0].item()])

    with LocalTensorMode(N):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert found == [1, 0, 1]
