"""The pool of processes that other tests rely on: it tells failures and never hangs."""

from __future__ import annotations

import os
import signal

import pytest
import torch
import torch.distributed as dist
from workers import Pool, WorkerDied, WorkersTimedOut


def total(rank: int, factor: int) -> int:
    x = torch.tensor([rank * factor])
    dist.all_reduce(x)
    return x.item()


def raise_on_one(rank: int) -> int:
    if rank == 2:
        raise ValueError("no such thing")
    return rank


def die_on_one(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def wait_for_nobody(rank: int) -> None:
    signal.pause()


def test_results_come_in_rank_order_from_one_group(gloo4: Pool) -> None:
    assert gloo4.run(total, 10) == [60, 60, 60, 60]


def test_an_error_keeps_its_type_and_names_its_rank(gloo4: Pool) -> None:
    with pytest.raises(ValueError, match="no such thing") as caught:
        gloo4.run(raise_on_one)
    assert "on rank 2" in caught.value.__notes__[0] and "raise_on_one" in caught.value.__notes__[0]
    assert gloo4.run(total, 1) == [6, 6, 6, 6]


def test_a_death_or_a_hang_ends_in_an_error_and_the_pool_starts_anew() -> None:
    pool = Pool(2)
    try:
        with pytest.raises(WorkerDied, match="die_on_one: rank 1 of 2 died with exit code -9"):
            pool.run(die_on_one)
        with pytest.raises(WorkersTimedOut, match=r"wait_for_nobody: ranks \[0, 1\] of 2"):
            pool.run(wait_for_nobody, timeout=0.2)
        assert pool.run(total, 1) == [1, 1]
    finally:
        pool.close()
