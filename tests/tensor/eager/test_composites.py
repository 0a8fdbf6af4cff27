"""Ops that torch decomposes in C++ before a DTensor sees them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from workers import Pool

import spmd
from spmd.mesh import init_device_mesh
from spmd.sim import LocalTensorMode, run_ranks
from spmd.tensor.eager.composites import composites
from spmd.tensor.eager.dtensor import distribute_tensor
from tests.tensor.single import AVG, S0, S1, SUM, R, agree, agree_at_once


@pytest.mark.parametrize("at, dim", [([2, 5], 0), ([0, 9], 1), ([], 0), (3, 0), (2, -1)], ids=str)
def test_tensor_split_reads_its_indices(at, dim):
    """The indices, or the number of sections, are a DTensor, sharded or not; with gradients."""
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
    """torch writes the powers into a plain tensor, over values that the gradient needs."""
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


# ---- one_hot ----------------------------------------------------------------------------------

CLASSES = torch.tensor([[0, 3, 2, 1, 1], [2, 2, 0, 1, 0]])
OUT_OF_RANGE = [(CLASSES, 3), (CLASSES - 1, -1), (CLASSES - 1, 4), (CLASSES[:, :0], -1), (CLASSES, -2), (CLASSES, 0)]


def one_hot(rank: int) -> list:
    """For each placement the classes of some rank that are right, and whether a wrong one is an error."""
    mesh, found = init_device_mesh("cpu", (4,)), []
    for placement in (R, S0, S1):
        x = distribute_tensor(CLASSES, mesh, [placement])
        right = [F.one_hot(x).full_tensor(), F.one_hot(x, 6).full_tensor()]
        found.append([y.equal(F.one_hot(CLASSES, n)) for y, n in zip(right, (-1, 6), strict=True)])
    whole = distribute_tensor(CLASSES, mesh)
    for classes, n in OUT_OF_RANGE:
        with pytest.raises(RuntimeError, match="one_hot"):
            F.one_hot(distribute_tensor(classes, mesh), n)
    with pytest.raises(RuntimeError, match="must be int64"):
        F.one_hot(whole.int())
    last = distribute_tensor(torch.tensor([0, 1, 2, 9]), mesh, [S0])
    try:
        F.one_hot(last, 5)
    except RuntimeError as error:
        return [*found, str(error)]
    return [*found, ""]


def test_one_hot_refuses_classes_out_of_range():
    """The rank that has the class raises. torch itself gives a row of zeros for a subclass of Tensor."""
    agree(lambda x: F.one_hot(x, 4), [CLASSES], [[S0, S1]], [[SUM, R]], [[S1, S1]])
    said = "one_hot: a class is negative, or not smaller than the number of classes, 5"
    assert run_ranks(one_hot, 4) == [[[True, True]] * 3 + [said if rank == 3 else ""] for rank in range(4)]
    with LocalTensorMode(4), pytest.raises(RuntimeError, match="not smaller than the number of classes, 3"):
        F.one_hot(distribute_tensor(CLASSES, init_device_mesh("cpu", (4,)), [S0]), 3)


# ---- products of elements ---------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
ROWS = {
    "no zero": [1.0, 2.0, 3.0, -2.0, 5.0],
    "a zero": [1.0, 0.0, 2.0, 3.0, 4.0],
    "two zeros": [0.0, 0.0, 2.0, 3.0, 4.0],
    "NaN": [1.0, NAN, 2.0, 3.0, 5.0],
    "a zero and NaN": [1.0, NAN, 0.0, 2.0, 3.0],
    "two zeros and NaN": [0.0, NAN, 0.0, 1.0, 2.0],
    "a zero and an infinity": [INF, 0.0, 2.0, 1.0, 3.0],
    "infinities": [INF, -INF, 2.0, 1.0, 3.0],
}
"""Rows of numbers whose product has a gradient with corners."""


def products(x: torch.Tensor) -> tuple:
    return x.prod(), x.prod(1), x.prod(0, keepdim=True), x.prod(-1, dtype=torch.float64)


@pytest.mark.parametrize("name", ROWS)
def test_gradients_of_products_are_those_of_one_device(name):
    """Each of the four products by itself, or a NaN of one would hide the gradients of the others."""
    x = torch.tensor([ROWS[name], ROWS["no zero"]], requires_grad=True)
    for i in range(4):
        agree_at_once(lambda x, i=i: products(x)[i], [x], [[S0, S1]], [[AVG, R]])


def test_gradients_of_products_have_gradients():
    def twice(x):
        (g,) = torch.autograd.grad((x.prod(0) ** 2).sum() + x.prod(), x, create_graph=True)
        return g

    for name in ("no zero", "a zero", "two zeros"):
        x = torch.tensor([ROWS[name], ROWS["no zero"]], dtype=torch.float64, requires_grad=True)
        agree_at_once(twice, [x], [[S0, S1]], [[R, R]])
    empty = torch.ones(0, 3, requires_grad=True)
    agree_at_once(lambda x: x.prod() + x.prod(0).sum() + x.sum(), [empty], [[R, S1]])


def product_gradients(rank: int) -> list[str]:
    """The rows with another gradient than on one device, whole or sharded."""
    mesh, wrong = init_device_mesh("cpu", (4,)), []
    for name, numbers in ROWS.items():
        x = torch.tensor(numbers, requires_grad=True)
        (want,) = torch.autograd.grad(x.prod(), x)
        for placement in (R, S0):
            y = distribute_tensor(x.detach(), mesh, [placement]).requires_grad_()
            (got,) = torch.autograd.grad(y.prod(), y)
            if not torch.allclose(got.full_tensor(), want, equal_nan=True):
                wrong.append(f"{name}, {placement}")
    return wrong


def test_so_it_is_on_gloo(gloo4: Pool):
    assert [found[:3] for found in gloo4.run(one_hot)] == [[[True, True]] * 3] * 4
    assert gloo4.run(product_gradients) == [[]] * 4
