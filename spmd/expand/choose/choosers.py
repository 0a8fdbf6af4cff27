"""What each class of cells chooses from: the ways to run its op on each axis, and all combinations of them.

    linear(x, w), class of 12 cells    ->    a `Chooser` with 5 ways on dp, 5 on tp, and 25 options

The rows of an op's rule are asked of a call with replicated operands. What they name joins the alphabets of the layouts
of the values around it; options are numbered once all alphabets are known.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
import torch
from torch import fx

from spmd.expand.choose.arrivals import along, arrival, arrivals, may_arrive, tried
from spmd.expand.choose.blocks import in_blocks, packings_of, packs, rows_of_blocks
from spmd.expand.choose.cells import Cell, Cells, is_tensor, operands_of, value_shape
from spmd.expand.choose.choice import Packing, Pin
from spmd.expand.choose.classes import Classes
from spmd.expand.choose.following import Following
from spmd.expand.choose.layouts import Layouts, sums_only
from spmd.expand.choose.options import Op, Options, Way, combined, rows_worth_taking
from spmd.expand.choose.work import FLOPS, Roofline
from spmd.expand.constraints import ConstrainOp
from spmd.expand.local_map import LocalMapGradientOp, LocalMapOp
from spmd.expand.lowered import made_rows
from spmd.expand.nodes import first_positions, result_metadata
from spmd.expand.places.roles import MARK
from spmd.mesh import DeviceMesh
from spmd.tensor.cache import frozen
from spmd.tensor.call import READS_VALUE, SCALAR, Call
from spmd.tensor.lower import _replicated_rule
from spmd.tensor.placement import REPLICATE, Placement, Shard
from spmd.tensor.recipes.random import Draw
from spmd.tensor.rules.book import rule_of
from spmd.tensor.rules.rule import Row, rows
from spmd.tensor.spec import Spec

TIMES_MOVED = 4
"""How often words are moved that come to a weight: gathered and reduced, forward and backward."""


@dataclass(eq=False)
class Chooser:
    """What a class of cells chooses from. operands: for the first cell, the value of each operand.

    ways: of each axis. op: its op with layouts; call, rows: its call on replicated operands, and all rows of its rule.
    members: for a cell of several ops, the rows of each op by placement.
    """

    cell: Cell
    operands: list[fx.Node]
    op: Op | None = None
    call: Call | None = None
    rows: Sequence[Row] = ()
    ways: list[list[Way]] = field(default_factory=list)
    members: list[dict[Placement, Row]] = field(default_factory=list)
    nbytes: int = 0
    given: tuple[tuple[Spec, ...], tuple[Spec, ...]] | None = None
    options: Options | None = None

    @property
    def node(self) -> fx.Node:
        return self.cell.node


class Choosers:
    """The choosers of all classes. by_op: how each op runs by itself. gradients: the places of gradients.

    kinds: the layouts of each shape and dtype.
    """

    def __init__(
        self, mesh: DeviceMesh, by_op: Mapping[fx.Node, Pin], gradients: Mapping[fx.Node, Spec], following: Following
    ) -> None:
        self.mesh, self.by_op, self.gradients, self.following = mesh, by_op, gradients, following
        self.axes = [a for a, n in enumerate(mesh.shape) if n > 1]
        self.along = {a: along(mesh, a) for a in self.axes}
        self.roofline = Roofline(mesh.topology)
        self.kinds: dict[tuple, Layouts] = {}
        self._rules: dict = {}
        self._refused: dict[Hashable, set[Hashable]] = {}
        self._bares: dict[tuple, Spec] = {}

    def layouts(self, value: fx.Node) -> Layouts:
        """The layouts of the values of this shape and dtype."""
        shape = value_shape(value)
        if shape not in self.kinds:
            self.kinds[shape] = Layouts(self.mesh, *shape)
        return self.kinds[shape]

    def of(self, classes: Classes, cells: Cells) -> list[Chooser]:
        """Of each class. Classes of equal ops that run alike by themselves choose from the same."""
        found: dict[int, Chooser] = {}
        known: dict[object, Chooser] = {}
        for k, own, cell in zip(classes.of, classes.own, cells.every, strict=True):
            if k in found:
                continue
            key = own, self.by_op.get(cell.node)
            if key in known and not known[key].given and cell.node not in self.gradients:
                found[k] = replace(known[key], cell=cell, operands=operands_of(cell))
            else:
                found[k] = known[key] = self._chooser(cell)
        return [found[k] for k in range(len(found))]

    def _chooser(self, cell: Cell) -> Chooser:
        chooser = Chooser(cell, operands_of(cell))
        target = cell.node.target
        if isinstance(target, LocalMapOp):
            chooser.given = tuple(target.call.ins), tuple(target.outs)
        elif isinstance(target, LocalMapGradientOp):
            chooser.given = (*target.of.outs, *target.of.cotangents), tuple(target.of.grads)
        elif isinstance(target, ConstrainOp) and target.constraint.is_complete:
            spec = target.spec(self.bare(chooser.operands[0]))
            chooser.given = (spec,), (spec,)
        elif target is MARK and cell.node in self.gradients:
            chooser.given = (self.gradients[cell.node],), (self.gradients[cell.node],)
        elif target in READS_VALUE:
            chooser.given = tuple(self.bare(n) for n in chooser.operands), ()
        elif len(cell.nodes) > 1:
            self._update(chooser)
        else:
            self._single(chooser)
        return chooser

    def bare(self, value: fx.Node) -> Spec:
        """The spec of a value that is replicated."""
        shape = value_shape(value)
        if shape not in self._bares:
            self._bares[shape] = Spec.of(self.mesh, *shape)
        return self._bares[shape]

    def call(self, node: fx.Node, given: Mapping[fx.Node, Spec] = MappingProxyType({})) -> tuple[Call, Sequence[Row]]:
        """The call of a node, and the rows of its rule. Operands are replicated where nothing else is given."""

        def spec(n: fx.Node):
            return (given.get(n) or self.bare(n)) if is_tensor(n) else SCALAR

        op, args = node.target, node.args
        if isinstance(op, Draw):
            op, args = op.op, (node.args[0], *node.args[2:])
        elif op is MARK or isinstance(op, ConstrainOp):
            op, args = torch.ops.aten.alias.default, node.args[:1]
        repeats = first_positions(operands_of(Cell((node,), (), ())))
        call = Call(op, fx.map_arg(args, spec), fx.map_arg(dict(node.kwargs), spec), result_metadata(node), repeats)
        return call, rows(rule_of(call) or _replicated_rule(call))

    def _single(self, chooser: Chooser) -> None:
        node = chooser.cell.node
        chooser.call, chooser.rows = call, every = self.call(node)
        outs = [self._of(o) if o is not None else None for o in call.outs]
        chooser.op = Op(call, [self.layouts(n) for n in chooser.operands], outs)
        kept = rows_worth_taking(chooser.op, every, self.mesh)
        kept = [row for row in kept if self.following.may_take(row, chooser.operands)]
        for axis in self.axes:
            ways = _said(node, axis) or [Way(row) for row in (*kept, *made_rows(call))]
            ways += self._arrivals(node, call, axis, kept)
            ways += self._way_by_op(node, axis, ways)
            chooser.ways.append(ways)
        self._admit(chooser)

    def _arrivals(self, node: fx.Node, call: Call, axis: int, kept: Sequence[Row]) -> list[Way]:
        if not may_arrive(node):
            return []
        own = call.op, frozen(call.args), frozen(call.kwargs), call.first_use
        key = own, self.along[axis]
        if key not in self._rules:
            self._rules[key] = arrivals(node, self.along[axis], kept, self._refused.setdefault(own, set()))
        return self._rules[key]

    def _of(self, meta) -> Layouts:
        key = tuple(meta.shape), meta.dtype
        if key not in self.kinds:
            self.kinds[key] = Layouts(self.mesh, *key)
        return self.kinds[key]

    def _way_by_op(self, node: fx.Node, axis: int, ways: Sequence[Way]) -> list[Way]:
        """The way that the op takes by itself, if it is not among these."""
        pin = self.by_op.get(node)
        if pin is None:
            return []
        row = pin.rows[axis]
        plain = all(map(sums_only, (*row.ins, *row.outs)))
        known = any((w.row.ins, w.row.outs) == (row.ins, row.outs) for w in ways)
        if known or not plain:
            return []
        return [arrival(node, self.along[axis], row) if pin.arrives else Way(row)]

    def _update(self, chooser: Chooser) -> None:
        """The ways of a cell of pointwise ops: all of them share out one dim, or none does."""
        cell = chooser.cell
        shape, _ = value_shape(cell.nodes[-1])
        for node in cell.nodes:
            call, every = self._rule(node)
            by_out = {row.outs[0]: row for row in every if row.factor is not None or row is every[0]}
            chooser.members.append(by_out)
            chooser.nbytes += sum(x.nbytes for x in call.tensors) + self.layouts(node).nbytes()
        for axis in self.axes:
            letters = [REPLICATE, *[Shard(d) for d, n in enumerate(shape) if n >= self.mesh.shape[axis]]]
            usable = [p for p in letters if all(p in each for each in chooser.members)]
            chooser.ways.append([Way(self._update_row(chooser, p)) for p in usable])
        self._admit(chooser)

    def _rule(self, node: fx.Node) -> tuple[Call, Sequence[Row]]:
        operands = operands_of(Cell((node,), (), ()))
        key = node.target, tuple(map(value_shape, operands)), first_positions(operands), value_shape(node)
        if key not in self._rules:
            self._rules[key] = self.call(node)
        return self._rules[key]

    def _update_row(self, chooser: Chooser, p: Placement) -> Row:
        ins: dict[fx.Node, Placement] = {}
        for node, by_out in zip(chooser.cell.nodes, chooser.members, strict=True):
            operands: list[fx.Node] = operands_of(Cell((node,), (), ()))
            for n, want in zip(operands, by_out[p].ins, strict=True):
                ins.setdefault(n, want)
        factor = p.dim if isinstance(p, Shard) else None
        return Row(tuple(ins[n] for n in chooser.operands), (p,) * len(chooser.cell.writes), factor)

    def _admit(self, chooser: Chooser) -> None:
        """Put the placements of all ways into the alphabets."""
        outs = self._outs(chooser)
        for way in [w for each in chooser.ways for w in each]:
            for n, p in zip(chooser.operands, way.row.ins, strict=True):
                self.layouts(n).letter(p)
            for layouts, p in zip(outs, way.row.outs, strict=True):
                if layouts is not None:
                    layouts.letter(p)

    def _outs(self, chooser: Chooser) -> list[Layouts | None]:
        return chooser.op.outs if chooser.op else [self.layouts(v) for v in chooser.cell.writes]

    def admit_orders(self) -> None:
        """Let several axes shard a dim in an order that is given for a dim of this size: what is computed from a tensor
        has the order of its axes, as a product with a weight and the sum of a gradient."""
        known = list(self.kinds.values())
        given = dict.fromkeys([each for layouts in known for each in layouts.reordered_dims])
        for layouts in known:
            for size, order in given:
                layouts.admit_order(size, order)

    def admit_inside(self, choosers: Sequence[Chooser], given: Iterable[Spec]) -> None:
        """Let an earlier axis of the mesh shard a dim inside of what a later one shards of a tensor that is given: that
        is a slice of what a rank has, where the order of the mesh would be an exchange.

        It pays where few words come to a large weight: they are gathered and reduced, forward and backward, where else
        its gradient would be. Elsewhere there would be twice as many options, of which none was better.
        """
        words = dict(sorted([each for chooser in choosers for each in _words(chooser)], reverse=True))
        orders = [(spec.shape[d], (*axes, axis)) for spec in given
                  if spec.local_nbytes > TIMES_MOVED * words.get(tuple(sorted(spec.shape)), spec.nbytes)
                  for d, axes in enumerate(spec.dims) for axis in self._earlier(spec, axes)]  # fmt: skip
        for layouts in list(self.kinds.values()):
            for size, order in dict.fromkeys(orders):
                layouts.admit_order(size, order)

    def _earlier(self, spec: Spec, axes: Sequence[int]) -> list[int]:
        """The axes that shard nothing of a tensor, and come before one of these."""
        taken = {axis for each in spec.dims for axis in each}
        return [axis for axis in self.axes if axis not in taken and any(axis < other for other in axes)]

    def find_packings(self, choosers: Sequence[Chooser], given: Iterable[Spec]) -> None:
        """The dims that are packed: in a layout that is given, or cut into blocks by the graph where a tensor that is
        given has a dim as long. Ops that cut such dims, or join their blocks, may do so in shards."""
        asked = list({id(each.ways): each for each in choosers if each.call is not None}.values())
        sizes = {n for spec in given for n in spec.shape}
        shortest = min([self.mesh.shape[a] for a in self.axes], default=1)
        known = dict.fromkeys(p for layouts in self.kinds.values() for p in layouts.packings)
        for packing in dict.fromkeys([*known, *packings_of(asked, self.call, sizes, shortest)]):
            added = [self._add_blocks(each, packing) for each in asked]
            if any(added):
                known[packing] = None
        self.packings = list(known)

    def _add_blocks(self, chooser: Chooser, packing: Packing) -> bool:
        """Let an op take and give blocks of a dim that is packed so. Returns whether it can."""
        before = sum(map(len, chooser.ways))
        for axis, ways in zip(self.axes, chooser.ways, strict=True):
            known = [(way.row.ins, way.row.outs) for way in ways]
            found = [way for ins in in_blocks(chooser, packing) for way in self._blocks(chooser, ins, packing, axis)]
            ways += [way for way in found if (way.row.ins, way.row.outs) not in known]
        self._admit(chooser)
        return sum(map(len, chooser.ways)) > before

    def _blocks(self, chooser: Chooser, ins: tuple[Placement, ...], packing: Packing, axis: int) -> list[Way]:
        """The ways of an op whose operands are shards of blocks, by its rule or decomposed."""
        rows = rows_of_blocks(chooser, ins, packing, axis, self.call)
        if rows:
            return [Way(row) for row in rows_worth_taking(chooser.op, rows, self.mesh)]
        way = tried(chooser.node, self.along[axis], ins) if may_arrive(chooser.node) else None
        return [way] if way is not None and packs(way.row, chooser.call, packing) else []

    def find_options(self, choosers: Sequence[Chooser]) -> None:
        """The options of all classes; those that choose from the same share them."""
        known = list(self.kinds.values())
        self.orders = list(dict.fromkeys(order for layouts in known for order in layouts.orders))
        for layouts in known:
            for p in list(layouts.alphabet):
                for packing in self.packings:
                    layouts.letter(packing.of(p, layouts.shape))
        made: dict[int, Options] = {}
        for chooser in choosers:
            if not chooser.given:
                if id(chooser.ways) not in made:
                    made[id(chooser.ways)] = self._options(chooser)
                chooser.options = made[id(chooser.ways)]

    def _options(self, chooser: Chooser) -> Options:
        if chooser.op is not None:
            found = combined(chooser.op, chooser.ways, self.axes, self.roofline)
            return found.beside(chooser.op, self.packings, self.orders)
        return self._update_options(chooser)

    def _update_options(self, chooser: Chooser) -> Options:
        layouts, ways = self.layouts(chooser.cell.nodes[-1]), chooser.ways
        op = Op(None, [self.layouts(n) for n in chooser.operands], [self.layouts(v) for v in chooser.cell.writes])
        found = combined(op, ways, self.axes, self.roofline)
        share = np.ones(found.digits.shape[1])
        for axis, each, d in zip(self.axes, ways, found.digits, strict=True):
            share = share * np.array([op.fraction(layouts, w.row.outs[0], axis) for w in each])[d]
        found.us = np.array([self.roofline.us(0, chooser.nbytes * s, layouts.dtype) for s in share])
        return found.beside(op, self.packings, self.orders)


def _words(chooser: Chooser) -> list[tuple[tuple[int, ...], int]]:
    """The sizes of the largest tensor of a product, and the bytes of the smallest one, which is moved to it."""
    if chooser.op is None or chooser.op.call.name not in FLOPS:
        return []
    least, *_, most = sorted([(layouts.nbytes(), layouts.shape) for layouts in chooser.op.tensors])
    return [(tuple(sorted(most[1])), least[0])]


def _said(node: fx.Node, axis: int) -> list[Way]:
    """The only way of a constraint on an axis where it says something."""
    said = node.target.constraint.placements[axis] if isinstance(node.target, ConstrainOp) else None
    return [] if said is None else [Way(Row((said,), (said,)))]
