"""Ranks that differ all get an error, with names and a diff."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from workers import Pool

from spmd.comm import agree
from spmd.mesh import DeviceMesh, init_device_mesh
from spmd.sim import run_ranks

MESH = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
Run = Callable[..., list]


@pytest.fixture(params=["threads", "gloo"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a function on four ranks, simulated or real."""
    if request.param == "gloo":
        return request.getfixturevalue("gloo4").run
    return lambda fn, *args: run_ranks(lambda rank: fn(rank, *args), 4)


def said(rank: int, values: list[str], mesh: DeviceMesh = MESH, failing: tuple[int, ...] = ()) -> str:
    """The error that `agree` raises on this rank."""
    error = ValueError(f"bad size on {rank}") if rank in failing else None
    try:
        agree(values[rank], mesh, "the program", error)
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return "agreed"


def test_equal_values_agree(run: Run) -> None:
    assert run(said, ["a\nb"] * 4) == ["agreed"] * 4


def test_the_first_two_that_differ_are_shown_on_every_rank(run: Run) -> None:
    texts = run(said, ["a\nb\nc", "a\nb\nc", "a\nx\nc", "y"])
    assert len(set(texts)) == 1
    assert "the program differs between rank 0 and rank 2" in texts[0]
    assert texts[0].endswith("--- rank 0\n+++ rank 2\n@@ -1,3 +1,3 @@\n a\n-b\n+x\n c")


def test_a_failure_is_told_to_the_others_and_raised_where_it_was(run: Run) -> None:
    other = "RuntimeError: the program: rank 1 failed: ValueError: bad size on 1"
    assert run(said, ["", "a", "b", "c"], MESH, (1,)) == [other, "ValueError: bad size on 1", other, other]


def test_of_two_failures_each_has_its_own(run: Run) -> None:
    texts = run(said, [""] * 4, MESH, (1, 3))
    assert texts[1] == "ValueError: bad size on 1" and texts[3] == "ValueError: bad size on 3"
    assert texts[0] == texts[2] == (
        "RuntimeError: the program: rank 1 failed (and 1 more rank): ValueError: bad size on 1"
    )  # fmt: skip


def test_ranks_are_named_as_the_mesh_numbers_them(run: Run) -> None:
    turned = DeviceMesh("cpu", [3, 1, 0, 2])
    texts = run(said, ["a", "b", "a", "a"], turned)
    assert all("differs between rank 3 and rank 1" in text for text in texts)


def test_a_long_diff_is_cut() -> None:
    long = "\n".join(map(str, range(100)))
    text = run_ranks(lambda rank: said(rank, [long, "none", long, long]), 4)[0]
    shown = text.split("\n")[1:]
    assert len(shown) == 20 and shown[-1] == "... 85 more lines"


def test_one_rank_agrees_with_itself_and_keeps_its_error() -> None:
    alone = init_device_mesh("cpu", (1,))
    agree("anything", alone, "the program")
    with pytest.raises(ValueError, match="mine"):
        agree("anything", alone, "the program", ValueError("mine"))


def half(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return said(rank, ["a", "a", "b", "c"], mesh["tp"])


def test_only_the_ranks_of_the_mesh_are_asked(gloo4: Pool) -> None:
    for texts in (gloo4.run(half), run_ranks(half, 4)):
        assert texts[:2] == ["agreed"] * 2 and "differs between rank 2 and rank 3" in texts[2]
