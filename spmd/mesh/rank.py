"""The rank that this code runs as, and the number of ranks.

On a real job torch.distributed knows both. Before it is initialised, the environment of the launcher does. A simulator
overrides both for the thread that runs as a rank:

    >>> with as_rank(3, world_size=8):
    ...     current_rank(), world_size()
    (3, 8)
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from spmd import _torch

_simulated: _torch.Carried[tuple[int, int | None] | None] = _torch.Carried("spmd_simulated_rank", None)


def current_rank() -> int:
    """The global rank that this code runs as: the override, else torch.distributed's, else $RANK, else 0."""
    simulated = _simulated.get()
    if simulated is not None:
        return simulated[0]
    rank = _torch.default_rank()
    return _from_env("RANK", 0) if rank is None else rank


def world_size() -> int:
    """The number of ranks: the override, else torch.distributed's, else $WORLD_SIZE, else 1."""
    simulated = _simulated.get()
    if simulated is not None and simulated[1] is not None:
        return simulated[1]
    return dist.get_world_size() if _initialised() else _from_env("WORLD_SIZE", 1)


@contextmanager
def as_rank(rank: int, world_size: int | None = None) -> Iterator[int]:
    """Run as `rank` inside the block, in this thread only. Blocks nest; the innermost wins.

    `world_size` None overrides the rank alone.
    """
    if rank < 0 or (world_size is not None and rank >= world_size):
        raise ValueError(f"as_rank: rank {rank} is not in 0..{'' if world_size is None else world_size - 1}")
    token = _simulated.set((rank, world_size))
    try:
        yield rank
    finally:
        _simulated.reset(token)


def is_rank_overridden() -> bool:
    """Whether `as_rank` says which rank this thread is, as it does for simulated ranks."""
    return _simulated.get() is not None


# ---- values that belong to a rank -------------------------------------------------------------

_process: dict[str, Any] = {}
_state: _torch.Carried[dict[str, Any]] = _torch.Carried("spmd_rank_state", _process)


def rank_state() -> dict[str, Any]:
    """Values that belong to the current rank, such as its random numbers: one dict a process, for all its threads.

    Simulated ranks that are threads have a dict each (`own_rank_state`); simulated ranks of one thread share one. A
    value is replaced and never changed.
    """
    return _state.get()


@contextmanager
def own_rank_state() -> Iterator[None]:
    """Inside, in this thread, the rank has a dict of its own; it starts with the values of the dict outside."""
    token = _state.set(dict(_state.get()))
    try:
        yield
    finally:
        _state.reset(token)


# ---- several ranks in one thread --------------------------------------------------------------

Fn = TypeVar("Fn", bound=Callable[..., Any])


class RankSimulator(Protocol):
    """Runs several ranks in one thread; there `current_rank` is an int that differs between them."""

    def each(self, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """Call `fn` once for each rank, with the arguments of that rank, and join the results to one value."""


_simulator: _torch.Carried[RankSimulator | None] = _torch.Carried("spmd_rank_simulator", None)


def rank_simulator() -> RankSimulator | None:
    """The simulator of several ranks in this thread; None where there is one rank, as on a real job."""
    return None if torch.compiler.is_dynamo_compiling() else _simulator.get()  # Dynamo compiles for one rank


@contextmanager
def simulated_by(simulator: RankSimulator | None) -> Iterator[None]:
    """Let the simulator run several ranks inside the block, in this thread only; None for one rank again."""
    token = _simulator.set(simulator)
    try:
        yield
    finally:
        _simulator.reset(token)


def per_rank(fn: Fn) -> Fn:
    """Decorates a function with branches or loops that depend on the rank: in one thread of several ranks it runs once
    for each.

    It may not communicate nor have other effects. On a real rank it is called as it is.

        @per_rank
        def share(rows, n):
            return rows // n + (1 if current_rank() < rows % n else 0)
    """

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        simulator = rank_simulator()
        return fn(*args, **kwargs) if simulator is None else simulator.each(fn, args, kwargs)

    return run


def _initialised() -> bool:
    return dist.is_available() and dist.is_initialized()


def _from_env(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise ValueError(f"${name} is {text!r}; it must be an integer. Unset it, or let the launcher set it.") from None
