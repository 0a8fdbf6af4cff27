"""Ops whose result has a size that depends on values: where an argument says the size, a program has them."""

from __future__ import annotations

import pytest
import torch

import spmd
from spmd import LocalTensorMode, Shard
from tests.expand.test_sizes import on_ranks

CODES, WEIGHTS = torch.tensor([3, 1, 0, 3, 1, 4, 4, 4, 2]), torch.linspace(-1, 2, 9)
PLACED = {"x": {"dp": Shard(0)}, "w": {"tp": Shard(0)}}

COUNTED = {
    "counts": lambda x, w: torch.bincount(x, minlength=5),
    "more counts than values": lambda x, w: x.bincount(minlength=7) / x.shape[0],
    "of few": lambda x, w: torch.bincount(x[:1], minlength=4),
    "of none": lambda x, w: torch.bincount(x[:0], w[:0], minlength=3),
    "weighted": lambda x, w: torch.bincount(x, w, 5),
    "weighted by whole numbers": lambda x, w: torch.bincount(x.int(), x, 5),
    "weighted by what has a gradient": lambda x, w: torch.bincount(x, (w * 2).requires_grad_().exp(), minlength=6),
    "in inference mode": lambda x, w: torch.inference_mode()(torch.bincount)(x, minlength=5),
}


@pytest.mark.parametrize("name", COUNTED)
def test_counts_are_those_of_one_device(name):
    """Nine values on two ranks and on four; a second size takes no other capture."""
    fn, given = COUNTED[name], [(CODES, WEIGHTS), (CODES[:6], WEIGHTS[:6])]
    want = [fn(*args) for args in given]
    for mesh_shape in ((2, 2), (4, 1)):
        found, captures = on_ranks(fn, given, PLACED, mesh_shape)
        for got, expected in zip(found, want, strict=True):
            torch.testing.assert_close(got, expected)
        assert captures == 1


@pytest.mark.parametrize("value", [-1, 5])
def test_a_value_that_has_no_count_is_an_error(value):
    """On one device there would be more counts. A later call finds it, too, on all ranks."""
    with LocalTensorMode(4):
        mesh = spmd.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        step = spmd.compile(lambda x: torch.bincount(x, minlength=5), mesh, inputs={"x": {"dp": Shard(0)}})
        step(CODES)
        with pytest.raises(RuntimeError, match=r"bincount at test_value_sizes.py:\d+: .* give a greater one"):
            step(CODES.index_fill(0, torch.tensor([8]), value))


UNKNOWN = {
    "bincount": (lambda x: x.bincount(), "give minlength"),
    "nonzero": (lambda x: (x > 1).nonzero(), r"torch.nonzero_static\(mask, size=n\)"),
    "a mask": (lambda x: x[x > 1], "divide sums by mask.sum"),
    "masked_select": (lambda x: x.masked_select(x > 1), "divide sums by mask.sum"),
    "repeat_interleave": (lambda x: x.repeat_interleave(x), "give output_size"),
    "unique": (lambda x: x.unique(), "keep sizes, such as torch.where"),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_size_that_nothing_says_is_an_error_that_says_what_to_write(name):
    fn, said = UNKNOWN[name]
    step = spmd.compile(fn, spmd.DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",)))
    with pytest.raises(NotImplementedError, match=rf"depends on values, .*{said}(.|\n)*test_value_sizes.py"):
        step.program_for(CODES)
