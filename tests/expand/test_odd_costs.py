"""Whatever costs are, passes make nothing slower or bigger, raise nothing, and find one program twice."""

import pytest

from spmd.expand.passes.keep_gathered import copied
from tests.expand.budgets import program_of
from tests.expand.odd_costs import ODD, faults, prices_without_sense


@pytest.mark.parametrize("machine", ODD)
def test_odd_machines(machine):
    """Costs of nothing, of ages, of one kind or size; `benchmarks/odd_costs.py` has more programs, and budgets."""
    assert faults(program_of("block, zero3", ODD[machine])) == []


def test_prices_that_have_nothing_to_do_with_sizes():
    """Larger takes less time, half is free, some take ages."""
    program = program_of("net")
    for seed in range(2):
        with prices_without_sense(seed):
            assert faults(copied(program), (("overlap",), ("chunks",))) == []
