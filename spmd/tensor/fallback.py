"""Ops that had to see whole tensors: which, how often, how many bytes, and the line that asked.

An op without a rule is not refused: its sharded operands are gathered and every rank runs it on all of them. That is
right, and it is not what a mesh is for. So each is counted, and `on_fallback` says what else is done about it.

    >>> import spmd.debug, torch
    >>> with spmd.debug.on_fallback("error"):
    ...     pass  # an op that would be gathered raises FallbackError here
    >>> spmd.debug.fallbacks.clear()
    >>> print(spmd.debug.fallbacks())
    no op was gathered
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace

from spmd.sim.exchange import caller

POLICIES = ("ignore", "warn", "error")


class FallbackError(RuntimeError):
    """An op would have to see whole tensors, and `on_fallback("error")` says no."""


class FallbackWarning(UserWarning):
    """An op saw whole tensors; see `on_fallback`."""


@dataclass(frozen=True)
class Fallback:
    """An op that saw whole tensors. nbytes: of all operands that were gathered, in all calls. where: of the first."""

    op: str
    calls: int
    nbytes: int
    where: str

    def __str__(self) -> str:
        return f"{self.op}: {self.calls} calls, {self.nbytes:,} bytes gathered, first at {self.where}"


class Fallbacks(tuple):
    """What was gathered, the most bytes first."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "no op was gathered"


_found: dict[str, Fallback] = {}
_lock = threading.Lock()
_policy: ContextVar[str] = ContextVar("spmd_on_fallback", default="ignore")


def fallbacks() -> Fallbacks:
    """The ops of this process, and the programs compiled in it, that saw whole tensors, since the last `clear()`.

    In a simulation with a thread a rank, the calls of all ranks are counted.
    """
    with _lock:
        return Fallbacks(sorted(_found.values(), key=lambda f: (-f.nbytes, f.op)))


def _clear() -> None:
    with _lock:
        _found.clear()


fallbacks.clear = _clear


@contextlib.contextmanager
def on_fallback(policy: str) -> Iterator[None]:
    """What to do, inside, where an op has to see whole tensors: "ignore", "warn" or "error". It is counted in any case.

    A compiled step asks when it is compiled.
    """
    if policy not in POLICIES:
        raise ValueError(f"on_fallback: {policy!r} is no policy; use one of {', '.join(POLICIES)}")
    token = _policy.set(policy)
    try:
        yield
    finally:
        _policy.reset(token)


def note(op: object, nbytes: int) -> None:
    """Count a call of an op whose operands, of so many bytes in all, are gathered.

    FallbackError where the policy says so.
    """
    where = caller()
    name = str(op)
    with _lock:
        seen = _found.get(name, Fallback(name, 0, 0, where))
        _found[name] = replace(seen, calls=seen.calls + 1, nbytes=seen.nbytes + nbytes)
    policy = _policy.get()
    if policy == "ignore":
        return
    text = (
        f"{name} at {where} sees whole tensors: {nbytes:,} bytes are gathered on every rank. Move what it reads with "
        "redistribute where that is cheap, or use ops that work on shards; spmd.debug.fallbacks() lists all."
    )
    if policy == "error":
        raise FallbackError(text)
    warnings.warn(text, FallbackWarning, stacklevel=2)
