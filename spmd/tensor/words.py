"""The commonest random numbers, each made of one random word: uniform, normal, exponential, and yes or no.

    words     3f1c9a02 ...        of 32 bits, or of 64
    uniform   the first 24 of them, as a fraction        (53 of 64)
    normal    where so much of the bell curve lies to the left

A number hangs on its own word alone, so that a block of them is made of a block of words; it is the words that have a
place in the global tensor (`spmd.tensor.random`). Made in a few passes of whole arrays, on CPUs: in less time than
torch's kernels take, which go from number to number.
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


class Recipe(NamedTuple):
    """How numbers are made of words: of 64 bits, if they are wide, or of 32."""

    wide: bool
    make: Callable[[np.ndarray], np.ndarray]


@functools.lru_cache(maxsize=1024)
def recipe(op: _torch.OpOverload, dtype: torch.dtype, *args: float) -> Recipe | None:
    """How the numbers of an op of `FILLS` are made, with these arguments; None where torch's kernel has to.

    >>> recipe(aten.uniform_.default, torch.float32, 1.0, 3.0).make(np.array([0, 1 << 31, 0xFFFFFFFF], np.uint32))
    array([1.       , 2.       , 2.9999998], dtype=float32)
    """
    make = _RECIPES.get(op)
    FILLS[op](torch.empty(0, dtype=dtype), *args)  # it knows what arguments may be, and says so
    return make and make(dtype, *args)


def _uniform(dtype: torch.dtype, low: float = 0.0, high: float = 1.0) -> Recipe | None:
    if dtype not in FLOATS:
        return None

    def make(words: np.ndarray) -> np.ndarray:
        x = _from_zero(words)
        if low != 0.0 or high != 1.0:
            x *= high - low
            x += low
        return x

    return Recipe(dtype == torch.float64, make)


def _normal(dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Recipe | None:
    if dtype not in FLOATS:
        return None

    def make(words: np.ndarray) -> np.ndarray:
        x = _around_zero(words)
        torch.from_numpy(x).erfinv_()
        x *= math.sqrt(2) * std
        if mean != 0.0:
            x += mean
        return x

    return Recipe(dtype == torch.float64, make)


def _exponential(dtype: torch.dtype, rate: float = 1.0) -> Recipe | None:
    """In float64 on the way, for small ones are told apart by how near to 1 the fraction is."""
    if dtype not in FLOATS:
        return None

    def make(words: np.ndarray) -> np.ndarray:
        x = _between(words)
        np.log(x, out=x)
        x *= -1 / rate
        return x

    return Recipe(dtype == torch.float64, make)


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
    aten.uniform_.default: _uniform, aten.uniform.default: _uniform,
    aten.normal_.default: _normal, aten.normal_functional.default: _normal,
    aten.exponential_.default: _exponential, aten.exponential.default: _exponential,
    aten.bernoulli_.float: _bernoulli, aten.bernoulli.p: _bernoulli,
}  # fmt: skip


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
    """Odd multiples of 2**-33 (2**-53) between 0 and 1, in float64."""
    if words.dtype == np.uint64:
        return (words >> 11 | 1).view(np.int64) * 2.0**-53
    x = words.astype(np.float64)
    x += 0.5
    x *= 2.0**-32
    return x
