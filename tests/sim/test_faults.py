"""Every simulation finds the faults that make a real job hang or compute wrong numbers: ranks, op and line."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from spmd import LocalTensorMode, Shard, distribute_tensor
from spmd.comm import all_gather_tensor, all_reduce, all_to_all_single, reduce_scatter_tensor
from spmd.mesh import current_rank, init_device_mesh
from spmd.sim import per_rank, run_ranks

ALL = [0, 1, 2, 3]


def skipped() -> None:
    """Rank 2 leaves a collective out."""
    if current_rank() != 2:
        all_reduce(torch.ones(2), "sum", ALL)  # line: skipped


def swapped() -> None:
    """Rank 1 calls two collectives in the other order."""
    x = torch.ones(4)
    if current_rank() == 1:
        all_gather_tensor(x, 0, ALL)  # line: swapped
        all_reduce(x, "sum", ALL)
    else:
        all_reduce(x, "sum", ALL)  # line: swapped
        all_gather_tensor(x, 0, ALL)


def other_shape() -> None:
    """Rank 3 has a row more."""
    all_reduce(torch.ones(5 if current_rank() == 3 else 4), "sum", ALL)  # line: shape


def other_dtype() -> None:
    """Rank 1 sends integers."""
    x = torch.ones(4, dtype=torch.int64 if current_rank() == 1 else torch.float32)
    all_gather_tensor(x, 0, ALL)  # line: dtype


def other_op() -> None:
    """Rank 2 takes the maximum."""
    reduce_scatter_tensor(torch.ones(4), "max" if current_rank() == 2 else "sum", 0, ALL)  # line: op


def other_splits() -> None:
    """Rank 0 sends more rows to rank 1 than rank 1 expects."""
    splits = [1, 2, 1, 0] if current_rank() == 0 else [1, 1, 1, 1]
    all_to_all_single(torch.ones(4), [1, 1, 1, 1], splits, ALL)  # line: splits


def one_alone() -> None:
    """Only rank 0 enters a group that has two."""
    if current_rank() == 0:
        all_reduce(torch.ones(2), "sum", [0, 1])  # line: alone


FAULTS: dict[str, tuple[Callable, str, str]] = {
    "skipped": (skipped, "all_reduce", r"rank 2|others have ended"),
    "swapped": (swapped, "all_reduce", "rank 1 calls all_gather"),
    "shape": (other_shape, "all_reduce", r"\[4\].*rank 3 calls .*\[5\]"),
    "dtype": (other_dtype, "all_gather", r"float32 \[4\].*rank 1 calls .*int64 \[4\]"),
    "op": (other_op, "reduce_scatter", r"sum.*rank 2 calls .*max"),
    "splits": (other_splits, "all_to_all", "rank 0 sends 2 rows to rank 1, which expects 1"),
    "alone": (one_alone, "all_reduce", r"rank 1|others have ended"),
}


def lines(name: str) -> str:
    """A pattern for this file's lines that are marked with a name."""
    text = Path(__file__).read_text().splitlines()
    found = [i for i, line in enumerate(text, 1) if line.endswith(f"# line: {name}")]
    return rf"{Path(__file__).name}:({'|'.join(map(str, found))})\b"


@pytest.mark.parametrize("name", FAULTS)
def test_threads_tell_the_ranks_the_op_and_the_line(name: str) -> None:
    fault, kind, message = FAULTS[name]
    with pytest.raises(RuntimeError, match="(?s)" + message) as error:
        run_ranks(lambda rank: fault(), 4)
    assert kind in str(error.value) and re.search(lines(name), str(error.value)), error.value


# Where one thread plays all ranks, a branch on the rank is caught first. So the faults below come from values that
# differ between ranks, or from playing some ranks only.


@pytest.mark.parametrize("name", ["skipped", "swapped", "shape", "dtype", "op", "splits", "alone"])
def test_a_branch_on_the_rank_is_caught_where_it_is_taken(name: str) -> None:
    fault, _, _ = FAULTS[name]
    with LocalTensorMode(4), pytest.raises(RuntimeError, match=r"ranks diverge here.* on rank 0.*per_rank") as error:
        fault()
    assert error.traceback[1].path == Path(__file__), "the traceback shows the branch"


def local_skip() -> None:
    x = torch.ones(2)
    with LocalTensorMode({0, 1, 3}):
        all_reduce(torch.ones(2), "sum", ALL)  # line: local skip
    all_reduce(x, "sum", ALL)


def local_shape() -> None:
    all_reduce(torch.ones(4 + length()), "sum", ALL)  # line: local shape


def local_gather() -> None:
    dist.all_reduce(torch.ones(4 + length()))  # line: local c10d


def local_dtype() -> None:
    all_gather_tensor(typed(), 0, ALL)  # line: local dtype


def local_op() -> None:
    all_reduce(torch.ones(2), reduction(), ALL)  # line: local op


def local_splits() -> None:
    all_to_all_single(torch.ones(4), [1, 1, 1, 1], splits(), ALL)  # line: local splits


def once_a_rank() -> None:
    communicating()


@per_rank
def length() -> int:
    return 1 if current_rank() == 3 else 0


@per_rank
def typed() -> torch.Tensor:
    return torch.ones(4, 4)[: 4 - length()]


@per_rank
def reduction() -> str:
    return "max" if current_rank() == 2 else "sum"


@per_rank
def splits() -> list[int]:
    return [1, 2, 1, 0] if current_rank() == 0 else [1, 1, 1, 1]


@per_rank
def communicating() -> None:
    if current_rank() != 1:
        all_reduce(torch.ones(2), "sum", ALL)  # line: once a rank


LOCAL: dict[str, tuple[Callable, str, str]] = {
    "local skip": (local_skip, "all_reduce", "rank 2 is not among the simulated ranks"),
    "local shape": (local_shape, "all_reduce", r"rank 0 calls .*\[4\].*rank 3 calls .*\[5\]"),
    "local c10d": (local_gather, "all_reduce", r"rank 0 calls .*\[4\].*rank 3 calls .*\[5\]"),
    "local dtype": (local_dtype, "all_gather", r"rank 0 calls .*\[4, 4\].*rank 3 calls .*\[3, 4\]"),
    "local op": (local_op, "all_reduce", "sum.*rank 2 calls .*max"),
    "local splits": (local_splits, "all_to_all", "rank 0 sends 2 rows to rank 1, which expects 1"),
    "once a rank": (once_a_rank, "all_reduce", "in a function that runs once a rank"),
}


@pytest.mark.parametrize("name", LOCAL)
def test_one_thread_tells_the_ranks_the_op_and_the_line(name: str) -> None:
    fault, kind, message = LOCAL[name]
    with LocalTensorMode(4), pytest.raises(RuntimeError, match="(?s)" + message) as error:
        fault()
    assert kind in str(error.value) and re.search(lines(name), str(error.value)), error.value


def test_a_dtensor_that_only_some_ranks_have_is_an_error() -> None:
    with LocalTensorMode(4), pytest.raises(RuntimeError, match=r"rank 2 is not in .*DeviceMesh"):
        distribute_tensor(torch.ones(4), init_device_mesh("cpu", (2,)), [Shard(0)])


def test_after_an_error_the_simulation_goes_on() -> None:
    with LocalTensorMode(4):
        with pytest.raises(RuntimeError):
            local_shape()
        assert all_reduce(torch.ones(1), "sum", ALL).reconcile().item() == 4
