"""Code that writes nodes: functions on tensors, recorded by running them on fx proxies, and what they wrote, again.

    movement.start(x)     reshape, repeat, contiguous, all_to_all_single      recorded for the first of many equal moves
                          the same four nodes of y                            written for each other one

To record a node takes three times as long as to write it again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from spmd.expand.nodes import added


class Tracer(fx.proxy.GraphAppendingTracer):
    """Appends what proxies do to a graph, where arguments have no symbols."""

    def create_proxy(
        self, kind: str, target: Any, args: tuple, kwargs: dict, name: str | None = None, *more: Any
    ) -> fx.Proxy:
        """The same proxy as torch makes, in half of the time: arguments are tuples, lists, proxies and values."""
        args, kwargs = fx.node.map_aggregate((args, kwargs), _node_of)
        return Recorded(self.create_node(kind, target, args, kwargs, name, *more), self)

    def create_node(
        self, kind: str, target: Any, args: tuple, kwargs: dict, name: str | None = None, type_expr: Any = None
    ) -> fx.Node:
        """A node at the end of the graph."""
        return added(self.graph, kind, target, args, kwargs, name)


class Recorded(fx.Proxy):
    """A proxy of whose functions torch is not asked again which tracer records them."""

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: tuple[type, ...], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> fx.Proxy:
        first = args[0] if args else None
        first = first[0] if isinstance(first, (list, tuple)) and first else first
        if not isinstance(first, fx.Proxy) or torch.overrides.is_tensor_method_or_property(function):
            return super().__torch_function__(function, types, args, kwargs)
        return first.tracer.create_proxy("call_function", function, args, kwargs or {})


def _node_of(x: Any) -> Any:
    return x.node if isinstance(x, fx.Proxy) else x


def nodes_in(x: Any) -> list[fx.Node]:
    """The nodes in an argument, as often as they occur."""
    found: list[fx.Node] = []
    fx.map_arg(x, found.append)
    return found


@dataclass(frozen=True)
class Recording:
    """The nodes that a function wrote. inputs: the nodes that it was given. results: what it gave, None where there is
    none. Both may have nodes in tuples, as several collectives of one move have several handles."""

    inputs: tuple[Any, ...]
    nodes: tuple[fx.Node, ...]
    results: tuple[Any, ...]

    @classmethod
    def of(cls, tracer: Tracer, inputs: Sequence[fx.Node], function: Callable[..., Sequence[Any]]) -> Recording:
        """What a function of proxies of some nodes writes at the end of their graph.

        >>> graph = fx.Graph()
        >>> x, y = graph.placeholder("x"), graph.placeholder("y")
        >>> square = Recording.of(Tracer(graph), [x], lambda x: [(x * x).abs()])
        >>> square.again(graph, [y]), [(n.name, n.args) for n in graph.nodes][2:]
        ([abs_2], [('mul', (x, x)), ('abs_1', (mul,)), ('mul_1', (y, y)), ('abs_2', (mul_1,))])
        """
        last = next(iter(reversed(tracer.graph.nodes)))
        made = function(*fx.node.map_aggregate(tuple(inputs), lambda n: Recorded(n, tracer)))
        nodes = []
        while (last := last.next).op != "root":
            nodes.append(last)
        return cls(tuple(inputs), tuple(nodes), fx.node.map_aggregate(tuple(made), _node_of))

    def again(self, graph: fx.Graph, inputs: Sequence[fx.Node], meta: Callable[[fx.Node], dict] = lambda n: {}) -> list:
        """The results of the same nodes, written at the end of a graph for other inputs, of which those are one that
        were one. meta: from one of the nodes to what is noted on its copy."""
        env = dict(zip(nodes_in(self.inputs), nodes_in(tuple(inputs)), strict=True))
        for node in self.nodes:
            new = env[node] = added(
                graph, node.op, node.target, *fx.map_arg((node.args, node.kwargs), env.__getitem__), None
            )
            new.meta |= meta(node)
        return list(fx.map_arg(self.results, env.__getitem__))
