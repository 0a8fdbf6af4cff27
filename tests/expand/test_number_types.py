"""The types of numbers that are symbols in a trace are those that they have on one device."""

from __future__ import annotations

import functools
import numbers

import pytest
import torch

from spmd import LocalTensorMode
from tests.expand.call_by_call import WAYS, Plain, X, check, compiled, same


def is_a_float(k):
    return isinstance(k, float)


def matched(k):
    match k:
        case bool():
            return "bool"
        case int():
            return "int"
        case float():
            return "float"
    return "another"


@functools.singledispatch
def told(k):
    return "object"


told.register(int, lambda k: "int")
told.register(float, lambda k: "float")


class Meta(type):
    pass


def asked(k):
    """All ways to ask for the type."""
    return [
        isinstance(k, float), isinstance(k, int), isinstance(k, bool), isinstance(k, (str, float)), type(k) is int,
        type(k) is float, type(k) is bool, type(k) in (int, bool), {int: 1, float: 2, bool: 3}[type(k)],
        type(k).__name__, k.__class__.__name__, k.__class__ is float, issubclass(type(k), int), is_a_float(k),
        matched(k), told(k), isinstance(k, numbers.Real), isinstance(k, numbers.Integral), isinstance(k, torch.Tensor),
        isinstance(k, str), next(map(type, [k, 1])) is float,
    ]  # fmt: skip


def of_classes(k):
    """What else code does with the name `type`."""
    made = type("Made", (), {"k": 1})
    local = Meta("Local", (), {})
    return [
        type(made) is type, isinstance(made, type), type(local) is Meta, issubclass(Meta, type), str is str,
        type(int) is type, made.k, type.mro(made)[-1] is object, repr(type), isinstance(1, type),
    ]  # fmt: skip


def of_results(k):
    """The types of what is computed."""
    found = [k + 1, k * 2.0, k / 2, k // 2, k % 2, -k, k > 0, k == 2, round(k), round(k, 1), k**2, abs(k), min(k, 1.5)]
    return [asked(x)[:12] for x in found]


WHAT = [asked, of_classes, of_results]
GIVEN = {"a float": [0.5, 2.0, -1.5], "an int": [3, 7, 2], "a bool": [True, False]}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("of", WHAT, ids=lambda f: f.__name__)
def test_an_argument(of, given, way):
    def step(model, x, k):
        return of(k), (model.weight * x.mean()).sum()

    check(Plain, step, [(X, k) for k in GIVEN[given]], way)


@pytest.mark.parametrize("of", WHAT, ids=lambda f: f.__name__)
def test_a_size(of):
    def step(model, x):
        return of(x.shape[0]), of(x.numel()), (model.weight * x.mean()).sum()

    check(Plain, step, [(X,), (X[:4],), (torch.cat([X, X]),)])


@pytest.mark.parametrize("of", WHAT, ids=lambda f: f.__name__)
@pytest.mark.parametrize("first", [1, 0.5])
def test_a_counter(of, first):
    def step(model, x):
        found = of(model.k)
        model.k = model.k + 1
        return found

    check(lambda: Plain(k=first), step, [(X,)] * 3)


@pytest.mark.parametrize("of", [asked, of_classes], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool])
def test_what_is_read_of_a_tensor(of, dtype):
    def step(model, x):
        return of((x.sum() > 1).to(dtype).item())

    check(Plain, step, [(X,), (-X,)])


def test_a_number_of_a_group():
    def step(model, optimizer, x):
        group = optimizer.param_groups[0]
        found = asked(group["lr"]), of_results(group["lr"]), asked(group["momentum"])
        (x @ model.weight).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        return found

    with LocalTensorMode(4):
        pairs = [(model := Plain(), torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)) for _ in range(2)]
        run = compiled(step, "dp")
        for lr in (0.5, 0.25):
            for _, optimizer in pairs:
                optimizer.param_groups[0]["lr"] = lr
            want = step(*pairs[0], X)
            same(run(*pairs[1], X), want, f"lr {lr}")
    assert "type" not in globals() and "__class__" not in vars(torch.SymFloat)
