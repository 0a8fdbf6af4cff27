"""Random numbers made of random words, each of one: uniform, normal, exponential, yes or no, and others.

    words         3f1c9a02 ...     of 32 bits, or of 64
    uniform       the first 24 of them, as a fraction (53 of 64)
    normal        where so much of the bell curve lies to the left
    exponential   minus the logarithm of the fraction

A number hangs on its own word alone, so that a block of them is made of a block of words; it is the words that have a
place in the global tensor (`spmd.tensor.random`). Made in a few passes of whole arrays, on CPUs: in less time than
torch's kernels take, which go from number to number.

Left out: half precision, complex numbers, and whole numbers out of more than 2**32; torch's kernels draw those.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from spmd import _torch
from spmd.tensor.rules.draws import FILLS

aten = torch.ops.aten

FLOATS = {torch.float32: np.float32, torch.float64: np.float64}


Make = Callable[[np.ndarray], np.ndarray]


class Recipe(NamedTuple):
    """How numbers are made of words: of 64 bits, if they are wide, or of 32."""

    wide: bool
    make: Make


@functools.lru_cache(maxsize=1024)
def recipe(op: _torch.OpOverload, dtype: torch.dtype, *args: float) -> Recipe | None:
    """How the numbers of an op of `FILLS` are made, with these arguments; None where torch's kernel has to.

    >>> recipe(aten.uniform_.default, torch.float32, 1.0, 3.0).make(np.array([0, 1 << 31, 0xFFFFFFFF], np.uint32))
    array([1.       , 2.       , 2.9999998], dtype=float32)
    """
    make = _RECIPES.get(op)
    FILLS[op](torch.empty(0, dtype=dtype), *args)  # it knows what arguments may be, and says so
    return make and make(dtype, *args)


def _uniform(low: float = 0.0, high: float = 1.0) -> Make:
    def make(words: np.ndarray) -> np.ndarray:
        x = _from_zero(words)
        if high - low != 1.0:
            x *= high - low
        if low != 0.0:
            x += low
            np.minimum(x, np.nextafter(x.dtype.type(high), x.dtype.type(low)), out=x)  # the sum may be rounded up
        return x

    return make


def _normal(mean: float = 0.0, std: float = 1.0) -> Make:
    def make(words: np.ndarray) -> np.ndarray:
        x = _around_zero(words)
        torch.from_numpy(x).erfinv_()
        x *= math.sqrt(2) * std
        if mean != 0.0:
            x += mean
        return x

    return make


def _log_normal(mean: float = 1.0, std: float = 2.0) -> Make:
    normal = _normal(mean, std)

    def make(words: np.ndarray) -> np.ndarray:
        x = normal(words)
        return np.exp(x, out=x)

    return make


def _exponential(rate: float = 1.0) -> Make:
    def make(words: np.ndarray) -> np.ndarray:
        x = _between(words)
        np.log(x, out=x)
        x *= -1 / rate
        return x

    return make


def _geometric(p: float) -> Make:
    def make(words: np.ndarray) -> np.ndarray:
        x = _between(words)
        np.log(x, out=x)
        x *= 1 / math.log1p(-p)
        return np.ceil(x, out=x)

    return make


def _cauchy(median: float = 0.0, sigma: float = 1.0) -> Make:
    def make(words: np.ndarray) -> np.ndarray:
        x = _between(words)
        x -= 0.5
        x *= math.pi
        np.tan(x, out=x)
        x *= sigma
        x += median
        return x

    return make


def _floats(of: Callable[..., Make]) -> Callable[..., Recipe | None]:
    """A recipe for the floats that numpy has."""

    def made(dtype: torch.dtype, *args: float) -> Recipe | None:
        return Recipe(dtype == torch.float64, of(*args)) if dtype in FLOATS else None

    return made


def _below(dtype: torch.dtype, end: int) -> Recipe | None:
    return _from_to(dtype, 0, end)


def _from_to(dtype: torch.dtype, low: int, end: int | None) -> Recipe | None:
    """The high half of the product of word and range. Wide where some numbers were likelier by 2**-16 of it or more."""
    if dtype.is_complex or end is None or end - low > 2**32:
        return None
    if dtype.is_floating_point and max(-low, end) > 1 / torch.finfo(dtype).eps:  # not all are floats
        return None
    n, wide = np.uint64(end - low), end - low > 2**16

    def make(words: np.ndarray) -> np.ndarray:
        x = _high_half(words, n) if wide else words.astype(np.uint64) * n >> 32
        x = x.view(np.int64)
        x += low
        return x

    return Recipe(wide, make)


def _high_half(words: np.ndarray, n: np.uint64) -> np.ndarray:
    x = words & np.uint64(2**32 - 1)
    x *= n
    x >>= 32
    x += (words >> 32) * n
    x >>= 32
    return x


def _bernoulli(dtype: torch.dtype, p: float = 0.5) -> Recipe | None:
    """Wide where p is so near to 0 or 1 that 32 bits would round it by more than a millionth."""
    if dtype.is_complex:
        return None
    if 2**-12 < p < 1 - 2**-12:
        below = round(p * 2**32)
        return Recipe(False, lambda words: words < below)
    below = round(p * 2**63)
    return Recipe(True, lambda words: words >> 1 < below)


_RECIPES = {
    op: made
    for ops, made in (
        ((aten.uniform_.default, aten.uniform.default), _floats(_uniform)),
        ((aten.normal_.default, aten.normal_functional.default), _floats(_normal)),
        ((aten.log_normal_.default, aten.log_normal.default), _floats(_log_normal)),
        ((aten.exponential_.default, aten.exponential.default), _floats(_exponential)),
        ((aten.geometric_.default, aten.geometric.default), _floats(_geometric)),
        ((aten.cauchy_.default, aten.cauchy.default), _floats(_cauchy)),
        ((aten.bernoulli_.float, aten.bernoulli.p), _bernoulli),
        ((aten.random_.to, aten.random.to), _below),
        ((getattr(aten.random_, "from"),), _from_to),
    )
    for op in ops
}


def _from_zero(words: np.ndarray) -> np.ndarray:
    """Multiples of 2**-24 (2**-53) from 0 to below 1."""
    if words.dtype == np.uint64:
        return (words >> 11).view(np.int64) * 2.0**-53
    x = (words >> 8).view(np.int32).astype(np.float32)
    x *= 2.0**-24
    return x


def _around_zero(words: np.ndarray) -> np.ndarray:
    """Odd multiples of 2**-24 (2**-53) between -1 and 1: as many on either side, and neither 0 nor 1."""
    if words.dtype == np.uint64:
        return (words.view(np.int64) >> 10 | 1) * 2.0**-53
    x = (words.view(np.int32) >> 7 | 1).astype(np.float32)
    x *= 2.0**-24
    return x


def _between(words: np.ndarray) -> np.ndarray:
    """Odd multiples of 2**-33 (2**-53) between 0 and 1, in float64: what is near to 1 makes the small exponentials."""
    if words.dtype == np.uint64:
        return (words >> 11 | 1).view(np.int64) * 2.0**-53
    x = words.astype(np.float64)
    x += 0.5
    x *= 2.0**-32
    return x
