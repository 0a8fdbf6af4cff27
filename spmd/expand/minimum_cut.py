"""The cheapest way to cut all paths of a graph: the nodes whose prices add up to least.

    a -> b -> d,  a -> c -> d       between a and d: b and c, or a alone, or d alone

By the theorem of Ford and Fulkerson the least price is the largest flow. The flow grows along shortest paths (Edmonds
and Karp, 1972). Of several cheapest cuts the one nearest to the sources is taken.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from math import inf

Node = Hashable
_Edges = dict[Node, dict[Node, float]]


def minimum_cut(
    prices: Mapping[Node, float], edges: Mapping[Node, Sequence[Node]], sources: Sequence[Node], sinks: Sequence[Node]
) -> tuple[set[Node], set[Node]]:
    """The nodes to cut so that no path leads from a source to a sink, and the nodes that sources still reach.

    prices: of cutting each node. A node that is cut is itself reached, if what leads to it is.

    >>> minimum_cut({"a": 3, "b": 1, "c": 1}, {"a": ["b", "c"]}, ["a"], ["b", "c"])[0] == {"b", "c"}
    True
    """
    left = _residual(prices, edges, sinks)
    starts = [(node, "in") for node in sources]
    for start in starts:  # one by one: what has no path to a sink any more gets none by what flows elsewhere
        while path := _path(left, start):
            flow = min(left[a][b] for a, b in path)
            if flow == inf:
                no_price = "a path leads from a source to a sink on which no node has a finite price"
                raise ValueError(f"minimum_cut: {no_price}")
            for a, b in path:
                left[a][b] -= flow
                left[b][a] = left[b].get(a, 0.0) + flow
    reached = _reached(left, starts)
    inside = {node for node in prices if (node, "in") in reached}
    return {node for node in inside if (node, "out") not in reached}, inside


def _residual(prices: Mapping[Node, float], edges, sinks) -> _Edges:
    """What can flow along each edge. A node is an edge, from its "in" to its "out", of its price."""
    left: _Edges = {"sink": {}}
    for node, price in prices.items():
        left[node, "in"], left[node, "out"] = {(node, "out"): price}, {}
    for node, readers in edges.items():
        left[node, "out"] |= {(reader, "in"): inf for reader in readers}
    for node in sinks:
        left[node, "out"]["sink"] = inf
    return left


def _reached(left: _Edges, starts: Sequence[Node], until: Node | None = None) -> dict[Node, Node]:
    """The nodes that something can still flow to from these, with the node before each on a shortest path. until: a
    node behind which no others are looked for."""
    before: dict[Node, Node] = {start: start for start in starts}
    queue: deque[Node] = deque(before)
    while queue and until not in before:
        a = queue.popleft()
        for b, rest in left[a].items():
            if rest > 0 and b not in before:
                before[b] = a
                queue.append(b)
    return before


def _path(left: _Edges, start: Node) -> list[tuple[Node, Node]]:
    """The edges of a shortest path from here along which something can flow; none if there is no such path."""
    before, b, path = _reached(left, [start], "sink"), "sink", []
    while b in before and b != start:
        path.append((before[b], b))
        b = before[b]
    return path
