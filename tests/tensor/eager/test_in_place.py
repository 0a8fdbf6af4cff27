"""Writes that change a shape, `out=` of any shape, and as_strided on the memory of the global tensor."""

from __future__ import annotations

import pytest
import torch

from spmd.tensor.eager.dtensor import distribute_tensor
from tests.tensor.single import AVG, S0, S1, SUM, R, agree, on_ranks


def changed(write):
    """A tensor, and a number times it, after the tensor got another shape."""

    def fn(x):
        y = x * 2
        write(y)
        return y.clone(), y * 3

    return fn


TURNED = {
    "t_": lambda x: x.t_(),
    "transpose_": lambda x: x.transpose_(0, 1),
    "swapaxes_": lambda x: x.swapaxes_(0, 1),
    "squeeze_": lambda x: x[:, :1].clone().squeeze_(),
    "squeeze_ of a dim": lambda x: x.squeeze_(0),
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "twice": lambda x: x.unsqueeze_(0).transpose_(0, 2).squeeze_(),
    "and written": lambda x: x.t_().add_(1),
}


@pytest.mark.parametrize("name", TURNED)
def test_a_tensor_may_be_turned_in_place(name):
    """The wrapper has the new shape, the block is not copied, gradients come back."""
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    agree(changed(TURNED[name]), [x], [[S0, R]], [[S1, S0]], [[SUM, R]], [[R, AVG]])


@pytest.mark.parametrize("size", [(30,), (3, 4), (2, 3, 5), (6, 7), (0,)])
def test_resize_keeps_the_elements_that_fit(size):
    """The elements keep the order of memory; new elements may have any value."""
    kept = min(30, torch.Size(size).numel())

    def fn(x):
        return x.clone().resize_(size).view(-1)[:kept]

    x = torch.arange(30.0, dtype=torch.float64).view(5, 6)
    agree(fn, [x], [[S0, R]], [[S1, S0]], [[SUM, R]])
    agree(lambda x: fn(x.t()), [x], [[S0, R]])


OUTS = {
    "nonzero": lambda x, out: torch.nonzero(x > 0, out=out(torch.int64)),
    "add": lambda x, out: torch.add(x, 1, out=out(torch.float64)),
    "matmul": lambda x, out: torch.matmul(x, x.t(), out=out(torch.float64)),
    "sort": lambda x, out: torch.sort(x, 1, out=(out(torch.float64), out(torch.int64)))[0],
    "inv": lambda x, out: torch.linalg.inv(x[:, :5], out=out(torch.float64)),
}


@pytest.mark.parametrize("name", OUTS)
def test_out_takes_the_shape_of_the_result(name):
    x = torch.randn(5, 6, dtype=torch.float64)
    agree(lambda x: OUTS[name](x, lambda dtype: x.new_empty(0, dtype=dtype)), [x], [[S0, R]], [[S1, S0]], [[SUM, R]])


def test_out_refuses_a_dtype_that_the_result_cannot_be_cast_to():
    def rank(mesh):
        x = distribute_tensor(torch.ones(4), mesh, [S0, R])
        with pytest.raises(RuntimeError, match="can't be cast"):
            torch.add(x, 0.5, out=x.to(torch.int64))
        return True

    assert on_ranks(rank) == [True] * 4


def test_a_tensor_with_views_gets_no_new_memory():
    """Its views would keep the old memory."""

    def rank(mesh):
        x = distribute_tensor(torch.ones(4, 4), mesh, [S0, R])
        seen = x[:, :1]
        with pytest.raises(RuntimeError, match="go on showing the old"):
            x.resize_(3, 5)
        x.t_()
        x.add_(1)
        return seen.full_tensor().flatten().tolist()

    assert on_ranks(rank) == [[2.0] * 4] * 4


STRIDES = {
    "windows": lambda x: x.as_strided((4, 3), (6, 1)),
    "overlapping": lambda x: x.as_strided((8, 3), (2, 1), 1),
    "copy": lambda x: torch.as_strided_copy(x, (4, 3), (6, 1)),
    "scatter": lambda x: torch.as_strided_scatter(x, x[:2, :2] * 2, (2, 2), (6, 1), 3),
    "stft": lambda x: torch.stft(x.reshape(-1), 8, window=x.new_ones(8), return_complex=True).abs(),
}


@pytest.mark.parametrize("name", STRIDES)
def test_strides_are_those_of_the_whole_tensor(name):
    """as_strided reads memory: the memory that the tensor would have on one device."""
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    agree(STRIDES[name], [x], [[R, R]], [[S0, R]], [[S1, S0]], [[SUM, R]])


def test_strides_of_a_part_are_refused():
    """No rank knows the memory outside of the part."""

    def rank(mesh):
        x = distribute_tensor(torch.ones(4, 4), mesh, [S0, R])
        with pytest.raises(NotImplementedError, match="Clone it before"):
            x[:, 1:].as_strided((2,), (1,))
        return True

    assert on_ranks(rank) == [True] * 4


def test_a_strided_view_is_written_through():
    """It is a view of a replicated tensor, and of a sharded tensor a view of a gathered copy."""

    def rank(mesh):
        found = []
        for lies in ([R, R], [S0, R], [S1, S0]):
            x = distribute_tensor(torch.zeros(4, 2), mesh, lies)
            x.as_strided((2,), (3,)).fill_(1)
            found.append(x.full_tensor().flatten().tolist())
        return found

    assert on_ranks(rank) == [[[1.0, 0, 0, 1, 0, 0, 0, 0]] * 3] * 4


def test_conjugates_and_negatives_are_values():
    """torch sets a bit for them that a DTensor does not have."""
    x = torch.randn(4, 6, dtype=torch.complex128, requires_grad=True)
    fns = lambda x: torch.view_as_real(x.conj().resolve_conj()), lambda x: x.conj().imag, lambda x: (x.mH @ x).abs()
    for fn in fns:
        agree(fn, [x], [[S0, R]], [[S1, S0]])


def test_conjugates_are_written_through():
    def rank(mesh):
        x = distribute_tensor(torch.ones(4, dtype=torch.complex64), mesh, [S0, R])
        turned = x.conj()
        turned.mul_(2j)
        x.add_(1)
        return x.full_tensor().tolist(), turned.full_tensor().tolist()

    assert on_ranks(rank) == [([1 - 2j] * 4, [1 + 2j] * 4)] * 4
