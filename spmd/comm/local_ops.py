"""The local ops that a calibration times: each kind at several sizes, called from Python in a row.

    for case in local_cases("cpu"):
        case.run()                      # `case.calls` calls of the op
        case.x                          # what its time is fitted to: operations, or bytes read and written

A call is timed among others like it, since a program calls ops one after the other: a single one behind a rest would
be slower. Small sizes show what it takes to call an op at all; so does a view, on the CPU, where nothing runs beside
calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

ROW_US = 4_000.0
"""About how long a row of calls takes."""
CALL_US, US_PER_OPERATION, US_PER_BYTE = 4.0, 1e-4, 5e-4
"""What is guessed of a call, to find how many make a row."""
MOST_CALLS = 1_000
LARGEST = {"cpu": 16 << 20, "cuda": 256 << 20}
"""The largest operand, in bytes."""
SMALLEST = 1 << 8
WIDTHS = {"cpu": (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768), "cuda": (64, 256, 512, 1024, 2048, 4096)}
"""Of the matrices that are multiplied: up to where ranks that share a core feel it."""
LENGTHS = {"cpu": (8, 16, 32, 64, 128, 256), "cuda": (64, 256, 512, 1024, 2048, 4096)}
"""Of the sequences of attention."""
PRODUCTS = (torch.float32, torch.bfloat16, torch.float64)
"""Dtypes whose matrix products are timed."""
FEWEST = 4
"""Sizes of each kind that are timed in any case."""
HEADS, WIDTH = 8, 64
"""Heads and features of attention."""
ELEMENTS = 256
"""Elements that a reduction or a norm goes over."""


@dataclass(frozen=True)
class LocalCase:
    """A local op at one size. x: operations, or bytes read and written. run: calls it `calls` times."""

    kind: str
    dtype: str
    x: float
    calls: int
    once: Callable[[], object]

    def run(self) -> None:
        """Call the op so often. Results are kept until the end, as memory that was just used is faster than other."""
        once = self.once
        _ = [once() for _ in range(self.calls)]


def local_cases(device: str, largest: int) -> Iterator[LocalCase]:
    """All that is timed on a "cpu" or on "cuda", by kind and dtype, from small to large. largest: bytes of an operand;
    of each kind a few sizes are timed in any case."""
    yield from _products(device, largest)
    yield from _attention(device, largest)
    yield from _by_bytes(device, min(largest, LARGEST[device]))
    if device == "cpu":
        x = torch.ones(64, 64)
        yield LocalCase("view", "float32", 0.0, MOST_CALLS, lambda: x.view(32, 128))


def _products(device: str, largest: int) -> Iterator[LocalCase]:
    for dtype in PRODUCTS:
        for n in [n for at, n in enumerate(WIDTHS[device]) if at < FEWEST or n * n * dtype.itemsize <= largest]:
            x, flops = torch.ones(n, n, dtype=dtype, device=device), 2.0 * n**3
            yield LocalCase("product", _name(dtype), flops, _calls(flops), lambda x=x: torch.mm(x, x))


def _attention(device: str, largest: int) -> Iterator[LocalCase]:
    dtype, attend = torch.float32 if device == "cpu" else torch.bfloat16, F.scaled_dot_product_attention
    row = HEADS * WIDTH * dtype.itemsize
    for n in [n for at, n in enumerate(LENGTHS[device]) if at < FEWEST or n * row <= largest]:
        q = torch.ones(1, HEADS, n, WIDTH, dtype=dtype, device=device)
        flops = 4.0 * q.numel() * n
        yield LocalCase("attention", _name(dtype), flops, _calls(flops), lambda q=q: attend(q, q, q))


def _by_bytes(device: str, largest: int) -> Iterator[LocalCase]:
    nbytes = SMALLEST
    while nbytes <= max(largest, SMALLEST * 4**FEWEST):
        x, y = torch.ones(2, nbytes // 4, device=device)
        rows, size = x.view(-1, min(ELEMENTS, nbytes // 4)), float(nbytes)
        for kind, moved, once in (
            ("pointwise", 3 * size, lambda x=x, y=y: torch.mul(x, y)),
            ("special", 2 * size, lambda x=x: F.gelu(x)),
            ("reduction", size, lambda r=rows: torch.sum(r, 1)),
            ("norm", 2 * size, lambda r=rows: F.layer_norm(r, r.shape[1:])),
        ):
            yield LocalCase(kind, "float32", moved, _calls(nbytes=moved), once)
        nbytes *= 4


def _calls(flops: float = 0.0, nbytes: float = 0.0) -> int:
    us = CALL_US + flops * US_PER_OPERATION + nbytes * US_PER_BYTE
    return max(2, min(MOST_CALLS, round(ROW_US / us)))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
