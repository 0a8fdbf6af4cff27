"""How much the first rank copies in each move between two states, as arrays: `Move.copies`, for all moves of a graph.

    all_gather(tp, 1)  f32[8, 8@tp] -> f32[8, 8]      blocks arrive one by one: 64 elements are copied into order

A rank copies the pieces that it cuts out of its block for others, unless these are consecutive rows of the block, in
the order of the ranks that they are for. It copies the pieces that it joins once for each dim in which they are side by
side, unless they arrive in order. All this is only computed where copies have a price.
"""

# ruff: noqa: B905 - the zipped sequences have one entry for each dim

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from spmd.tensor.redistribute.all_ranks import RankSides, common
from spmd.tensor.redistribute.graph import SLICE, Graph, Scatters, divides, sides_of
from spmd.tensor.redistribute.states import Space

Sides = Sequence[RankSides]  # for each dim, where blocks start and stop, by state and rank


def copies_of(graph: Graph, space: Space) -> Copies:
    """The copies of all moves of a graph. Spaces with the same order of ranks and dims share them."""
    cutting = space.cutting
    axes = sorted(itertools.chain(*cutting.movable))
    order = tuple([tuple([axes.index(a) for a in each]) for each in cutting.movable])
    key = space.starts_with_dim_0, order, tuple([cutting.mesh_shape[a] for a in axes])
    found = graph.copies.get(key)
    if found is None:
        found = graph.copies[key] = Copies(graph, _blocks(graph, space))
    return found


def _blocks(graph: Graph, space: Space) -> Blocks:
    cutting, dims, ns = space.cutting, graph.layouts.dims, space.cutting.mesh_shape
    moving = sorted(itertools.chain(*cutting.movable))
    n = prod([ns[a] for a in moving])
    even = divides(space, n)
    ranks = moving if even else cutting.rank_axes
    places = dict(zip(ranks, np.indices([ns[a] for a in ranks]).reshape(len(ranks), -1)))
    if even:  # count in cells, inside the outer axes that stay
        cuts = [[(tuple([a for i in axes for a in cutting.movable[i]]), 1) for axes in dim.axes] for dim in dims]
    else:
        cuts = [[cutting.cut(d, *each) for each in dim.layouts] for d, dim in enumerate(dims)]
    sizes = [n] * len(dims) if even else cutting.sizes
    sides = [sides_of(size, each, ns, places) for size, each in zip(sizes, cuts)]
    at = graph.layouts.at[graph.chosen].T
    # A rank that is not the first along an axis that stays is in no group of the first rank.
    groups = [*cutting.movable, *[(a,) for a in ranks if a not in moving]]
    where = np.array([sum([places[a] for a in axes]) for axes in groups])
    boxes = [side.rows(i) for side, i in zip(sides, at)]
    if not boxes:  # a tensor without dims has one element, on every rank
        shape = len(graph.chosen), where.shape[1]
        boxes = [RankSides(np.zeros(shape, int), np.ones(shape, int), 1, 1)]
    return Blocks(boxes, where, space.starts_with_dim_0)


class UniqueValues(NamedTuple):
    """An array with few distinct values: these values, and for each place the index of its value, `inverse`."""

    values: list[int]
    inverse: np.ndarray

    @staticmethod
    def of(cells: np.ndarray) -> UniqueValues:
        """An array in this form."""
        values, inverse = np.unique(cells, return_inverse=True)
        return UniqueValues(values.tolist(), inverse.reshape(cells.shape))


class CopiedCells(NamedTuple):
    """As `Copied`, for many moves."""

    packed: UniqueValues
    joined: UniqueValues
    times: np.ndarray


class Pieces(NamedTuple):
    """The pieces that a box has in common with the boxes of a group's ranks; one entry for each move."""

    in_rows: np.ndarray  # whether the pieces are consecutive rows of the box
    dims: np.ndarray  # in how many dims they are side by side
    cells: np.ndarray  # the cells of all pieces together
    alike: np.ndarray  # whether the ranks' boxes have one size


