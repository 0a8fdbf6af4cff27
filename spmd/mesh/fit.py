"""From measured times to costs: a curve for each collective, and one ring for all of them together.

A curve is the maximum over a few lines, us + us_per_byte * x, without negative numbers. So it grows with the bytes and
never jumps, whatever the noise in the times:

    >>> kib = [2**k for k in range(10, 21)]
    >>> took = [max(20.0, 10.0 + x / 1000) for x in kib]
    >>> curve = fit_curve(kib, took)
    >>> [(round(us, 3), round(us_per_byte, 6)) for us, us_per_byte in curve]
    [(20.0, 0.0), (10.0, 0.001)]
    >>> errors(curve, [3000, 50_000], [20.0, 66.0]).round(3).tolist()    # predicted 20 and 60
    [0.0, -0.091]

Errors are relative, so that small messages count as much as large ones. The fit minimises the sum of their absolute
values, so that a few wrong times do not bend the curve.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

import numpy as np

from spmd.mesh.algorithms import STEPS, Line
from spmd.mesh.layout import Ladder
from spmd.mesh.machine import Link, Way

MOST_LINES = 3
LEAST_GAIN = 0.01  # a further line must reduce the mean error by this much
POINTS_PER_LINE = 2
ROUNDS, SMALLEST_ERROR = 20, 1e-4  # of `_least_errors`


@dataclass(frozen=True)
class Sample:
    """The measured time of one collective, in microseconds, on groups with this ladder (`layout.py`).

    `nbytes` is the argument of the collective's function in `cost.py`.
    """

    collective: str
    ladder: Ladder
    nbytes: int
    us: float


def fit_curve(nbytes: Sequence[float], us: Sequence[float], most: int = MOST_LINES) -> tuple[Line, ...]:
    """The lines, from the flattest to the steepest, whose maximum is nearest to the measured times.

    It tries each way to divide the sizes, in their order, into ranges: it fits a line to each range, and compares the
    maximum of all lines with all times. ValueError where there is nothing to fit.
    """
    if not len(nbytes) or len(nbytes) != len(us) or min(us) <= 0 or min(nbytes) < 0:
        raise ValueError("fit_curve: give one size or more, none below 0, and for each a time above 0")
    order = np.argsort(nbytes, kind="stable")
    x, y = np.asarray(nbytes, float)[order], np.asarray(us, float)[order]
    lines = {cut: _line(x[slice(*cut)], y[slice(*cut)]) for cut in combinations(range(len(x) + 1), 2)}
    found = ([lines[cut] for cut in ranges] for ranges in _ranges(len(x), most))
    best = min(found, key=lambda curve: LEAST_GAIN * len(curve) + float(np.abs(errors(curve, x, y)).mean()))
    return tuple(sorted(dict.fromkeys(best), key=lambda line: line[::-1]))


def errors(curve: Sequence[Line], nbytes: Sequence[float], us: Sequence[float]) -> np.ndarray:
    """The relative errors of a curve: (predicted - measured) / measured, one for each measured time."""
    x, y = np.asarray(nbytes, float), np.asarray(us, float)
    return np.max([a + b * x for a, b in curve], axis=0) / y - 1


def fit_sum(terms: Sequence[Sequence[float]], us: Sequence[float]) -> list[float]:
    """The c without negative numbers for which c[0] + c[1] * terms[0] + ... is nearest to the measured times.

    What is added up grows with each term. So is the time of a product of matrices, of a call, its operations and its
    bytes, for matrices of any form:

        >>> flops, nbytes = [2e6, 2e6, 16e6, 128e6], [1e5, 9e5, 1e6, 2e6]
        >>> us = [5 + 1e-5 * x + 2e-4 * y for x, y in zip(flops, nbytes)]
        >>> [float(f"{c:.3g}") for c in fit_sum([flops, nbytes], us)]
        [5.0, 1e-05, 0.0002]
    """
    if min(us) <= 0 or any(len(each) != len(us) for each in terms):
        raise ValueError("fit_sum: give times above 0, and for each as many terms")
    return _least_errors(np.stack([np.ones(len(us)), *np.asarray(terms, float)], 1), np.asarray(us, float))


def fit_ring(samples: Sequence[Sample], levels: int) -> Way:
    """One ring for all samples: it gives the costs of groups that were not timed.

    A level of links that no sample crosses gets the numbers of the next level outwards, or else inwards.

        >>> from spmd.mesh.layout import Rung
        >>> four = (Rung(level=0, size=4, below=1, upto=4),)
        >>> took = {1000: 13.0, 10_000: 21.1, 100_000: 102.1}      # about 12 us, and then 3/4 of the bytes
        >>> way = fit_ring([Sample("all_gather", four, x, us) for x, us in took.items()], levels=1)
        >>> round(way.links[0].gb_per_s, 2)
        0.83
    """
    rows = np.array([_ring_terms(sample, levels) for sample in samples])
    found = _least_errors(rows, np.array([sample.us for sample in samples]))
    crossed = [level for level in range(levels) if rows[:, 1 + 2 * level].any()]
    links = {level: Link(found[1 + 2 * level], 1e-3 / max(found[2 + 2 * level], 1e-9)) for level in crossed}
    nearest = [min(crossed, key=lambda c: (c < level, abs(c - level))) for level in range(levels)]
    return Way("ring", found[0], tuple(links[level] for level in nearest), "measured")


def _ranges(n: int, most: int) -> Iterator[list[tuple[int, int]]]:
    """All ways to divide n sizes into at most `most` ranges, each with enough points for a line."""
    for count in range(1, max(1, min(most, n // POINTS_PER_LINE)) + 1):
        for inner in combinations(range(1, n), count - 1):
            ends = (0, *inner, n)
            ranges = list(pairwise(ends))
            if count == 1 or all(end - start >= POINTS_PER_LINE for start, end in ranges):
                yield ranges


def _line(x: np.ndarray, y: np.ndarray) -> Line:
    us, us_per_byte = _least_errors(np.stack([np.ones_like(x), x], 1), y)
    return us, us_per_byte


def _ring_terms(sample: Sample, levels: int) -> list[float]:
    """1, and for each level the hops and the bytes: the factors of the numbers of a ring."""
    terms = [1.0] + [0.0] * (2 * levels)
    for rung in sample.ladder:
        hops, share = STEPS[sample.collective, "ring"](rung, sample.ladder)
        terms[1 + 2 * rung.level] += hops
        terms[2 + 2 * rung.level] += share * sample.nbytes
    return terms


def _least_errors(rows: np.ndarray, y: np.ndarray) -> list[float]:
    """The c without negative entries for which the sum of the absolute values of (rows @ c - y) / y is the least.

    Least absolute deviations by repeated least squares, with weights from the last errors.
    """
    relative = rows / y[:, None]
    scale = np.abs(relative).max(0)
    scale[scale == 0] = 1
    relative, weights, before = relative / scale, np.ones(len(y)), None
    for _ in range(ROUNDS):
        found = _nonnegative(relative * weights[:, None], weights)
        if before is not None and np.allclose(found, before, rtol=1e-4):
            break
        weights, before = 1 / np.sqrt(np.maximum(np.abs(relative @ found - 1), SMALLEST_ERROR)), found
    return (found / scale).tolist()


def _nonnegative(a: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The least squares solution of a @ c = y without negative entries: it tries every choice of the few columns."""
    best, least = np.zeros(a.shape[1]), float(y @ y)
    for count in range(1, a.shape[1] + 1):
        for chosen in map(list, combinations(range(a.shape[1]), count)):
            c = np.linalg.lstsq(a[:, chosen], y, rcond=None)[0]
            left = float(((a[:, chosen] @ c - y) ** 2).sum())
            if (c >= 0).all() and left < least:
                best, least = np.zeros(a.shape[1]), left
                best[chosen] = c
    return best
