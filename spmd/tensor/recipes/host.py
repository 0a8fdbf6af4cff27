"""Copies to host memory and back: how a value waits where the device has no room for it.

    there = to_host(x)            a copy engine begins; x stays until it is done
    kept = on_host(there, x)      it is done, and x may be freed
    back = from_host(kept)        a copy engine begins
    y = arrived(back)             it is done: y is x, to the bit

The first three are nodes of a program, the last one is written before the first reader, as the wait for a collective
is. On CUDA each direction has a stream of its own, beside that of the ops; host memory is pinned, and it is the stream
of the ops that waits, not the program. Elsewhere host and device are one, and a copy is made at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True)
class Copied:
    """A copy that is made, or under way. source: the device of what was copied. done: what happens behind the copy;
    None where it was made at once."""

    value: torch.Tensor
    source: torch.device
    done: torch.cuda.Event | None = None


def to_host(x: torch.Tensor) -> Copied:
    """Begin to copy a tensor to host memory.

    >>> x = torch.arange(6.0).view(2, 3).t()
    >>> y = arrived(from_host(on_host(to_host(x), x)))
    >>> torch.equal(x, y), x.stride() == y.stride(), x.data_ptr() == y.data_ptr()
    (True, True, False)
    """
    host = room(x)
    return Copied(host, x.device, _copy(host, x, x.device, "to host"))


def room(x: torch.Tensor) -> torch.Tensor:
    """Host memory for a tensor."""
    return torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)


def on_host(copied: Copied, x: torch.Tensor) -> Copied:
    """Wait for a copy of x to host memory. x: read only so that its memory stays until here."""
    _wait(copied)
    return copied


def from_host(copied: Copied) -> Copied:
    """Begin to copy a tensor back to where it was."""
    back = torch.empty_like(copied.value, device=copied.source)
    return Copied(back, copied.source, _copy(back, copied.value, copied.source, "from host"))


def arrived(copied: Copied) -> torch.Tensor:
    """Wait for a copy from host memory."""
    _wait(copied)
    return copied.value


HOST_COPIES = frozenset({to_host, from_host})
"""What begins a copy, on an engine of the device where it has one."""
ON_HOST = frozenset({to_host, on_host})
"""What gives a value in host memory."""


def _copy(into: torch.Tensor, x: torch.Tensor, device: torch.device, way: str) -> torch.cuda.Event | None:
    """Copy on the stream of this way, behind all that the device was given to do."""
    if device.type != "cuda":
        into.copy_(x)
        return None
    engine = _engine(way, device)
    engine.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(engine):
        into.copy_(x, non_blocking=True)
    return engine.record_event()


def _wait(copied: Copied) -> None:
    if copied.done is not None:
        torch.cuda.current_stream(copied.source).wait_event(copied.done)


@lru_cache(maxsize=64)
def _engine(way: str, device: torch.device) -> torch.cuda.Stream:
    """The stream on which a device copies one way."""
    return torch.cuda.Stream(device)
