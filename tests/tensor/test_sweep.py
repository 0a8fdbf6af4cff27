"""A part of the sweep over torch's op database; all of it in benchmarks/coverage.py."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable

import pytest
import torch

from tests.tensor.oracle import split
from tests.tensor.single import SUM
from tests.tensor.sweep import MESHES, Case, OnThreads, Ours, R, ask, cases, entries


@pytest.fixture(autouse=True)
def quiet_and_steady():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own samples cause warnings
        yield
    torch.set_num_threads(threads)


def check(asked: Iterable[Case], side: type, least: int = 100) -> None:
    """Never another number, never an error. least: how many cases have to be judged."""
    sides = {mesh: side(mesh) for mesh in MESHES}
    verdicts = [(case, ask(case, sides[case.mesh])) for case in asked]
    judged = [(case, v) for case, v in verdicts if v is not None]
    failed = [f"{v.kind}: {case}: {v.why}" for case, v in judged if v.kind not in ("right", "random")]
    assert len(judged) > least
    assert not failed, "\n".join(failed)


def test_ops_of_torch_give_what_they_give_on_one_device():
    """Forward and backward, in place and with out, placed at random, on simulated ranks."""
    check((case for entry in entries()[::40] for case in cases(entry, 1, 1)), Ours, 25)


@pytest.mark.parametrize("start", range(1, 3))
def test_more_ops_of_torch_give_what_they_give_on_one_device(start):
    check((case for entry in entries()[start::10] for case in cases(entry, 1, 1)), Ours)


def test_ops_of_torch_on_threads():
    """What the simulation would hide: some entries. `.ci/run` asks each."""
    check((case for entry in entries()[::24] for case in itertools.islice(cases(entry, 1, 1), 1)), OnThreads, 15)


def found(fn, like: torch.Tensor, placing, side: type) -> str:
    """The verdict on a function of a tensor with these placements."""
    case = Case("op", "", fn, ((like,), {}), (4,), (placing,), (like,), (split(like.detach(), placing, (4,)),))
    return ask(case, side((4,))).kind


@pytest.mark.parametrize("side", [Ours, OnThreads])
def test_the_sweep_finds_what_it_looks_for(side):
    x = torch.arange(6.0).requires_grad_()
    local = {"now": 0}

    def wrong(x):
        local["now"] += 1
        return x * local["now"]

    def fails(x):
        if type(x) is not torch.Tensor:
            raise ValueError("not this one")
        return x

    def unsupported(x):
        if type(x) is not torch.Tensor:
            raise NotImplementedError("not this one")
        return x

    assert found(lambda x: x * 2, x, (SUM,), side) == "right"
    assert found(wrong, x, (R,), side) == "wrong"
    assert found(fails, x, (R,), side) == "crashed"
    assert found(unsupported, x, (R,), side) == "unsupported"
    assert found(torch.rand_like, x.detach(), (R,), side) == "random"
