"""Switches: modes that a block turns on or off, and that may be set for the whole process.

    >>> loud = Switch("loud")
    >>> with loud.turned(True):
    ...     loud.is_on()
    True
    >>> loud.is_on()
    False

Blocks nest, the innermost wins, and what is set for the process counts outside of all of them. A block counts for its
thread, and for the backward passes that it starts, wherever autograd runs them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

from spmd import _torch


class Switch:
    """One mode, by its name."""

    def __init__(self, name: str) -> None:
        self._inside: ContextVar[bool | None] = ContextVar(f"spmd_{name}", default=None)
        self._carried = f"spmd_{name}"
        self._everywhere = False

    @contextlib.contextmanager
    def turned(self, on: bool) -> Iterator[None]:
        """On, or off, inside the block."""
        token, before = self._inside.set(on), _torch.carried(self._carried)
        _torch.carry(self._carried, on)
        try:
            yield
        finally:
            _torch.carry(self._carried, before)
            self._inside.reset(token)

    def set(self, on: bool) -> None:
        """On, or off, for the process, outside of blocks, from now on."""
        self._everywhere = bool(on)

    def is_on(self) -> bool:
        """Whether it is on here."""
        inside = self._inside.get()
        if inside is None:
            inside = _torch.carried(self._carried)  # a thread of autograd's engine has no context of ours
        return self._everywhere if inside is None else inside
