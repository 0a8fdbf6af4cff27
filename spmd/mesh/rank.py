"""Which rank this code plays, and among how many.

On a real job torch.distributed knows. Before it is initialised the launcher's environment does. The simulator
overrides both for the thread that plays a rank:

    >>> with as_rank(3, world_size=8):
    ...     current_rank(), world_size()
    (3, 8)
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from spmd import _torch

_played: ContextVar[tuple[int, int | None] | None] = ContextVar("spmd_played_rank", default=None)


def current_rank() -> int:
    """The global rank this code plays: the override, else torch.distributed's, else $RANK, else 0."""
    played = _played.get()
    if played is not None:
        return played[0]
    rank = _torch.default_rank()
    return _from_env("RANK", 0) if rank is None else rank


def world_size() -> int:
    """How many ranks there are: the override, else torch.distributed's, else $WORLD_SIZE, else 1."""
    played = _played.get()
    if played is not None and played[1] is not None:
        return played[1]
    return dist.get_world_size() if _initialised() else _from_env("WORLD_SIZE", 1)


@contextmanager
def as_rank(rank: int, world_size: int | None = None) -> Iterator[int]:
    """Play `rank` inside the block, in this thread only. Blocks nest; the innermost wins.

    `world_size` None leaves the size to whoever else knows it.
    """
    if rank < 0 or (world_size is not None and rank >= world_size):
        raise ValueError(f"as_rank: rank {rank} is not in 0..{'' if world_size is None else world_size - 1}")
    token = _played.set((rank, world_size))
    try:
        yield rank
    finally:
        _played.reset(token)


# ---- what a rank keeps for itself -------------------------------------------------------------

_process: dict[str, Any] = {}
_place: ContextVar[dict[str, Any]] = ContextVar("spmd_place", default=_process)


def place() -> dict[str, Any]:
    """What the rank that this code plays keeps for itself: one a process, which all its threads share.

    Ranks that are threads of one process have one each (`own_place`); ranks that one thread plays share it. Values are
    replaced and never changed.
    """
    return _place.get()


@contextmanager
def own_place() -> Iterator[None]:
    """Inside, in this thread, the rank keeps its own; it starts with what the place around holds."""
    token = _place.set(dict(_place.get()))
    try:
        yield
    finally:
        _place.reset(token)


# ---- several ranks in one thread --------------------------------------------------------------

Fn = TypeVar("Fn", bound=Callable[..., Any])


class Players(Protocol):
    """Who plays several ranks in one thread; there `current_rank` is an int that differs between them."""

    def each(self, fn: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        """The results of `fn`, called once for each rank with that rank's arguments, as one."""


_players: ContextVar[Players | None] = ContextVar("spmd_players", default=None)


def players() -> Players | None:
    """Who plays several ranks in this thread; None where there is one rank, as on a real job."""
    return None if torch.compiler.is_dynamo_compiling() else _players.get()  # Dynamo compiles for one rank


@contextmanager
def played_by(who: Players | None) -> Iterator[None]:
    """Let `who` play several ranks inside the block, in this thread only; None for one rank again."""
    token = _players.set(who)
    try:
        yield
    finally:
        _players.reset(token)


def per_rank(fn: Fn) -> Fn:
    """Decorates a function whose way depends on the rank: where one thread plays several, it runs once for each.

    It may not communicate nor have other effects; on a real rank it is called as it is.

        @per_rank
        def share(rows, n):
            return rows // n + (1 if current_rank() < rows % n else 0)
    """

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        who = players()
        return fn(*args, **kwargs) if who is None else who.each(fn, args, kwargs)

    return run


def _initialised() -> bool:
    return dist.is_available() and dist.is_initialized()


def _from_env(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    try:
        return int(text) if text else default
    except ValueError:
        raise ValueError(f"${name} is {text!r}; it must be an integer. Unset it, or let the launcher set it.") from None
