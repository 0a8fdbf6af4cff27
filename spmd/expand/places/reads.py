"""Where each reader of a parameter reads it, while a program is written.

    w: stored f32[64@dp, 16], computed f32[64, 16]

    t = aten.t(w); mm(x, t)          reads it where it is computed with: gathered once for all readers of a forward
    mm(g, t)                         the same in the backward, gathered again; the view is made again, too
    _to_copy(w, bf16)                the shard is cast, and what is gathered is the result
    add(w, update)                   reads it where its state is

A value that is computed from one parameter alone follows the parameter. A view of it is written where a reader needs
it, from what this reader reads. Arithmetic that runs on the shards runs there, and its result is stored as the
parameter is. A reduction of it, such as a norm, is made of the shards, too: that leaves little to send.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Protocol

from torch import fx

from spmd import _torch
from spmd.expand.places.places import Places
from spmd.expand.places.roles import Roles, phase_of
from spmd.tensor.lower import Lowering
from spmd.tensor.redistribute.plan import Plan, plan

STORED, COMPUTED, STATE = "stored", "computed", "state"
"""At which of its places a parameter is read."""

PARAMETER = "parameter"
"""In the metadata of a node of a program: the path of the parameter whose value it is."""


class Writer(Protocol):
    """What this needs of the expander. local: the value of each node of the captured graph. moved_anew: the values of
    the program that are moved in each phase anew."""

    local: dict[fx.Node, fx.Node]
    moved_anew: set[fx.Node]

    def call(self, node: fx.Node) -> None:
        """Write a node. It reads of its operands what they have in `local`."""

    def move_to_final_spec(self, node: fx.Node) -> None:
        """Move a value that was written to where all its readers meet it."""

    def lowering(self, node: fx.Node, specs: Mapping[fx.Node, Any]) -> Lowering:
        """How the node would be lowered, if its operands had these specs."""

    def move(self, value: fx.Node, moves: Plan, phase: int | None = None) -> fx.Node:
        """The value after these moves, which are written once in a phase."""


@dataclass
class Reads:
    """The values that follow parameters, and what was written for their readers.

    places: of parameters and of their new values. chosen: whether readers move a parameter from where it is stored to
    where a choice for the program wants it, in each phase anew, and not by way of the place that it is computed in.
    operand: for each value that follows a parameter, the operand that it follows it by; itself for a parameter. roots:
    values that exist as they are stored, parameters and arithmetic on them, with their nodes in the program. All others
    are views. made: by value, place and phase.
    """

    writer: Writer
    roles: Roles
    places: Mapping[fx.Node, Places]
    chosen: bool = False
    operand: dict[fx.Node, fx.Node] = field(default_factory=dict)
    roots: dict[fx.Node, fx.Node] = field(default_factory=dict)
    made: dict[tuple, fx.Node] = field(default_factory=dict)

    def begin(self, node: fx.Node) -> None:
        """Follow a parameter, or its new value, if it is computed with or updated elsewhere than it is stored."""
        if node in self.places and not self.places[node].is_one:
            self.operand[node], self.roots[node] = node, self.writer.local[node]
            self.roots[node].meta[PARAMETER] = self.roles.parameters[node]
            self._moves_anew(node)

    def write(self, node: fx.Node) -> bool:
        """Let a node read its operands where it has to. Returns whether it is written, or will be when it is read."""
        operands = [n for n in node.all_input_nodes if n in self.operand] if self.operand else ()
        if not operands:
            return False
        if node not in self.roles.compute:
            self._read(operands, STATE, node)
        elif len(operands) > 1 or not _is_alone(node, operands[0]):
            self._read(operands, COMPUTED, node)
        elif _is_view(node):
            self.operand[node] = operands[0]
            return True
        elif self._is_on_shards(node, operands[0]):
            self._read(operands, STORED, node)
            self.writer.call(node)
            self.operand[node], self.roots[node] = operands[0], self.writer.local[node]
            self._moves_anew(node)
            return True
        else:
            self._read(operands, STORED if _shrinks(node, operands[0]) else COMPUTED, node)
        return False

    def give(self, node: fx.Node) -> None:
        """Let a loop read its operands: its body moves the parameters, as they are stored, to where it computes."""
        operands = [n for n in node.all_input_nodes if n in self.operand]
        self._read([n for n in operands if n in self.places], STORED, node)
        self._read([n for n in operands if n not in self.places], COMPUTED, node)

    def end(self, output: fx.Node) -> None:
        """Let the output of the graph read what is stored."""
        self._read([n for n in output.all_input_nodes if n in self.operand], STORED, output)

    # ---- reading --------------------------------------------------------------------------------
    def _read(self, operands: Sequence[fx.Node], place: str, reader: fx.Node) -> None:
        for n in operands:
            self.writer.local[n] = self._at(n, place, phase_of(reader))

    def _at(self, n: fx.Node, place: str, phase: int) -> fx.Node:
        """The value of n at a place. What is gathered to compute with is gathered anew in each phase."""
        key = n, place, phase if place == COMPUTED else None
        if key not in self.made:
            self.made[key] = self._moved(n, place, key[-1]) if n in self.roots else self._viewed(n, place, phase)
        return self.made[key]

    def _moved(self, n: fx.Node, place: str, phase: int | None) -> fx.Node:
        value, layout = self.roots[n], self._layout(n, place)
        spec = value.meta["spec"]
        return self.writer.move(value, plan(spec, spec.with_layout(layout.dims, layout.units)), phase)

    def _viewed(self, n: fx.Node, place: str, phase: int) -> fx.Node:
        source = self.operand[n]
        self.writer.local[source] = self._at(source, place, phase)
        self.writer.call(n)
        self.writer.move_to_final_spec(n)
        return self.writer.local[n]

    def _moves_anew(self, n: fx.Node) -> None:
        """Let what moves a stored value be written once in each phase."""
        if self.chosen:
            self.writer.moved_anew.add(self.roots[n])

    # ---- layouts --------------------------------------------------------------------------------
    def _layout(self, n: fx.Node, place: str) -> Any:
        """The spec of n at a place; of a view with several results, the specs of all."""
        source = self.operand[n]
        if source is n:
            stays = place == STORED or (place == COMPUTED and self.chosen)
            found = None if stays else getattr(self.places[n], place)
            return self.roots[n].meta["spec"] if found is None else found
        if n in self.roots:  # arithmetic: laid out as its operand
            return self._layout(source, place)
        above = self._layout(source, place)
        if isinstance(above, tuple):
            return above[n.args[1]]
        outs = self.writer.lowering(n, {source: above}).outs
        return outs if _has_many(n) else outs[0]

    def _is_on_shards(self, node: fx.Node, operand: fx.Node) -> bool:
        """Whether an op runs on the shards of its operand, and leaves a tensor of this shape that is sharded alike."""
        spec = self._layout(operand, STORED)
        if not isinstance(node.target, _torch.OpOverload) or _has_many(node) or node.meta["val"].shape != spec.shape:
            return False
        lowering = self.writer.lowering(node, {operand: spec})
        moves = any(p.steps for p in lowering.plans)
        return not moves and lowering.local is None and lowering.outs[0].same_layout(spec)


def phases_of_reading(node: fx.Node) -> tuple[int, ...]:
    """The phases in which a reader of a parameter is written: its own, or for a view those of the view's readers."""
    if not _is_view(node) or len(node.all_input_nodes) > 1:
        return (phase_of(node),)
    return tuple(sorted({phase for user in node.users for phase in phases_of_reading(user)}))


def _is_alone(node: fx.Node, operand: fx.Node) -> bool:
    """Whether all other operands of a node are numbers, or tensors of one number."""
    return all(_size(n) == 1 for n in node.all_input_nodes if n is not operand)


def _is_view(node: fx.Node) -> bool:
    """Whether a node shows what its operand has: all of it, a part, or one of several parts."""
    is_op = isinstance(node.target, _torch.OpOverload)
    return _torch.is_view(node.target) if is_op else node.target is operator.getitem


def _shrinks(node: fx.Node, operand: fx.Node) -> bool:
    return not _has_many(node) and _size(node) < _size(operand)


def _has_many(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (tuple, list))


def _size(node: fx.Node) -> int:
    """How many elements a value has; 1 for a number."""
    shape = getattr(node.meta.get("val"), "shape", ())
    return prod(shape)
