"""A step that raises does so as on one device, on all ranks alike, in a capture or in the run, and later calls work."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable

import pytest
import torch

from spmd import LocalTensorMode
from spmd.sim import run_ranks
from tests.expand.call_by_call import WAYS, Plain, X, check, compiled, outcome, same


class Odd(LookupError):
    pass


def raised(error: Exception) -> float:
    raise error


def caught(k: float) -> str | float:
    try:
        return 1 / k
    except ZeroDivisionError:
        return "infinite"


def caught_in_math(k: float) -> str | float:
    try:
        return math.log(k)
    except ValueError as error:
        return str(error)


RAISING: dict[str, Callable[[float, torch.Tensor], object]] = {
    "of a constant": lambda k, x: math.exp(800) if k > 5 else 1.0,
    "of another constant": lambda k, x: math.sqrt(-1.0) if k > 5 else 1.0,
    "exp": lambda k, x: math.exp(k * 100),
    "sqrt": lambda k, x: math.sqrt(5 - k),
    "log": lambda k, x: math.log(8 - k),
    "a division": lambda k, x: 1 / (8.0 - k),
    "a remainder": lambda k, x: (7.5 % (8.0 - k), 7.5 // (8.0 - k)),
    "a power": lambda k, x: (8.0 - k) ** -2,
    "a large power": lambda k, x: 10.0 ** (k * 100),
    "a complex power": lambda k, x: (5.0 - k) ** 0.5,
    "an int": lambda k, x: int(math.inf if k > 5 else k),
    "an int of infinity": lambda k, x: int(k * 1e308),
    "rounded": lambda k, x: round(k * 1e308 - k * 1e308),
    "of a size": lambda k, x: k / (x.shape[0] - 8 + int(k < 5)),
    "an int by a size": lambda k, x: (7 // (x.shape[0] - 8 + int(k < 5)), 7 % (x.shape[0] - 8 + int(k < 5))),
    "a size by another": lambda k, x: x.numel() // (x.shape[0] - 2 * x.shape[1] + int(k < 5)),
    "of what is read": lambda k, x: math.sqrt(5 - k + 0 * x.sum().item()),
    "a division by what is read": lambda k, x: 1 / (x.sum().item() * 0 + 8 - k),
    "a large power of what is read": lambda k, x: 10.0 ** (x.sum().item() * 0 + k * 100),
    "an index": lambda k, x: [1, 1.0, 2.0, 3.0][int(k)],
    "an error of the user's": lambda k, x: raised(Odd("eight")) if k > 5 else 1.0,
    "a division that is caught": lambda k, x: caught(8.0 - k),
    "a logarithm that is caught": lambda k, x: caught_in_math(5.0 - k),
    "a key": lambda k, x: {1.0: 1, 2.0: 2, 3.0: 3}[k],
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("first", [8.0, 1.0])
@pytest.mark.parametrize("name", RAISING)
def test_it_raises_what_one_device_raises_and_goes_on(name, first, way):
    def step(model, x, k):
        y = (x @ model.weight).square().mean()
        return RAISING[name](k, x), y

    check(Plain, step, [(X, k) for k in (first, 2.0, 1.0, 8.0, 8.0, 3.0, 1.0)], way)


@pytest.mark.parametrize("name", ["exp", "of a constant", "of what is read", "an error of the user's"])
def test_a_training_goes_on(name):
    """With ranks in threads of their own, and an optimiser. What the call before has left in gradients is its own."""

    def step(model, optimizer, x, k):
        optimizer.zero_grad()
        loss = (x @ model.weight).square().mean()
        loss.backward()
        found = RAISING[name](k, x)
        optimizer.step()
        return found, loss.detach()

    def trained(make: Callable) -> list:
        model = Plain()
        run, optimizer = make(step), torch.optim.AdamW(model.parameters(), lr=0.1)
        return [outcome(run, model, optimizer, X, k) for k in (1.0, 8.0, 2.0, 8.0)]

    want = trained(lambda step: step)
    for got in run_ranks(lambda rank: trained(lambda step: compiled(step, "sharded")), 4):
        same([x for x, _ in got], [x for x, _ in want], name)


def by_name(y):
    try:
        return math.exp(y)
    except OverflowError:
        return math.inf


def by_a_base(y):
    try:
        return 1 / y
    except (KeyError, ArithmeticError) as error:
        return str(error)


def by_none(y):
    with contextlib.nullcontext():
        try:
            return int(y)
        except:  # noqa: E722
            return 0


def behind_another(y):
    try:
        try:
            return y**-1.5
        except KeyError:
            return 1
        finally:
            y = 2
    except Exception:
        return 0


def of_another_kind(y):
    try:
        found = math.exp(y) + 1 / y
    except (KeyError, OSError):
        return 0
    try:
        return {}["a"]
    except Exception:
        return found


def of_a_finally(y):
    try:
        return y / 2 + 1 / y
    finally:
        y = 2


@pytest.mark.parametrize("read", [by_name, by_a_base, by_none, behind_another], ids=lambda f: f.__name__)
def test_an_error_of_the_run_that_the_step_catches_is_refused_with_the_line(read):
    def step(model, x):
        return read((x @ model.weight).mean().item())

    with LocalTensorMode(4), pytest.raises(RuntimeError, match=r"only the run knows.*\n  at .*test_raising_steps"):
        compiled(step, "dp")(Plain(), X)


@pytest.mark.parametrize("read", [of_another_kind, of_a_finally], ids=lambda f: f.__name__)
def test_what_catches_no_such_error_does_not_matter(read):
    def step(model, x):
        return x * read((x @ model.weight).mean().item())

    check(Plain, step, [(X,), (X * 0,), (X,)])
