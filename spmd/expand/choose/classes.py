"""Classes: the cells of a graph that choose alike, and the values that are alike for a bound.

    12 layers of a GPT, 1,525 cells    ->    260 classes: for each op the first layer, the last, and all between

In a small graph cells are of one class if their ops, shapes, specs and surroundings are alike altogether, which is
found a round of refinement at a time. In a large one the layers are found first (`repeats.py`): the cells of the first
and of the last are classes of their own, and those between choose alike where they are alike but for their layer. So a
model of 48 layers has as many classes as one of 12. Where a large graph has no layers, the first cell of a type and its
last are classes of their own, and all between are one; types are then alike up to so many values away.

A round is a few operations on arrays: the hash of a value is a sum over the cells around it, that of a cell a sum over
its values. The hashes are those of numbers that are given in order of appearance, so all ranks find the same.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
from torch import fx

from spmd.expand.choose.cells import Cell, Cells
from spmd.expand.choose.repeats import by_appearance, layers_of, mixed
from spmd.expand.nodes import described
from spmd.expand.places.roles import MARK
from spmd.tensor.spec import Spec

MOST_CELLS = 1000
"""Cells of a graph in which no two have to choose alike unless their surroundings are alike altogether."""

MOST_CLASSES = 1000
"""Classes of a larger graph with its layers. Where there are more, few of its cells are in layers."""

ROUNDS = 3
"""Rounds of refinement in such a graph."""


@dataclass(eq=False)
class Meeting:
    """A value, or one of its moves, with the cells around it, by number.

    known: all else that is known of it. maker: the cell that writes it, and where among what that writes. readers: the
    cells that read it, and as which operand. ends: all of these.
    """

    value: fx.Node
    known: Hashable
    maker: tuple[int, int] | None
    readers: list[tuple[int, int]]

    ends: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.ends = _ends(self.maker, self.readers)


@dataclass(eq=False)
class Group:
    """Values with the same maker and the same readers, by classes. slots: for each reader its end of the kind.

    kind: the same for groups that one class meets in one place, so that it cannot tell them apart.
    """

    members: list[Meeting]
    maker: tuple[int, int] | None
    readers: list[tuple[int, int]]
    kind: int = -1
    slots: list[Hashable] = field(default_factory=list)


class Classes:
    """The classes of cells, and the values in groups.

    of: the class of each cell, numbered in order of appearance. own: the same for cells with equal ops and shapes.
    groups: all values. are_shared: whether cells may be of one class that are alike but for their layer; not if they
    are to be `apart`, or if the graph is small.
    """

    def __init__(
        self, cells: Cells, sources: dict[fx.Node, Spec], meetings: Sequence[Meeting], apart: bool = False
    ) -> None:
        self.own = _numbered_cells(cells, sources)
        self.are_shared = len(self.own) > MOST_CELLS and not apart
        self.of, types = _classes(self.own, meetings, self.are_shared)
        self._before = dict(zip(self.of, types.before.tolist(), strict=True))
        self.groups = self._groups(meetings, types.values.tolist())
        self._join_kinds()
        self._find_slots()

    def _groups(self, meetings: Sequence[Meeting], like: Sequence[int]) -> list[Group]:
        found: dict[Hashable, Group] = {}
        for meeting, alike in zip(meetings, like, strict=True):
            maker = meeting.maker and (self.of[meeting.maker[0]], meeting.maker[1])
            readers = sorted([(self.of[i], at) for i, at in meeting.readers])
            key = alike, meeting.known, maker, tuple(readers)
            if key not in found:
                found[key] = Group([], maker, readers, alike)
            found[key].members.append(meeting)
        return list(found.values())

    def _join_kinds(self) -> None:
        """Number the kinds. Groups that look alike and that one class meets in one place are of one kind."""
        root = list(range(len(self.groups)))

        def of(g: int) -> int:
            while root[g] != g:
                root[g] = g = root[root[g]]
            return g

        met: dict[Hashable, int] = {}
        for g, group in enumerate(self.groups):
            for end in _ends(group.maker, group.readers):
                root[of(g)] = of(met.setdefault((group.kind, *end), g))
        for g, group in enumerate(self.groups):
            group.kind = of(g)

    def _find_slots(self) -> None:
        """Name the ends of each kind, so that each class is at one end. Readers that looked alike a round before are
        told apart by their order; if a class is then at several ends, all of these are one."""
        named: dict[Hashable, Hashable] = {}
        unclear: set[Hashable] = set()
        for group in self.groups:
            seen: dict[Hashable, int] = {}
            for k, at in group.readers:
                like = group.kind, self._before[k], at
                seen[like] = seen.get(like, -1) + 1
                group.slots.append((*like, seen[like]))
                if named.setdefault((group.kind, k, at), group.slots[-1]) != group.slots[-1]:
                    unclear.add(like)
        for group in self.groups:
            group.slots = [slot[:3] if slot[:3] in unclear else slot for slot in group.slots]


def _classes(own: list[int], meetings: Sequence[Meeting], shared: bool) -> tuple[list[int], _Types]:
    """The class of each cell, and the types by which values are alike. shared: whether layers are of one class."""
    if not shared:
        types = _Types(own, meetings, len(own))
        return types.of.tolist(), types
    values: dict[fx.Node, list[tuple[int, int]]] = {}
    for m in meetings:
        values.setdefault(m.value, []).extend(m.ends)
    layers = layers_of(own, list(values.values()))
    types = _Types(layers.like, meetings, 1)
    of = by_appearance(3 * types.of + np.array(layers.places))
    if of.max() < MOST_CLASSES:
        return of.tolist(), types
    types = _Types(own, meetings, ROUNDS)
    return _apart(types.of).tolist(), types


class _Types:
    """The types of cells, refined a round at a time: cells stay together while the values around them are alike.

    of: the type of each cell; before: that of a round ago. values: the type of each value, by that of its cells then.
    """

    def __init__(self, own: Sequence[int], meetings: Sequence[Meeting], rounds: int) -> None:
        ends = np.fromiter(chain.from_iterable([end for m in meetings for end in m.ends]), np.int64)
        self._cell, self._at = ends.reshape(-1, 2).T
        self._value = np.repeat(np.arange(len(meetings)), [len(m.ends) for m in meetings])
        self._known = mixed(np.array(_numbered([m.known for m in meetings]), np.uint64))
        color = mixed(np.array(own, np.uint64))
        self.of = self.before = by_appearance(color)
        self.values = np.zeros(len(meetings), np.int64)
        for _ in range(rounds):
            values, color = self._refined(color)
            self.before, self.of, self.values = self.of, by_appearance(color), by_appearance(values)
            if self.of.max() == self.before.max():
                break

    def _refined(self, color: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What the values are like by the cells around them, and the cells by these values."""
        at = self._at.astype(np.uint64)
        values, cells = self._known.copy(), mixed(color)
        np.add.at(values, self._value, mixed(color[self._cell] + mixed(at)))
        np.add.at(cells, self._cell, mixed(values[self._value] + mixed(at)))
        return values, cells


