"""The table of tests of which the test command asks some cases names tests that there are."""

from __future__ import annotations

from pathlib import Path

import pytest
from sampled import ONE_IN, is_sampled


@pytest.mark.parametrize("name", ONE_IN)
def test_each_row_names_a_test(name):
    path, _, test = name.partition("::")
    assert f"def {test.partition('[')[0]}(" in (Path(__file__).parent / path).read_text(encoding="utf-8")


def test_one_in_so_many_is_asked():
    """In order from the first; a case that has a row of its own is not counted with the others."""
    some, none = (
        "expand/test_pins.py::test_a_pinned_step_trains_as_one_device",
        "cli/test_demo.py::test_a_rank_of_a_launcher_is_used",
    )
    assert ONE_IN[some] == 7 and ONE_IN[none] == 0
    ids = [none, "x.py::test", *(f"{some}[{i}]" for i in range(8)), "x.py::test"]
    assert is_sampled(ids) == [False, True, True, *[False] * 6, True, True]
