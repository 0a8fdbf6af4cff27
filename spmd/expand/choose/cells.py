"""Cells: the ops of a graph that choose together.

    p.lerp(g), p.mul(..), .sqrt(), .addcdiv(..)      the update of one parameter is one cell

Pointwise ops of one shape whose results are read by such ops of the same cell alone, or are outputs, form one cell. All
other ops are cells of their own.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import fx

from spmd import _torch
from spmd.expand.constraints import ConstrainOp
from spmd.expand.local_map import LocalMapGradientOp, LocalMapOp
from spmd.expand.nodes import operands_in_order
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
    """All cells in order. operands: the values that each reads, in order. shapes: those of all tensors, with dtypes."""

    every: list[Cell]
    operands: list[list[fx.Node]]
    shapes: dict[fx.Node, tuple[tuple[int, ...], torch.dtype]]


def cells_of(graph: fx.Graph, placed: Collection[fx.Node] = ()) -> Cells:
    """The cells of a graph. placed: values that go to a place of their own as soon as they are made."""
    shapes = {n: value_shape(n) for n in graph.nodes if isinstance(n.meta.get("val"), _TENSORS)}
    every = _cells(graph, shapes, placed)
    return Cells(every, [_operands(cell, shapes) for cell in every], shapes)


_TENSORS = torch.Tensor, TensorMeta


def is_tensor(node: fx.Node) -> bool:
    """Whether the value of a node is one tensor."""
    return isinstance(node.meta.get("val"), _TENSORS)


def value_shape(node: fx.Node) -> tuple[tuple[int, ...], torch.dtype]:
    """The global shape and dtype of a value."""
    value = node.meta["val"]
    return tuple(value.shape), value.dtype


def operands_of(cell: Cell) -> list[fx.Node]:
    """The value of each operand of a cell; a value that is read twice is listed twice."""
    return _operands(cell, [n for n in cell.node.all_input_nodes if is_tensor(n)])


def _operands(cell: Cell, tensors: Collection[fx.Node]) -> list[fx.Node]:
    if len(cell.nodes) > 1:
        return list(cell.reads)
    node = cell.node
    if isinstance(node.target, Draw):
        return [node.args[0]]
    if isinstance(node.target, (LocalMapOp, LocalMapGradientOp)):
        return _nodes_in(node.args)
    if not node.kwargs:
        return [n for n in _nodes_in(node.args) if n in tensors]
    return [n for n in operands_in_order(node) if n in tensors]


def _nodes_in(args: Sequence) -> list[fx.Node]:
    """The nodes among positional arguments."""
    found = []
    for x in args:
        if isinstance(x, fx.Node):
            found.append(x)
        elif isinstance(x, (tuple, list)):
            found += _nodes_in(x)
    return found


# ---- cells ------------------------------------------------------------------------------------


Shapes = dict[fx.Node, tuple[tuple[int, ...], torch.dtype]]


def _cells(graph: fx.Graph, shapes: Shapes, placed: Collection[fx.Node]) -> list[Cell]:
    reads = {n: [x for x in n.all_input_nodes if x in shapes] for n in graph.nodes if n.op == "call_function"}
    nodes = [n for n, operands in reads.items() if _decides(n, operands)]
    group = _updates([n for n in nodes if n in shapes and n not in placed], shapes)
    members: dict[fx.Node, list[fx.Node]] = {}
    for n in nodes:
        members.setdefault(group.get(n, n), []).append(n)
    return [_cell(tuple(each), reads, shapes) for each in members.values()]


def _decides(node: fx.Node, operands: Sequence[fx.Node]) -> bool:
    """Whether something is to be chosen for a node, or its specs are given."""
    if isinstance(node.target, _torch.OpOverload):
        return bool(operands)
    return isinstance(node.target, (Draw, LocalMapOp, LocalMapGradientOp, ConstrainOp))


def _updates(nodes: Sequence[fx.Node], shapes: Shapes) -> dict[fx.Node, fx.Node]:
    """For each op at the end of the graph, the first op of its cell: pointwise ops of a shape, read by each other."""
    group: dict[fx.Node, fx.Node] = {}
    for n in reversed(nodes):
        if _is_read_within(n, group) and _may_join(n.target):
            readers = [r for r in n.users if r.op != "output"]
            if all([shapes[r][0] == shapes[n][0] for r in readers]):
                group[n] = n
                for r in readers:
                    _join(group, n, r)
    return {n: _root(group, n) for n in group}


def _is_read_within(node: fx.Node, group: Collection[fx.Node]) -> bool:
    return all(r in group or r.op == "output" for r in node.users)


@lru_cache(maxsize=4096)
def _may_join(op: object) -> bool:
    """Whether the calls of an op may be parts of a cell of several."""
    pointwise = isinstance(op, _torch.OpOverload) and is_pointwise(op) and op is not MARK
    return pointwise and torch.Tag.nondeterministic_seeded not in op.tags


def _join(group: dict[fx.Node, fx.Node], a: fx.Node, b: fx.Node) -> None:
    group[_root(group, b)] = _root(group, a)


def _root(group: dict[fx.Node, fx.Node], n: fx.Node) -> fx.Node:
    while group[n] is not n:
        group[n] = group[group[n]]
        n = group[n]
    return n


def _cell(nodes: tuple[fx.Node, ...], reads: dict[fx.Node, list[fx.Node]], shapes: Shapes) -> Cell:
    if len(nodes) == 1 and nodes[0] in shapes:
        return Cell(nodes, tuple(reads[nodes[0]]), nodes if nodes[0].users else ())
    inside = set(nodes)
    read = dict.fromkeys([x for n in nodes for x in reads[n] if x not in inside])
    writes: dict[fx.Node, None] = {}
    for n in nodes:
        for value in [n] if n in shapes else [u for u in n.users if u.target is operator.getitem]:
            if value in shapes and not inside.issuperset(value.users):
                writes[value] = None
    return Cell(nodes, tuple(read), tuple(writes))
