"""The garbage collector, which looks at all objects again and again while many are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event

_others_freeze = Event()
"""Set once somebody else has frozen objects. Python walks over all of them to count them, so they are counted once."""


@contextmanager
def collector_off() -> Iterator[None]:
    """Inside, the garbage collector does not run: for code that makes many objects and little garbage.

    What was made counts as old afterwards: else the collector would look at all of it as soon as it is on again. It is
    looked at in the next full round.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            _count_as_old()
            gc.enable()


def _count_as_old() -> None:
    """Move all objects to the oldest generation. Not where others have frozen some: these would be thawed."""
    if not _others_freeze.is_set() and gc.get_freeze_count():
        _others_freeze.set()
    if not _others_freeze.is_set():
        gc.freeze()
        gc.unfreeze()
