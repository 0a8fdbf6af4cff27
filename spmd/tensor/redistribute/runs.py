"""Runs: the boxes of a group of very many ranks in short, and what is cut out and joined at once because of it.

    f32[10@tp, 6], tp has 64      ranks 0 to 9 have a row each, the others none
                                  Run(((0, 1), (0, 6)), count=10, dim=0, step=1), Run(((0, 0), (0, 0)), count=54)

The blocks of the ranks along an axis lie in even steps along one dim, but for the last one that has any, which may be
smaller. A run of them is cut by one view with a dim more, and not one box at a time, so neither the graph of a rank nor
the time to write it grows with the ranks. A group of `FEW_RANKS` ranks or fewer, and packed dims, keep box by box: a
run of one box each.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from spmd.comm.added import FEW_RANKS
from spmd.tensor.redistribute import boxes as one_by_one
from spmd.tensor.redistribute.all_ranks import sides
from spmd.tensor.redistribute.boxes import Box, narrowed, overlap, relative_to, shape_of, tiled, volume
from spmd.tensor.redistribute.moves import Coordinate, members
from spmd.tensor.redistribute.tables import Part
from spmd.tensor.spec import Spec


class Run(NamedTuple):
    """So many boxes, each `step` indices further along `dim` than the one before. They have one shape."""

    first: Box
    count: int = 1
    dim: int = 0
    step: int = 0

    @property
    def volume(self) -> int:
        """How many elements one of its boxes has."""
        return volume(self.first)

    @property
    def hull(self) -> Box:
        """The box that those of the run tile, if each begins where the one before ends."""
        if self.count == 1 or not self.step:
            return self.first
        start, stop = self.first[self.dim]
        return (*self.first[: self.dim], (start, stop + (self.count - 1) * self.step), *self.first[self.dim + 1 :])

    @property
    def is_tiling(self) -> bool:
        """Whether its boxes tile the hull."""
        if self.count == 1:
            return True
        start, stop = self.first[self.dim] if self.first else (0, 1)
        return self.step == stop - start

    @property
    def is_in_order(self) -> bool:
        """Whether the elements of the hull, row-major, are those of its boxes one after the other."""
        return all([stop - start == 1 for start, stop in self.first[: self.dim]])

    def singles(self) -> Iterator[Run]:
        """The boxes of the run, each as a run of its own."""
        for i in range(self.count):
            by = [i * self.step if d == self.dim else 0 for d in range(len(self.first))]
            moved = [tuple([edge + k for edge in side]) for side, k in zip(self.first, by, strict=True)]
            yield Run(tuple(moved))


class Sizes(list[int]):
    """A list of sizes that knows its runs: for each stretch of equal ones the size, and how often it stands there.

    To find them again takes a look at each rank of a group, for each move that a program makes over it.

    >>> Sizes([(4, 2), (4, 1), (0, 2)]), Sizes([(4, 2), (4, 1), (0, 2)]).runs
    ([4, 4, 4, 0, 0], ((4, 3), (0, 2)))
    """

    def __init__(self, runs: Sequence[tuple[int, int]]) -> None:
        found = [(size, [n for _, n in group]) for size, group in itertools.groupby(runs, key=operator.itemgetter(0))]
        self.runs = tuple([(size, sum(counts)) for size, counts in found])
        super().__init__(itertools.chain.from_iterable([[size] * count for size, count in self.runs]))


@dataclass(frozen=True)
class Boxes:
    """A box for each rank of a group, in the order of the ranks."""

    runs: tuple[Run, ...]

    @cached_property
    def sizes(self) -> Sizes:
        """How many elements the box of each rank has."""
        return Sizes([(run.volume, run.count) for run in self.runs])

    @cached_property
    def largest(self) -> int:
        """How many elements the largest box has."""
        return max([run.volume for run in self.runs])

    @cached_property
    def one_by_one(self) -> list[Box]:
        """The boxes themselves."""
        return [single.first for run in self.runs for single in run.singles()]

    @cached_property
    def parts(self) -> tuple[Part, ...] | None:
        """The boxes that have elements as parts of a table with a row for each rank; None where single boxes will do.
        """
        if not self._is_short:
            return None
        starts = itertools.accumulate([run.count for run in self.runs], initial=0)
        return tuple([
            (at, run.count, run.first, run.dim, run.step)
            for at, run in zip(starts, self.runs, strict=False) if run.volume
        ])  # fmt: skip

    # ---- cutting --------------------------------------------------------------------------------
    def cut(self, x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """The boxes of x, which has this shape: each box row-major, one after the other, in one row."""
        parts = [_cut(x, shape, runs) for runs in _parts([run for run in self.runs if run.volume])]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 0) if parts else x.new_empty(0)

    def cut_rows(self, x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """The same, with each box padded to a row as long as the largest.

        The whole rows in front are cut at once, and the empty ones behind are padding of the last one.
        """
        row, ends = self.largest, list(itertools.accumulate([run.count for run in self.runs]))
        whole = next((i for i, run in enumerate(self.runs) if run.volume != row), len(self.runs))
        filled = max((i + 1 for i, run in enumerate(self.runs) if run.volume), default=whole)
        parts = [_padded_rows(_cut(x, shape, [run]), run, row) for run in self.runs[whole:filled]]
        if whole:
            parts.insert(0, Boxes(self.runs[:whole]).cut(x, shape))
        flat = torch.cat(parts, 0) if len(parts) > 1 else parts[0]
        return padded(flat, ends[filled - 1] * row, ends[-1] * row)

    # ---- joining --------------------------------------------------------------------------------
    def joined(self, y: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """The tensor of this shape that the boxes tile. In y they are one after the other, as `cut` leaves them."""
        if not self._is_short:
            return one_by_one.joined(y, self.one_by_one, shape)
        if not prod(shape):
            return y.new_zeros(shape)
        filled = [run for run in self.runs if run.volume]
        pieces = y.split([run.count * run.volume for run in filled], 0) if len(filled) > 1 else [y]
        return tiled([(run.hull, _joined(pieces[i], run)) for i, run in enumerate(filled)], 0)

    def joined_rows(self, y: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """The same, if each box is padded in y to a row as long as the largest."""
        if not self._is_short:
            return one_by_one.joined_padded(y, self.one_by_one, shape, self.largest)
        at, row, tiles = 0, self.largest, []
        for run in self.runs:
            if run.volume:
                tiles.append((run.hull, _joined(_without_padding(y, at, run, row), run)))
            at += run.count
        return tiled(tiles, 0)

    def joined_table(self, rows: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """As `joined_rows`, of a table with a row for each rank that may be columns of a larger one. What is made keeps
        nothing of it alive, and rows that are only padding are left there."""
        if not self._is_short:
            return one_by_one.joined_table(rows, self.one_by_one, shape, self.largest)
        at, tiles = 0, []
        for run in self.runs:
            if run.volume:
                own = rows.narrow(0, at, run.count)
                own = own if run.volume == self.largest else own.narrow(1, 0, run.volume)
                tiles.append((run.hull, _joined(own.clone(memory_format=torch.contiguous_format), run)))
            at += run.count
        return tiled(tiles, 0) if tiles else rows.new_zeros(shape)

    @cached_property
    def _is_short(self) -> bool:
        """Whether runs say more than single boxes, and each can be joined at once."""
        filled = [run for run in self.runs if run.volume]
        return any([run.count > 1 for run in self.runs]) and all([run.is_tiling for run in filled])


def _parts(runs: list[Run]) -> list[list[Run]]:
    """Neighbouring single boxes together, and each longer run by itself."""
    found: list[list[Run]] = []
    for run in runs:
        if run.count == 1 and found and found[-1][0].count == 1:
            found[-1].append(run)
        else:
            found.append([run])
    return found


def _cut(x: torch.Tensor, shape: Sequence[int], runs: Sequence[Run]) -> torch.Tensor:
    """The boxes of one longer run, or of several single ones."""
    run = runs[0]
    if run.count > 1 and not run.step and run.volume:
        return one_by_one.cut(x, shape, [run.first]).repeat(run.count)
    if run.count == 1 or not run.is_tiling or not run.volume:
        return one_by_one.cut(x, shape, [single.first for each in runs for single in each.singles()])
    if run.is_in_order:
        return one_by_one.cut(x, shape, [run.hull])
    seen = narrowed(x, run.hull, shape)
    sizes, d = shape_of(run.hull), run.dim
    return seen.view((*sizes[:d], run.count, run.step, *sizes[d + 1 :])).movedim(d, 0).reshape(-1)


def _joined(y: torch.Tensor, run: Run) -> torch.Tensor:
    """The hull of a run whose boxes are in y, one after the other."""
    sizes, first = shape_of(run.hull), shape_of(run.first)
    if run.count == 1 or run.is_in_order:
        return y.view(sizes)
    return y.view((run.count, *first)).movedim(0, run.dim).reshape(sizes)


def _padded_rows(flat: torch.Tensor, run: Run, row: int) -> torch.Tensor:
    if run.count == 1 or run.volume == row:
        return padded(flat, run.count * run.volume, run.count * row)
    if not run.volume:
        return flat.new_zeros(run.count * row)
    return torch.nn.functional.pad(flat.view(run.count, run.volume), (0, row - run.volume)).view(-1)


def _without_padding(y: torch.Tensor, at: int, run: Run, row: int) -> torch.Tensor:
    """The boxes of a run, of which the first is in this row of y."""
    if run.volume == row:
        return y.narrow(0, at * row, run.count * row)
    if run.count == 1:
        return y.narrow(0, at * row, run.volume)
    return y.narrow(0, at * row, run.count * row).view(run.count, row).narrow(1, 0, run.volume).reshape(-1)


def padded(flat: torch.Tensor, size: int, to: int) -> torch.Tensor:
    """A row of `size` elements, padded to `to` elements. The padding is never read."""
    return flat if size == to else torch.nn.functional.pad(flat, (0, to - size))


# ---- the boxes of a group ---------------------------------------------------------------------


@functools.lru_cache(maxsize=16384)
def group_blocks(spec: Spec, axes: tuple[int, ...], coordinate: Coordinate) -> Boxes:
    """The blocks of the ranks that form a group along the axes with the rank at the coordinate."""
    arrays = _arrays(spec, axes, coordinate)
    return _each(members(spec, axes, coordinate)) if arrays is None else in_runs(arrays)


@functools.lru_cache(maxsize=16384)
def sent_boxes(before: Spec, after: Spec, axes: tuple[int, ...], coordinate: Coordinate) -> Boxes:
    """What each rank of the group wants, that this rank has; relative to this rank's block."""
    return _met(after, axes, coordinate, before.box(coordinate))


