"""Nodes of fx graphs, made without questions that are answered already."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

from torch import fx
from torch.fx.graph import _illegal_char_regex, _illegal_names

operands_of: Callable[[fx.Node], dict[fx.Node, None]] = operator.attrgetter("_input_nodes")
"""The nodes among the arguments of a node, each once, in order: what `all_input_nodes` makes a new list of."""


class _Walk:
    """Finds the nodes of a graph by a walk over it. torch keeps a table of them by what they call, which costs a third
    of the time in which a node is made, and is asked a few times for each graph."""

    def __init__(self, graph: fx.Graph):
        self._graph = graph

    def __contains__(self, node: fx.Node) -> bool:
        return not node._erased

    def insert(self, node: fx.Node) -> None:
        """Nothing is noted."""

    remove = insert

    def find_nodes(self, *, op: str, target: Any = None) -> list[fx.Node]:
        """As torch's table finds them, in the order of the graph."""
        return [n for n in self._graph.nodes if n.op == op and (target is None or n.target == target)]


def walked(graph: fx.Graph) -> fx.Graph:
    """The graph, whose nodes are found by a walk over it from now on."""
    graph._find_nodes_lookup_table = _Walk(graph)
    return graph


def new_graph() -> fx.Graph:
    """An empty graph, whose nodes are found by a walk over it.

    >>> graph = new_graph()
    >>> x = graph.placeholder("x")
    >>> y, z = graph.call_function(abs, (x,)), graph.call_function(abs, (x,))
    >>> graph.erase_node(y)
    >>> graph.find_nodes(op="call_function", target=abs), graph.find_nodes(op="placeholder")
    ([abs_2], [x])
    """
    return walked(fx.Graph())


def create_node(
    graph: fx.Graph, op: str, target: Any, args: tuple, kwargs: dict[str, Any], wanted: str | None
) -> fx.Node:  # fmt: skip
    """A new node where the graph inserts, as `graph.create_node` makes it, in half of the time.

    That one looks for symbols in the arguments, which are said to have none, and takes a name apart even if it is free.

    >>> graph = fx.Graph()
    >>> x = create_node(graph, "placeholder", "x", (), {}, "x")
    >>> create_node(graph, "call_function", abs, (x,), {}, "abs"), x.users
    (abs_1, {abs_1: None})
    """
    if graph._owning_module is not None:  # which may have hooks
        return graph.create_node(op, target, args, kwargs, wanted)
    if wanted is None:
        wanted = _snake_case(target.__name__) if callable(target) else _method_name(target)
    names = graph._graph_namespace
    name = _free(names, wanted)
    node = _inserted(graph, _node(graph, name, op, target, args, kwargs))
    names._obj_to_name[node] = name
    return node


@functools.lru_cache(maxsize=4096)
def _method_name(method: str) -> str:
    return fx.Graph()._target_to_str(method)


def node_again(node: fx.Node, args: tuple, kwargs: dict[str, Any]) -> fx.Node:
    """The same call with other arguments, where its graph inserts, and by the same name: for the graph of a trace,
    whose nodes all get new names (`rename`). To look for a free one takes a third of the time of a node.

    >>> graph = fx.Graph()
    >>> y = graph.call_function(abs, (graph.placeholder("x"),))
    >>> node_again(y, (y,), {}), len(graph.nodes)
    (abs_1, 3)
    """
    return _inserted(node.graph, _node(node.graph, node.name, node.op, node.target, args, kwargs))


def copy_named(graph: fx.Graph, node: fx.Node, args: tuple, kwargs: dict[str, Any]) -> fx.Node:
    """A copy of a node with other arguments at the end of a graph that has taken over its names (`take_names`)."""
    return _inserted(graph, _node(graph, node.name, node.op, node.target, args, kwargs))


def take_names(graph: fx.Graph, of: fx.Graph) -> None:
    """Let the names of one graph be taken in another, an empty one, for copies of its nodes."""
    names, taken = graph._graph_namespace, of._graph_namespace
    names._used_names, names._base_count = set(taken._used_names), dict(taken._base_count)


