"""The bodies of a program's loops, rewritten."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from torch import fx

from spmd.expand.loops.loop import Loop

T = TypeVar("T")


def with_bodies(program: T, rewrite: Callable[[T], T]) -> T:
    """A program whose loops have the bodies that a function makes of theirs. Its graph is changed."""
    for node in program.graph.nodes:
        if isinstance(node.target, Loop):
            node.target = replace(node.target, body=rewrite(node.target.body))
    return program


def has_loops(graph: fx.Graph) -> bool:
    """Whether a node of a graph is a loop."""
    return any(isinstance(node.target, Loop) for node in graph.nodes)
