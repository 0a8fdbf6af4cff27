"""Random trainings with parameters in random places give what one device gives; `benchmarks/trainings.py` asks many."""

import pytest

from tests.expand.places.random_trainings import Training, differences

SEEDS = range(12)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_training_is_that_of_one_device(seed):
    """Losses, parameters, gradients, buffers and the optimiser's state after two steps."""
    training = Training.of(seed)
    assert not differences(training, 2), training
