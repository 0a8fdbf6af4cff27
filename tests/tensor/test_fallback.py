"""Ops that fall back to replicated operands are counted, and give a warning or an error if the user wants."""

from __future__ import annotations

import warnings

import pytest
import torch

import spmd
from spmd import Replicate, Shard, debug
from spmd.sim import LocalTensorMode


@pytest.fixture
def sharded():
    """A 4 x 4 matrix, its rows on four ranks, and a fresh count."""
    debug.fallbacks.clear()
    with LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        yield spmd.distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)])
    debug.fallbacks.clear()


def test_what_is_gathered_is_counted_with_its_first_line(sharded):
    for _ in range(3):
        torch.unique(sharded)
    (found,) = debug.fallbacks()
    assert (found.op, found.calls, found.nbytes) == ("aten._unique2.default", 3, 3 * 64)
    assert found.where.startswith("test_fallback.py:")
    assert str(debug.fallbacks()).startswith("aten._unique2.default: 3 calls, 192 bytes gathered, first at test_")


def test_what_needs_no_gathering_is_not_counted(sharded):
    (sharded + 1).sum().item()
    torch.unique(sharded.redistribute(placements=[Replicate()]))
    sharded.softmax(0)  # a move of a rule, and not a fallback
    sharded.sum().sqrt()  # a scalar with an owed sum
    assert not debug.fallbacks()
    assert str(debug.fallbacks()) == "no op was gathered"


def test_a_policy_warns_or_refuses(sharded):
    with debug.on_fallback("warn"), pytest.warns(debug.FallbackWarning, match="64 bytes are gathered"):
        torch.unique(sharded)
    with debug.on_fallback("error"):
        with debug.on_fallback("ignore"):
            torch.unique(sharded)
        with pytest.raises(debug.FallbackError, match=r"_unique2.*redistribute"):
            torch.unique(sharded)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.unique(sharded)
    assert debug.fallbacks()[0].calls == 4


def test_writes_that_gather_are_counted_each_time(sharded):
    """A call that is repeated takes the fast path, but is counted."""
    x = sharded.flatten() * 1
    for _ in range(3):
        x.cumprod_(0)
    assert [f.calls for f in debug.fallbacks() if "cumprod" in f.op] == [3]


def test_a_compiled_step_asks_when_it_is_compiled():
    debug.fallbacks.clear()

    def step(x):
        return torch.median(x) * 2

    with LocalTensorMode(2):
        mesh = spmd.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
        x = torch.randn(4, 4)
        compiled = spmd.compile(step, mesh, inputs={"x": {"dp": Shard(0)}})
        with debug.on_fallback("error"), pytest.raises(debug.FallbackError, match="median"):
            compiled(x)
        compiled(x)
    assert [f.op for f in debug.fallbacks()] == ["aten.median.default"]
    debug.fallbacks.clear()


def test_policies_have_names():
    with pytest.raises(ValueError, match="use one of ignore, warn, error"), debug.on_fallback("panic"):
        pass
