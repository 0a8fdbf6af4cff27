"""Cells: the ops of a graph that choose together.

    p.lerp(g), p.mul(..), .sqrt(), .addcdiv(..)      the update of one parameter is one cell

Pointwise ops of one shape whose results are read by such ops of the same cell alone, or are outputs, form one cell. All
other ops are cells of their own.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from spmd import _torch
from spmd.expand.constraints import ConstrainOp
from spmd.expand.local_map import LocalMapGradientOp, LocalMapOp
from spmd.expand.nodes import in_schema_order
from spmd.expand.places.roles import MARK
from spmd.tensor.call import TensorMeta, is_pointwise
from spmd.tensor.recipes.random import Draw


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


def operands_of(cell: Cell) -> list[fx.Node]:
    """The value of each operand of a cell; a value that is read twice is listed twice."""
    if len(cell.nodes) > 1:
        return list(cell.reads)
    node = cell.node
    if isinstance(node.target, Draw):
        return [node.args[0]]
    found: list[fx.Node] = []
    if isinstance(node.target, (LocalMapOp, LocalMapGradientOp)):
        fx.map_arg(node.args, found.append)
    else:
        in_schema_order(node, lambda n: found.append(n) if is_tensor(n) else None)
    return found


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
