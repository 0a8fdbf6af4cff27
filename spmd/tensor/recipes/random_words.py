"""Formulas that turn one random word into one random number: uniform, normal, exponential, Bernoulli and others.

    words         3f1c9a02 ...     of 32 bits, or of 64
    uniform       the first 24 bits of the word, as a fraction (53 bits of a word of 64)
    normal        the inverse of the normal distribution function, at the fraction
    exponential   minus the logarithm of the fraction

Each number depends on its own word alone, so a block of numbers is made from a block of words. The words have a place
in the global tensor (`spmd.tensor.recipes.random`). On CPUs the formulas run in a few passes over whole arrays. That
takes less time than torch's kernels, which go from number to number.

Left out: half precision, complex numbers, and integers out of a range of more than 2**32. torch's kernels draw those.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from spmd import _torch
from spmd.tensor.rules.random_ops import RANDOM_FILLS

aten = torch.ops.aten

FLOATS = {torch.float32: np.float32, torch.float64: np.float64}


Make = Callable[[np.ndarray], np.ndarray]
"""A function from an array of words to an array of numbers."""


class WordFormula(NamedTuple):
    """How numbers are made from words. The words have 64 bits if `wide`, else 32."""

    wide: bool
    make: Make

    @property
    def itemsize(self) -> int:
        """The bytes of a number as it is made. The tensor that it is copied into may have smaller ones."""
        return self.make(np.empty(0, np.uint64 if self.wide else np.uint32)).itemsize


@functools.lru_cache(maxsize=1024)
def word_formula(op: _torch.OpOverload, dtype: torch.dtype, *args: float) -> WordFormula | None:
    """The formula of an op of `RANDOM_FILLS` with these arguments; None where torch's kernel has to draw.

    >>> word_formula(aten.uniform_.default, torch.float32, 1.0, 3.0).make(np.array([0, 1 << 31, 0xFFFFFFFF], np.uint32))
    array([1.       , 2.       , 2.9999998], dtype=float32)
    """
    make_formula = _FORMULAS.get(op)
    RANDOM_FILLS[op](torch.empty(0, dtype=dtype), *args)  # the kernel checks the arguments, and raises its own error
    return make_formula and make_formula(dtype, *args)


def _uniform(low: float = 0.0, high: float = 1.0) -> Make:
    def make(words: np.ndarray) -> np.ndarray:
        x = _fraction_from_zero(words)
        if high - low != 1.0:
            x *= high - low
        if low != 0.0:
            x += low
            np.minimum(x, np.nextafter(x.dtype.type(high), x.dtype.type(low)), out=x)  # the sum may be rounded up
        return x

    return make


def _normal(mean: float = 0.0, std: float = 1.0) -> Make:
    def make(words: np.ndarray) -> np.ndarray:
        x = _fraction_around_zero(words)
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
        x = _fraction_inside(words)
        np.log(x, out=x)
        x *= -1 / rate
        return x

    return make


def _geometric(p: float) -> Make:
    def make(words: np.ndarray) -> np.ndarray:
        x = _fraction_inside(words)
        np.log(x, out=x)
        x *= 1 / math.log1p(-p)
        return np.ceil(x, out=x)

    return make


def _cauchy(median: float = 0.0, sigma: float = 1.0) -> Make:
    def make(words: np.ndarray) -> np.ndarray:
        x = _fraction_inside(words)
        x -= 0.5
        x *= math.pi
        np.tan(x, out=x)
        x *= sigma
        x += median
        return x

    return make


def _for_floats(make_of: Callable[..., Make]) -> Callable[..., WordFormula | None]:
    """A formula for the float dtypes that numpy has."""

    def make_formula(dtype: torch.dtype, *args: float) -> WordFormula | None:
        return WordFormula(dtype == torch.float64, make_of(*args)) if dtype in FLOATS else None

    return make_formula


def _integer_below(dtype: torch.dtype, end: int) -> WordFormula | None:
    return _integer_from_to(dtype, 0, end)


def _integer_from_to(dtype: torch.dtype, low: int, end: int | None) -> WordFormula | None:
    """An integer from `low` to `end`: the high half of the product of the word and the range.

    The words are wide where otherwise some numbers would be likelier than others by 2**-16 of their chance or more.
    """
    if dtype.is_complex or end is None or end - low > 2**32:
        return None
    if dtype.is_floating_point and max(-low, end) > 1 / torch.finfo(dtype).eps:  # the dtype does not have all of them
        return None
    n, wide = np.uint64(end - low), end - low > 2**16

    def make(words: np.ndarray) -> np.ndarray:
        x = _high_half(words, n) if wide else words.astype(np.uint64) * n >> 32
        x = x.view(np.int64)
        x += low
        return x

    return WordFormula(wide, make)


def _high_half(words: np.ndarray, n: np.uint64) -> np.ndarray:
    x = words & np.uint64(2**32 - 1)
    x *= n
    x >>= 32
    x += (words >> 32) * n
    x >>= 32
    return x


def _bernoulli(dtype: torch.dtype, p: float = 0.5) -> WordFormula | None:
    """True with the chance p. The words are wide where 32 bits would round p, near 0 or 1, by more than a millionth."""
    if dtype.is_complex:
        return None
    if 2**-12 < p < 1 - 2**-12:
        below = round(p * 2**32)
        return WordFormula(False, lambda words: words < below)
    below = round(p * 2**63)
    return WordFormula(True, lambda words: words >> 1 < below)


_FORMULAS = {
    op: make_formula
    for ops, make_formula in (
        ((aten.uniform_.default, aten.uniform.default), _for_floats(_uniform)),
        ((aten.normal_.default, aten.normal_functional.default), _for_floats(_normal)),
        ((aten.log_normal_.default, aten.log_normal.default), _for_floats(_log_normal)),
        ((aten.exponential_.default, aten.exponential.default), _for_floats(_exponential)),
        ((aten.geometric_.default, aten.geometric.default), _for_floats(_geometric)),
        ((aten.cauchy_.default, aten.cauchy.default), _for_floats(_cauchy)),
        ((aten.bernoulli_.float, aten.bernoulli.p), _bernoulli),
        ((aten.random_.to, aten.random.to), _integer_below),
        ((getattr(aten.random_, "from"),), _integer_from_to),
    )
    for op in ops
}


def _fraction_from_zero(words: np.ndarray) -> np.ndarray:
    """Multiples of 2**-24 (of 2**-53 for wide words), from 0 to below 1."""
    if words.dtype == np.uint64:
        return (words >> 11).view(np.int64) * 2.0**-53
    x = (words >> 8).view(np.int32).astype(np.float32)
    x *= 2.0**-24
    return x


def _fraction_around_zero(words: np.ndarray) -> np.ndarray:
    """Odd multiples of 2**-24 (of 2**-53 for wide words) between -1 and 1.

    As many are below 0 as above it, and none is 0 or 1.
    """
    if words.dtype == np.uint64:
        return (words.view(np.int64) >> 10 | 1) * 2.0**-53
    x = (words.view(np.int32) >> 7 | 1).astype(np.float32)
    x *= 2.0**-24
    return x


def _fraction_inside(words: np.ndarray) -> np.ndarray:
    """Odd multiples of 2**-33 (of 2**-53 for wide words) between 0 and 1.

    They are float64, because the fractions near 1 make the small exponentials.
    """
    if words.dtype == np.uint64:
        return (words >> 11 | 1).view(np.int64) * 2.0**-53
    x = words.astype(np.float64)
    x += 0.5
    x *= 2.0**-32
    return x
