"""Fallbacks: ops that ran on replicated tensors, how often, with how many bytes, and the line that called them.

An op without a rule is not refused: its sharded operands are gathered, and every rank runs it on the global tensors.
That is right, but it wastes the mesh. So each such call is counted, and `on_fallback` says whether it also warns or
raises.

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
from dataclasses import dataclass, replace

from spmd import _torch
from spmd.comm.user_line import caller

POLICIES = ("ignore", "warn", "error")


class FallbackError(RuntimeError):
    """An op would have to run on replicated tensors, and `on_fallback("error")` forbids it."""


class FallbackWarning(UserWarning):
    """An op ran on replicated tensors; see `on_fallback`."""


@dataclass(frozen=True)
class Fallback:
    """An op that ran on replicated tensors.

    nbytes: of all operands that were gathered, in all calls. where: the line of the first call.
    """

    op: str
    calls: int
    nbytes: int
    where: str

    def __str__(self) -> str:
        return f"{self.op}: {self.calls} calls, {self.nbytes:,} bytes gathered, first at {self.where}"


class Fallbacks(tuple):
    """The fallbacks, the one with most bytes first."""

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "no op was gathered"


_found: dict[str, Fallback] = {}
_lock = threading.Lock()
_policy: _torch.Carried[str] = _torch.Carried("spmd_on_fallback", "ignore")


def fallbacks() -> Fallbacks:
    """The ops that ran on replicated tensors since the last `clear()`, in this process and in programs compiled in it.

    In a simulation with one thread for each rank, the calls of all ranks are counted.
    """
    with _lock:
        return Fallbacks(sorted(_found.values(), key=lambda f: (-f.nbytes, f.op)))


def _clear() -> None:
    with _lock:
        _found.clear()


fallbacks.clear = _clear


@contextlib.contextmanager
def on_fallback(policy: str) -> Iterator[None]:
    """Inside the block, "ignore" a fallback, "warn" of it, or make it an "error". It is counted in any case.

    A compiled step reads the policy when it is compiled.
    """
    if policy not in POLICIES:
        raise ValueError(f"on_fallback: {policy!r} is no policy; use one of {', '.join(POLICIES)}")
    token = _policy.set(policy)
    try:
        yield
    finally:
        _policy.reset(token)


def note(op: object, nbytes: int) -> None:
    """Count a call of an op whose operands, of `nbytes` in all, are gathered.

    Raises FallbackError if the policy is "error".
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
        f"{name} at {where} runs on replicated tensors: {nbytes:,} bytes are gathered on every rank. Move its "
        "operands with redistribute before it where that is cheap, or use ops that work on shards; "
        "spmd.debug.fallbacks() lists all."
    )
    if policy == "error":
        raise FallbackError(text)
    warnings.warn(text, FallbackWarning, stacklevel=2)
