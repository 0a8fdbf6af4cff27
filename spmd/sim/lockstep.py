"""The bound programs of all ranks, run side by side: each until it waits for something that has not come.

A rank's program is plain torch code with collectives in it (`expand/bind`); programs of different ranks may differ, as
uneven shards make them. When all ranks wait, what they have posted is exchanged, and they go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx


class Walk:
    """One rank's way through its program, a node at a time."""

    def __init__(self, module: fx.GraphModule, by: Any, inputs: Sequence[Any]) -> None:
        self._module, self._by = module, by
        self._nodes = list(module.graph.nodes)
        self._next = 0
        self._inputs = iter(inputs)
        self._values: dict[fx.Node, Any] = {}
        self._spent = _last_uses(self._nodes)
        self.result: Any = None

    @property
    def ended(self) -> bool:
        """Whether the program has returned its result."""
        return self._next == len(self._nodes)

    def go(self) -> bool:
        """Run until a wait for something that has not arrived, or the end; whether it went on at all."""
        start = self._next
        while not self.ended:
            node = self._nodes[self._next]
            if node.target == self._by.wait_tensor and not self._by.has(self._values[node.args[0]]):
                break
            self._run(node)
            self._next += 1
        return self._next > start

    def _run(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            value = next(self._inputs)
        elif node.op == "get_attr":
            value = getattr(self._module, node.target)
        else:
            args = fx.map_arg(node.args, self._values.__getitem__)
            kwargs = fx.map_arg(node.kwargs, self._values.__getitem__)
            if node.op == "output":
                self.result = args[0]
                return
            value = node.target(*args, **kwargs) if node.op == "call_function" else _method(node, args, kwargs)
        self._values[node] = value
        for spent in self._spent.get(node, ()):
            del self._values[spent]


def _method(node: fx.Node, args: tuple, kwargs: dict) -> Any:
    if node.op != "call_method":
        raise AssertionError(f"a bound program has no {node.op} nodes, and here is {node}")
    return getattr(args[0], node.target)(*args[1:], **kwargs)


def _last_uses(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each node the values that nobody reads after it."""
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        last.setdefault(node, node)
        for read in node.all_input_nodes:
            last[read] = node
    spent: dict[fx.Node, list[fx.Node]] = {}
    for value, reader in last.items():
        if reader.op != "output":
            spent.setdefault(reader, []).append(value)
    return spent


def walk_together(
    walks: Sequence[Walk], playing: Callable[[int], AbstractContextManager], deliver: Callable[[], bool]
) -> list[Any]:
    """The results of all ranks, as far as they get.

    `playing(i)` is the context of the i-th rank; `deliver()` exchanges what it can and says whether there was any.
    """
    with torch.no_grad():
        moving = True
        while moving:
            moving = False
            for i, walk in enumerate(walks):
                with playing(i):
                    moving |= walk.go()
            moving |= deliver()
    return [walk.result for walk in walks]
