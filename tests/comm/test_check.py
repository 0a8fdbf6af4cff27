"""Wrong calls: a rank finds its own mistakes before anything is sent; in `checked()` ranks compare their calls."""

from __future__ import annotations

import re
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from workers import Pool

import spmd
from spmd.comm import (
    all_gather_into_tensor_coalesced,
    all_gather_tensor,
    all_reduce,
    all_reduce_coalesced,
    all_to_all_single,
    broadcast,
    check_metadata,
    checked,
    permute_tensor,
    reduce_scatter_tensor,
    reduce_scatter_tensor_coalesced,
    scatter,
    stuck,
    wait,
)
from spmd.mesh import DeviceMesh, as_rank
from spmd.sim import run_ranks

FOUR = [0, 1, 2, 3]
X = torch.ones(4, 6)

REFUSED: dict[str, tuple[Callable, type[Exception], str]] = {
    "no such op": (lambda: all_reduce(X, "mean", FOUR), ValueError, "reduce_op is 'mean'; it must be one of sum"),
    "op of one": (lambda: reduce_scatter_tensor(X, "SUM", 0, FOUR), ValueError, "reduce_op is 'SUM'"),
    "average of ints": (lambda: all_reduce(X.long(), "avg", FOUR), TypeError, "avg of torch.int64 is no reduction"),
    "bits of floats": (lambda: all_reduce(X, "band", FOUR), TypeError, "band of torch.float32"),
    "xor of bools": (lambda: all_reduce(X.bool(), "bxor", FOUR), TypeError, "bxor of torch.bool"),
    "order of complex": (lambda: all_reduce(X.cfloat(), "max", FOUR), TypeError, "max of torch.complex64"),
    "sum of float8": (lambda: all_reduce(X.to(torch.float8_e5m2), "sum", FOUR), TypeError, "float8_e5m2"),
    "op of coalesced": (lambda: all_reduce_coalesced([X, X.long()], "avg", FOUR), TypeError, "avg of torch.int64"),
    "uneven rows": (
        lambda: reduce_scatter_tensor(X, "sum", 1, FOUR), ValueError, r"dim 1 of \[4, 6\] has 6 entries, which 4 ranks"
    ),
    "uneven rows of coalesced": (
        lambda: reduce_scatter_tensor_coalesced([X, X], "sum", [0, 1], FOUR), ValueError, r"dim 1 of \[4, 6\]"
    ),
    "too few dims": (
        lambda: reduce_scatter_tensor_coalesced([X, X], "sum", [0], FOUR), ValueError, "1 dims for 2 tensors"
    ),
    "no such dim": (lambda: all_gather_tensor(X, 2, FOUR), IndexError, r"dim 2 is not in a tensor of shape \[4, 6\]"),
    "no such dim from the end": (lambda: reduce_scatter_tensor(X, "sum", -3, FOUR), IndexError, "dim -3"),
    "scalar": (lambda: reduce_scatter_tensor(X[0, 0], "sum", 0, FOUR), IndexError, r"shape \[\]"),
    "scalar rows": (lambda: all_to_all_single(X[0, 0], None, None, FOUR), IndexError, "all_to_all_single: dim 0"),
    "scalar scattered": (lambda: scatter(X[0, 0], 0, FOUR), IndexError, "scatter: dim 0"),
    "src too large": (lambda: broadcast(X, 4, FOUR), ValueError, "src 4 is not in 0..3: it is a place in the group"),
    "src of another group": (lambda: broadcast(X, 2, [[2, 3], [0, 1]]), ValueError, r"src 2 is not in 0\.\.1"),
    "src negative": (lambda: scatter(X, -1, FOUR), ValueError, "scatter: src -1"),
    "uneven scatter": (lambda: scatter(X[:3], 0, FOUR), ValueError, r"dim 0 of \[3, 6\] has 3 entries"),
    "list too short": (lambda: scatter([X, X], 0, FOUR), ValueError, "a list of 2 tensors for a group of 4 ranks"),
    "one split given": (lambda: all_to_all_single(X, [1] * 4, None, FOUR), ValueError, "give both output_split_sizes"),
    "splits too short": (lambda: all_to_all_single(X, [1] * 3, [1] * 4, FOUR), ValueError, "one number of rows for"),
    "splits negative": (lambda: all_to_all_single(X, [1] * 4, [5, -1, 0, 0], FOUR), ValueError, "one number of rows"),
    "splits that do not add up": (
        lambda: all_to_all_single(X, [1] * 4, [1, 1, 1, 2], FOUR), ValueError, "add up to 5, but the input has 4 rows"
    ),
    "uneven exchange": (lambda: all_to_all_single(X[:3], None, None, FOUR), ValueError, "3 entries, which 4 ranks"),
    "two to one": (lambda: permute_tensor(X, [1, 1, 2, 3], FOUR), ValueError, "each at most once, or -1"),
    "permuted too far": (lambda: permute_tensor(X, [1, 2, 3, 4], FOUR), ValueError, r"src_dst is \[1, 2, 3, 4\]"),
    "permuted below": (lambda: permute_tensor(X, [1, 2, 3, -2], FOUR), ValueError, "src_dst is"),
    "permuted too few": (lambda: permute_tensor(X, [1, 0], FOUR), ValueError, "it must have 4 entries"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_a_rank_alone_can_tell_is_an_error_at_once(case: str) -> None:
    """Without a process group: nothing can have been sent."""
    call, error, text = REFUSED[case]
    with as_rank(1), pytest.raises(error, match=text):
        call()


def all_refused(rank: int) -> float:
    for call, error, _ in REFUSED.values():
        with pytest.raises(error):
            call()
    return wait(all_reduce(torch.ones(()), "sum", FOUR)).item()


def test_a_group_is_usable_after_all_errors(gloo4: Pool) -> None:
    assert gloo4.run(all_refused) == [4.0] * 4



def first(ys: list[torch.Tensor]) -> torch.Tensor:
    every = [wait(y) for y in ys]
    return every[0]


# What rank 1 calls while the others call with `odd` False, and what the error says of both.
UNLIKE: dict[str, tuple[Callable, str, str]] = {
    "dtype": (
        lambda odd: all_reduce(X.double() if odd else X, "sum", FOUR),
        r"all_reduce\('sum'\) of float32 \[4, 6\]", r"all_reduce\('sum'\) of float64 \[4, 6\]",
    ),
    "shape": (
        lambda odd: all_gather_tensor(X[:2] if odd else X, 1, FOUR),
        r"all_gather_tensor\(1\) of float32 \[4, 6\]", r"of float32 \[2, 6\]",
    ),
    "layout of equal sizes": (lambda odd: broadcast(X.T if odd else X, 0, FOUR), r"\[4, 6\]", r"\[6, 4\]"),
    "op": (lambda odd: all_reduce(X, "max" if odd else "sum", FOUR), "'sum'", "'max'"),
    "src": (lambda odd: broadcast(X, int(odd), FOUR), r"broadcast\(0\)", r"broadcast\(1\)"),
    "dim": (lambda odd: reduce_scatter_tensor(X.repeat(1, 2), "sum", int(odd), FOUR), r"'sum', 0\)", r"'sum', 1\)"),
    "collective": (
        lambda odd: all_gather_tensor(X, 0, FOUR) if odd else all_reduce(X, "sum", FOUR), "all_reduce", "all_gather"
    ),
    "how many": (lambda odd: first(all_reduce_coalesced([X] * (2 + odd), "sum", FOUR)),
                 r"of float32 \[4, 6\] on cpu, float32 \[4, 6\] on cpu,\n", "cpu, float32 .* cpu, float32 .* cpu"),
    "one of several": (
        lambda odd: first(all_gather_into_tensor_coalesced([X, X.half() if odd else X], FOUR)), "float32", "float16"
    ),
    "rows of an exchange": (
        lambda odd: all_to_all_single(X.double() if odd else X, [1] * 4, [1] * 4, FOUR), "float32", "float64"
    ),
    "splits": (
        lambda odd: all_to_all_single(X, [1] * 4, [1, 0, 2, 1] if odd else [1] * 4, FOUR),
        "rank 1 sends 0 rows to rank 1", "expects 1",
    ),
}  # fmt: skip


def unlike(rank: int, case: str, how: str) -> tuple[str, float]:
    """The error, and the result of a call directly afterwards."""
    call = UNLIKE[case][0]
    before = dist.get_debug_level()
    if how == "detail":
        dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        with checked() if how == "checked" else checked(None):
            with pytest.raises(RuntimeError) as error:
                call(rank == 1)
            return str(error.value), wait(call(False)).sum().item()
    finally:
        if how == "detail":
            dist.set_debug_level(before)


@pytest.mark.parametrize("case", list(UNLIKE))
@pytest.mark.parametrize("how", ["checked", "detail"])
def test_calls_that_part_are_an_error_on_all_ranks(gloo4: Pool, case: str, how: str) -> None:
    """The error names the calls of both ranks, and the next call works."""
    _, one, other = UNLIKE[case]
    for text, _ in gloo4.run(unlike, case, how):
        assert re.search(one, text) and re.search(other, text), text


def of_two(rank: int) -> list[str]:
    """Two groups at once: a mismatch in one does not affect the other."""
    with checked():
        try:
            y = all_reduce(X.double() if rank == 3 else X, "sum", [[0, 1], [2, 3]])
        except RuntimeError as error:
            return [str(error).replace("\n", " ")]
        return [str(wait(y)[0, 0].item())]


def test_only_the_group_that_parts_fails(gloo4: Pool) -> None:
    found = gloo4.run(of_two)
    assert found[:2] == [["2.0"]] * 2
    assert all("rank 2 calls all_reduce" in text and "rank 3 calls all_reduce" in text for [text] in found[2:])


def test_simulated_ranks_compare_too() -> None:
    def call(rank: int) -> str:
        with checked(), pytest.raises(RuntimeError) as error:
            all_reduce(X, "sum" if rank else "max", FOUR)
        return str(error.value)

    assert all("rank 0 calls all_reduce('max')" in text for text in run_ranks(call, 4))


def test_metadata_is_compared_on_request() -> None:
    """Shapes and dtypes, of all tensors, on all ranks of the mesh."""

    def call(rank: int) -> str:
        mesh = DeviceMesh("cpu", FOUR)
        check_metadata("the step", [X, X.half()], mesh)
        with pytest.raises(RuntimeError) as error:
            check_metadata("the step", [X, X[:3] if rank == 2 else X], mesh)
        return str(error.value)

    for text in run_ranks(call, 4):
        assert re.search(r"rank 0 calls the step .*\[4, 6\] on cpu,\nbut rank 2 .*float32 \[3, 6\]", text), text


def one_index_is_out_of_range(rank: int) -> str:
    mesh = DeviceMesh("cpu", FOUR)
    rows = spmd.distribute_tensor(torch.tensor([0, 1, 9, 1]), mesh, [spmd.Shard(0)])
    with pytest.raises((IndexError, RuntimeError)) as error, checked():
        spmd.distribute_tensor(X, mesh)[rows].sum().item()
    return str(error.value)


def test_a_rank_that_fails_alone_is_named_at_the_next_exchange(gloo4: Pool) -> None:
    """Its rows are wrong, and those of the others are not."""
    said = gloo4.run(one_index_is_out_of_range)
    wrong = "index 9 is out of bounds for dimension 0 with size 4"
    assert said[2] == wrong
    assert all(f"rank 2 failed: IndexError: {wrong}" in said[rank] for rank in (0, 1, 3)), said


def on_two_meshes(rank: int) -> str:
    """Ranks 0 and 1 use a pair of ranks and all ranks in two orders."""
    everyone, pair = DeviceMesh("cpu", FOUR), DeviceMesh("cpu", [0, 1])
    meshes = {0: [pair, everyone], 1: [everyone, pair]}.get(rank, [everyone])
    for mesh in (everyone, pair) if rank < 2 else meshes:
        wait(all_reduce(X, "sum", mesh))  # makes the groups, where ranks that part are told anyway
    with mock.patch.object(stuck, "LOOK_AFTER_S", 0.2), pytest.raises(RuntimeError) as error, checked():
        for mesh in meshes:
            wait(all_reduce(X, "sum", mesh))
    return str(error.value)


def test_ranks_that_wait_on_different_meshes_are_named(gloo4: Pool) -> None:
    """All ranks learn of it, also those that wait for the two."""
    said = gloo4.run(on_two_meshes)
    gloo4.kill()  # after such an error a job ends
    for text in said:
        assert re.search(r"rank 0 waits at .* for ranks \[0, 1\]", text), said
        assert re.search(r"rank 1 waits at .* for ranks \[0, 1, 2, 3\]", text), said
        assert "they wait for each other" in text
