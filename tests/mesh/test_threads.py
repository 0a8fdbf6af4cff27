"""Threads of one process that communicate: one after the other, at once, and with groups of their own."""

from __future__ import annotations

import functools
import sys
import threading
import time

import pytest
import torch
from workers import Pool

import spmd
from spmd import DTensor, Partial, Replicate, init_device_mesh
from spmd._torch import default_store
from spmd.comm import OwnGroups, all_reduce, wait
from spmd.mesh import threads


@functools.cache
def grid() -> spmd.DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def total(number: float) -> float:
    """Four times the number: a sum over all ranks, then over one axis with half of it."""
    full = DTensor.from_local(torch.tensor([float(number)]), grid(), [Partial(), Partial()]).full_tensor()
    half = wait(all_reduce(torch.tensor([float(number)]), "sum", (grid(), "tp")))
    assert half.item() * 2 == full.item()
    return full.item()


def one_sum(number: float) -> float:
    """The same in one exchange."""
    return wait(all_reduce(torch.tensor([float(number)]), "sum", [0, 1, 2, 3])).item()


def until(condition) -> None:
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def at_once(rank: int, key: str) -> tuple[list, list[str], float]:
    """A thread waits in an exchange for rank 3; on the other ranks a second thread wants to exchange."""
    store, sums, errors = default_store(), [], []
    one_sum(0)

    def first() -> None:
        if rank == 3:
            until(lambda: store.add(key, 0) == 3)
        sums.append(one_sum(5))

    def second() -> None:
        try:
            one_sum(7)
        except RuntimeError as error:
            errors.append(str(error))

    a, b = threading.Thread(target=first, name="first"), threading.Thread(target=second, name="second")
    a.start()
    if rank != 3:
        until(lambda: threads._is_inside_exchange(sys._current_frames().get(a.ident)))
        b.start()
        b.join()
        store.add(key, 1)
    a.join()
    return sums, errors, total(2)


def test_threads_that_exchange_at_once_are_an_error(gloo4: Pool) -> None:
    """The thread that comes second is told what to do; nothing is mixed, and others go on later."""
    for rank, (sums, errors, later) in enumerate(gloo4.run(at_once, f"test_threads/{time.time()}")):
        assert sums == [20.0] and later == 8.0
        for text in errors:
            assert f"rank {rank}: the threads 'second' and 'first' exchange at once" in text and "OwnGroups" in text
        assert len(errors) == (rank != 3)


def with_own_groups(rank: int) -> tuple[list[float], bool]:
    """Three threads, of which two have groups of their own; and a step that is compiled in one of them."""
    wrong, own = [], [OwnGroups(grid(), "first"), OwnGroups(grid(), "second")]

    def work(k: int) -> None:
        for i in range(20):
            number = 100 * k + i
            if total(number) != 4 * number:
                wrong.append(number)

    def work_with(k: int) -> None:
        with own[k]:
            work(k + 1)
            step = spmd.compile(lambda x: x * 1, grid())
            x = DTensor.from_local(torch.ones(2), grid(), [Partial(), Replicate()])
            if step(x).full_tensor()[0] != 2:
                wrong.append(-1.0)

    workers = [threading.Thread(target=work_with, args=(k,)) for k in range(2)]
    for thread in workers:
        thread.start()
    work(0)
    for thread in workers:
        thread.join()
    return wrong, total(3) == 12


def test_threads_with_groups_of_their_own_do_not_mix(gloo4: Pool) -> None:
    assert gloo4.run(with_own_groups) == [([], True)] * 4


def one_after_the_other(rank: int) -> list[float]:
    """A thread may hand over to another."""
    found: list[float] = []
    for number in range(3):
        thread = threading.Thread(target=lambda number=number: found.append(total(number)))
        thread.start()
        thread.join()
        found.append(total(number))
    return found


def test_threads_may_take_turns(gloo4: Pool) -> None:
    assert gloo4.run(one_after_the_other) == [[0.0, 0.0, 4.0, 4.0, 8.0, 8.0]] * 4


def test_own_groups_have_names_and_are_nothing_in_a_simulation() -> None:
    with pytest.raises(ValueError, match="the name is 'a b'; give an identifier"):
        OwnGroups(spmd.DeviceMesh("cpu", [0, 1]), "a b")
    with spmd.LocalTensorMode(2):
        mesh = init_device_mesh("cpu", (2,))
        with OwnGroups(mesh, "own"):
            assert wait(all_reduce(torch.ones(1), "sum", mesh)).reconcile().item() == 2
