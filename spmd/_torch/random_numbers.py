"""The random numbers of torch's CPU kernels from any state, and the seed that torch's default generator keeps."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from spmd._torch.carried import Carried


class Twister:
    """A generator of torch's CPU kernels that starts from a state given as words, not from a seed of 32 bits.

    `get_state` is a C struct: seed, left and seeded, next, the 624 words of the Mersenne twister in 64 bits each, and
    normal numbers kept for later.
    """

    words = 624

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(5489)  # the seed is the first word of the state
        self._state = self._generator.get_state()
        fields = self._state.numpy().view(np.uint64)
        self._words = fields[3 : 3 + self.words]
        assert fields[0] == self._words[0] == 5489 and self._words[-1] and len(fields) == 632, "another layout"

    def started(self, state: np.ndarray) -> torch.Generator:
        """The generator at the start of the numbers that follow from these `words` words of 32 bits."""
        self._words[:] = state
        self._generator.set_state(self._state)
        return self._generator


# ---- the seed of torch's default generator ----------------------------------------------------


def kept_seed() -> int:
    """The number that torch's default generator keeps as its seed; it does not draw from it."""
    return torch.initial_seed()


def keep_seed(seed: int) -> None:
    """Let torch's default generator keep another number as its seed. What it draws stays the same.

    Another thread that draws plain numbers in the same microsecond may draw them twice.
    """
    own = _own_seed.get()
    if own is None:
        torch.default_generator.set_state(_with_seed(torch.default_generator.get_state(), seed))
    else:
        own.seed = seed


def _with_seed(state: torch.Tensor, seed: int) -> torch.Tensor:
    ctypes.c_uint64.from_address(state.data_ptr()).value = seed  # half the time of a view by numpy
    return state


def _seed_of(state: torch.Tensor) -> int:
    return ctypes.c_uint64.from_address(state.data_ptr()).value  # no op, which a trace would record


@dataclasses.dataclass
class _OwnSeed:
    seed: int


_own_seed: Carried[_OwnSeed | None] = Carried("spmd_own_seed", None)
_lock, _open, _hidden = threading.Lock(), 0, torch.default_generator


@contextlib.contextmanager
def own_seeds() -> Iterator[None]:
    """For ranks that are threads: inside the block, each that is started with `own_seed` keeps a seed of its own.

    The generator itself, and with it what plain tensors draw, stays one for all threads. Inside the block the functions
    of torch.random (`torch.manual_seed`, `torch.get_rng_state`, ...) find another object in the place of the default
    generator. Threads without an own seed notice nothing.
    """
    global _open
    with _lock:
        _open += 1
        torch.random.default_generator = _SeedByThread()
    before = kept_seed()
    try:
        yield
    finally:
        with _lock:
            _open -= 1
            if not _open:
                torch.random.default_generator = _hidden
        keep_seed(before)


@contextlib.contextmanager
def own_seed(seed: int) -> Iterator[None]:
    """Inside, this thread keeps a seed of its own, which begins as this one. See `own_seeds`."""
    token = _own_seed.set(_OwnSeed(seed))
    try:
        yield
    finally:
        _own_seed.reset(token)


class _SeedByThread:
    """torch's default generator, but for the seed that it keeps."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_hidden, name)

    def initial_seed(self) -> int:
        own = _own_seed.get()
        return _hidden.initial_seed() if own is None else own.seed

    def manual_seed(self, seed: int) -> torch.Generator:
        self._keep(torch.Generator().manual_seed(seed).initial_seed())
        return _hidden.manual_seed(seed)

    def seed(self) -> int:
        seed = _hidden.seed()
        self._keep(seed)
        return seed

    def get_state(self) -> torch.Tensor:
        return _with_seed(_hidden.get_state(), self.initial_seed())

    def set_state(self, state: torch.Tensor) -> None:
        _hidden.set_state(state)
        self._keep(_seed_of(state))

    def _keep(self, seed: int) -> None:
        own = _own_seed.get()
        if own is not None:
            own.seed = seed
