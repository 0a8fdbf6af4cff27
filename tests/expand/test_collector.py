"""While many objects are made the collector is off; what others have frozen stays frozen, and is counted once."""

import gc
import threading
from unittest import mock

import pytest

from spmd.expand import collector
from spmd.expand.collector import collector_off


@pytest.fixture
def asked():
    """What is asked of the collector, where nobody is known to freeze objects yet."""
    with (
        mock.patch.object(collector, "_others_freeze", threading.Event()),
        mock.patch.object(gc, "get_freeze_count") as count,
        mock.patch.object(gc, "freeze") as freeze,
        mock.patch.object(gc, "unfreeze") as unfreeze,
    ):
        asked = mock.Mock()
        for each, name in ((count, "count"), (freeze, "freeze"), (unfreeze, "unfreeze")):
            asked.attach_mock(each, name)
        yield asked


def test_it_is_off_inside_and_as_before_outside():
    with collector_off():
        assert not gc.isenabled()
        with collector_off():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_it_is_on_again_behind_an_error():
    with pytest.raises(ZeroDivisionError), collector_off():
        1 / 0  # noqa: B018
    assert gc.isenabled()


def test_what_was_made_counts_as_old(asked):
    asked.count.return_value = 0
    for _ in range(2):
        with collector_off():
            pass
    assert asked.mock_calls == [mock.call.count(), mock.call.freeze(), mock.call.unfreeze()] * 2


def test_what_others_have_frozen_stays_so_and_is_counted_once(asked):
    asked.count.return_value = 1_000_000
    for _ in range(3):
        with collector_off():
            pass
    assert asked.mock_calls == [mock.call.count()]