@functools.lru_cache(maxsize=16384)
def received_boxes(before: Spec, after: Spec, axes: tuple[int, ...], coordinate: Coordinate) -> Boxes:
    """What each rank of the group has, that this rank wants; relative to this rank's block after the move."""
    return _met(before, axes, coordinate, after.box(coordinate))


def _met(spec: Spec, axes: tuple[int, ...], coordinate: Coordinate, own: Box) -> Boxes:
    """What the box of each rank of the group has in common with this rank's own one, relative to that."""
    arrays = _arrays(spec, axes, coordinate)
    if arrays is None or not _is_simple(own):
        return _each([relative_to(overlap(own, box), own) for box in members(spec, axes, coordinate)])
    return in_runs(_common(arrays, own))


def _each(boxes: Sequence[Box]) -> Boxes:
    return Boxes(tuple([Run(box) for box in boxes]))


def _is_simple(box: Box) -> bool:
    return all([len(side) == 2 for side in box])


def _arrays(spec: Spec, axes: tuple[int, ...], coordinate: Coordinate) -> np.ndarray | None:
    """Start and stop of each rank of a group in each dim, as [ranks, dims, 2]; None where box by box will do."""
    counts = [n if a in axes else 1 for a, n in enumerate(spec.mesh.shape)]
    if prod(counts) <= FEW_RANKS or spec.is_packed:
        return None
    found = np.zeros((prod(counts), len(spec.shape), 2), np.int64)
    for d, side in enumerate(sides(spec)):
        for edge, array in enumerate((side.start, side.stop)):
            found[:, d, edge] = np.broadcast_to(_in_group(array, axes, coordinate), counts).reshape(-1)
    return found


