"""Switches: modes that a block turns on or off, and that may be set for the whole process.

    >>> loud = Switch("loud")
    >>> with loud.turned(True):
    ...     loud.is_on()
    True
    >>> loud.is_on()
    False

Blocks nest, and the innermost counts. Outside of all blocks, the value for the process counts. A block counts for its
thread and for the backward passes that it starts, in whatever thread autograd runs them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from spmd import _torch


class Switch:
    """A mode with a name."""

    def __init__(self, name: str) -> None:
        self._inside: _torch.Carried[bool | None] = _torch.Carried(f"spmd_{name}", None)
        self._in_process = False

    @contextlib.contextmanager
    def turned(self, on: bool) -> Iterator[None]:
        """Turn the mode on or off inside the block."""
        before = self._inside.set(on)
        try:
            yield
        finally:
            self._inside.reset(before)

    def set(self, on: bool) -> None:
        """Turn the mode on or off for the process from now on, outside of blocks."""
        self._in_process = bool(on)

    def is_on(self) -> bool:
        """Whether the mode is on here."""
        inside = self._inside.get()
        return self._in_process if inside is None else inside
