"""Random programs, each compiled as one step, give the same results as on one device."""

from __future__ import annotations

import random

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.tensor.fuzz import compiled_differences, fails_like, graph_of, shrink, write


@pytest.mark.parametrize("programs", [8, 20])
def test_random_programs_compiled(programs, record_property):
    """The eager fuzz tests' programs, with views, writes, lists and dtypes, without ops that no graph can hold."""
    seen = []

    @settings(max_examples=programs, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(st.integers(0, 2**32 - 1))
    def run(seed):
        program = graph_of(write(random.Random(seed)))
        seen.append(program)
        if compiled_differences(program):
            small = shrink(program, fails_like(program, compiled_differences))
            raise AssertionError(f"{small}\n\n" + "\n".join(compiled_differences(small)))

    run()
    assert len(seen) == programs
    record_property("cases", f"{len(seen)} random programs of {sum(len(p.steps) for p in seen)} steps, each run twice")