def _ends(maker: tuple[int, int] | None, readers: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The cells around a value, and where they meet it; a number below zero for what writes it."""
    return [*([(maker[0], -1 - maker[1])] if maker else []), *readers]


def _apart(types: np.ndarray) -> np.ndarray:
    """Classes of types: the first cell of each type, the last, and all between."""
    place = np.ones(len(types), np.int64)
    place[np.unique(types, return_index=True)[1]] = 0
    place[len(types) - 1 - np.unique(types[::-1], return_index=True)[1]] = 2
    return by_appearance(3 * types + place)


def _numbered(keys: Sequence[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _numbered_cells(cells: Cells, sources: dict[fx.Node, Spec]) -> list[int]:
    """Numbers of cells, the same for those with equal ops, arguments and shapes, and equal specs of what is given."""
    known = [sources.get(value) or shape for value, shape in cells.shapes.items()]
    number = dict(zip(cells.shapes, _numbered(known), strict=True)).__getitem__
    return _numbered([
        (_own(cell), tuple(map(number, cell.reads)), tuple(map(number, cell.writes)), tuple(map(_port, cell.writes)))
        for cell in cells.every
    ])  # fmt: skip


def _own(cell: Cell) -> Hashable:
    """The ops of a cell with their arguments; values are written by their places in the cell, numbers by -1. The
    argument of a mark is the name of a parameter, which tells no two layers apart."""
    place = {n: i for i, n in enumerate((*cell.reads, *cell.nodes))}

    def written(x: Any) -> Hashable:
        return place.get(x, -1) if isinstance(x, fx.Node) else described(x, written)

    return tuple([
        MARK if n.target is MARK else (n.target, *map(written, n.args), n.kwargs and written(dict(n.kwargs)))
        for n in cell.nodes
    ])  # fmt: skip


def _port(value: fx.Node) -> int:
    return value.args[1] if value.target is operator.getitem else 0
