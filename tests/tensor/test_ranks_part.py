"""Ranks that part in eager code: inside `checked()` the first exchange that differs is an error on all ranks."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from workers import Pool

import spmd
from spmd import DTensor, Replicate, Shard, init_device_mesh
from spmd.comm import all_reduce, checked, wait

X = torch.arange(32.0).view(8, 4)


@functools.cache
def grid() -> spmd.DeviceMesh:
    return init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))


def sharded(dim: int = 0, **kwargs) -> DTensor:
    return DTensor.from_local(X.chunk(4, dim)[grid().get_rank()].contiguous(), grid(), [Shard(dim)], **kwargs)


def one_more(odd: bool) -> None:
    x = sharded()
    if odd:
        x.full_tensor()
    x.sum().full_tensor()


def one_more_at_the_end(odd: bool) -> None:
    x = sharded()
    x.full_tensor()
    if odd:
        x.full_tensor()


def swapped(odd: bool) -> None:
    x, y = sharded(), sharded() * 2
    if odd:
        y.sum().full_tensor()
        x.sum().full_tensor()
    else:
        x.sum().full_tensor()
        y.sum().full_tensor()


def other_placement(odd: bool) -> None:
    block = torch.ones(4, 4)
    DTensor.from_local(block, grid(), [Shard(1) if odd else Shard(0)]).full_tensor()


def one_has_it_all(odd: bool) -> None:
    DTensor.from_local(torch.ones(4, 4), grid(), [Replicate() if odd else Shard(0)]).full_tensor()


def other_global_shape(odd: bool) -> None:
    DTensor.from_local(torch.ones(2, 4), grid(), [Shard(0)], shape=(7 if odd else 8, 4)).full_tensor()


def other_dtype(odd: bool) -> None:
    DTensor.from_local(torch.ones(2, 4, dtype=torch.int32 if odd else torch.float32), grid(), [Shard(0)]).full_tensor()


def other_op(odd: bool) -> None:
    x = sharded()
    x.sort(0) if odd else x.median(0)


def in_the_backward(odd: bool) -> None:
    x = sharded().requires_grad_()
    y = x.redistribute(grid(), [Shard(1)], backward_dtype=torch.float64 if odd else None)
    (y * y).sum().backward()


def of_a_plan(odd: bool) -> None:
    sharded().redistribute(grid(), [Replicate() if odd else Shard(1)], async_op=True).to_local()


def against_a_collective(odd: bool) -> None:
    x = sharded()
    wait(all_reduce(torch.ones(8, 4), "sum", grid())) if odd else x.full_tensor()


def against_a_step(odd: bool) -> None:
    x = sharded()
    step = spmd.compile(lambda x: x.sum(), grid())
    step(x) if odd else x.full_tensor()


def over_other_axes(odd: bool) -> None:
    """On a mesh of two axes: the ranks that part wait in different groups, but all ranks of the mesh compare."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = spmd.distribute_tensor(X, mesh, [Shard(0), Shard(1)])
    x.redistribute(mesh, [Shard(0), Replicate()] if odd else [Replicate(), Shard(1)])


def fails_alone(odd: bool) -> None:
    x = sharded()
    x.full_tensor()
    if odd:
        raise ValueError("bad file")
    x.full_tensor()


# What rank 1 does while the others call with `odd` False, and what the error says.
PARTED: dict[Callable, tuple[str, ...]] = {
    one_more: ("all_reduce", "all_gather", "test_ranks_part.py:"),
    one_more_at_the_end: ("the end of checked()", "all_gather"),
    swapped: ("calls all_reduce", "Rank 0 is at test_ranks_part.py"),
    other_placement: ("f32[16@tp, 4]", "f32[4, 16@tp]"),
    one_has_it_all: ("the end of checked()", "f32[16@tp, 4]"),
    other_global_shape: ("f32[7@tp, 4]", "f32[8@tp, 4]"),
    other_dtype: ("f32[8@tp, 4]", "i32[8@tp, 4]"),
    other_op: ("aten.sort", "aten.median"),
    in_the_backward: ("f32[8, 4@tp] -> f32[8@tp, 4]", "f64[8, 4@tp] -> f64[8@tp, 4]"),
    of_a_plan: ("all_to_all", "all_gather"),
    against_a_collective: ("all_reduce('sum') of float32 [8, 4]", "all_gather"),
    against_a_step: ("the call of", "all_gather"),
    over_other_axes: ("all_gather(dp, 0)", "all_gather(tp, 1)"),
    fails_alone: ("rank 1 failed: ValueError: bad file",),
}


def parted(rank: int, every: int = 1) -> list[str]:
    """The error of each case. After each the ranks go on together."""
    found = []
    for case in PARTED:
        try:
            with checked(every=every):
                case(rank == 1)
            found.append("no error")
        except (RuntimeError, ValueError) as error:
            found.append(str(error))
        assert torch.equal(sharded().full_tensor(), X), (case.__name__, found)
    return found


def test_ranks_that_part_get_an_error_that_names_the_difference(gloo4: Pool) -> None:
    every = gloo4.run(parted)
    for i, (case, texts) in enumerate(PARTED.items()):
        for rank, said in enumerate(every):
            if case is fails_alone and rank == 1:
                assert said[i] == "bad file"
            else:
                assert said[i] != "no error" and all(text in said[i] for text in texts), (case.__name__, said[i])


def sampled(rank: int) -> tuple[str, str]:
    """Sums in another order on rank 1: their numbers are mixed, and the next comparison says so."""
    x = sharded()
    try:
        with checked(every=4):
            for _ in range(5):
                x.full_tensor()
            swapped(rank == 1)
            for _ in range(5):
                x.full_tensor()
    except RuntimeError as error:
        noticed = str(error)
    try:
        with checked(every=100):
            swapped(rank == 1)
    except RuntimeError as error:
        return noticed, str(error)
    return noticed, "no error"


def test_a_sampled_comparison_notices_earlier_differences(gloo4: Pool) -> None:
    for noticed, at_the_end in gloo4.run(sampled):
        assert "calls all_reduce(tp): f32[] +sum@tp -> f32[]" in noticed
        assert "It is number 2 of the 4 exchanges" in noticed
        assert "It is number 1 of the 3 exchanges" in at_the_end


def test_all_goes_well_inside(gloo4: Pool) -> None:
    assert gloo4.run(all_well) == [True] * 4


def all_well(rank: int) -> bool:
    """Ranks that do the same are right inside of `checked()`, also compiled, uneven, sampled, and in nested blocks."""
    step = spmd.compile(lambda x: (x @ x.T).sum(0), grid(), inputs={"x": {"tp": Shard(0)}})
    for every in (1, 2, 7):
        with checked(every=every):
            x = spmd.distribute_tensor(X[:7], grid(), [Shard(0)])
            assert torch.allclose((x.T @ x).full_tensor(), X[:7].T @ X[:7])
            with checked(False):
                assert torch.equal(x.full_tensor(), X[:7])
            with checked():
                assert torch.allclose(step(X[:7]).full_tensor(), (X[:7] @ X[:7].T).sum(0))
            assert torch.equal(wait(all_reduce(torch.ones(3), "sum", grid())), torch.full((3,), 4.0))
            assert torch.equal(x.redistribute(grid(), [Shard(1)], async_op=True).full_tensor(), X[:7])
    return True


def test_every_is_at_least_one() -> None:
    with pytest.raises(ValueError, match="every is 0"), checked(every=0):
        pass