class Blocks:
    """The blocks of every rank in every state. where: for each movable axis, 0 on ranks that are first along it."""

    def __init__(self, sides: Sides, where: np.ndarray, starts_with_dim_0: bool) -> None:
        self.sides, self.starts_with_dim_0 = sides, starts_with_dim_0
        # As bits, the axes along which a rank is not the first.
        self.away = sum([(place > 0).astype(int) << i for i, place in enumerate(where)])
        self.first = np.prod([side.lengths()[:, 0] for side in sides], axis=0)

    def pieces(self, box: np.ndarray, group: np.ndarray, axes: np.ndarray) -> Pieces:
        """The pieces of the first rank's box, in one state, and the boxes of its group along these axes, in another."""
        inside = (self.away & ~axes[:, None]) == 0
        sizes = overlaps = np.ones(1, int)
        whole, offsets = [], []
        for side in self.sides:
            mine, theirs = side.rows(box), side.rows(group)
            mine = mine._replace(start=mine.start[:, :1], stop=mine.stop[:, :1])
            length = common(mine, theirs)
            sizes, overlaps = sizes * theirs.lengths(), overlaps * length
            whole.append(length == mine.lengths())
            offsets.append((_place(mine, theirs, length), length, mine.lengths()))
        filled = inside & (overlaps > 0)
        apart = np.array([(filled & ~each).any(1) for each in whole])
        alike = ((sizes == sizes[:, :1]) | ~inside).all(1)
        cells = np.where(filled, overlaps, 0).sum(1)
        return Pieces(self._in_rows(filled, apart, *offsets[0]), apart.sum(0), cells, alike)

    def _in_rows(self, filled: np.ndarray, apart: np.ndarray, start, length, whole) -> np.ndarray:
        if not self.starts_with_dim_0:  # then no piece is split along dim 0, so several pieces are no rows
            return (filled.sum(1) == 1) & ~apart.any(0)
        lengths = np.where(filled, length, 0)
        before = lengths.cumsum(1) - lengths
        return ((before == start) | ~filled).all(1) & (lengths.sum(1) == whole[:, 0]) & ~apart[1:].any(0)


def _place(mine: RankSides, theirs: RankSides, length: np.ndarray) -> np.ndarray:
    """Where in the box of the first rank its pieces start; -1 where a piece is not in one place."""
    if isinstance(mine.count, int) and isinstance(theirs.count, int) and mine.count == theirs.count == 1:
        return np.maximum(mine.start, theirs.start) - mine.start
    end = mine.stop + (mine.count - 1) * mine.period
    start = mine.below(np.maximum(mine.start, theirs.at_or_after(mine.start)))
    stop = mine.below(np.minimum(end, theirs.at_or_before(end)))
    several = (np.minimum(mine.count, theirs.count) > 1) & (mine.count != theirs.count)
    if several.any():
        start, stop = [np.where(several, *each) for each in zip(_ends(mine, theirs), (start, stop))]
    return np.where(stop - start == length, start, -1)


def _ends(mine: RankSides, theirs: RankSides) -> tuple[np.ndarray, np.ndarray]:
    """Where in the box of the first rank the first interval of each piece starts, and where the last one stops."""
    start = stop = np.zeros(1, int)
    for k in reversed(range(int(np.max(theirs.count)))):
        a, b = [mine.below(edge + k * theirs.period) for edge in (theirs.start, theirs.stop)]
        filled = (a < b) & (k < theirs.count)
        start, stop = np.where(filled, a, start), np.where(filled, np.maximum(b, stop), stop)
    return start, stop


class Copies:
    """The copies of `graph.moves` for each two states, of `graph.gathers`, and of `graph.scatters`."""

    def __init__(self, graph: Graph, blocks: Blocks) -> None:
        self.blocks, unique = blocks, UniqueValues.of
        slices = np.array([kind == SLICE for _, kind, _ in graph.moves])[graph.move_index]
        rows = [self._row(s, removed, each) for s, (removed, each) in enumerate(zip(graph.removed, slices))]
        packed, times = [np.stack(each) for each in zip(*rows)]
        self.moves = CopiedCells(unique(packed), unique(np.broadcast_to(blocks.first, times.shape)), times)
        found = blocks.pieces(graph.outer, graph.inner, graph.added)
        times = np.where(found.alike & found.in_rows, 0, found.dims)
        self.gathers = CopiedCells(unique(np.zeros(len(times), int)), unique(blocks.first[graph.outer]), times)
        self._scatters: dict[int, CopiedCells] = {}

    def _row(self, s: int, removed: np.ndarray, slices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For the moves from state s to each other: the cells that are packed, and how often the joined are copied."""
        here, there = np.full(len(removed), s), np.arange(len(removed))
        sent, received = self.blocks.pieces(here, there, removed), self.blocks.pieces(there, here, removed)
        packed = np.where(sent.in_rows | slices, 0, sent.cells)
        times = np.where(slices, 1, np.where(received.in_rows, 0, received.dims))
        return packed, times

    def scatters(self, pending: int, scatters: Scatters, ranks: Sequence[int]) -> CopiedCells:
        """The copies of `graph.scatters(pending)`. ranks: for each the size of its group."""
        found = self._scatters.get(pending)
        if found is None:
            packed = self._scattered(scatters, np.array(ranks, int))
            none = np.zeros_like(packed)
            found = self._scatters[pending] = CopiedCells(UniqueValues.of(packed), UniqueValues.of(none), none)
        return found

    def _scattered(self, scatters: Scatters, ranks: np.ndarray) -> np.ndarray:
        found = self.blocks.pieces(scatters.outer, scatters.inner, scatters.reduced)
        uncopied = found.alike & (found.in_rows | (found.cells == 0))
        return np.where(uncopied, 0, ranks * self.blocks.first[scatters.inner])
