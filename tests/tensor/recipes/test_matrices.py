"""Triangles and diagonals of sharded matrices are those of one device, and nothing is sent."""

from __future__ import annotations

import itertools

import pytest
import torch

import spmd
from tests.tensor.rules.test_norms import smooth
from tests.tensor.single import AVG, MAX, S0, S1, S2, SUM, R, agree_at_once, mesh_of, placed

LIE = [[S0, S1], [S1, S0], [S0, S0], [S1, R], [S0, SUM]]


@pytest.mark.parametrize("shape", [(8, 8), (5, 7), (2, 9), (1, 3)], ids=str)
def test_they_are_those_of_one_device(shape):
    """Forward and backward, with even, uneven and empty blocks, and diagonals inside the matrix and beyond it."""

    def fn(x):
        found = [x.trace(), x.diag(), x.diag(2), x.diag(-1)]
        for k in (0, 1, -2, 6, -9):
            found += [x.tril(k), x.triu(k)]
        return tuple(found)

    agree_at_once(fn, [smooth(*shape)], *[[placing] for placing in LIE])


def test_of_batches_and_other_kinds():
    def fn(x):
        diagonals = [torch.diagonal_copy(x, k, *dims) for k, dims in itertools.product((0, -2), ((1, 2), (2, 0)))]
        return (x.tril(1), x.triu(), *diagonals)

    agree_at_once(fn, [smooth(3, 4, 5)], [[S1, S2]], [[S0, S2]], [[S2, S2]], [[AVG, S1]])
    agree_at_once(lambda x: (x.tril(), x.triu(1)), [smooth(5, 4)], [[MAX, S0]], [[S1, MAX]])
    agree_at_once(lambda x: (x.tril(), x.diag(), x.t().triu()), [smooth(5, 4).detach() > 0], [[S0, S1]])
    agree_at_once(lambda x: (x.trace(), x.diag(1)), [torch.arange(20, dtype=torch.int32).view(5, 4)], [[S0, S1]])


def test_writes_are_those_of_one_device():
    agree_at_once(lambda x: x.clone().tril_(1).triu_(), [smooth(5, 4)], [[S0, S1]], [[S1, R]])


@pytest.mark.parametrize("shape", [(8, 8), (5, 7), (7, 2), (1, 3), (3, 3, 3)], ids=str)
def test_filled_diagonals_are_those_of_one_device(shape):
    def fn(x):
        y, mask = x * 2, torch.ones_like(x, dtype=torch.bool)
        y.transpose(0, 1).fill_diagonal_(0.5)
        y.fill_diagonal_(-1e9, wrap=True)
        return y, (x * 1).fill_diagonal_(3), mask.fill_diagonal_(False)

    agree_at_once(fn, [smooth(*shape)], *[[placing] for placing in LIE])


def test_a_filled_diagonal_sends_nothing():
    with spmd.LocalTensorMode(4) as mode:
        x = placed(smooth(5, 7).detach(), [S0, S1], mesh_of((2, 2)))
        before = len(mode.sent)
        x.fill_diagonal_(1.0)
        assert len(mode.sent) == before


WRONG = [((4,), "two dims or more"), ((2, 3, 2), "equal length")]


@pytest.mark.parametrize("shape, said", WRONG, ids=str)
def test_what_has_no_diagonal_is_an_error(shape, said):
    with spmd.LocalTensorMode(4), pytest.raises(RuntimeError, match=said):
        placed(smooth(*shape).detach(), [S0, R], mesh_of((2, 2))).fill_diagonal_(1)


def test_a_view_that_had_to_be_copied_is_read_up_to_date():
    """x[1:] of sharded rows is a copy. Recipes read it after a write into x, as all other ops do."""

    def fn(x):
        x = x.clone()
        v, first = x[1:], torch.zeros_like(x[1:, :1], dtype=torch.int64)
        x.mul_(2)
        found = [v.trace(), v.gather(1, first), v.tril()]
        x.add_(1)
        return (*found, v.trace(), v.gather(1, first), v.diag())

    agree_at_once(fn, [smooth(6, 4).detach()], [[S0, S1]], [[S0, S0]])


def test_nothing_is_sent():
    given = smooth(8, 8).detach()
    with spmd.LocalTensorMode(4) as mode:
        x = placed(given, [S0, S1], mesh_of((2, 2)))
        lie = [str(y._spec) for y in (x.tril(), x.triu(1), x.trace(), x.diag())]
        assert lie == ["f64[8@dp, 8@tp]", "f64[8@dp, 8@tp]", "f64[] +sum@dp +sum@tp", "f64[8] +sum@dp +sum@tp"]
        assert not mode.sent
