"""The graph of a capture at given sizes, as a capture at these sizes would have made it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from spmd import _torch
from spmd.expand.loops.loop import Loop
from spmd.expand.sizes.lift import SIZED
from spmd.expand.sizes.size import Size, evaluated
from spmd.mesh import DeviceMesh
from spmd.tensor.call import SCALAR, TensorMeta
from spmd.tensor.rules.meta import makes_with_numbers
from spmd.tensor.spec import Spec

Values = Mapping[str, float]
"""The values of symbols, by name."""


def graph_at(graph: fx.Graph, values: Values) -> fx.Graph:
    """A copy with numbers in the place of sizes."""
    return _graph_at(graph, _numbers(graph, values))


def _graph_at(graph: fx.Graph, number: Any) -> fx.Graph:
    new, copies = _torch.new_graph(), {}
    _torch.take_names(new, graph)
    known: dict[int, Any] = {}  # what was stamped shares its values

    def here(x: Any) -> Any:
        return copies[x] if isinstance(x, fx.Node) else number(x)

    for node in graph.nodes:
        is_sized = node.meta.get(SIZED)
        arguments = node.args, node.kwargs
        there = fx.node.map_aggregate(arguments, here) if is_sized else fx.map_arg(arguments, copies.__getitem__)
        copies[node] = copy = _torch.copy_named(new, node, *there)
        copy.meta.update(node.meta)
        if isinstance(node.target, Loop):
            copy.target = replace(node.target, body=_graph_at(node.target.body, number))
        if not is_sized:
            continue
        value = node.meta.get("val")
        if id(value) not in known:
            known[id(value)] = _metadata_at(value, number)
        copy.meta["val"] = known[id(value)]
    return new


def _numbers(graph: fx.Graph, values: Values) -> Any:
    """A function that gives the number for a `Size`, and anything else as it is."""
    texts = _texts(graph)
    found = dict(zip(texts, evaluated(texts, values), strict=True))
    return lambda x: found[x.text] if isinstance(x, Size) else x


def _texts(graph: fx.Graph) -> tuple[str, ...]:
    """The texts of the sizes in a graph, each once, in order."""
    found: dict[str, None] = {}
    seen: set[int] = set()  # values: what was stamped shares them

    def note(x: Any) -> None:
        if isinstance(x, Size):
            found[x.text] = None
        elif isinstance(x, TensorMeta):
            for n in (*x.shape, *x.stride, x.offset):
                note(n)

    bodies = [node.target.body for node in graph.nodes if isinstance(node.target, Loop)]
    for node in itertools.chain(graph.nodes, *[body.nodes for body in bodies]):
        if node.meta.get(SIZED):
            value = node.meta.get("val")
            given = (node.args, dict(node.kwargs)) if id(value) in seen else (node.args, dict(node.kwargs), value)
            seen.add(id(value))
            fx.node.map_aggregate(given, note)
    return tuple(found)


def _metadata_at(value: Any, number: Any) -> Any:
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return tuple(_metadata_at(x, number) for x in value)
    if not isinstance(value, TensorMeta):
        return value
    shape, stride = tuple(map(number, value.shape)), tuple(map(number, value.stride))
    return TensorMeta(shape, stride, value.dtype, number(value.offset))


# ---- whether ops agree ------------------------------------------------------------------------


def ops_agree(graph: fx.Graph, mesh: DeviceMesh) -> bool:
    """Whether each op of a graph at given sizes makes tensors of the shapes that the graph says, without data."""
    asked: set[tuple] = set()
    return all(_agrees(node, mesh, asked) for node in graph.nodes if node.meta.get(SIZED))


def _agrees(node: fx.Node, mesh: DeviceMesh, asked: set[tuple]) -> bool:
    if not isinstance(node.target, _torch.OpOverload):
        return True

    def described(n: fx.Node) -> Any:
        value = n.meta.get("val")
        known = isinstance(value, TensorMeta)
        return Spec.of(mesh, value.shape, value.dtype, stride=value.stride) if known else SCALAR

    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), described)
    value = node.meta["val"]
    shapes = [
        (x.shape, x.dtype) if isinstance(x, TensorMeta) else None
        for x in (value if isinstance(value, tuple) else (value,))
    ]
    key = node.target, repr(args), repr(kwargs), tuple(shapes)
    if key in asked:
        return True
    asked.add(key)
    try:
        return makes_with_numbers(shapes, node.target, args, kwargs, torch.device(mesh.device_type))
    except (RuntimeError, IndexError, ValueError, TypeError, NotImplementedError):
        return False  # the op does not take these sizes
