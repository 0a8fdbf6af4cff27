"""What a step reads of tensors of one number that it keeps, of each dtype: flags, counts, rates."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from tests.expand.call_by_call import WAYS, Plain, X, check

DTYPES = [
    torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
]  # fmt: skip


def by_item(t, x):
    return x * t.item()


def by_float(t, x):
    return x * float(t)


def by_int(t, x):
    return x * int(t)


def by_bool(t, x):
    return x * bool(t)


def by_if(t, x):
    return x * 2 if t else x * 3


def by_if_of_item(t, x):
    return x * 2 if t.item() else x * 3


def by_if_not(t, x):
    return x * 2 if not t else x * 3


def by_comparisons(t, x):
    k = t.item()
    found = [k == 1, k != 0, k > 0.5, k < 1, k >= 1, k <= 0, t == 1, t > 0, t != 0, k == 1, k == True]  # noqa: E712
    return [3 if each else 4 for each in found]


def by_arithmetic(t, x):
    k = t.item()
    found = [k + 1, 1 + k, k * 2.5, 2 - k, k - 1, k / 4, 3 // (k + 1), (k + 2) % 2, k**2, 2**k, -k, abs(k), +k]
    return [x.sum() * each for each in found]


def as_an_argument(t, x):
    return torch.where(torch.tensor(True), x, t), torch.full((2,), t.item()), x.new_full((), t.item()), x + t


def as_a_shape(t, x):
    return torch.ones(int(t) + 1, 2), x.reshape(2, -1)[: int(t) + 1], [0] * int(t)


def by_all(t, x):
    return x * 2 if t.all() else x * 3


def by_not(t, x):
    return x * 2 if torch.logical_not(t) else x * 3


def by_its_number(t, x):
    return x * 2 if t.float().item() > 0.5 else x * 3


WAYS_TO_READ: list[Callable] = [
    by_item, by_float, by_int, by_bool, by_if, by_if_of_item, by_if_not, by_comparisons, by_arithmetic, as_an_argument,
    as_a_shape, by_all, by_not, by_its_number,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("read", WAYS_TO_READ, ids=lambda f: f.__name__)
def test_what_is_read_is_what_is_kept(read, dtype, way):
    """The first call finds 0, and sets 1."""

    def step(model, x):
        found = read(model.initted, x * 1.0)
        with torch.no_grad():
            model.initted.copy_(torch.tensor(1, dtype=dtype))
        return found, model.weight.sum()

    check(lambda: Plain(initted=torch.tensor(0, dtype=dtype)), step, [(X,)] * 3, way)


class Average(Plain):
    """A moving average of a tensor, which begins as a copy."""

    def __init__(self):
        super().__init__(initted=torch.tensor(False), average=torch.zeros(4, dtype=torch.float64))

    def update(self, x):
        if not self.initted:
            self.average.copy_(x)
            self.initted.fill_(True)
        else:
            self.average.lerp_(x, 0.25)


@pytest.mark.parametrize("way", WAYS)
def test_a_moving_average(way):
    def step(model, x):
        model.update(x.mean(0))
        return model.average.sum()

    check(Average, step, [(X + i,) for i in range(4)], way)


def test_numbers_are_rounded_as_their_dtype_is():
    """A rate of single precision, which the step multiplies: no branch by what doubles would have."""

    def step(model, x):
        model.rate.mul_(0.1)
        lower = model.rate * 3
        return x * 2 if lower.item() > 0.3 * float(torch.tensor(0.1)) else x * 3

    check(lambda: Plain(rate=torch.tensor(1.0)), step, [(X,)] * 3)
    assert math.isclose(float(torch.tensor(0.1)), 0.1, rel_tol=1e-7)
