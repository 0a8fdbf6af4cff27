"""What is read of a node: its operands in the order of the schema, and the metadata of its results."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from spmd import _torch
from spmd.expand.origins import ORIGIN, Line
from spmd.tensor.cache import frozen
from spmd.tensor.call import ASSERTS, SCALAR, TensorMeta

SOURCE = "source"
"""In the metadata of a node of a program: the op of the captured graph that it was written for, by name."""


LINE = "line"
"""In the metadata of a node of a program, and of a rank's code: the user's line that it comes from, as text."""


MADE_FOR = "made for"
"""In the metadata of a node of a rank's code: the node of the program that it was written for, by name."""


BACKWARD = " backward"
"""Behind a line: autograd made the node for an op of the line."""


def added(graph: fx.Graph, op: str, target: Any, args: tuple, kwargs: dict[str, Any], name: str | None) -> fx.Node:
    """A new node at the end of a graph, in a third of the time of the graph's `create_node`, which looks for symbols in
    the arguments: after a capture there are none.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> added(graph, "call_function", torch.relu, (x,), {}, "relu"), x.users
    (relu, {relu: None})
    """
    return _torch.create_node(graph, op, target, args, kwargs, name)


def copied(graph: fx.Graph, node: fx.Node, of: Callable[[fx.Node], Any]) -> fx.Node:
    """A copy of a node at the end of a graph, as `node_copy` makes it. of: what stands for each of its operands.

    >>> graph, new = fx.Graph(), fx.Graph()
    >>> x = graph.placeholder("x")
    >>> copied(new, x, {}.get).name
    'x'
    """
    args, kwargs = fx.map_arg((node.args, node.kwargs), of)
    new = added(graph, node.op, node.target, args, kwargs, node.name)
    new.meta.update(node.meta)
    return new


def graph_copied(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph, with the metadata of its nodes."""
    new, copies = _torch.new_graph(), {}
    for node in graph.nodes:
        if node.op == "output":
            new.output(fx.map_arg(node.args[0], copies.__getitem__)).meta.update(node.meta)
        else:
            copies[node] = copied(new, node, copies.__getitem__)
    return new


def is_collective(node: fx.Node) -> bool:
    """Whether a node of a rank's graph calls a functional collective, or waits for one."""
    return getattr(node.target, "namespace", "") == "_c10d_functional"


def read_instead(new: Mapping[fx.Node, fx.Node]) -> None:
    """Let the readers of nodes read others. Each reader is written once: an output of many values is read by many."""
    for reader in dict.fromkeys(user for node in new for user in node.users):
        _torch.set_arguments(reader, *fx.map_arg((reader.args, reader.kwargs), lambda n: new.get(n, n)))


def line_of(node: fx.Node) -> str:
    """The user's line that a captured op, or its forward op, was written at; empty where none is known."""
    origin = node.meta.get(ORIGIN)
    if origin is None or not origin.lines:
        return node.meta.get(LINE, "")
    return _line_text(origin.lines[0], origin.backward)


@lru_cache(maxsize=1 << 14)
def _line_text(line: Line, backward: bool) -> str:
    return f"{line}{BACKWARD if backward else ''}"


def is_backward(node: fx.Node) -> bool:
    """Whether autograd made a node of a program, as far as that is known."""
    return line_of(node).endswith(BACKWARD)


def source_of(node: fx.Node) -> str:
    """The name of the captured op that a node was written for; of a captured op its own."""
    return node.meta.get(SOURCE, node.name)


def take_origin(node: fx.Node, of: fx.Node) -> None:
    """Let a node that a pass writes come from where another one does."""
    node.meta.update({key: of.meta[key] for key in (SOURCE, LINE) if key in of.meta})


def in_schema_order(node: fx.Node, operand: Callable[[fx.Node], Any]) -> tuple[tuple, dict]:
    """Map the operands of a call in the order of `Call.tensors`: first the positional ones, then keywords by schema."""
    args = fx.map_arg(node.args, operand)
    if not node.kwargs:
        return args, {}
    order = sorted(node.kwargs, key=lambda name: _torch.argument_index(node.target, name))
    return args, {name: fx.map_arg(node.kwargs[name], operand) for name in order}


def operands_in_order(node: fx.Node) -> list[fx.Node]:
    """The operands of a call in the order of `Call.tensors`. One that occurs twice is listed twice."""
    found: list[fx.Node] = []
    in_schema_order(node, found.append)
    return found


def is_dead(node: fx.Node) -> bool:
    """Whether nothing reads a node, and it does nothing else: it is no input, output or assert."""
    if node.users or node.op in ("placeholder", "output"):
        return False
    return not node.is_impure() and node.target not in ASSERTS  # of which torch knows one as impure


def result_metadata(node: fx.Node) -> tuple[TensorMeta | None, ...]:
    """The metadata of each result; None where it is no tensor."""
    value = node.meta["val"]
    leaves = value if isinstance(value, (tuple, list)) else (value,)
    return tuple(map(_metadata, leaves))


def _metadata(value: Any) -> TensorMeta | None:
    """Of a fake tensor from the capture, or the metadata that was computed for an op of a decomposition."""
    if isinstance(value, torch.Tensor):
        return TensorMeta.of(value)
    return value if isinstance(value, TensorMeta) else None


def first_positions(operands: list[fx.Node]) -> tuple[int, ...]:
    """For each operand, the first position at which the same tensor occurs."""
    return tuple(operands.index(n) for n in operands)


def described(x: Any, spec: Callable[[fx.Node], Any]) -> Hashable:
    """A hashable value in place of an argument, with the spec of each node in it. TypeError where it has no hash."""
    if isinstance(x, fx.Node):
        found = spec(x)
        return SCALAR if found is None else found
    if type(x) is int:  # as `frozen` has it
        return int, x
    if isinstance(x, (tuple, list)):
        return (list, *[described(y, spec) for y in x])
    if isinstance(x, dict):
        return (dict, *[(name, described(y, spec)) for name, y in x.items()])
    return frozen(x)


def described_call(node: fx.Node, spec: Callable[[fx.Node], Any]) -> Hashable:
    """A hashable value in place of what a node calls and with what, as `described`."""
    found: list[Hashable] = [node.target]
    for x in node.args:
        if isinstance(x, fx.Node):
            of_node = spec(x)
            found.append(SCALAR if of_node is None else of_node)
        else:
            found.append(described(x, spec))
    if node.kwargs:
        found.append(described(node.kwargs, spec))
    return tuple(found)
