"""The local ops that a calibration times: each kind at several sizes, called from Python in a row.

    for case in local_cases("cpu", 4 << 20):
        case.run(100)               # so many calls of the op
        case.x, case.nbytes         # what its time is fitted to: operations, or bytes read and written

A call is timed among others like it, since a program calls ops one after the other: a single one behind a rest would
be slower. Small sizes show what it takes to call an op at all; so does a view, on the CPU, where nothing runs beside
calls.

Products of matrices have several forms, and what a program multiplies is seldom square: rows times a weight, the sums
over many rows of a weight's gradient, few rows, and the batches of small products of attention that is written out. An
operation on one takes more time than on another where more bytes are read and written for it, so both are known of
each.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

KEPT = 4 << 20
"""Bytes of results that are kept: about what a core's own caches hold, so that results go to memory that was freed some
ops ago, as in a program. In what was just freed they would be written faster. To memory that the system has yet to give
they would be written ten times more slowly, and a training gets that in its first steps only."""
LARGEST = {"cpu": 16 << 20, "cuda": 256 << 20}
"""The largest operand, in bytes."""
SMALLEST = 1 << 8
SMALLEST_COPY = 1 << 10
FORMS: dict[str, tuple[tuple[Callable[[int], tuple[int, int, int, int]], tuple[int, ...]], ...]] = {
    "cpu": (
        (lambda n: (1, n, n, n), (8, 32, 128, 256, 512)),
        (lambda n: (1, 8 * n, n, n), (16, 64, 128, 256)),  # rows times a weight
        (lambda n: (1, n, 8 * n, n), (16, 64, 128)),  # the gradient of a weight
        (lambda n: (1, 16, n, n), (64, 256, 768)),  # few rows
        (lambda n: (16, n, 32, n), (16, 64, 128)),  # scores of attention, over 16 batches and heads
    ),
    "cuda": (
        (lambda n: (1, n, n, n), (64, 256, 1024, 2048, 4096)),
        (lambda n: (1, 8 * n, n, n), (256, 512, 1024, 2048)),
        (lambda n: (1, n, 8 * n, n), (256, 512, 1024, 2048)),
        (lambda n: (1, 16, n, n), (1024, 4096, 8192)),
        (lambda n: (64, n, 64, n), (128, 512, 2048)),
    ),
}
"""Forms of products, each as (batch, m, k, n) of its widths."""
LENGTHS = {"cpu": (8, 16, 32, 64, 128, 256), "cuda": (64, 256, 512, 1024, 2048, 4096)}
"""Of the sequences of attention."""
PRODUCTS = (torch.float32, torch.bfloat16, torch.float64)
"""Dtypes whose matrix products are timed."""
FEWEST = 4
"""Sizes of each kind that are timed in any case; of each form of a product, one."""
FEWEST_COPIES = 5
HEADS, WIDTH = 8, 64
"""Heads and features of attention."""
ELEMENTS = 256
"""Elements that a reduction or a norm goes over."""
PIECES = 4
"""Pieces that the timed copy concatenates on dim 1, as a gather on dim 1 does."""


@dataclass(frozen=True)
class LocalCase:
    """A local op at one size. x: operations, or bytes read and written; of a copy, those of its result. nbytes: of a
    product, the bytes that it reads and writes."""

    kind: str
    dtype: str
    x: float
    once: Callable[[], torch.Tensor]
    nbytes: float = 0.0

    def run(self, calls: int) -> None:
        """Call the op so often, one call behind the other."""
        once, first = self.once, self.once()
        kept = deque([first], maxlen=max(1, KEPT // max(1, first.nbytes)))
        for _ in range(calls - 1):
            kept.append(once())


def local_cases(device: str, largest: int) -> Iterator[LocalCase]:
    """All that is timed on a "cpu" or on "cuda", by kind and dtype, from small to large. largest: bytes of an operand;
    of each kind a few sizes are timed in any case."""
    yield from _products(device, largest)
    yield from _attention(device, largest)
    yield from _by_bytes(device, min(largest, LARGEST[device]))
    yield from _copies(device, min(largest, LARGEST[device]))
    if device == "cpu":
        x = torch.ones(64, 64)
        yield LocalCase("view", "float32", 0.0, lambda: x.view(32, 128))


def _products(device: str, largest: int) -> Iterator[LocalCase]:
    for dtype in PRODUCTS:
        for shape in [each for form, widths in FORMS[device] for each in _fitting(form, widths, largest, dtype)]:
            batch, m, k, n = shape
            x, y = (torch.ones(batch, *each, dtype=dtype, device=device) for each in ((m, k), (k, n)))
            multiply = torch.bmm
            if batch == 1:
                multiply, x, y = torch.mm, x[0], y[0]
            nbytes = batch * (m * k + k * n + m * n) * dtype.itemsize
            flops = 2.0 * batch * m * k * n
            yield LocalCase("product", _name(dtype), flops, partial(multiply, x, y), float(nbytes))


def _fitting(
    form: Callable[[int], tuple[int, int, int, int]], widths: tuple[int, ...], largest: int, dtype: torch.dtype
) -> Iterator[tuple[int, int, int, int]]:
    for at, width in enumerate(widths):
        batch, m, k, n = form(width)
        if at == 0 or batch * max(m * k, k * n, m * n) * dtype.itemsize <= largest:
            yield batch, m, k, n


def _attention(device: str, largest: int) -> Iterator[LocalCase]:
    dtype, attend = torch.float32 if device == "cpu" else torch.bfloat16, F.scaled_dot_product_attention
    row = HEADS * WIDTH * dtype.itemsize
    for n in [n for at, n in enumerate(LENGTHS[device]) if at < FEWEST or n * row <= largest]:
        q = torch.ones(1, HEADS, n, WIDTH, dtype=dtype, device=device)
        yield LocalCase("attention", _name(dtype), 4.0 * q.numel() * n, lambda q=q: attend(q, q, q))


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
            yield LocalCase(kind, "float32", moved, once)
        nbytes *= 4


def _copies(device: str, largest: int) -> Iterator[LocalCase]:
    nbytes = SMALLEST_COPY
    while nbytes <= max(largest, SMALLEST_COPY * 4 ** (FEWEST_COPIES - 1)):
        pieces = torch.ones(PIECES, nbytes // 4 // PIECES**2, PIECES, device=device).unbind(0)
        yield LocalCase("copy", "float32", float(nbytes), lambda pieces=pieces: torch.cat(pieces, 1))
        nbytes *= 4


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
