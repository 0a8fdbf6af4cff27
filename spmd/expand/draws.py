"""The random numbers of a captured step: each draw has a number, and draws that are made again have the same.

    dropout(x), checkpoint(block)      draws 0 and 1; in the backward pass the block draws number 1 again

A program's random numbers are those of `spmd.manual_seed`, in order. While a step is captured, torch's generator
carries the number of the next draw, as it does for DTensors (`spmd.tensor.recipes.stream`). So an activation checkpoint
that sets the generator back sets the numbers back.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from spmd import _torch
from spmd.expand.user_code import at_user_line, current_frames
from spmd.tensor.call import Call
from spmd.tensor.recipes import stream
from spmd.tensor.recipes.random import Draw
from spmd.tensor.rules.decompositions import decompositions
from spmd.tensor.rules.random_ops import RANDOM_FILLS


@dataclass(frozen=True)
class Draws:
    """The input of the graph for random numbers: the seed and the number of the first draw. count: how many draws."""

    count: int

    def __str__(self):
        return f"random numbers, {self.count} draws"


@dataclass
class Numbering:
    """The numbers of the draws of one capture. drawn: how many there were. seen: the last node that was looked at."""

    drawn: int = 0
    seen: fx.Node | None = field(default=None, repr=False)

    @contextmanager
    def drawing(self, op: Any, args: tuple, kwargs: dict[str, Any]) -> Iterator[None]:
        """Around each op of the step: what it draws is numbered."""
        if Call(op, args, kwargs, ()).draws:
            _check(op, kwargs)
        elif torch.Tag.nondeterministic_seeded not in op.tags:
            yield
            return
        nodes = _torch.proxy_mode().tracer.graph.nodes
        last = next(iter(reversed(nodes)), None)
        yield
        for node in _after(nodes, last):
            if node.target in RANDOM_FILLS:
                node.meta["draw"] = self.next(op)

    def next(self, op: Any) -> int:
        """The number of the next draw, which is made by this op."""
        number = stream.next_in_trace()
        if number is None:
            _refuse(
                op, "draws after the step has seeded torch's generator, so that each call draws the same numbers; make "
                "them before the step and pass them as an argument or keep them in a buffer, or seed outside the step"
            )  # fmt: skip
        if number >= self.drawn and _torch.in_backward():
            _refuse(
                op, "draws in a backward pass, where activation checkpointing would compute with other numbers than "
                "the forward pass did; leave checkpoint's preserve_rng_state on"
            )  # fmt: skip
        self.drawn = max(self.drawn, number + 1)
        return number


def is_taken_apart(op: Any) -> bool:
    """Whether an op that may draw is to be traced as other ops. Autograd does that, but not in inference mode."""
    may_draw = torch.Tag.nondeterministic_seeded in op.tags
    return may_draw and not _has_number(op) and _torch.is_composite(op)


def _has_number(op: Any) -> bool:
    """Whether what an op draws can be numbered: it fills a tensor, or is decomposed into ops that do."""
    return op in RANDOM_FILLS or op in decompositions


def _after(nodes: Any, last: fx.Node | None) -> list[fx.Node]:
    found = []
    for node in reversed(nodes):
        if node is last:
            break
        found.append(node)
    return found[::-1]


def _check(op: Any, kwargs: dict[str, Any]) -> None:
    """Refuse a draw that cannot be numbered."""
    if kwargs.get("generator") is not None:
        _refuse(op, "draws from a generator of its own, which would be frozen; use spmd.manual_seed, or draw outside")
    if not _has_number(op):
        _refuse(op, "draws in its kernel, which is not supported in a compiled step; use uniform_, normal_ or dropout")


def _refuse(op: Any, why: str) -> None:
    raise NotImplementedError(f"{op}: {why}{at_user_line(current_frames())}")


def number_draws(graph: fx.Graph) -> tuple[Draws, ...]:
    """Make the drawing nodes of a graph draw by number. An input has the number of the first one of a call.

    Draws that nothing reads are gone and have no number.
    """
    drawing = [n for n in graph.nodes if n.target in RANDOM_FILLS]
    if not drawing:
        return ()
    place = {number: i for i, number in enumerate(sorted({n.meta["draw"] for n in drawing}))}
    last = [n for n in graph.nodes if n.op == "placeholder"][-1:]
    with graph.inserting_after(last[0]) if last else graph.inserting_before(next(iter(graph.nodes))):
        rng = graph.placeholder("rng")
    for node in drawing:
        node.args = (node.args[0], rng, *node.args[1:])
        node.kwargs = {name: x for name, x in node.kwargs.items() if name != "generator"}
        node.target = Draw(node.target, place[node.meta["draw"]])
    return (Draws(len(place)),)
