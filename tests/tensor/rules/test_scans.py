"""Scans, extremes and variances along sharded dims give the results of one device and send a few numbers a block."""

from __future__ import annotations

import pytest
import torch
from versions import aminmax

import spmd
from spmd import debug
from spmd.tensor.rules.scans import scan_decompositions
from tests.tensor.oracle import close
from tests.tensor.rules.test_norms import smooth
from tests.tensor.single import S0, S1, S2, SUM, R, agree_at_once, every_rank, mesh_of, placed

aten, inf, nan = torch.ops.aten, float("inf"), float("nan")

SCANS = {
    "aminmax": aminmax,
    "aminmax of a dim": lambda x: aminmax(x, dim=1, keepdim=True),
    "argmax": lambda x: x.argmax(1),
    "argmin": lambda x: x.argmin(0, True),
    "cumsum": lambda x: x.cumsum(1) + x.cumsum(0),
    "cummax, cummin": lambda x: (*x.cummax(1), *x.cummin(0)),
    "cumprod": lambda x: x.cumprod(1) + x.cumprod(0),
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
    "max": lambda x: x.max(1),
    "min": lambda x: x.min(-2, True),
    "std": lambda x: (x.std(), torch.std_mean(x, 1, correction=2)[0]),
    "topk": lambda x: x.topk(2, 1),
    "topk, the least": lambda x: x.topk(1, 0, largest=False),
    "var": lambda x: (x.var(1), *torch.var_mean(x, [0], correction=0, keepdim=True)),
}
LIE = [[S0, S1], [S1, S1], [S1, S0], [R, S1], [SUM, S1]]


@pytest.mark.parametrize("shape", [(8, 32), (5, 7), (3, 16)], ids=str)
@pytest.mark.parametrize("name", SCANS)
def test_they_are_those_of_one_device(name, shape):
    """Forward and backward, with even, uneven and empty blocks."""
    agree_at_once(SCANS[name], [smooth(*shape)], *[[placing] for placing in LIE])


def test_of_more_dims():
    for name in ("argmax", "cumsum", "topk", "var"):
        agree_at_once(SCANS[name], [smooth(4, 32, 3)], [[S1, S1]], [[S2, S1]])
    flat = lambda x: (x.cumsum(0), x.argmax(0), x.topk(2, 0)[1], x.argmax())  # noqa: E731
    agree_at_once(flat, [smooth(32)], [[S0, S0]], [[R, S0]])


def test_equals_and_what_is_no_number():
    """Of equal values the first one. NaN is the maximum and the minimum. A row may have only infinite values."""
    ties = torch.tensor([[3, 1, 3, 1], [0, 0, 0, 0], [1, 2, 2, 2], [5, 5, 5, 1]])
    odd = torch.tensor([[1.0, -inf, 2.0, inf], [-inf] * 4, [1, nan, 3, nan], [nan] * 4, [inf, inf, 1, 2]])
    for x in (ties, ties.to(torch.uint8), odd, odd.to(torch.bfloat16), odd.t().contiguous().t()):
        best = lambda x: (*x.max(1), *x.min(1), x.argmax(1), x.argmin(1))  # noqa: E731
        agree_at_once(best, [x], [[R, S1]], [[S1, S1]], [[S0, S1]])
    agree_at_once(lambda x: (x.cumsum(1), x.logcumsumexp(1), x.std(1)), [odd], [[R, S1]], [[S1, S0]])


def test_running_extremes():
    """Of equal values the last one, and NaN from the first one on. Some blocks of 5 on 2 x 2 ranks are shorter."""
    ties = torch.tensor([[3, 1, 3, 1, 3], [0, 0, 0, 0, 0], [1, 2, 2, 2, 1], [5, 5, 5, 1, 5]])
    odd = torch.tensor([[1.0, -inf, 2.0, inf], [-inf] * 4, [1, nan, 3, nan], [nan] * 4, [inf, inf, 1, 2]])
    for x in (ties, ties.to(torch.uint8), odd, odd.to(torch.bfloat16)):
        agree_at_once(lambda x: (*x.cummax(1), *x.cummin(1)), [x], [[R, S1]], [[S1, S1]], [[S0, S1]])
    agree_at_once(lambda x: (*(x > 1).max(1), *(x > 1).min(0)), [ties], [[R, S1]], [[S0, S1]])


def test_running_products():
    """Zeros, and their gradients; products of single precision, which a block alone would make infinite."""
    def of(x):
        return (x * (x.detach() > -0.2)).cumprod(1)

    agree_at_once(of, [smooth(3, 8)], [[S0, S1]], [[S1, S1]])
    large = torch.tensor([1e-30, 1e-15, 1e30, 1e20, 1e30, 1e-30, 2.0, 3.0])
    agree_at_once(lambda x: x.cumprod(0), [large], [[S0]], mesh_shape=(4,))
    debug.fallbacks.clear()
    agree_at_once(lambda x: x.cumprod(0), [torch.arange(1, 10)], [[S0, S0]])
    assert not debug.fallbacks()


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.bfloat16, torch.complex128], ids=str)
def test_dtypes_are_those_of_one_device(dtype):
    x = (smooth(4, 32).detach() * 5).to(dtype)
    fns = [lambda x: x.cumsum(1), lambda x: x.cumsum(1, dtype=torch.float64 if dtype != torch.complex128 else dtype)]
    if dtype == torch.bfloat16:
        fns += [lambda x: x.var(1), lambda x: x.logcumsumexp(1), lambda x: x.std()]
    with spmd.LocalTensorMode(4):
        d = placed(x, [S0, S1], mesh_of((2, 2)))
        for fn in fns:
            with torch.utils._python_dispatch._disable_current_modes():
                want = fn(x)
            for got in every_rank(fn(d)):
                assert got.dtype == want.dtype and close(got, want, 2e-2 if dtype == torch.bfloat16 else 1e-9)


@pytest.mark.parametrize("name", ["argmax", "max", "topk", "logcumsumexp", "std"])
def test_what_is_sent_is_numbers_a_block(name):
    """For a large vocabulary on four ranks, no scores are sent and nothing is gathered."""
    debug.fallbacks.clear()
    with spmd.LocalTensorMode(4) as mode:
        SCANS[name](placed(smooth(4, 4096).detach(), [S1], mesh_of((4,))))
        assert not debug.fallbacks()
        assert 0 < max(sent.nbytes for sent in mode.sent) <= 4 * 4 * 2 * 8  # rows, blocks, two numbers for each


def test_where_the_dim_lies_whole_the_op_stays():
    with spmd.LocalTensorMode(4):
        x = placed(smooth(8, 32).detach(), [S0, S0], mesh_of((2, 2)))
        for op, args in ((aten.max.dim, (1,)), (aten.argmin.default, (1,)), (aten.topk.default, (2, 1)),
                         (aten.cumsum.default, (1,)), (aten.logcumsumexp.default, (1,)), (aten.var.correction, ([1],))):
            assert scan_decompositions[op](x, *args) is NotImplemented
            cut = args[:-1] + (0,) if op == aten.topk.default else ([0],) if op == aten.var.correction else (0,)
            wide = placed(smooth(64, 8).detach(), [S0, S0], mesh_of((2, 2)))
            assert scan_decompositions[op](wide, *cut) is not NotImplemented
