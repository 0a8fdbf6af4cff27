"""The ways to run an op beyond the rows of its rule: what happens if an operand arrives sharded on a dim that is whole.

    native_layer_norm(f32[8, 64@tp])     decomposed: two all-reduces of a number a row, and the result stays sharded
    embedding(f32[V@tp, d], i64[t])      a recipe: the result is a Partial, and no table is gathered

Whether an op has a decomposition or a recipe for such operands, and what that costs, is found by writing a program of
the one op, on a mesh of the one axis.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace

from torch import fx

from spmd import _torch
from spmd.expand.choose.choice import Pin
from spmd.expand.choose.options import Way
from spmd.expand.choose.price import node_work, program_cost
from spmd.expand.choose.work import Roofline
from spmd.expand.expand import expand
from spmd.expand.nodes import operands_in_order
from spmd.expand.places.roles import Roles
from spmd.mesh import DeviceMesh
from spmd.tensor.call import TensorMeta
from spmd.tensor.placement import REPLICATE, Placement, Shard
from spmd.tensor.recipes import RECIPES
from spmd.tensor.rules.decompositions import decompositions
from spmd.tensor.rules.rule import Row
from spmd.tensor.spec import Spec, placed


def may_arrive(node: fx.Node) -> bool:
    """Whether the op has a decomposition or a recipe, and takes no numbers that are known at run time only."""
    known = node.target in decompositions or node.target in RECIPES
    return known and all("val" in n.meta and hasattr(n.meta["val"], "shape") for n in node.all_input_nodes)


def along(mesh: DeviceMesh, axis: int) -> DeviceMesh:
    """The part of a mesh along one axis; equal for axes of one size with the same links.

    >>> from spmd.mesh import init_device_mesh
    >>> mesh = init_device_mesh("cpu", (2, 3, 2))
    >>> along(mesh, 0) == along(mesh, 2), along(mesh, 1).shape
    (True, (3,))
    """
    n = mesh.shape[axis]
    return DeviceMesh(mesh.device_type, list(range(n))).with_topology(mesh.topology.take((axis,)))


def arrivals(node: fx.Node, mesh: DeviceMesh, rows: Sequence[Row], refused: set[Hashable]) -> list[Way]:
    """The ways of an op on a mesh of one axis beyond these rows. refused: gets what came to nothing, which is not tried
    again on an axis that shares out as evenly."""
    operands = operands_in_order(node)
    shapes = [tuple(n.meta["val"].shape) for n in operands]
    known = {row.ins for row in rows}
    found: dict[tuple[Placement, ...], Way] = {}
    for shape in dict.fromkeys(shapes):
        for dim, size in enumerate(shape):
            ins = tuple(Shard(dim) if s == shape else REPLICATE for s in shapes)
            whole = not any(p == Shard(dim) for row in rows for p, s in zip(row.ins, shapes, strict=True) if s == shape)
            as_even = ins, size % mesh.size() == 0
            if size >= mesh.size() and whole and ins not in known and as_even not in refused:
                way = tried(node, mesh, ins)
                if way is None:
                    refused.add(as_even)
                else:
                    found.setdefault(way.row.ins, way)
    return list(found.values())


def arrival(node: fx.Node, mesh: DeviceMesh, row: Row) -> Way:
    """The way of an op whose operands arrive as in a row, as they do by op, on a mesh of one axis."""
    way = tried(node, mesh, row.ins) if may_arrive(node) else None
    return Way(row, True) if way is None else replace(way, row=row)


def tried(node: fx.Node, mesh: DeviceMesh, ins: tuple[Placement, ...]) -> Way | None:
    """What the op does with operands that arrive so; None if it does no more than its rule says."""
    graph, given, operands = _torch.new_graph(), {}, operands_in_order(node)
    specs: dict[fx.Node, Spec] = {}
    for n, p in zip(operands, ins, strict=True):
        if n not in given:
            given[n] = graph.placeholder(n.name)
            given[n].meta["val"] = n.meta["val"]
            specs[n] = placed(Spec.of(mesh, tuple(n.meta["val"].shape), n.meta["val"].dtype), [p])
            given[n].meta["spec"] = specs[n]
    op = graph.node_copy(node, given.__getitem__)
    results = _results(graph, op)
    graph.output(tuple(results))
    pins: dict[fx.Node, Pin] = {}
    inputs = [(n.name, spec) for n, spec in specs.items()]
    names = [r.name for r in results]
    program = expand("tried", mesh, graph, {}, inputs, names, lambda i, spec: spec, Roles(), {}, pins=pins)
    pin = pins.get(op)
    if pin is None or not pin.arrives or pin.rows[0].ins != ins:
        return None
    cost, own = program_cost(program), _own_work(op, specs, pin.rows[0])
    return Way(pin.rows[0], True, cost.moves, max(1.0, cost.work / own) if own else 1.0)


def _own_work(op: fx.Node, specs: Mapping[fx.Node, Spec], row: Row) -> float:
    """Microseconds of an op that is one: it reads and writes once what each part of its decomposition does again."""
    mesh, value = next(iter(specs.values())).mesh, op.meta["val"]
    outs = zip(value if isinstance(value, (tuple, list)) else (value,), row.outs, strict=True)
    made = tuple(
        [placed(Spec.of(mesh, tuple(x.shape), x.dtype), [p]) if hasattr(x, "shape") else None for x, p in outs]
    )
    op.meta["spec"] = made
    return node_work(op, mesh, Roofline(mesh.topology))


def _results(graph: fx.Graph, op: fx.Node) -> list[fx.Node]:
    value = op.meta["val"]
    if not isinstance(value, (tuple, list)):
        return [op]
    found = []
    for i, each in enumerate(value):
        if isinstance(each, TensorMeta) or hasattr(each, "shape"):
            found.append(graph.create_node("call_function", operator.getitem, (op, i)))
            found[-1].meta["val"] = each
    return found
