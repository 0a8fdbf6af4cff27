"""Random steps are right or refused, and leave nothing changed where they are refused."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

import spmd
from tests.audit.places import KINDS, ORDER, PLACES, ROUTES, WHEN, WHO
from tests.audit.random_steps import Drawn, outcome

pytestmark = pytest.mark.not_audited("they are compared with one device call by call")

SAMPLE, ALL, PART = range(40), range(2000), 40


@pytest.mark.parametrize("seed", SAMPLE)
def test_random_steps_are_right_or_refused(seed):
    check(seed)


@pytest.mark.nightly
@pytest.mark.parametrize("first", ALL[len(SAMPLE) :: PART])
def test_two_thousand_random_steps_are_right_or_refused(first):
    for seed in range(first, first + PART):
        check(seed)


def check(seed: int) -> None:
    drawn = Drawn.of(seed)
    found = outcome(drawn)
    assert found.word in ("right", "refused"), f"{drawn!r}\n{found.text}\n\n{drawn}"


def test_seeds_draw_all_there_is():
    """And each seed always the same."""
    drawn = [Drawn.of(seed) for seed in ALL]
    assert drawn == [Drawn.of(seed) for seed in ALL]
    for name, table in {
        "place": PLACES,
        "kind": KINDS,
        "route": ROUTES,
        "who": WHO,
        "when": WHEN,
        "order": ORDER,
    }.items():
        assert {getattr(each, name) for each in drawn} == set(table)


def forgets(step, mesh, **said):
    """A compiled step that loses what the step keeps in `S.n`."""

    def run(*args):
        there = step.__globals__["S"]
        before, result = there.n, step(*args)
        there.n = before
        return result

    return run


def refuses_late(step, mesh, **said):
    """A compiled step that is refused when all is done."""

    def run(*args):
        step(*args)
        raise RuntimeError("no")

    return run


def keeps_a_trace(step, mesh, **said):
    """A compiled step that leaves a symbol behind."""

    def run(*args):
        result = step(*args)
        step.__globals__["S"].n = torch.SymInt.__new__(torch.SymInt)
        return result

    return run


FAULTS = {
    forgets: "after call 0: S.n: 1 on one device, and compiled 0",
    refuses_late: "call 0 was refused and left: S.n: 0 on one device, and compiled 1",
    keeps_a_trace: "after call 0: S.n: a SymInt was left there, which stood for a value in a capture",
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("place", ["object", "slots", "installed"])
def test_a_fault_is_told(place, fault):
    with mock.patch.object(spmd, "compile", fault):
        found = outcome(Drawn(place, "count"))
    assert (found.word, found.text) == ("wrong", FAULTS[fault])
