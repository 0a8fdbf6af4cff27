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
from contextvars import ContextVar

from spmd import _torch


class Switch:
    """A mode with a name."""

    def __init__(self, name: str) -> None:
        self._inside: ContextVar[bool | None] = ContextVar(f"spmd_{name}", default=None)
        self._carried = f"spmd_{name}"
        self._in_process = False

    @contextlib.contextmanager
    def turned(self, on: bool) -> Iterator[None]:
        """Turn the mode on or off inside the block."""
        token, before = self._inside.set(on), _torch.stashed(self._carried)
        _torch.stash(self._carried, on)
        try:
            yield
        finally:
            _torch.stash(self._carried, before)
            self._inside.reset(token)

    def set(self, on: bool) -> None:
        """Turn the mode on or off for the process from now on, outside of blocks."""
        self._in_process = bool(on)

    def is_on(self) -> bool:
        """Whether the mode is on here."""
        inside = self._inside.get()
        if inside is None:
            inside = _torch.stashed(self._carried)  # a thread of autograd's engine does not have our context
        return self._in_process if inside is None else inside
