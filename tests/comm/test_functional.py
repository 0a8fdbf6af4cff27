"""Every collective, for every notation of a group, dtype and shape, against a plain computation of its result."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from workers import Pool

from spmd.comm import AsyncTensor
from spmd.sim import run_ranks
from tests.comm.plain import (
    NOTATIONS,
    WITHOUT_PROCESS_GROUP,
    Case,
    called,
    group_of,
    inputs,
    of_all_dtypes,
    of_all_shapes,
    results,
    typical,
)

TABLES = {"typical": typical, "all dtypes": of_all_dtypes, "all shapes": of_all_shapes}

# How a call is run.
WAYS: dict[str, Callable] = {
    "eager": lambda f, xs: f(*xs),
    "make_fx fake": lambda f, xs: make_fx(f, tracing_mode="fake")(*xs)(*xs),
    "make_fx symbolic": lambda f, xs: make_fx(f, tracing_mode="symbolic")(*xs)(*xs),
    "make_fx real": lambda f, xs: make_fx(f)(*xs)(*xs),
    "compile": lambda f, xs: torch.compile(f, fullgraph=True, backend="aot_eager")(*xs),
}


def wrong(found: object, expected: torch.Tensor, given: list[torch.Tensor]) -> str | None:
    """How a result differs from the expected one, down to the bits; None where it does not."""
    if not isinstance(found, torch.Tensor):
        return f"{found!r} is no tensor"
    if (found.dtype, found.shape) != (expected.dtype, expected.shape):
        return f"{found.dtype} {list(found.shape)} and not {expected.dtype} {list(expected.shape)}"
    if found.numel() and any(x.numel() and found.data_ptr() == x.data_ptr() for x in given):
        return "the memory of an input"
    a, b = (x.to(torch.complex128 if x.dtype.is_complex else torch.float64) for x in (found, expected))
    return None if torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) else f"{found} and not {expected}"


def one(rank: int, case: Case, spelling: str, way: str) -> str | None:
    group, place, ranks = group_of(spelling, rank)
    n = len(ranks)
    given = [inputs(case, i, n) for i in range(n)]
    mine = inputs(case, place, n)
    found = WAYS[way](lambda *xs: called(case, place, n, xs, group), mine)
    expected = results(case, given)[place]
    if len(found) != len(expected):
        return f"{len(found)} results and not {len(expected)}"
    if way == "eager" and not all(isinstance(y, AsyncTensor) for y in found):
        return "no AsyncTensor"
    if way != "eager" and any(isinstance(y, AsyncTensor) for y in found):
        return "an AsyncTensor from a trace"
    complaints = [wrong(y, z, mine) for y, z in zip(found, expected, strict=True)]
    complaints += [wrong(x, z, []) and "the input was changed" for x, z in zip(mine, given[place], strict=True)]
    return next(filter(None, complaints), None)


def run_table(rank: int, table: str, spellings: list[str], way: str, step: int, but: tuple = ()) -> list[str]:
    """What is wrong on this rank, a line each.

    Of the table every step-th case, from another first one for each spelling; but for reductions by some ops.
    """
    found = []
    for i, spelling in enumerate(spellings):
        cases = TABLES[table](len(group_of(spelling, rank)[2]))
        for case in [case for case in cases[i % step :: step] if not set(but) & set(map(str, case.args))]:
            torch.compiler.reset() if way == "compile" else None
            found.append((one(rank, case, spelling, way), f"{case}, group by {spelling}, {way}"))
    return [f"rank {rank}: {what}: {complaint}" for complaint, what in found if complaint]


EVERY, TWO = list(NOTATIONS), ["turned list", "axis by number"]


BITWISE = ("band", "bor", "bxor")  # which the simulator does not play

RUNS = [
    ("typical", EVERY, "eager", 1),
    ("typical", EVERY, "make_fx fake", 3),
    ("typical", EVERY, "make_fx symbolic", 12),
    ("typical", EVERY, "make_fx real", 8),
    ("typical", EVERY, "compile", 12),
    ("all dtypes", TWO, "eager", 1),
    ("all dtypes", TWO, "make_fx fake", 19),
    ("all dtypes", TWO, "compile", 107),
    ("all shapes", TWO, "eager", 1),
    ("all shapes", TWO, "make_fx fake", 5),
    ("all shapes", TWO, "make_fx symbolic", 17),
]


@pytest.mark.parametrize("table, spellings, way, step", RUNS, ids=[f"{table}, {way}" for table, _, way, _ in RUNS])
def test_every_collective_gives_what_a_plain_computation_gives(
    gloo4: Pool, table: str, spellings: list[str], way: str, step: int
) -> None:
    """Values, dtypes and shapes; the results have their own memory, and the inputs do not change."""
    lines = gloo4.run(run_table, table, spellings, way, step, timeout=200)
    assert [line for each in lines for line in each] == []


@pytest.mark.parametrize("table", list(TABLES))
def test_simulated_ranks_get_the_same(table: str) -> None:
    spellings = WITHOUT_PROCESS_GROUP if table == "typical" else TWO
    lines = run_ranks(lambda rank: run_table(rank, table, spellings, "eager", 1, BITWISE), 4)
    assert [line for each in lines for line in each] == []
