"""Cells: the ops of a graph that choose together, and which of them choose alike.

    p.lerp(g), p.mul(..), .sqrt(), .addcdiv(..)      the update of one parameter is one cell
    block 3, linear 1  =  block 7, linear 1           equal surroundings: one class, one variable

Pointwise ops of one shape whose results are read by such ops of the same cell alone, or are outputs, form one cell. All
other ops are cells of their own. Cells are of one class if their ops, shapes, specs and surroundings are alike. In a
small graph that is asked of all of it, a round of refinement at a time. In a large one it is asked of what is up to
three values away: then the middle layers of a deep model are one class for each op, and those at its ends have others.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from spmd import _torch
from spmd.expand.constraints import ConstrainOp
from spmd.expand.local_map import LocalMapGradientOp, LocalMapOp
from spmd.expand.places.roles import MARK
from spmd.tensor.cache import frozen
from spmd.tensor.call import TensorMeta, is_pointwise
from spmd.tensor.recipes.random import Draw
from spmd.tensor.spec import Spec

MOST_CELLS = 1000
"""Cells of a graph in which no two have to choose alike unless their surroundings are alike altogether."""

ROUNDS = 3
"""Rounds of refinement in a larger graph."""


@dataclass(eq=False)
class Cell:
    """Ops that choose together. reads: the values that it reads, each once. writes: those that others read."""

    nodes: tuple[fx.Node, ...]
    reads: tuple[fx.Node, ...]
    writes: tuple[fx.Node, ...]

    @property
    def node(self) -> fx.Node:
        return self.nodes[0]


@dataclass(eq=False)
class Cells:
    """All cells in order, and the cell that writes each value."""

    every: list[Cell]
    writer: dict[fx.Node, Cell]


def cells_of(graph: fx.Graph, placed: Collection[fx.Node] = ()) -> Cells:
    """The cells of a graph. placed: values that go to a place of their own as soon as they are made."""
    every = _cells(graph, placed)
    return Cells(every, {value: cell for cell in every for value in cell.writes})


def is_tensor(node: fx.Node) -> bool:
    """Whether the value of a node is one tensor."""
    return isinstance(node.meta.get("val"), (torch.Tensor, TensorMeta))


def value_shape(node: fx.Node) -> tuple[tuple[int, ...], torch.dtype]:
    """The global shape and dtype of a value."""
    value = node.meta["val"]
    return tuple(value.shape), value.dtype


# ---- cells ------------------------------------------------------------------------------------


def _cells(graph: fx.Graph, placed: Collection[fx.Node]) -> list[Cell]:
    nodes = [n for n in graph.nodes if n.op == "call_function" and _decides(n)]
    group = _updates([n for n in nodes if n not in placed])
    members: dict[fx.Node, list[fx.Node]] = {}
    for n in nodes:
        members.setdefault(group.get(n, n), []).append(n)
    return [_cell(tuple(each)) for each in members.values()]


def _decides(node: fx.Node) -> bool:
    """Whether something is to be chosen for a node, or its specs are given."""
    if isinstance(node.target, (Draw, LocalMapOp, LocalMapGradientOp, ConstrainOp)):
        return True
    return isinstance(node.target, _torch.OpOverload) and any(map(is_tensor, node.all_input_nodes))


def _updates(nodes: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """For each op at the end of the graph, the first op of its cell: pointwise ops of a shape, read by each other."""
    group: dict[fx.Node, fx.Node] = {}
    for n in reversed(nodes):
        if not _may_join(n):
            continue
        readers = [r for r in n.users if r.op != "output"]
        if not all(r in group and value_shape(r)[0] == value_shape(n)[0] for r in readers):
            continue
        group[n] = n
        for r in readers:
            _join(group, n, r)
    return {n: _root(group, n) for n in group}


def _may_join(node: fx.Node) -> bool:
    pointwise = isinstance(node.target, _torch.OpOverload) and is_pointwise(node.target) and node.target is not MARK
    return pointwise and is_tensor(node) and torch.Tag.nondeterministic_seeded not in node.target.tags


def _join(group: dict[fx.Node, fx.Node], a: fx.Node, b: fx.Node) -> None:
    group[_root(group, b)] = _root(group, a)


def _root(group: dict[fx.Node, fx.Node], n: fx.Node) -> fx.Node:
    while group[n] is not n:
        group[n] = group[group[n]]
        n = group[n]
    return n


def _cell(nodes: tuple[fx.Node, ...]) -> Cell:
    inside = set(nodes)
    reads = dict.fromkeys(x for n in nodes for x in n.all_input_nodes if is_tensor(x) and x not in inside)
    writes: dict[fx.Node, None] = {}
    for n in nodes:
        for value in [n] if is_tensor(n) else [u for u in n.users if u.target is operator.getitem]:
            if is_tensor(value) and any(r not in inside for r in value.users):
                writes[value] = None
    return Cell(nodes, tuple(reads), tuple(writes))


# ---- classes ----------------------------------------------------------------------------------


@dataclass(eq=False)
class Meeting:
    """A value, or one of its moves, with the cells around it, by number.

    known: all else that is known of it. maker: the cell that writes it, and where among what that writes. readers: the
    cells that read it, and as which operand. kind: the same for values with equal surroundings.
    """

    value: fx.Node
    known: Hashable
    maker: tuple[int, int] | None
    readers: list[tuple[int, int]]
    kind: int = -1


class Classes:
    """Classes of cells, refined a round at a time: cells stay together while the values around them are alike.

    of: the class of each cell. alike: for each class the class that it was part of when kinds of values were last told
    apart; so all cells of a class meet values of the same kinds.
    """

    def __init__(self, cells: Cells, sources: dict[fx.Node, Spec], meetings: Sequence[Meeting]) -> None:
        self.of = _numbered([(_own(cell), _shapes(cell, sources)) for cell in cells.every])
        self.alike = list(range(max(self.of, default=-1) + 1))
        self.meetings = meetings
        self.around: list[list[tuple[Meeting, tuple[int, ...]]]] = [[] for _ in self.of]
        for meeting in meetings:
            where: dict[int, tuple[int, ...]] = {}
            if meeting.maker:
                where[meeting.maker[0]] = (-1 - meeting.maker[1],)
            for i, at in meeting.readers:
                where[i] = (*where.get(i, ()), at)
            for i, places in where.items():
                self.around[i].append((meeting, places))
        self._kinds: dict[Hashable, int] = {}
        self._changed: Iterable[int] = range(len(self.of))
        most = ROUNDS if len(self.of) > MOST_CELLS else len(self.of)
        while most and self._refine():
            most -= 1

    def _refine(self) -> bool:
        """Refine once. Returns whether anything has changed."""
        self._renew_kinds()
        apart = self._apart()
        self.alike, self._changed = list(range(len(self.alike))), []
        for color, parts in apart.items():
            for part in parts[1:]:
                for i in part:
                    self.of[i] = len(self.alike)
                self.alike.append(color)
                self._changed += part
        return bool(self._changed)

    def _renew_kinds(self) -> None:
        """Number the kinds of values again that a changed cell meets."""
        of = self.of
        for meeting in dict.fromkeys(meeting for i in self._changed for meeting, _ in self.around[i]):
            maker = meeting.maker and (of[meeting.maker[0]], meeting.maker[1])
            key = meeting.known, maker, tuple(sorted([(of[i], at) for i, at in meeting.readers]))
            meeting.kind = self._kinds.setdefault(key, len(self._kinds))

    def _apart(self) -> dict[int, list[list[int]]]:
        """For each class that falls apart its parts, in order of appearance."""
        found: dict[int, dict[Hashable, list[int]]] = {}
        for i, (color, around) in enumerate(zip(self.of, self.around, strict=True)):
            key = tuple(sorted([(meeting.kind, where) for meeting, where in around]))
            found.setdefault(color, {}).setdefault(key, []).append(i)
        return {color: list(parts.values()) for color, parts in found.items() if len(parts) > 1}


def _numbered(keys: Sequence[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def _own(cell: Cell) -> Hashable:
    """The ops of a cell with their arguments; values are written by their places in the cell."""
    place = {n: i for i, n in enumerate((*cell.reads, *cell.nodes))}

    def written(n: fx.Node) -> Hashable:
        if n.target is MARK:  # its argument is the name of a parameter, which tells no two layers apart
            return n.target
        return (n.target, *(frozen(fx.map_arg(a, lambda x: _Place(place.get(x, -1)))) for a in (n.args, n.kwargs)))

    return tuple(map(written, cell.nodes))


class _Place(int):
    """Where a value stands in a cell; -1 for a number."""


def _shapes(cell: Cell, sources: dict[fx.Node, Spec]) -> Hashable:
    """The shapes of what a cell reads and writes, and the specs of what is given."""
    return (tuple(sources.get(x) or value_shape(x) for x in cell.reads),
            tuple((sources.get(x) or value_shape(x), _port(x)) for x in cell.writes))  # fmt: skip


def _port(value: fx.Node) -> int:
    return value.args[1] if value.target is operator.getitem else 0
