"""The layers of a model, found as what repeats in the order of its cells.

    a b c d  b c d  b c d  b c d  e        b c d is repeated four times, from 1; `a` and `e` stand alone

The forward of a deep model is a run of equal layers, each of which reads what the one before wrote, and so is its
backward. A run may be longer than its repetitions by a part of one, and then it is open where they begin: they begin so
that as little as possible goes from one to the next, and so that the layers of the backward are those of the forward.
What is in no run and meets one layer only, as the update of a parameter, belongs to that layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

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
    """What is known of each cell. like: the same for cells that are alike but for their layer. stack: that of its
    layer; -1 outside. number: of its layer. ends: the first number of a stack of layers and its last, by stack."""

    like: np.ndarray
    stack: np.ndarray
    number: np.ndarray
    ends: list[tuple[int, int]] = field(default_factory=list)

    @property
    def layer(self) -> list[tuple[int, int] | None]:
        """The stack and the number of the layer of each cell; None outside."""
        return [None if k < 0 else (k, n) for k, n in zip(self.stack.tolist(), self.number.tolist(), strict=True)]

    @property
    def places(self) -> list[int]:
        """For each cell 0 if it is in the first layer or in none, 2 if it is in the last, 1 between."""
        first, last = np.array([*self.ends, (0, 0)])[self.stack].T
        between = 1 + (self.number >= last)
        return np.where((self.stack < 0) | (self.number <= first), 0, between).tolist()

    def join(self, values: Sequence[Ends]) -> None:
        """Let cells outside be of the layer that they meet, if it is one."""
        joining = _Joining(self, values)
        while joining.join():
            pass


class _Joining:
    """Cells while they join layers. cell, at, value: the ends of the values that may tell something yet."""

    def __init__(self, layers: Layers, values: Sequence[Ends]) -> None:
        self.layers, self.values = layers, len(values)
        ends = np.fromiter(chain.from_iterable([end for ends in values for end in ends]), np.int64).reshape(-1, 2)
        self.cell, self.at = ends.T
        self.value = np.repeat(np.arange(len(values)), list(map(len, values)))

    def join(self) -> bool:
        """Let those join that meet values of one layer alone. Returns whether there were any."""
        layers = self.layers
        layer = np.where(layers.stack < 0, -1, layers.stack << 32 | layers.number)
        inside = layer[self.cell] >= 0
        least, most = _ranges(self.value[inside], layer[self.cell[inside]], self.values)
        tells = np.bincount(self.value[~inside], minlength=self.values).astype(bool) & (least >= most)
        self._keep(tells[self.value])
        inside = layer[self.cell] >= 0
        seen = np.zeros(self.values, np.uint64)
        ends = mixed(layers.like[self.cell] + mixed(self.at.astype(np.uint64)))
        np.add.at(seen, self.value[inside], ends[inside])
        told = ~inside & (most[self.value] >= 0)
        cell, value = self.cell[told], self.value[told]
        met = np.zeros(len(layer), np.uint64)
        np.add.at(met, cell, mixed(mixed(seen[value]) + mixed(self.at[told].astype(np.uint64))))
        least, most = _ranges(cell, most[value], len(layer))
        fresh = least == most
        layers.stack[fresh], layers.number[fresh] = most[fresh] >> 32, most[fresh] & 0xFFFFFFFF
        layers.like[fresh] = mixed(mixed(layers.like[fresh]) + met[fresh])
        return bool(fresh.any())

    def _keep(self, ends: np.ndarray) -> None:
        self.cell, self.at, self.value = self.cell[ends], self.at[ends], self.value[ends]


def _ranges(of: np.ndarray, x: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """The least and the largest of the numbers that belong to each of so many; beyond all and -1 where none does."""
    least, most = np.full(number, np.iinfo(np.int64).max), np.full(number, -1)
    np.minimum.at(least, of, x)
    np.maximum.at(most, of, x)
    return least, most


def mixed(x: np.ndarray) -> np.ndarray:
    """A hash of each number (the finalizer of splitmix64: G. Steele et al., "Fast splittable pseudorandom number
    generators", 2014)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def layers_of(keys: Sequence[int], values: Sequence[Ends]) -> Layers:
    """The layers of a sequence of cells. keys: the same for equal ones. values: all values, by the cells around them.

    >>> chain = [[(i, -1), (i + 1, 0)] for i in range(13)]  # each cell reads what the one before wrote
    >>> layers_of([0, *[1, 2, 3] * 4, 5], chain).places
    [0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 2, 2, 2, 2]
    """
    edges = np.array([(w, i) for ends in values for w, at in ends if at < 0 for i, to in ends if to >= 0], np.int64)
    edges = edges.reshape(-1, 2)
    keys = np.array(keys, np.int64)
    stack, layer = np.full(len(keys), -1), np.full(len(keys), -1)
    found = Layers(keys.astype(np.uint64), stack, layer)
    free = int(keys.max(initial=-1)) + 1
    for stretch in _stretches(keys):
        run, (to, sign, first) = _aligned(stretch, edges, stack, layer)
        if not _is_chain(run, edges):
            continue
        if to < 0:
            to, sign, first = len(found.ends), 1, 0
            found.ends.append((0, run.times - 1))
        at = np.arange(run.start, run.stop)
        stack[at], layer[at] = to, first + sign * run.repetition(at)
        found.like[at] = free + (at - run.start) % run.period
        free += run.period
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


def by_appearance(keys: np.ndarray) -> np.ndarray:
    """Numbers of keys, in order of appearance."""
    _, first, number = np.unique(keys, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[number]


def _most(x: np.ndarray) -> tuple[int, int]:
    """How often the most common number is there, and the number."""
    if not len(x):
        return 0, 0
    numbers, counts = np.unique(x, return_counts=True)
    return int(counts.max()), int(numbers[counts.argmax()])
