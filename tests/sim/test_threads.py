"""Ranks in threads: everything that would hang in a real job is an error that says why."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from spmd.comm import transport
from spmd.mesh import current_rank, init_device_mesh, world_size
from spmd.sim import Call, RankStopped, ThreadWorld, run_ranks

LINE = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
GRID = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def sum_along(mesh_axis: str, x: torch.Tensor) -> torch.Tensor:
    t = transport()
    return t.wait_tensor(t.all_reduce(x, "sum", t.group(GRID, mesh_axis)))


def test_each_thread_plays_its_rank() -> None:
    assert run_ranks(lambda rank: (rank, current_rank(), world_size(), GRID.get_coordinate()), 4) == [
        (0, 0, 4, (0, 0)), (1, 1, 4, (0, 1)), (2, 2, 4, (1, 0)), (3, 3, 4, (1, 1))
    ]  # fmt: skip
    assert current_rank() == 0


def test_many_collectives_on_groups_that_cross() -> None:
    """Each group runs at its own pace; a rank's n-th call meets the n-th calls of the others."""

    def work(rank: int) -> float:
        x = torch.tensor(float(rank))
        for i in range(100):
            x = sum_along("tp", x) / 2 if i % 3 else sum_along("dp", x) / 2
        return x.item()

    assert run_ranks(work, 4) == [1.5] * 4


def test_groups_progress_apart() -> None:
    """The second row ends before the first one begins, so no barrier spans the world."""
    done = threading.Barrier(2)

    def work(rank: int) -> int:
        if rank == 0:
            done.wait(timeout=30)
        out = [sum_along("tp", torch.tensor(rank)) for _ in range(20)][-1].item()
        if rank == 2:
            done.wait(timeout=30)
        return out

    assert run_ranks(work, 4) == [1, 1, 5, 5]


def test_reductions_go_in_rank_order() -> None:
    """1e8 + 1 - 1e8 in float32 is 0 in this order and 1 in others: the same bits every time."""
    values = [1e8, 1.0, -1e8, 0.0]

    def work(rank: int) -> float:
        return transport().all_reduce(torch.tensor(values[rank]), "sum", transport().group(LINE, 0)).item()

    assert [run_ranks(work, 4) for _ in range(5)] == [[0.0] * 4] * 5


def test_results_are_ones_own_and_inputs_may_be_reused_at_once() -> None:
    def work(rank: int) -> float:
        x = torch.full((8,), float(rank))
        out = sum_along("tp", x)
        x.fill_(100.0)
        out += rank
        return sum_along("tp", out)[0].item()

    assert run_ranks(work, 4) == [3.0, 3.0, 15.0, 15.0]


def test_calls_are_counted_in_bytes() -> None:
    def work(rank: int) -> int:
        t = transport()
        t.all_gather_into_tensor(torch.ones(2, 3), 2, t.group(GRID, "dp"))
        if rank < 2:
            t.broadcast(torch.ones(5, dtype=torch.float64), 0, t.group(GRID, "tp"))
        return len(t.calls)

    world = ThreadWorld(4)
    assert world.run(work) == [2, 2, 1, 1]
    assert world.calls[1] == [Call("all_gather_into_tensor", "1,3", 24), Call("broadcast", "0,1", 40)]
    assert world.calls[2] == [Call("all_gather_into_tensor", "0,2", 24)]


@pytest.mark.parametrize("enabled", [True, False])
def test_threads_have_the_callers_grad_mode(enabled: bool) -> None:
    with torch.set_grad_enabled(enabled):
        assert run_ranks(lambda rank: torch.is_grad_enabled(), 2) == [enabled] * 2
    with torch.inference_mode(not enabled):
        assert run_ranks(lambda rank: torch.is_inference_mode_enabled(), 2) == [not enabled] * 2


def test_collectives_leave_the_graph_and_the_mode_alone() -> None:
    def work(rank: int) -> tuple[bool, bool]:
        out = sum_along("tp", torch.ones(2, requires_grad=True))
        return out.requires_grad, torch.is_grad_enabled()

    assert run_ranks(work, 4) == [(False, True)] * 4


def fail_on_two(rank: int) -> None:
    if rank == 2:
        raise KeyError("the key")
    transport().gather_objects(rank, LINE)


def other_kinds(rank: int) -> None:
    t, group = transport(), transport().group(GRID, "tp")
    t.all_reduce(torch.ones(2), "sum", group) if rank % 2 else t.broadcast(torch.ones(2), 0, group)


def other_shapes(rank: int) -> None:
    transport().all_reduce(torch.ones(2 + rank), "sum", transport().group(LINE, 0))