def input_named(graph: fx.Graph, name: str) -> fx.Node:
    """An input of this name where a graph inserts, which is not looked for: as `node_again`."""
    return _inserted(graph, _node(graph, name, "placeholder", name, (), {}))


def rename_input(node: fx.Node, name: str) -> None:
    """Give an input another name, in the same way."""
    object.__setattr__(node, "name", name)
    node.target = name


def _node(graph: fx.Graph, name: str, op: str, target: Any, args: tuple, kwargs: dict[str, Any]) -> fx.Node:
    """A node that is in no graph yet. torch's own way asks first whether op and target are such as a node may have,
    which takes as long as all else."""
    node = fx.Node.__new__(fx.Node)
    _of_c(node, graph, name, op, target, None)
    node._update_args_kwargs(args, kwargs)
    return node


_of_c = fx.Node.__base__.__init__


def set_arguments(node: fx.Node, args: tuple, kwargs: dict[str, Any]) -> None:
    """Give a node other arguments, all at once. To set `args`, and then `kwargs`, notes all readers twice.

    >>> graph = fx.Graph()
    >>> x, y = graph.placeholder("x"), graph.placeholder("y")
    >>> z = graph.call_function(max, (x,))
    >>> set_arguments(z, (y,), {"key": abs})
    >>> z.args, z.kwargs, x.users, y.users
    ((y,), {'key': <built-in function abs>}, {}, {max_1: None})
    """
    node._update_args_kwargs(args, kwargs)


def _inserted(graph: fx.Graph, node: fx.Node) -> fx.Node:
    graph._insert(node)
    if type(table := graph._find_nodes_lookup_table) is not _Walk:  # which notes nothing
        table.insert(node)
    graph._len += 1
    return node


_snake_case = functools.lru_cache(maxsize=4096)(fx.graph._snake_case)  # the name that a call of a function wishes


def _free(names: Any, wanted: str) -> str:
    """Take the name, or the next free one with a number, as `create_name` does."""
    if _take(names, wanted):
        return wanted
    if (parts := _parts(wanted)) is None:
        possible = _possible(wanted)
        return _free(names, possible) if possible else names.create_name(wanted, None)
    base, used = parts[0], names._used_names
    number = names._base_count.get(base, 0)
    name = wanted
    while name in used:
        number += 1
        name = f"{base}_{number}"
    used.add(name)
    names._base_count[base] = number
    return name


def _take(names: Any, wanted: str) -> bool:
    """Take a name that is free, as `create_name` does; False where it is not, or may be no name."""
    if wanted in names._used_names or (parts := _parts(wanted)) is None:
        return False
    base, number = parts
    if number is None:
        names._base_count.setdefault(base, 0)
    else:
        names._base_count[base] = number
    names._used_names.add(wanted)
    return True


@functools.lru_cache(maxsize=1 << 15)  # the graphs of a step have the same names
def _parts(name: str) -> tuple[str, int | None] | None:
    """A name without its number, and that; None for what may be no name."""
    if name in _illegal_names or not (name.isidentifier() and name.isascii()):
        return None
    base, _, number = name.rpartition("_")
    return (base, int(number)) if base and number.isdecimal() else (name, None)


@functools.lru_cache(maxsize=4096)
def _possible(name: str) -> str:
    """What torch makes of a name with signs that a name may not have, of ops such as `mm.default`; empty where that may
    be no name either."""
    found = _illegal_char_regex.sub("_", name)
    return found if _parts(found) else ""


def rename(graph: fx.Graph, wanted: Callable[[fx.Node], str]) -> None:
    """Give all nodes of the graph of a trace new names, in order, as if they were made with these wishes. The graph has
    no module any more.

    wanted: from a node to the name that it is to have if that is free.
    """
    graph.owning_module = None
    graph.set_codegen(fx.graph.CodeGen())
    names = graph._graph_namespace = type(graph._graph_namespace)()
    for node in graph.nodes:
        name = _free(names, wanted(node))
        names._obj_to_name[node] = name
        object.__setattr__(node, "name", name)  # Node's own files the node anew, behind those that keep their names
