"""Floats of a step compute as Python's do, op by op: infinity, NaN, signed zeros, and the errors that Python raises."""

from __future__ import annotations

import math

import pytest
import torch

from spmd import LocalTensorMode
from tests.expand.call_by_call import WAYS, Plain, X, check, compiled, same

inf, nan = math.inf, math.nan

FLOATS = [0.5, -0.0, 0.0, inf, -inf, nan, 1e16, -3.25, 1e-300]


def simplified(k):
    """What algebra makes simple, and IEEE does not."""
    return [
        k * 0, k * 0.0, k - k, (k + 1) - k, k + k - k, 0 - k, -k, k * 1, +k, abs(k), k + 0.0, k - 0.0,
        (k * 3) * (1 / 3), 0.1 + k + 0.2, k * 0.1 * 10, k * k - k * k, (k + 0.1) * (k - 0.1), 1 - (1 - k), k * 2 - k,
    ]  # fmt: skip


def compared(k):
    """Each comparison as a result, and as a branch."""
    found = [k != k, k == k, k < 1, k <= k, k > 0, k >= 0.0, k < 1.5, k == 0, not k, bool(k), k == 1e16 + 1]
    return found + [1 if each else 0 for each in found]


def smallest(k):
    """Python's min and max take the first where none is greater, and an int as it is."""
    return [
        min(k, 1.0), max(k, 1.0), min(1.0, k), max(1.0, k), min(k, nan), max(nan, k), max(0.0, k), max(k, -0.0),
        min(0, k), max(k, 0), min(k, 2.0, 1.0), max([k, 0.25]),
    ]  # fmt: skip


def rounded(k):
    if not math.isfinite(k):
        return "not finite"
    return [
        int(k), math.floor(k), math.ceil(k), math.trunc(k), round(k), round(k, 1), k // 1, k % 1, k // 0.3, k % -0.3,
        divmod(k, 0.7), k.is_integer(), float(k),
    ]  # fmt: skip


def inside_a_tensor(k):
    ones = torch.ones(2, dtype=torch.float64)
    return [ones * (k - k + k * 0), torch.full((2,), k, dtype=torch.float64) * (k + 1 - k)]


EXPRESSIONS = [simplified, compared, smallest, rounded, inside_a_tensor]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("of", EXPRESSIONS, ids=lambda f: f.__name__)
def test_an_argument(of, way):
    def step(model, x, k):
        return of(k), (model.weight * x.mean()).sum()

    check(Plain, step, [(X, k) for k in FLOATS], way)


@pytest.mark.parametrize("of", EXPRESSIONS, ids=lambda f: f.__name__)
def test_a_counter(of):
    """A float that the step keeps, which is set between calls, too."""

    def step(model, x):
        found = of(model.k)
        model.k = model.k * 0.5 - 0.1
        return found

    check(lambda: Plain(k=0.75), step, [(X,)] * 4)


@pytest.mark.parametrize("of", [simplified, compared, smallest], ids=lambda f: f.__name__)
def test_a_number_of_a_group(of):

    def step(model, optimizer, x):
        found = of(optimizer.param_groups[0]["lr"])
        (x @ model.weight).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return found

    with LocalTensorMode(4):
        pairs = []
        for _ in range(2):
            model = Plain()
            pairs.append((model, torch.optim.SGD(model.parameters(), lr=0.5)))
        run = compiled(step, "dp")
        for lr in (0.5, 0.0, 1e16, 0.25):
            for _, optimizer in pairs:
                optimizer.param_groups[0]["lr"] = lr
            want = step(*pairs[0], X)
            same(run(*pairs[1], X), want, f"lr {lr}")


@pytest.mark.parametrize("of", [simplified, smallest], ids=lambda f: f.__name__)
def test_what_is_read_of_a_tensor(of):
    def step(model, x):
        return of(x.sum().item())

    check(Plain, step, [(torch.full((4, 1), k, dtype=torch.float64),) for k in (0.5, inf, nan, 0.0, 1e16, -0.0)])