def other_ops(rank: int) -> None:
    transport().all_reduce(torch.ones(2), "max" if rank == 3 else "sum", transport().group(LINE, 0))


def other_splits(rank: int) -> None:
    transport().all_to_all_single(torch.ones(4), [1, 1, 1, 2 * (rank == 0)], [1, 1, 1, 1], transport().group(LINE, 0))


def one_ends_early(rank: int) -> None:
    if rank != 1:
        transport().all_reduce(torch.ones(2), "sum", transport().group(GRID, "dp"))


def circle(rank: int) -> None:
    for axis in ("dp", "tp") if rank in (0, 3) else ("tp", "dp"):
        transport().all_reduce(torch.ones(2), "sum", transport().group(GRID, axis))


def unknown_op(rank: int) -> None:
    transport().all_reduce(torch.ones(2), "median", transport().group(LINE, 0))


def foreign_group(rank: int) -> None:
    transport().broadcast(torch.ones(2), 0, "ranks:1,2")


def uneven_scatter(rank: int) -> None:
    transport().reduce_scatter_tensor(torch.ones(6), "sum", 4, transport().group(LINE, 0))


def global_source(rank: int) -> None:
    transport().broadcast(torch.ones(2), rank - rank % 2 + 1, transport().group(GRID, "tp"))


@pytest.mark.parametrize(
    "fn, error, message",
    [
        (fail_on_two, KeyError, "the key"),
        (other_kinds, RuntimeError, r"rank \d calls broadcast.*, but rank \d calls all_reduce\(.*, sum\)"),
        (other_shapes, RuntimeError, r"rank 0 calls all_reduce\(.* \[2\], sum\), but rank 1 calls .* \[3\], sum\)"),
        (other_ops, RuntimeError, r"rank 0 calls .* sum\), but rank 3 calls .* max\)"),
        (other_splits, RuntimeError, "rank 3 sends 1 rows to rank 0, which expects 2"),
        (one_ends_early, RuntimeError, r"others have ended: rank 3 waits in all_reduce.* on group 1,3 for rank 1"),
        (circle, RuntimeError, "all ranks wait: rank 0 waits in .* on group 0,2 for rank 2; rank 1 waits in"),
        (unknown_op, ValueError, "op 'median' is none of sum, avg, product, min, max"),
        (foreign_group, ValueError, "rank 0 calls a collective on group 1,2, which it is not in"),
        (uneven_scatter, ValueError, "4 ranks cannot share evenly; pad it first"),
        (global_source, ValueError, r"src 3 is not in 0..1: it is a place in the group"),
    ],
)  # fmt: skip
def test_what_would_hang_or_crash_is_an_error_that_says_why(fn: Callable, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        run_ranks(fn, 4, timeout=20)


def test_the_error_is_the_failing_ranks_own_and_names_it() -> None:
    with pytest.raises(KeyError) as caught:
        run_ranks(fail_on_two, 4)
    assert caught.value.__notes__ == ["(raised on simulated rank 2)"]


def test_a_mismatch_is_told_to_all_ranks() -> None:
    said: dict[int, str] = {}

    def work(rank: int) -> None:
        try:
            other_ops(rank)
        except RuntimeError as error:
            said[rank] = str(error)
            raise

    with pytest.raises(RuntimeError):
        run_ranks(work, 4)
    assert sorted(said) == [0, 1, 2, 3] and all("rank 3 calls" in text for text in said.values())


def test_an_error_raised_because_of_a_stop_does_not_hide_its_cause() -> None:
    def work(rank: int) -> None:
        try:
            fail_on_two(rank)
        except RankStopped as stop:
            raise RuntimeError("wrapped") from stop

    with pytest.raises(KeyError):
        run_ranks(work, 4)


def test_of_several_errors_the_lowest_ranks_is_told() -> None:
    together = threading.Barrier(3)

    def work(rank: int) -> None:
        together.wait(timeout=30)
        raise ValueError(f"from {rank}")

    for _ in range(10):
        with pytest.raises(ValueError, match="from 0"):
            run_ranks(work, 3)


def test_a_rank_that_does_not_end_is_named() -> None:
    release = threading.Event()
    with pytest.raises(TimeoutError, match=r"within 0\.1 s: rank 1 is computing"):
        run_ranks(lambda rank: release.wait(30) if rank == 1 else None, 2, timeout=0.1)
    release.set()


def test_a_world_can_run_again_after_an_error() -> None:
    world = ThreadWorld(4)
    with pytest.raises(KeyError):
        world.run(fail_on_two)
    assert world.run(lambda rank: transport().gather_objects(rank, LINE)) == [[0, 1, 2, 3]] * 4


def test_a_world_needs_a_rank() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        run_ranks(lambda rank: None, 0)