def _in_group(array: np.ndarray, axes: tuple[int, ...], coordinate: Coordinate) -> np.ndarray:
    """What an array over the mesh has for the ranks of a group."""
    places = [slice(None) if a in axes else slice(c, c + 1) for a, c in enumerate(coordinate)]
    return array[tuple([slice(None) if n == 1 else at for n, at in zip(array.shape, places, strict=True)])]


def _common(of_ranks: np.ndarray, box: Box) -> np.ndarray:
    """The overlap of each rank's box with this one, relative to it. Boxes of no elements are equal."""
    mine = np.array(box, np.int64).reshape(-1, 2)
    start = np.maximum(of_ranks[..., 0], mine[:, 0])
    stop = np.maximum(start, np.minimum(of_ranks[..., 1], mine[:, 1]))
    found = np.stack([start, stop], -1) - mine[:, :1]
    found[(start == stop).any(-1)] = 0
    return found


def in_runs(of_ranks: np.ndarray) -> Boxes:
    """The boxes of many ranks, given as [ranks, dims, 2], in as few runs as there are steps between them.

    >>> in_runs(np.array([[[0, 2]], [[2, 4]], [[4, 6]], [[6, 7]], [[7, 7]], [[7, 7]]])).runs
    (Run(first=((0, 2),), count=3, dim=0, step=2), Run(first=((6, 7),), count=1, dim=0, step=0), \
Run(first=((7, 7),), count=2, dim=0, step=0))
    """
    moved = np.diff(of_ranks, axis=0)
    is_even = (moved[..., 0] == moved[..., 1]).all(-1) & ((moved[..., 0] != 0).sum(-1) <= 1)
    changes = 1 + np.flatnonzero((moved[1:] != moved[:-1]).any((1, 2)))
    runs, i, n = [], 0, len(of_ranks)
    while i < n:
        if i == n - 1 or not is_even[i]:
            runs.append(Run(_box(of_ranks[i])))
            i += 1
            continue
        at = int(np.searchsorted(changes, i, side="right"))
        last = int(changes[at]) if at < len(changes) else n - 1
        steps = moved[i, :, 0]
        dim = int(np.flatnonzero(steps)[0]) if steps.any() else 0
        runs.append(Run(_box(of_ranks[i]), last + 1 - i, dim, int(steps[dim]) if steps.size else 0))
        i = last + 1
    return Boxes(tuple(runs))


def _box(edges: np.ndarray) -> Box:
    return tuple([(start, stop) for start, stop in edges.tolist()])
