"""A program with the rounds of its loops one behind the other, as they run."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from torch import fx

from spmd import _torch
from spmd.expand.loops.bodies import has_loops
from spmd.expand.loops.loop import Loop
from spmd.expand.nodes import copied

T = TypeVar("T")


def unrolled(program: T) -> T:
    """The same program without loops; itself where it has none."""
    if not has_loops(program.graph):
        return program
    new = _torch.new_graph()
    copies: dict[fx.Node, fx.Node] = {}
    results: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for node in program.graph.nodes:
        if node.op == "output":
            new.output(fx.map_arg(node.args[0], copies.__getitem__)).meta.update(node.meta)
        elif isinstance(node.target, Loop):
            body, operands = node.target.body.graph, [copies[n] for n in node.args]
            results[node] = node.target.run(functools.partial(_round, new, body), operands)
        elif node.target is operator.getitem and node.args[0] in results:
            copies[node] = results[node.args[0]][node.args[1]]
        else:
            copies[node] = copied(new, node, copies.__getitem__)
    return replace(program, graph=new)


def _round(new: fx.Graph, body: fx.Graph, inputs: list[fx.Node]) -> list[fx.Node]:
    """Write a round. Returns its outputs."""
    given = iter(inputs)
    copies: Mapping[fx.Node, fx.Node] = {}
    for node in body.nodes:
        if node.op == "output":
            return [copies[n] for n in node.args[0]]
        copies[node] = next(given) if node.op == "placeholder" else copied(new, node, copies.__getitem__)
    return []
