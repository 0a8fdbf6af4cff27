"""Where a program gathers what is stored in shards, and where it reduces gradients: by structure, for tests of places.

    standing(program)["up.weight"]     Standing(gathers=("forward", "backward"), reductions=("reduce_scatter",))

Nothing here knows the names of ops. What is made of a parameter alone follows it; a move says for which op of the
captured graph it was written; and the capture says which pass made an op, and which values are gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from spmd import Program, _torch
from spmd.expand.nodes import SOURCE
from spmd.expand.places.roles import phase_of
from spmd.tensor.redistribute.plan import Step

KEPT = "kept"


@dataclass(frozen=True)
class Standing:
    """What is sent for one parameter, in order.

    gathers: for each gather, the passes that read what it gives, joined by a plus; `KEPT` for a new value that the step
    leaves. reductions: the kinds of the moves that end its gradient's sums. read_by: the passes that compute with it.
    misplaced: moves that something else was computed before or behind: a gather stands right before its first reader,
    a reduction, and the gather of a new value, right behind what made it.
    """

    gathers: tuple[str, ...] = ()
    reductions: tuple[str, ...] = ()
    read_by: tuple[str, ...] = ()
    misplaced: tuple[str, ...] = ()


def standing(program: Program) -> dict[str, Standing]:
    """Where the moves of each parameter stand, by its path in the model."""
    look = _Look(program)
    return {path.removeprefix("model."): look.of(path) for path in program.places}


class _Look:
    """A program beside the graph that was captured. at: the position of each node."""

    def __init__(self, program: Program) -> None:
        self.nodes = list(program.graph.nodes)
        self.at = {n: i for i, n in enumerate(self.nodes)}
        self.captured, self.roles = program.reasons.given.graph, program.reasons.given.roles
        self.by_name = {n.name: n for n in self.captured.nodes}
        self.given = {name: n for n, (name, _) in zip(self.nodes, program.inputs, strict=False)}
        left = program.graph.output_node().args[0]
        self.left = {name: n for n, (name, _) in zip(left, program.outputs, strict=True)}

    def of(self, path: str) -> Standing:
        gathers = list(self._gathers(self.given[path]))
        gradients = set(self.roles.gradients.get(path, ()))
        reductions = [n for n in self._steps() if self._written_for(n) in gradients and n.target.before.partial]
        new = [n for n in (self.left.get(path),) if isinstance(n, fx.Node) and _grows(n)]
        misplaced = [n for n in gathers if not self._is_right_before_reader(n)]
        misplaced += [n for n in reductions if not self._is_right_behind(n)]
        return Standing(
            tuple([self._passes(n) for n in gathers] + [KEPT] * len(new)),
            tuple(n.target.kind for n in reductions), self._read_by(path), tuple(n.name for n in misplaced),
        )  # fmt: skip

    # ---- gathers --------------------------------------------------------------------------------
    def _gathers(self, parameter: fx.Node) -> Iterator[fx.Node]:
        """The moves that make more of a parameter, or of what follows from it alone."""
        follows = {parameter}
        for node in self.nodes[self.at[parameter] + 1 :]:
            if node.op == "call_function" and node.all_input_nodes and follows.issuperset(node.all_input_nodes):
                follows.add(node)
                if _grows(node):
                    yield node

    def _passes(self, move: fx.Node) -> str:
        readers = sorted(set(_readers(move)), key=self.at.__getitem__)
        return "+".join(dict.fromkeys([self._pass(self.by_name[n.meta[SOURCE]]) for n in readers]))

    def _is_right_before_reader(self, move: fx.Node) -> bool:
        first = min([self.at[n] for n in _readers(move)])
        return all(map(_computes_nothing, self.nodes[self.at[move] + 1 : first]))

    # ---- gradients ------------------------------------------------------------------------------
    def _steps(self) -> Iterator[fx.Node]:
        return (n for n in self.nodes if isinstance(n.target, Step))

    def _written_for(self, move: fx.Node) -> fx.Node | None:
        return self.by_name.get(move.meta.get(SOURCE))

    def _is_right_behind(self, move: fx.Node) -> bool:
        (source,) = move.all_input_nodes
        return all(map(_computes_nothing, self.nodes[self.at[source] + 1 : self.at[move]]))

    # ---- the captured graph ---------------------------------------------------------------------
    def _read_by(self, path: str) -> tuple[str, ...]:
        (parameter,) = [n for n, name in self.roles.parameters.items() if name == path and n.op == "placeholder"]
        readers = [n for n in _readers(parameter) if n in self.roles.compute]
        return tuple(dict.fromkeys([self._pass(n) for n in self.captured.nodes if n in readers]))

    def _pass(self, captured: fx.Node) -> str:
        """The first forward and the first backward have no number; further ones have."""
        number, name = divmod(phase_of(captured), 2)
        return ("forward", "backward")[name] + (f" {number + 1}" if number else "")


def _readers(value: fx.Node) -> Iterator[fx.Node]:
    """Who computes with a value, or a view of it; the output of a graph does not."""
    for user in value.users:
        if _computes_nothing(user):
            yield from _readers(user)
        elif user.op != "output":
            yield user


def _computes_nothing(node: fx.Node) -> bool:
    """Whether a node sends, is a view, or takes one of several results."""
    if isinstance(node.target, _torch.OpOverload):
        return _torch.is_view(node.target)
    return isinstance(node.target, Step) or node.target is operator.getitem


def _grows(node: fx.Node) -> bool:
    """Whether a node is a move after which a rank has more."""
    return isinstance(node.target, Step) and node.target.after.local_nbytes > node.target.before.local_nbytes
