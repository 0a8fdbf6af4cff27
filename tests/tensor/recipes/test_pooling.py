"""Pooling and padding of images that are sharded along height, width or depth: as on one device, by halos."""

from __future__ import annotations

from functools import partial
from math import inf

import pytest
import torch
import torch.nn.functional as F

from spmd.tensor.placement import Shard
from tests.expand.side_by_side import agree as in_programs
from tests.tensor.recipes.test_convolutions import halos_always, sent, t
from tests.tensor.single import S0, S1, S2, SUM, agree_at_once

__all__ = ["halos_always"]
S3 = Shard(3)


def maxima(n: int, **options):
    return partial(getattr(F, f"max_pool{n}d"), return_indices=True, **options)


CASES = {
    "max 1d": (maxima(1, kernel_size=3, stride=1, padding=1), (2, 3, 8)),
    "max 1d, tiles": (maxima(1, kernel_size=2), (2, 3, 9)),
    "max 1d, uneven": (maxima(1, kernel_size=3, stride=2, padding=1, ceil_mode=True), (3, 10)),
    "max 1d, a rank with no rows": (maxima(1, kernel_size=4, stride=1, padding=2, dilation=2), (1, 2, 9)),
    "max 2d": (maxima(2, kernel_size=(3, 2), stride=(1, 2), padding=(1, 0)), (1, 2, 5, 9)),
    "max 3d": (maxima(3, kernel_size=(2, 2, 3), stride=1, padding=1, ceil_mode=True), (1, 2, 3, 4, 5)),
    "average 1d": (partial(F.avg_pool1d, kernel_size=3, stride=1, padding=1), (2, 3, 8)),
    "average 1d, tiles": (partial(F.avg_pool1d, kernel_size=2), (2, 3, 10)),
    "average 2d": (partial(F.avg_pool2d, kernel_size=(2, 3), stride=2, padding=1, ceil_mode=True), (1, 2, 5, 9)),
    "average 2d of the image": (
        partial(F.avg_pool2d, kernel_size=4, stride=1, padding=2, count_include_pad=False), (1, 2, 4, 6)),
    "average 3d": (partial(F.avg_pool3d, kernel_size=2, stride=1, divisor_override=3), (1, 2, 3, 4, 7)),
    "average 3d, tiles": (partial(F.avg_pool3d, kernel_size=2), (1, 2, 4, 4, 4)),
    "padding": (partial(F.pad, pad=(2, 3, 1, 0), value=0.5), (2, 4, 7)),
    "padding, shorter": (partial(F.pad, pad=(-1, 3, 0, -2)), (2, 4, 9)),
    "padding, longer than blocks": (partial(F.pad, pad=(9, 1)), (2, 5)),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("halos_always")
def test_pooling_is_pooling(name):
    """Forward and backward, on one axis and on two."""
    fn, shape = CASES[name]
    x = t(*shape)
    last, above = Shard(x.ndim - 1), Shard(x.ndim - 2)
    agree_at_once(fn, [x], [[last]], [[above]], mesh_shape=(4,))
    agree_at_once(fn, [x], [[last, last]], [[above, last]], [[SUM, last]], [[last, S0]])


@pytest.mark.parametrize("dilation", [1, 2])
@pytest.mark.usefixtures("halos_always")
def test_the_first_of_equal_maxima_is_never_padding(dilation):
    """Not even where all numbers of a window are -inf, or the least of their dtype."""
    low = torch.full((1, 1, 8), -inf, dtype=torch.float64)
    agree_at_once(maxima(1, kernel_size=4, stride=1, padding=2, dilation=dilation), [low], [[S2]], mesh_shape=(4,))
    least = torch.full((1, 8, 8), torch.iinfo(torch.int32).min, dtype=torch.int32)
    agree_at_once(lambda x: F.max_pool2d(x, 3, 1, 1, return_indices=True), [least], [[S1]], mesh_shape=(4,))


@pytest.mark.parametrize("name", ["max 2d", "average 2d", "average 3d, tiles", "padding"])
@pytest.mark.usefixtures("halos_always")
def test_programs_pool_as_one_device(name):
    fn, shape = CASES[name]
    last = Shard(len(shape) - 1)
    in_programs(fn, [t(*shape)], [[last, S0]], [[S1, last]])


def test_only_halos_are_sent():
    """Of 64 columns on 4 ranks: a column each way. Backward it is that of the gradients."""
    image, column = (1, 8, 16, 64), 8 * 16 * 8
    assert sent(lambda x: F.max_pool2d(x, 3, 1, 1), S3, shapes=[image]) == (2 * column, 4 * column)
    assert sent(lambda x: F.avg_pool2d(x, 3, 1, 1), S3, shapes=[image]) == (2 * column, 4 * column)
    assert sent(lambda x: F.avg_pool2d(x, 2), S3, shapes=[image]) == (0, 0)
    assert sent(lambda x: F.max_pool2d(x, 2), S3, shapes=[image]) == (0, 0)
    assert sent(lambda x: F.pad(x, (1, 0)), S3, shapes=[image])[0] <= 4 * column
