"""The layers of a model, found as what repeats in the order of its cells.

    a b c d  b c d  b c d  b c d  e        b c d is repeated four times, from 1; `a` and `e` stand alone

The forward of a deep model is a run of equal layers, each of which reads what the one before wrote, and so is its
backward. A run may be longer than its repetitions by a part of one, and then it is open where they begin: they begin so
that as little as possible goes from one to the next, and so that the layers of the backward are those of the forward.
What is in no run and meets one layer only, as the update of a parameter, belongs to that layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

FEWEST = 4
"""Repetitions of a run: the first, the last, and two between."""

MOST_PERIODS = 16
"""Distances between equal cells that are tried as periods."""

Ends = Sequence[tuple[int, int]]
"""The cells around a value: the number of each, and where it meets the value; below zero for the one that writes it."""


@dataclass(frozen=True)
class Run:
    """So many equal parts of a sequence, one after the other."""

    start: int
    period: int
    times: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.times

    def repetition(self, places: np.ndarray) -> np.ndarray:
        """The repetition of each place in the sequence; -1 outside."""
        inside = (places >= self.start) & (places < self.stop)
        return np.where(inside, (places - self.start) // self.period, -1)


@dataclass(eq=False)
class Layers:
    """What is known of each cell. like: the same for cells that are alike but for their layer. layer: its number; None
    outside. ends: the first number of a stack of layers and its last, by stack."""

    like: list[Hashable]
    layer: list[tuple[int, int] | None]
    ends: list[tuple[int, int]] = field(default_factory=list)

    @property
    def places(self) -> list[int]:
        """For each cell 0 if it is in the first layer or in none, 2 if it is in the last, 1 between."""
        return [0 if x is None or x[1] <= self.ends[x[0]][0] else 1 + (x[1] >= self.ends[x[0]][1]) for x in self.layer]

    def join(self, values: Sequence[Ends]) -> None:
        """Let cells outside be of the layer that they meet, if it is one."""
        numbers: dict[Hashable, int] = {}
        like = [numbers.setdefault(x, len(numbers)) for x in self.like]
        fresh = True
        while fresh:
            found: dict[int, list[tuple]] = {}
            left = []
            for ends in values:
                inside = [(self.layer[i], like[i], at) for i, at in ends if self.layer[i] is not None]
                if len(inside) == len(ends) or len({layer for layer, _, _ in inside}) > 1:
                    continue  # it tells nothing, and will not
                left.append(ends)
                for i, at in ends if inside else ():
                    if self.layer[i] is None:
                        found.setdefault(i, []).append((inside[0][0], at, tuple(sorted([x[1:] for x in inside]))))
            fresh = {i: met for i, met in found.items() if len({layer for layer, _, _ in met}) == 1}
            for i, met in fresh.items():
                self.layer[i] = met[0][0]
                alike = like[i], tuple(sorted([each[1:] for each in met]))
                like[i] = numbers.setdefault(alike, len(numbers))
            values = left
        self.like = like


def layers_of(keys: Sequence[int], values: Sequence[Ends]) -> Layers:
    """The layers of a sequence of cells. keys: the same for equal ones. values: all values, by the cells around them.

    >>> chain = [[(i, -1), (i + 1, 0)] for i in range(13)]  # each cell reads what the one before wrote
    >>> layers_of([0, *[1, 2, 3] * 4, 5], chain).places
    [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2]
    """
    edges = np.array([(w, i) for ends in values for w, at in ends if at < 0 for i, to in ends if to >= 0], np.int64)
    edges = edges.reshape(-1, 2)
    found = Layers(list(keys), [None] * len(keys))
    stack, layer = np.full(len(keys), -1), np.full(len(keys), -1)
    for stretch in _stretches(np.array(keys, np.int64)):
        run, (to, sign, first) = _aligned(stretch, edges, stack, layer)
        if not _is_chain(run, edges):
            continue
        if to < 0:
            to, sign, first = len(found.ends), 1, 0
            found.ends.append((0, run.times - 1))
        at = np.arange(run.start, run.stop)
        stack[at], layer[at] = to, first + sign * run.repetition(at)
        for i, k in zip(at.tolist(), layer[at].tolist(), strict=True):
            found.layer[i], found.like[i] = (to, k), ("run", run.start, (i - run.start) % run.period)
    found.join(values)
    return found


def _stretches(keys: np.ndarray) -> list[tuple[int, int, int]]:
    """Where the sequence repeats itself: start, period and length. The longest first to choose, in order at the end."""
    free = np.ones(len(keys), bool)
    periods, found = _periods(keys), []
    while True:
        each = [stretch for p in periods for stretch in _of_period(keys, free, p)]
        if not each:
            return sorted(found)
        start, period, length = max(each, key=lambda s: (s[2], -s[1], -s[0]))
        found.append((start, period, length))
        free[start : start + length] = False


def _periods(keys: np.ndarray) -> list[int]:
    """The most common distances between a key and the next equal one."""
    order = np.argsort(keys, kind="stable")
    apart = np.diff(order)[np.diff(keys[order]) == 0]
    common = Counter(apart.tolist()).items()
    return [p for p, _ in sorted(common, key=lambda each: (-each[1], each[0]))[:MOST_PERIODS]]


def _of_period(keys: np.ndarray, free: np.ndarray, period: int) -> list[tuple[int, int, int]]:
    """All stretches of a period that repeat often enough, among what is free."""
    same = (keys[period:] == keys[:-period]) & free[period:] & free[:-period]
    ends = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]])))
    return [(a, period, b - a + period) for a, b in ends.reshape(-1, 2).tolist() if b - a >= (FEWEST - 1) * period]


def _aligned(
    stretch: tuple[int, int, int], edges: np.ndarray, stack: np.ndarray, layer: np.ndarray
) -> tuple[Run, tuple[int, int, int]]:
    """The run of a stretch, and how its repetitions are layers of a stack that is known: the stack, 1 or -1 if they
    count on or back, and the layer of the first; the stack is -1 if they are none."""
    start, period, length = stretch
    edges = edges[((edges >= start) & (edges < start + length)).any(1)]
    stacks = range(int(stack.max(initial=-1)) + 1)
    best: tuple[int, Run, tuple[int, int, int]] | None = None
    for d in range(length % period + 1):
        run = Run(start + d, period, (length - d) // period)
        a, b = run.repetition(edges[:, 0]), run.repetition(edges[:, 1])
        link, most = (-1, 1, 0), 0
        for mine, other in ((a, edges[:, 1]), (b, edges[:, 0])):
            for k in stacks:
                here = (mine >= 0) & (stack[other] == k)
                for sign in (1, -1):
                    number, first = _most(layer[other[here]] - sign * mine[here])
                    if number >= run.times and number > most:
                        link, most = (k, sign, first), number
        score = int(((a == b) & (a >= 0)).sum()) + most
        if best is None or score > best[0]:
            best = score, run, link
    return best[1:]


def _is_chain(run: Run, edges: np.ndarray) -> bool:
    """Whether each repetition reads what the one before wrote, wherever the repetitions begin.

    So no place in the run may be without a value that is written before it and read behind it. Updates of parameters
    one after the other are no chain, though in some rotation a repetition reads the count of steps of the one before.
    """
    a, b = run.repetition(edges[:, 0]), run.repetition(edges[:, 1])
    if len(np.unique(a[(a >= 0) & (b == a + 1)])) < run.times - 1:
        return False
    writer, reader = (edges[(a >= 0) & (b >= 0)] - run.start).T
    passing = np.zeros(run.stop - run.start, np.int64)
    np.add.at(passing, writer, 1)
    np.add.at(passing, reader, -1)
    return bool((passing.cumsum()[:-1] > 0).all())


def _most(x: np.ndarray) -> tuple[int, int]:
    """How often the most common number is there, and the number."""
    if not len(x):
        return 0, 0
    numbers, counts = np.unique(x, return_counts=True)
    return int(counts.max()), int(numbers[counts.argmax()])
