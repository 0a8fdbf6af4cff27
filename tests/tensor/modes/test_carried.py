"""What a block sets is known where autograd runs backward passes in its threads: on GPUs, and deep inside of others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import spmd
from spmd import LocalTensorMode, Shard
from spmd._torch import Carried
from spmd.comm.transport import transport
from spmd.mesh.rank import as_rank, current_rank, rank_simulator
from spmd.tensor.modes import deterministic
from tests.tensor.modes.deep import in_backward_passes


def in_a_thread_of_autograd(ask: Callable[[], Any]) -> Any:
    """What the function gives in the backward pass of a thread that autograd has started."""
    *_, (thread, found) = in_backward_passes(lambda left: None if left else (threading.get_ident(), ask()))
    assert thread != threading.get_ident()
    return found


def test_a_value_is_carried_along_and_given_back():
    colour = Carried("test colour", "grey")
    assert in_a_thread_of_autograd(colour.get) == "grey"
    outer = colour.set("red")
    inner = colour.set(None)
    assert in_a_thread_of_autograd(colour.get) is None
    colour.reset(inner)
    assert in_a_thread_of_autograd(colour.get) == "red"
    colour.reset(outer)
    assert in_a_thread_of_autograd(colour.get) == "grey" == colour.get()


def test_other_threads_have_their_own():
    colour, seen = Carried("test colour of threads", "grey"), []
    token = colour.set("red")
    thread = threading.Thread(target=lambda: seen.append(in_a_thread_of_autograd(colour.get)))
    thread.start()
    thread.join()
    colour.reset(token)
    assert seen == ["grey"]


@pytest.mark.parametrize(
    "inside, ask",
    [
        (lambda: as_rank(3, 8), current_rank),
        (lambda: LocalTensorMode(2), lambda: type(transport()).__name__),
        (lambda: LocalTensorMode(2), lambda: rank_simulator() is not None),
        (spmd.deterministic, deterministic.is_on),
    ],
)
def test_what_blocks_of_spmd_set(inside, ask):
    outside = ask()
    with inside():
        here, there = ask(), in_a_thread_of_autograd(ask)
    assert here == there != outside == in_a_thread_of_autograd(ask)


def test_collectives_of_a_backward_pass_are_counted_and_right():
    def gradient() -> torch.Tensor:
        with torch.enable_grad():
            x = spmd.distribute_tensor(torch.arange(6.0), mesh, [Shard(0)]).requires_grad_()
            (x.sum() ** 2).full_tensor().backward()
            return x.grad.full_tensor().reconcile()

    with LocalTensorMode(2):
        mesh = spmd.init_device_mesh("cpu", (2,))
        with spmd.debug.CommDebugMode() as here:
            wanted = gradient()
        with spmd.debug.CommDebugMode() as there:
            found = in_a_thread_of_autograd(gradient)
    assert torch.equal(found, wanted) and torch.equal(wanted, torch.full((6,), 30.0))
    assert there.get_total_counts() == here.get_total_counts() > 0
