"""Choices for random small graphs equal exhaustive search; `benchmarks/choose_exact.py` has hundreds."""

from __future__ import annotations

import pytest

from tests.expand.choose.small_graphs import compared


@pytest.mark.parametrize("mesh_name, seeds", [("2", 6), ("2x2", 4), ("2, packed", 4), ("2x2, ordered", 4)])
def test_the_choices_for_small_graphs_are_the_best(mesh_name, seeds):
    """The cost is that of the best of all assignments, and the certificate says so."""
    found = [each for each in (compared(seed, mesh_name) for seed in range(seeds)) if each is not None]
    assert len(found) > 3 and any(number > 10 for *_, number in found)
    for best, solved, _ in found:
        assert solved.us == pytest.approx(best) and solved.at_least <= best + 1e-6 and solved.gap < 1e-6
