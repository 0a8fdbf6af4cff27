"""Ops that torch takes apart in C++ before a DTensor sees them."""

from __future__ import annotations

import pytest
import torch

import spmd
from spmd.sim import run_ranks
from spmd.tensor.composites import composites
from tests.tensor.single import S0, S1, R, agree


@pytest.mark.parametrize("at, dim", [([2, 5], 0), ([0, 9], 1), ([], 0), (3, 0), (2, -1)], ids=str)
def test_tensor_split_reads_its_indices(at, dim):
    """Indices, or a number of sections, that are a DTensor; sharded or not, with gradients."""
    x, where = torch.randn(7, 5, dtype=torch.float64, requires_grad=True), torch.tensor(at, dtype=torch.int64)
    sharded = [S0, R] if where.ndim else [R, R]
    agree(lambda x, at: torch.tensor_split(x, at, dim), [x, where], [[S0, S1], [R, R]], [[R, S0], sharded])


def test_tensor_split_refuses_what_torch_refuses():
    for where in (torch.tensor([1.0]), torch.tensor([[1]])):
        with pytest.raises(RuntimeError):
            torch.tensor_split(torch.randn(4), where)
        with pytest.raises(RuntimeError, match="must be a 0-D or 1-D tensor of int64"):
            composites[torch.ops.aten.tensor_split.tensor_indices_or_sections](torch.randn(4), where)


@pytest.mark.parametrize("how", [{}, {"N": 3, "increasing": True}, {"N": 1}, {"N": 0}], ids=str)
def test_powers_of_each_element(how):
    """torch writes them into a plain tensor, over what a gradient would need."""
    x = torch.tensor([0.5, 2.0, 0.0, -1.0, 3.0], dtype=torch.float64)
    agree(lambda x: torch.vander(x, **how), [x], [[S0, R]], [[R, S0]], [[S0, S0]])
    agree(lambda x: torch.vander(x, **how), [torch.arange(5, dtype=torch.int32)], [[S0, R]])


def test_what_has_no_powers_is_refused():
    for x, n in ((torch.ones(2, 2), None), (torch.ones(2), -1)):
        with pytest.raises(RuntimeError, match="x must have one dim and N must not be negative"):
            composites[torch.ops.aten.vander.default](x, n)


def test_a_new_tensor_of_data_is_plain_and_of_the_same_dtype() -> None:
    def made(mesh):
        x = spmd.distribute_tensor(torch.ones(4, dtype=torch.float64), mesh, [spmd.Shard(0)])
        return x.new_tensor([1, 2]), x.new_tensor(3, dtype=torch.int32), x.new([4.0])

    for found in run_ranks(lambda rank: made(spmd.init_device_mesh("cpu", (2,))), 2):
        assert [(y.dtype, y.tolist()) for y in found] == [
            (torch.float64, [1.0, 2.0]), (torch.int32, 3), (torch.float64, [4.0])
        ]  # fmt: skip
        assert {type(y) for y in found} == {torch.Tensor}
