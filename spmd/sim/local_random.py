"""Each simulated rank's own stream of random numbers, from generators that the process has once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch

States = dict[int, torch.Tensor]


class Randomness:
    """The states that each rank's generators are in. All start where the process's stand."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.owner: object | None = None
        self._states: WeakKeyDictionary[torch.Generator, States] = WeakKeyDictionary()

    @contextmanager
    def owned_by(self, owner: object) -> Iterator[None]:
        """Inside, ranks have states of their own; afterwards the process goes on from the lowest rank's."""
        self.owner = owner
        try:
            yield
        finally:
            for generator, states in self._states.items():
                generator.set_state(states[self.ranks[0]])
            self._states.clear()
            self.owner = None

    @contextmanager
    def of(self, rank: int, generator: torch.Generator | None = None) -> Iterator[None]:
        """Draw from the rank's stream inside; None: from torch's default generator."""
        generator = torch.default_generator if generator is None else generator
        states = self._states.get(generator)
        if states is None:
            states = self._states[generator] = dict.fromkeys(self.ranks, generator.get_state())
        generator.set_state(states[rank])
        try:
            yield
        finally:
            states[rank] = generator.get_state()
