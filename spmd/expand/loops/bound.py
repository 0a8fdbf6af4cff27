"""A loop in a rank's code: it calls the code of its body once a round.

    loop = bound_loop(w, clone, batch_1, batch_2)     clone: the first value of what the body writes into
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any

from torch import fx

from spmd.expand.function import Function
from spmd.expand.loops.loop import Loop
from spmd.expand.passes.aliasing import memories, written_into
from spmd.expand.verify_bound import written_by


@dataclass(frozen=True, eq=False)
class BoundLoop:
    """Runs a body with the operands of a loop. loop: what its operands and results are. module: the code of the body.
    kept: instead, the text of its code.
    """

    loop: Loop
    module: fx.GraphModule | None = None
    kept: Function | None = None
    __name__: str = field(default="loop", init=False)

    def __call__(self, *operands: Any) -> tuple:
        return self.loop.run(lambda inputs: self.function(*inputs), operands)

    @cached_property
    def function(self) -> Callable[..., Sequence[Any]]:
        """What is called in each round."""
        return self.code.made("the body of a loop")

    @cached_property
    def code(self) -> Function:
        """The code of the body as a function."""
        return Function.of(self.module) if self.kept is None else self.kept

    def rounds(self, operands: Sequence[Any]) -> Generator[list[Any], Sequence[Any], tuple]:
        """As those of the loop: for who runs bodies step by step."""
        return self.loop.rounds(operands)

    @cached_property
    def overwritten(self) -> tuple[int, ...]:
        """The operands, by their places, that a caller must not have in memory that others read: carried values that
        the body writes into, or gives back in the memory in which they came."""
        first, graph, places = self.loop.invariants, self.module.graph, self._tensors
        found, values = memories(graph), [n for n in graph.output_node().args[0] if isinstance(n, fx.Node)]
        bases = {found[n].base for n in (*chain.from_iterable(map(written_by, graph.nodes)), *values)}
        return tuple([i for n, i in places.items() if n in bases and first <= i < first + self.loop.carried])

    @cached_property
    def _tensors(self) -> dict[fx.Node, int]:
        """The inputs of the body that are tensors, with their places. A number has no memory."""
        inputs = enumerate(self.module.graph.find_nodes(op="placeholder"))
        return {n: i for i, n in inputs if n.meta.get("spec") is not None}

    @cached_property
    def given_back(self) -> dict[int, int]:
        """The results, by their places, that are what an operand was, in its memory: carried values into which the body
        writes the next ones. With the places of these operands."""
        first, values = self.loop.invariants, self.module.graph.output_node().args[0][: self.loop.carried]
        into = {i: written_into(value) for i, value in enumerate(values) if isinstance(value, fx.Node)}
        return {i: first + i for i, node in into.items() if self._tensors.get(node) == first + i}
