"""Which nodes of a captured graph come from a module, a parameter or a line.

    blocks.*.mlp.up            ops of these modules and of those inside, their gradients, and their parameters' update
    blocks.*.mlp.up.weight     ops that read this parameter, make its gradient, or update it
    model.py:31                ops that this line calls, also by other lines
    "self.up("                 the same, for all lines with this piece of code
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator

from torch import fx

from spmd import _torch
from spmd.expand.origins import ORIGIN, Line, Origin
from spmd.expand.phases import NEW_VALUE
from spmd.expand.places.roles import MARK, Roles
from spmd.expand.state import Slot
from spmd.tensor.annotations.patterns import matches, what_there_is

Found = dict[fx.Node, tuple[str, ...]]
"""For nodes, where they are from: the paths of modules and parameters, or lines."""


def is_line(text: str) -> bool:
    """Whether it is a line's name, such as `model.py:31`."""
    return re.fullmatch(r".+:\d+", text) is not None


def nodes_of(of: str, graph: fx.Graph, roles: Roles, outputs: tuple) -> Found:
    """The nodes that come from there. ValueError, with what is near, if there are none."""
    paths = _paths(graph, roles, outputs)
    if not is_line(of):
        found = {n: hits for n, all_ in paths.items() if (hits := tuple(p for p in all_ if _is_in(p, of)))}
        if found:
            return found
    found = {n: (str(hit),) for n in graph.nodes if (hit := _line_of(n, of)) is not None}
    if not found:
        raise ValueError(f"explain: {of!r} names no module, parameter or line of the step. {_near(of, graph, paths)}")
    return found


def lines_with(of: str, graph: fx.Graph) -> list[Line]:
    """The innermost lines that are named, or have this piece of code."""
    found = [n.meta[ORIGIN].lines[0] for n in graph.nodes if n.meta.get(ORIGIN, Origin()).lines]
    return [line for line in dict.fromkeys(found) if _is_line(line, of)]


def parameters_of(of: str, roles: Roles) -> list[str]:
    """The parameters that are named, and those of the modules that are named."""
    paths = dict.fromkeys(roles.parameters.values())
    return [path for path in paths if matches(of, path) or matches(of, path.rpartition(".")[0])]


def _is_line(line: Line, of: str) -> bool:
    return line.is_at(of) if is_line(of) else of in line.text


def _line_of(node: fx.Node, of: str) -> Line | None:
    lines = node.meta.get(ORIGIN, Origin()).lines if node.op == "call_function" else ()
    return next((line for line in lines if _is_line(line, of)), None)


def _is_in(path: str, of: str) -> bool:
    """Whether a pattern matches a path, or one that it begins with."""
    parts = path.split(".")
    return any(matches(of, ".".join(parts[:n])) for n in range(1, len(parts) + 1))


def _near(of: str, graph: fx.Graph, paths: Found) -> str:
    names = [p for each in paths.values() for p in each]
    if is_line(of):
        names = [str(n.meta[ORIGIN].lines[0]) for n in graph.nodes if n.meta.get(ORIGIN, Origin()).lines]
    return what_there_is(of, names)


# ---- modules and parameters -------------------------------------------------------------------


def _paths(graph: fx.Graph, roles: Roles, outputs: tuple) -> Found:
    """For each op the module that it is of, and the parameters that it reads, differentiates or updates alone."""
    follows = dict(roles.parameters)
    updates = _updates(graph, roles, outputs)
    gradients = {n: path for path, nodes in roles.gradients.items() for n in nodes}
    found: Found = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        read = {follows[n] for n in node.all_input_nodes if n in follows}
        if len(read) == 1 and _is_view(node):
            follows.setdefault(node, next(iter(read)))
        own = [node.meta.get(ORIGIN, Origin()).module, updates.get(node), gradients.get(node)]
        own += sorted(read) if node in roles.compute else []
        found[node] = tuple(dict.fromkeys(path for path in own if path)) or ("",)
    for node in found:
        if node.target is MARK:
            for maker in _makers(node):
                found[maker] = tuple(dict.fromkeys((*found.get(maker, ()), node.args[1])))
    return found


def _makers(mark: fx.Node) -> Iterator[fx.Node]:
    """The op that makes the gradient of a parameter, and the views of it that lead to its mark."""
    node = mark.args[0]
    while _is_view(node) and node.op == "call_function":
        yield node
        node = node.args[0]
    if node.op == "call_function":
        yield node


def _is_view(node: fx.Node) -> bool:
    is_op = isinstance(node.target, _torch.OpOverload)
    return _torch.is_view(node.target) if is_op else node.target is operator.getitem


def _updates(graph: fx.Graph, roles: Roles, outputs: tuple) -> dict[fx.Node, str]:
    """The parameter whose new value or state a node that updates leads to, where it is one alone."""
    leads: dict[fx.Node, set[str]] = {}
    for node, path in _ends(graph, outputs):
        leads.setdefault(node, set()).add(path)
    for node in reversed(graph.nodes):
        for operand in node.all_input_nodes if node.op != "output" else ():
            if operand not in roles.compute:
                leads.setdefault(operand, set()).update(leads.get(node, ()))
    return {n: next(iter(paths)) for n, paths in leads.items() if len(paths) == 1 and n not in roles.compute}


def _ends(graph: fx.Graph, outputs: tuple) -> Iterator[tuple[fx.Node, str]]:
    for value, slot in zip(graph.output_node().args[0], outputs, strict=True):
        if isinstance(value, fx.Node) and isinstance(slot, Slot) and slot.kind in ("parameter", "optimizer"):
            yield value, slot.path
    for node in graph.nodes:
        if NEW_VALUE in node.meta:
            yield node, node.meta[NEW_VALUE]
