"""Cells: the ops of a graph that choose together, and which of them choose alike.

    p.lerp(g), p.mul(..), .sqrt(), .addcdiv(..)      the update of one parameter is one cell
    block 3, linear 1  =  block 7, linear 1           equal surroundings: one class, one variable

Pointwise ops of one shape whose results are read by such ops of the same cell alone, or are outputs, form one cell. All
other ops are cells of their own. Cells with the same op, shapes, specs and surroundings are of one class: hashes of
neighbourhoods are refined a round at a time, forward and backward, as long as the number of classes stays small. So
the middle layers of a deep model are one class for each op, and the layers at its ends have classes of their own. Small
graphs have a class for each cell.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

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

MOST_CLASSES = 320
"""Classes are refined until there are more than this."""


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
    """All cells in order, the cell that writes each value, and for each cell the number of its class.

    alike: for each class the class that it was part of when values were last told apart.
    """

    every: list[Cell]
    writer: dict[fx.Node, Cell] = field(default_factory=dict)
    class_of: dict[Cell, int] = field(default_factory=dict)
    alike: list[int] = field(default_factory=list)


def cells_of(graph: fx.Graph, sources: dict[fx.Node, Spec]) -> Cells:
    """The cells of a graph and their classes. sources: the specs of values that are given, and of gradients' places."""
    every = _cells(graph)
    writer = {value: cell for cell in every for value in cell.writes}
    found = Cells(every, writer)
    refinement = _Refinement(found, sources)
    while refinement.round():
        pass
    found.class_of = dict(zip(every, refinement.color, strict=True))
    found.alike = refinement.alike
    return found


def is_tensor(node: fx.Node) -> bool:
    """Whether the value of a node is one tensor."""
    return isinstance(node.meta.get("val"), (torch.Tensor, TensorMeta))


def value_shape(node: fx.Node) -> tuple[tuple[int, ...], torch.dtype]:
    """The global shape and dtype of a value."""
    value = node.meta["val"]
    return tuple(value.shape), value.dtype


# ---- cells ------------------------------------------------------------------------------------


def _cells(graph: fx.Graph) -> list[Cell]:
    nodes = [n for n in graph.nodes if n.op == "call_function" and _decides(n)]
    group = _updates(nodes)
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
class _Meeting:
    """A value with the cells around it. own: what is known of it. ends: for each cell, its number and how it meets it.
    kind: a number that is equal for values with equal surroundings."""

    own: Hashable
    ends: list[tuple[int, int]]
    kind: int = -1


class _Refinement:
    """Classes of cells, refined a round at a time: cells stay together while the values around them are alike.

    color: the class of each cell. alike: the class that each class was part of a round before. By then values were
    told apart, so the values around equal cells are of equal kinds.
    """

    def __init__(self, cells: Cells, sources: dict[fx.Node, Spec]) -> None:
        self.meetings, self.around = _meetings(cells, sources)
        self.kinds: dict[Hashable, int] = {}
        self.color = _numbered([(_own(cell), _shapes(cell, sources)) for cell in cells.every])
        self.alike = list(range(max(self.color, default=-1) + 1))
        self.changed = set(range(len(self.color)))

    def round(self) -> bool:
        """Refine once, unless there would be too many classes. Returns whether anything has changed."""
        self._renew_kinds()
        parts = self._parts()
        if len(self.alike) + sum([len(p) - 1 for p in parts.values()]) > MOST_CLASSES:
            return False
        self.alike = list(range(len(self.alike)))
        self.changed = set()
        for color, groups in parts.items():
            for group in groups[1:]:
                for i in group:
                    self.color[i] = len(self.alike)
                self.changed.update(group)
                self.alike.append(color)
        return bool(self.changed)

    def _renew_kinds(self) -> None:
        """Number the values again that a changed cell meets."""
        color = self.color
        for m in dict.fromkeys(m for i in sorted(self.changed) for m in self.around[i]):
            meeting = self.meetings[m]
            key = meeting.own, tuple(sorted([(color[i], at) for i, at in meeting.ends]))
            meeting.kind = self.kinds.setdefault(key, len(self.kinds))

    def _parts(self) -> dict[int, list[list[int]]]:
        """For each class that falls apart its parts, in order of appearance."""
        found: dict[int, dict[Hashable, list[int]]] = {}
        for i, (color, around) in enumerate(zip(self.color, self.around, strict=True)):
            key = tuple([self.meetings[m].kind for m in around])
            found.setdefault(color, {}).setdefault(key, []).append(i)
        return {color: list(groups.values()) for color, groups in found.items() if len(groups) > 1}


def _meetings(cells: Cells, sources: dict[fx.Node, Spec]) -> tuple[list[_Meeting], list[list[int]]]:
    """All values with the cells around them, and for each cell the values that it reads and writes."""
    number: dict[fx.Node, int] = {}
    meetings: list[_Meeting] = []
    around: list[list[int]] = []

    def meet(value: fx.Node, i: int, at: int) -> int:
        if value not in number:
            number[value] = len(meetings)
            returned = any(r.op == "output" for r in value.users)
            meetings.append(_Meeting((sources.get(value) or value_shape(value), returned), []))
        meetings[number[value]].ends.append((i, at))
        return number[value]

    for i, cell in enumerate(cells.every):
        read = [meet(x, i, at) for at, x in enumerate(cell.reads)]
        around.append(read + [meet(x, i, ~_port(x)) for x in cell.writes])
    return meetings, around


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
