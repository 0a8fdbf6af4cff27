"""Room for the passes over the body of a loop.

A pass may let a body need as much memory as the program needs elsewhere: in its update, say, or while the last round
runs beside what was reduced.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import fx

from spmd.expand.loops.loop import Loop
from spmd.expand.timeline.alive import alive_until
from spmd.expand.timeline.prices import Prices
from spmd.expand.timeline.work import Reader, made
from spmd.tensor.redistribute.collective_moves import AllGather, Exchange, ReduceScatter

if TYPE_CHECKING:
    from spmd.expand.program import Program

ASKS = {AllGather.kind, ReduceScatter.kind, Exchange.kind}
"""Moves for whose buckets memory is asked."""


def with_room(program: Program) -> Program:
    """A program whose bodies know how many bytes they may need more than they do. Its graph is changed."""
    loops = [node for node in program.graph.nodes if isinstance(node.target, Loop) and _asks(node.target.body)]
    if not loops:
        return program
    reader, most = Reader(program), alive_until(program, loops).most
    held = reader.held(reader.read(Prices(program.mesh)))
    for node in loops:
        around = held + _alive_at(node, reader)
        spare = max(0, most - around - node.target.body.beside_inputs)
        node.target = replace(node.target, body=replace(node.target.body, spare=spare))
    return program


def _asks(body: Program) -> bool:
    return any(step.kind in ASKS for _, step in body.steps())


def _alive_at(loop: fx.Node, reader: Reader) -> int:
    """The bytes of what was made before a loop and is read by it or later. What was sent has arrived when it begins."""
    at, places = reader.places[loop], reader.places
    before = (n for n, i in places.items() if i < at and n.op.startswith("call"))
    read = {reader.shows[n]: None for n in before if any(places[user] >= at for user in n.users)}
    return sum([made(n) for n in read if n.op.startswith("call")])
