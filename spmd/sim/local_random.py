"""Each simulated rank's own stream of random numbers, from the generators that the process has only once."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

Ranks = tuple[int, ...]


class Randomness:
    """The states of the generators on each rank. All ranks start from the states of the process."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.owner: object | None = None
        self._states: dict[torch.Generator, _States] = {}

    @contextmanager
    def owned_by(self, owner: object) -> Iterator[None]:
        """Inside, each rank has its own states; afterwards the process continues from those of the lowest rank."""
        self.owner = owner
        try:
            yield
        finally:
            for generator, states in self._states.items():
                states.leave(generator)
            self._states.clear()
            self.owner = None

    @contextmanager
    def drawing_as(self, rank: int, generator: torch.Generator | None = None) -> Iterator[None]:
        """Inside, the generator draws from the rank's stream; None: torch's default generator."""
        generator = torch.default_generator if generator is None else generator
        states = self._states.get(generator)
        if states is None:
            self._forget_unused()
            states = self._states[generator] = _States(self.ranks, generator)
        states.begin(rank, generator)
        try:
            yield
        finally:
            states.end(rank, generator)

    def _forget_unused(self) -> None:
        """Drop the generators that nobody else holds: to those of torch 2.11 there are no weak references."""
        for generator, count in [*zip(self._states, _reference_counts(self._states), strict=True)]:
            if count <= _ALONE:
                del self._states[generator]


def _reference_counts(objects: Iterable[object]) -> list[int]:
    return [sys.getrefcount(x) for x in objects]


_ALONE = _reference_counts({object(): None})[0]
"""The count of what only a dictionary holds."""

REMEMBERED = 256
"""How many states are remembered in which ranks differ."""


class _States:
    """The states of one generator on each rank.

    Between draws the generator has the state of the lowest rank that has drawn. So if it has another one, the user has
    seeded it or set it to another state since, and that counts for all ranks: they continue from this state, or, if it
    is one that the generator had before, from where each rank was then. The seed, which a CPU's generator keeps in the
    first 8 bytes and does not draw from, is the same for all ranks.
    """

    def __init__(self, ranks: Ranks, generator: torch.Generator) -> None:
        self.ranks = ranks
        self._room = generator.get_state()
        self._bytes = self._room.numpy()
        self._seed = 8 if generator.device.type == "cpu" else 0
        self._start = self._held = self._bytes.tobytes()
        self._of = dict.fromkeys(ranks, self._start)
        self._parted: OrderedDict[bytes, dict[int, bytes]] = OrderedDict()

    def begin(self, rank: int, generator: torch.Generator) -> None:
        """Let the generator draw for the rank."""
        self._listen(generator)
        self._put(generator, self._of[rank])

    def end(self, rank: int, generator: torch.Generator) -> None:
        """Keep the rank's state, and leave the generator in that of the lowest rank that has drawn."""
        self._of[rank] = generator.get_state().numpy().tobytes()
        numbers = {r: state[self._seed :] for r, state in self._of.items()}
        start = self._start[self._seed :]
        drawn = next((r for r in self.ranks if numbers[r] != start), self.ranks[0])
        self._held = self._of[drawn]
        if rank == self.ranks[-1] and any(x != numbers[drawn] for x in numbers.values()):
            self._parted[numbers[drawn]] = numbers
            if len(self._parted) > REMEMBERED:
                self._parted.popitem(last=False)
        self._put(generator, self._held)

    def leave(self, generator: torch.Generator) -> None:
        """Leave the generator in the state of the lowest rank."""
        self._listen(generator)
        self._put(generator, self._of[self.ranks[0]])

    def _listen(self, generator: torch.Generator) -> None:
        """Follow what the user has done to the generator since the last draw."""
        now = generator.get_state().numpy().tobytes()
        if now == self._held:
            return
        seed, numbers = now[: self._seed], now[self._seed :]
        if numbers == self._held[self._seed :]:
            known = {r: state[self._seed :] for r, state in self._of.items()}
        else:
            known, self._start = self._parted.get(numbers, {}), now
        self._of = {r: seed + known.get(r, numbers) for r in self.ranks}
        self._held = now

    def _put(self, generator: torch.Generator, state: bytes) -> None:
        self._bytes[:] = np.frombuffer(state, np.uint8)
        generator.set_state(self._room)
