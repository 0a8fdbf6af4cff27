"""A part of the sweep over torch's op database; all of it in benchmarks/coverage.py."""

from __future__ import annotations

import warnings

import pytest
import torch

from tests.tensor.oracle import split
from tests.tensor.single import SUM
from tests.tensor.sweep import Case, Ours, R, ask, cases, entries


@pytest.fixture(autouse=True)
def quiet_and_steady():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of what its own samples do
        yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("start", range(2))
def test_ops_of_torch_give_what_they_give_on_one_device(start):
    """Forward and backward, in place and with out, however the tensors lie; never another number, never an error."""
    sides = {mesh: Ours(mesh) for mesh in ((4,), (2, 2))}
    asked, failed = 0, []
    for entry in entries()[start::10]:
        for case in cases(entry, 1, 2):
            verdict = ask(case, sides[case.mesh])
            asked += verdict is not None
            if verdict is not None and verdict.kind not in ("right", "random"):
                failed.append(f"{verdict.kind}: {case}: {verdict.why}")
    assert asked > 100
    assert not failed, "\n".join(failed)


def found(fn, like: torch.Tensor, placing) -> str:
    """The verdict on a function of a tensor placed so."""
    case = Case("op", "", fn, ((like,), {}), (4,), (placing,), (like,), (split(like.detach(), placing, (4,)),))
    return ask(case, Ours((4,))).kind


def test_the_sweep_finds_what_it_looks_for():
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

    assert found(lambda x: x * 2, x, (SUM,)) == "right"
    assert found(wrong, x, (R,)) == "wrong"
    assert found(fails, x, (R,)) == "crashed"
    assert found(unsupported, x, (R,)) == "unsupported"
    assert found(torch.rand_like, x.detach(), (R,)) == "random"
