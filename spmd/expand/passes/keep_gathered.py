"""Keep what was gathered for the forward, where the backward would gather it again.

    g = all_gather(w); mm(x, g) ... g2 = all_gather(w); mm(d, g2)    ->    mm(d, g)

A program gathers a parameter once for each pass that reads it, and frees it after the last reader. The places of the
parameter say what else may be: `reshard=False` keeps it from the first gather on. `"cost"` keeps it where that costs
nothing: where the most bytes that are gathered at once stay what they are. So the last layers, which the backward reads
first, are gathered once, and so is a model whose embedding is larger than its layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import fx

from spmd import _torch
from spmd.expand.nodes import graph_copied
from spmd.expand.places.reads import PARAMETER
from spmd.expand.program import Program
from spmd.tensor.redistribute.plan import Step


def keep_gathered(program: Program) -> Program:
    """The same program with fewer gathers, as the places of its parameters allow."""
    if all(places.reshard is True for places in program.places.values()):
        return program
    if not any(_moved(set(_parameters(program)), program.graph)):
        return program
    program = copied(program)
    parameters = _parameters(program)
    _keep_all({n for n, name in parameters.items() if program.places[name].reshard is False}, program.graph)
    _keep_free({n for n, name in parameters.items() if program.places[name].reshard == "cost"}, program.graph)
    return program


def copied(program: Program) -> Program:
    """The same program with a graph of its own."""
    return replace(program, graph=graph_copied(program.graph))


def gathered_bytes(program: Program) -> list[int]:
    """For each node of the program, in order: the bytes that a rank holds of parameters gathered to compute with.

    A new parameter that is gathered because it is kept whole does not count.
    """
    order = {n: i for i, n in enumerate(program.graph.nodes)}
    moved = _moved(set(_parameters(program)), program.graph)
    read = [n for n in moved if any(user.op != "output" for user in n.users)]
    return _profile([_Gathered.of(n, order) for n in read], len(order))


def gathered_again(program: Program) -> set[fx.Node]:
    """The moves that make more of parameters which are to be freed behind the forward."""
    freed = {n for n, name in _parameters(program).items() if program.places[name].reshard is True}
    return set(_moved(freed, program.graph))


# ---- which values are gathered parameters -----------------------------------------------------


def _parameters(program: Program) -> dict[fx.Node, str]:
    return {node: node.meta[PARAMETER] for node in program.graph.nodes if PARAMETER in node.meta}


def _moved(parameters: set[fx.Node], graph: fx.Graph) -> Iterator[fx.Node]:
    """The moves that make more of a parameter, or of what was computed from it alone and is stored as it is."""
    follows = set(parameters)
    for node in graph.nodes:
        operands = _torch.operands_of(node)
        if node.op != "call_function" or not operands or not follows.issuperset(operands):
            continue
        if isinstance(node.target, Step):
            if node.target.after.local_nbytes > node.target.before.local_nbytes:
                yield node
        elif node.meta.get("spec") is not None:
            follows.add(node)


@dataclass(frozen=True)
class _Gathered:
    """A gathered value: it is alive from the first node to the one before the last, which reads it."""

    node: fx.Node
    first: int
    last: int

    @classmethod
    def of(cls, node: fx.Node, order: dict[fx.Node, int]) -> _Gathered:
        return cls(node, order[node], last_read(node, order))

    @property
    def nbytes(self) -> int:
        return self.node.target.after.local_nbytes


def last_read(node: fx.Node, order: dict[fx.Node, int]) -> int:
    """The position of the last reader, of the value or of a view of it."""
    reads = [last_read(user, order) if _is_view(user) else order[user] for user in node.users]
    return max(reads, default=order[node])


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, _torch.OpOverload) and _torch.is_view(node.target)


def _profile(values: list[_Gathered], length: int) -> list[int]:
    alive = [0] * length
    for value in values:
        for i in range(value.first, value.last):
            alive[i] += value.nbytes
    return alive


# ---- keeping them -----------------------------------------------------------------------------


def _keep_all(parameters: set[fx.Node], graph: fx.Graph) -> None:
    first: dict[tuple[fx.Node, Step], fx.Node] = {}
    for node in list(_moved(parameters, graph)):
        kept = first.setdefault((node.args[0], node.target), node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)


def _keep_free(parameters: set[fx.Node], graph: fx.Graph) -> None:
    """Join gathers of one value that follow each other, the nearest first, while the peak stays what it is."""
    order = {n: i for i, n in enumerate(graph.nodes)}
    values = [_Gathered.of(n, order) for n in _moved(parameters, graph)]
    alive, before = _profile(values, len(order)), {}
    peak = max(alive, default=0)
    for one, next_ in sorted(_pairs(values), key=lambda pair: (pair[1].first - pair[0].last, pair[0].first)):
        gap = range(one.last, next_.first)
        if max((alive[i] for i in gap), default=0) + one.nbytes <= peak:
            before[next_.node] = one.node
            for i in gap:
                alive[i] += one.nbytes
    for node in sorted(before, key=order.__getitem__):
        kept = before[node] = before.get(before[node], before[node])
        node.replace_all_uses_with(kept)
        graph.erase_node(node)


def _pairs(values: list[_Gathered]) -> list[tuple[_Gathered, _Gathered]]:
    """Each gathered value with the next one of the same source."""
    last: dict[tuple, _Gathered] = {}
    pairs = []
    for value in values:
        key = value.node.args[0], value.node.target
        if key in last:
            pairs.append((last[key], value))
        last[key] = value
    return pairs
