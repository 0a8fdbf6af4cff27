"""The garbage collector, which looks at all objects again and again while many are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
            if not gc.get_freeze_count():  # what others have frozen stays so
                gc.freeze()
                gc.unfreeze()
            gc.enable()
