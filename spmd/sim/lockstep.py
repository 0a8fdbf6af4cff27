"""Run the bound programs of all ranks together: each until it waits for a result that has not arrived.

A rank's program is plain torch code with collectives in it (`expand/bind`). The programs of the ranks may differ, for
example with uneven shards. When all ranks wait, their posts are exchanged, and the programs continue.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx


class ProgramRun:
    """One rank's run of its program, node by node."""

    def __init__(self, module: fx.GraphModule, transport: Any, inputs: Sequence[Any]) -> None:
        self._module, self._transport = module, transport
        self._nodes = list(module.graph.nodes)
        self._next = 0
        self._inputs = iter(inputs)
        self._values: dict[fx.Node, Any] = {}
        self._loop: _LoopRun | None = None
        self._dead_after = _dead_after_each(self._nodes)
        self.result: Any = None
        self.error: Exception | None = None

    @property
    def ended(self) -> bool:
        """Whether the program has returned its result, or raised an error."""
        return self._next == len(self._nodes) or self.error is not None

    def advance_or_fail(self) -> bool:
        """The same as `advance`. An error is kept: the other ranks go on, as they would in a job of their own."""
        try:
            return self.advance()
        except Exception as error:
            self.error = error
            return True

    def advance(self) -> bool:
        """Run until a wait for a result that has not arrived, or the end; whether any node ran."""
        start = self._next
        while not self.ended:
            node = self._nodes[self._next]
            if node.target == self._transport.wait_tensor and not self._has_arrived(node.args[0]):
                break
            if hasattr(node.target, "rounds"):
                advanced, ended = self._run_loop(node)
                if not ended:
                    return advanced or self._next > start
            else:
                self._run(node)
            self._next += 1
        return self._next > start

    def _run_loop(self, node: fx.Node) -> tuple[bool, bool]:
        """Run a loop as far as it comes; whether any node ran, and whether it has ended."""
        if self._loop is None:
            operands = fx.map_arg(node.args, self._values.__getitem__)
            self._loop = _LoopRun(node.target, self._transport, operands)
        advanced = self._loop.advance()
        if not self._loop.ended:
            return advanced, False
        self._note(node, self._loop.result)
        self._loop = None
        return True, True

    def _has_arrived(self, node: fx.Node) -> bool:
        return self._transport.has_arrived(self._values[node])

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
            value = node.target(*args, **kwargs) if node.op == "call_function" else _call_method(node, args, kwargs)
        self._note(node, value)

    def _note(self, node: fx.Node, value: Any) -> None:
        self._values[node] = value
        for dead in self._dead_after.get(node, ()):
            del self._values[dead]


class _LoopRun:
    """One rank's run of a loop: a run of its body in each round. loop: a loop of a rank's code (`expand/loops`)."""

    def __init__(self, loop: Any, transport: Any, operands: Sequence[Any]) -> None:
        self._module, self._transport, self._rounds = loop.module, transport, loop.rounds(operands)
        self.result: Any = None
        self._round = self._next_round(None)

    @property
    def ended(self) -> bool:
        """Whether all rounds have run."""
        return self._round is None

    def advance(self) -> bool:
        """Run until a wait for a result that has not arrived, or the end; whether any node ran."""
        advanced = False
        while self._round is not None:
            advanced |= self._round.advance()
            if not self._round.ended:
                break
            self._round = self._next_round(self._round.result)
        return advanced

    def _next_round(self, outputs: Any) -> ProgramRun | None:
        """The run of the next round. outputs: of the one before; None for the first."""
        try:
            return ProgramRun(self._module, self._transport, self._rounds.send(outputs))
        except StopIteration as end:
            self.result = end.value
            return None


def _call_method(node: fx.Node, args: tuple, kwargs: dict) -> Any:
    if node.op != "call_method":
        raise AssertionError(f"a bound program has no {node.op} nodes, and here is {node}")
    return getattr(args[0], node.target)(*args[1:], **kwargs)


def _dead_after_each(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """For each node the values that no later node reads."""
    last: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        last.setdefault(node, node)
        for read in node.all_input_nodes:
            last[read] = node
    dead: dict[fx.Node, list[fx.Node]] = {}
    for value, reader in last.items():
        if reader.op != "output":
            dead.setdefault(reader, []).append(value)
    return dead


def run_together(
    runs: Sequence[ProgramRun], playing: Callable[[int], AbstractContextManager], deliver: Callable[[], bool]
) -> list[Any]:
    """Run the programs of all ranks as far as possible; return their results. If some raise, all others are run before
    the error of the first is raised.

    `playing(i)`: the context of the i-th rank. `deliver()`: exchanges complete posts; whether there were any.
    """
    with torch.no_grad():
        progress = True
        while progress:
            progress = False
            for i, run in enumerate(runs):
                with playing(i):
                    progress |= run.advance_or_fail()
            progress |= deliver()
    for run in runs:
        if run.error is not None:
            raise run.error
    return [run.result for run in runs]
