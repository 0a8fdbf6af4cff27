"""Flags and numbers that a step keeps in Python, and that it has from comparisons of numbers that may change."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from spmd import LocalTensorMode
from tests.expand.call_by_call import WAYS, Plain, X, check, compiled

SIZES = [(X, 0.5), (X[:4], 0.5), (X, 0.1), (X[:4], 0.5), (X, 0.1), (torch.cat([X, X]), 0.3)]


def used(model: Plain, x: torch.Tensor) -> torch.Tensor:
    """The flag decides, too."""
    return (x @ model.weight).sum() * (2.0 if getattr(model, "flag", None) else 1.0)


def of_a_float(model, x, k):
    model.flag = k > 0.25
    return used(model, x)


def of_a_size(model, x, k):
    model.flag = x.shape[0] < 8
    return used(model, x)


def of_both(model, x, k):
    model.flag = x.shape[0] * k > 3
    return used(model, x)


def beside_another(model, x, k):
    model.flag, model.other = k > 0.25, not k > 0.25
    return used(model, x)


def in_a_dict(model, x, k):
    model.stats["late"] = k > 0.25
    return used(model, x) * (3.0 if model.stats["late"] else 1.0)


def of_two(model, x, k):
    model.flag = (k > 0.25) & (x.shape[0] < 8)
    return used(model, x)


def at_first(model, x, k):
    if getattr(model, "flag", None) is None:
        model.flag = k > 0.25
    return used(model, x)


def a_number_at_first(model, x, k):
    if getattr(model, "first", None) is None:
        model.first = (k * 2, x.shape[0])
    return used(model, x) * model.first[0] * model.first[1]


def a_string(model, x, k):
    model.flag = "late" if k > 0.25 else ""
    return used(model, x)


KINDS: list[Callable] = [
    of_a_float, of_a_size, of_both, beside_another, in_a_dict, of_two, at_first, a_number_at_first, a_string,
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("step", KINDS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("flag", [None, False, True])
def test_a_flag_is_that_of_one_device(step, flag, way):
    def make():
        own = {} if step in (at_first, a_number_at_first) else {"flag": flag}
        return Plain(stats={"late": flag}, other=flag, **own)

    check(make, step, SIZES, way)


def test_what_the_caller_sets_back_is_set_again():
    """A program that sets a number at the first call is right for the numbers of that call alone."""
    with LocalTensorMode(4):
        ours, theirs = Plain(first=None), Plain(first=None)
        run = compiled(a_number_at_first, "dp")
        for k in (0.5, 0.25, 0.125):
            ours.first = theirs.first = None
            run(ours, X, k), a_number_at_first(theirs, X, k)
            assert ours.first == theirs.first


@pytest.mark.parametrize("what", ["flag", "number", "in a list"])
def test_what_only_the_run_knows_is_refused_with_the_line(what):
    def step(model, x):
        loss = (x @ model.weight).sum()
        if what == "flag":
            model.flag = loss.item() < 2.5
        elif what == "number":
            model.pair = (loss.item(), 1)
        else:
            model.stats["late"] = [loss.item() < 2.5]
        return loss

    with LocalTensorMode(4):
        model = Plain(flag=None, stats={"late": None}, pair=None)
        with pytest.raises(RuntimeError, match="known only when the program runs"):
            compiled(step, "dp")(model, X)
        assert model.flag is None and model.pair is None and model.stats == {"late": None}
