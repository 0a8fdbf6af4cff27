"""What the first rank copies on its way from each state to each other, as arrays: as `Move.copies` has it of two boxes.

A rank that cuts pieces out of its block for others copies them, unless they follow each other there, row by row, in the
order of the ranks they are for; and one that puts pieces together copies them once for each dim in which they lie side
by side, unless they have come in order. Only where copies have a price is this looked at.
"""

# ruff: noqa: B905 - what is zipped has one entry a dim

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from spmd.tensor.redistribute.graph import SLICE, Graph, Scatters, divides, sides_of
from spmd.tensor.redistribute.states import Space

Sides = Sequence[tuple[np.ndarray, np.ndarray]]  # for each dim where the block of each rank starts and stops, by state


def copies_of(graph: Graph, space: Space) -> Copies:
    """The copies of all moves of a graph: the same for all spaces in which ranks and dims come in the same order."""
    cutting = space.cutting
    axes = sorted(itertools.chain(*cutting.movable))
    order = tuple([tuple([axes.index(a) for a in each]) for each in cutting.movable])
    key = space.leads, order, tuple([cutting.mesh_shape[a] for a in axes])
    found = graph.copies.get(key)
    if found is None:
        found = graph.copies[key] = Copies(graph, _blocks(graph, space))
    return found


def _blocks(graph: Graph, space: Space) -> Blocks:
    cutting, dims, ns = space.cutting, graph.layouts.dims, space.cutting.mesh_shape
    moving = sorted(itertools.chain(*cutting.movable))
    n = prod([ns[a] for a in moving])
    even = divides(space, n)
    ranks = moving if even else cutting.ranks
    places = dict(zip(ranks, np.indices([ns[a] for a in ranks]).reshape(len(ranks), -1)))
    if even:  # in cells, and inside of the outer axes that stay
        cuts = [[(tuple([a for i in axes for a in cutting.movable[i]]), 1) for axes in dim.axes] for dim in dims]
    else:
        cuts = [[cutting.cut(d, *each) for each in dim.layouts] for d, dim in enumerate(dims)]
    sizes = [n] * len(dims) if even else cutting.sizes
    sides = [sides_of(size, each, ns, places) for size, each in zip(sizes, cuts)]
    at = graph.layouts.at[graph.chosen].T
    # A rank that is not the first along an axis that stays is in no group of the first rank.
    groups = [*cutting.movable, *[(a,) for a in ranks if a not in moving]]
    where = np.array([sum([places[a] for a in axes]) for axes in groups])
    return Blocks([(starts[i], stops[i]) for (starts, stops), i in zip(sides, at)], where, space.leads)


class Few(NamedTuple):
    """An array of few numbers: those that occur, and for each place which of them is there."""

    numbers: list[int]
    which: np.ndarray

    @staticmethod
    def of(cells: np.ndarray) -> Few:
        """The same of an array."""
        numbers, which = np.unique(cells, return_inverse=True)
        return Few(numbers.tolist(), which.reshape(cells.shape))


class Cells(NamedTuple):
    """As `Copied`, of many moves."""

    packed: Few
    joined: Few
    times: np.ndarray


class Pieces(NamedTuple):
    """What a box has in common with those of a group's ranks, an entry for each move."""

    in_rows: np.ndarray  # whether one follows the other in the box
    dims: np.ndarray  # in how many dims they lie side by side
    cells: np.ndarray  # of all of them
    alike: np.ndarray  # whether the ranks' boxes are of one size


class Blocks:
    """The blocks of every rank in every state. `where`: for each axis, by number, 0 where a rank is the first."""

    def __init__(self, sides: Sides, where: np.ndarray, leads: bool) -> None:
        self.sides, self.leads = sides, leads
        self.away = sum([(place > 0).astype(int) << i for i, place in enumerate(where)])  # from the first rank, as bits
        self.first = np.prod([stops[:, 0] - starts[:, 0] for starts, stops in sides], axis=0)

    def pieces(self, box: np.ndarray, group: np.ndarray, axes: np.ndarray) -> Pieces:
        """Of the first rank's box in one state with those of its group, along these axes, in another."""
        inside = (self.away & ~axes[:, None]) == 0
        sizes = overlaps = np.ones(1, int)
        whole, lies = [], []
        for starts, stops in self.sides:
            (a, b), (c, d) = (starts[box, :1], stops[box, :1]), (starts[group], stops[group])
            start = np.maximum(a, c)
            length = np.maximum(np.minimum(b, d) - start, 0)
            sizes, overlaps = sizes * (d - c), overlaps * length
            whole.append(length == b - a)
            lies.append((start - a, length, b - a))
        filled = inside & (overlaps > 0)
        apart = np.array([(filled & ~each).any(1) for each in whole])
        alike = ((sizes == sizes[:, :1]) | ~inside).all(1)
        cells = np.where(filled, overlaps, 0).sum(1)
        return Pieces(self._in_rows(filled, apart, *lies[0]), apart.sum(0), cells, alike)

    def _in_rows(self, filled: np.ndarray, apart: np.ndarray, start, length, whole) -> np.ndarray:
        if not self.leads:  # the first dim of all, which none of these is, would have to come in pieces
            return (filled.sum(1) == 1) & ~apart.any(0)
        lengths = np.where(filled, length, 0)
        before = lengths.cumsum(1) - lengths
        return ((before == start) | ~filled).all(1) & (lengths.sum(1) == whole[:, 0]) & ~apart[1:].any(0)


class Copies:
    """Cells that are copied by `graph.moves`, for each two states, by `graph.gathers`, and by `graph.scatters`."""

    def __init__(self, graph: Graph, blocks: Blocks) -> None:
        self.blocks = blocks
        slices = np.array([kind == SLICE for _, kind, _ in graph.moves])[graph.which]
        rows = [self._row(s, left, each) for s, (left, each) in enumerate(zip(graph.left, slices))]
        packed, times = [np.stack(each) for each in zip(*rows)]
        self.moves = Cells(Few.of(packed), Few.of(np.broadcast_to(blocks.first, times.shape)), times)
        found = blocks.pieces(graph.outer, graph.inner, graph.added)
        times = np.where(found.alike & found.in_rows, 0, found.dims)
        self.gathers = Cells(Few.of(np.zeros(len(times), int)), Few.of(blocks.first[graph.outer]), times)
        self._scatters: dict[int, Cells] = {}

    def _row(self, s: int, left: np.ndarray, slices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """From one state to all: what is packed, and how often what comes is put in order."""
        here, there = np.full(len(left), s), np.arange(len(left))
        sent, come = self.blocks.pieces(here, there, left), self.blocks.pieces(there, here, left)
        packed = np.where(sent.in_rows | slices, 0, sent.cells)
        times = np.where(slices, 1, np.where(come.in_rows, 0, come.dims))
        return packed, times

    def scatters(self, pending: int, scatters: Scatters, ranks: Sequence[int]) -> Cells:
        """What is copied by `graph.scatters(pending)`, among so many ranks."""
        found = self._scatters.get(pending)
        if found is None:
            packed = self._scattered(scatters, np.array(ranks, int))
            none = np.zeros_like(packed)
            found = self._scatters[pending] = Cells(Few.of(packed), Few.of(none), none)
        return found

    def _scattered(self, scatters: Scatters, ranks: np.ndarray) -> np.ndarray:
        found = self.blocks.pieces(scatters.outer, scatters.inner, scatters.reduced)
        as_it_lies = found.alike & (found.in_rows | (found.cells == 0))
        return np.where(as_it_lies, 0, ranks * self.blocks.first[scatters.inner])
