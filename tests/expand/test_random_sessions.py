"""Trainings between whose calls the user changes something give what one device gives."""

from __future__ import annotations

import pytest

from tests.expand.random_sessions import Session, differences


@pytest.mark.parametrize("seed", [104, 108, 128])
def test_a_session_gives_what_one_device_gives(seed):
    """Bools returned by a step that is chosen for the program; units of shards that another size does not have."""
    assert not differences(Session.of(seed))
