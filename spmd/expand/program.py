"""A program: what a single-device function becomes on a mesh, the same for all ranks.

It is an fx graph of local ops and moves. Each node carries its spec (`node.meta["spec"]`: a `Spec`, a tuple of them
for an op with several results, None for a number). Moves are still moves - a `Step` of a plan as the target -
and not chunks and waits; sizes that differ between ranks are `LocalShape`s. `bind` (`spmd.expand.bind`) turns it into
plain torch code for one rank.

    print(program)                what it does, with specs in the margin
    program.collectives           what it sends: kind, axis, bytes, modelled time
    program.comm_time()           modelled microseconds of all of it, one after the other
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from spmd import _torch
from spmd.mesh import DeviceMesh, MeshTopoInfo
from spmd.tensor.redistribute.bucket import Bucket
from spmd.tensor.redistribute.plan import Step
from spmd.tensor.spec import Spec

SAFE_LOCALLY = {
    torch.ops.aten.view.default: torch.ops.aten.reshape.default,
    torch.ops.aten._unsafe_view.default: torch.ops.aten.reshape.default,
}
"""Ops that look at strides, by those that do not: a move leaves a block contiguous, whatever the trace saw."""


@dataclass(frozen=True)
class LocalShape:
    """Stands in an argument list for the local shape of a spec, which a rank's coordinate decides."""

    spec: Spec

    def __repr__(self):
        return f"local({list(self.spec.shape)})" if not any(self.spec.dims) else f"local({self.spec})"


@dataclass(frozen=True)
class UnlessEmpty:
    """An op that refuses an empty block: ranks whose results are empty, which lie so, do not call it."""

    op: _torch.OpOverload
    outs: tuple[Spec, ...]

    @property
    def __name__(self) -> str:
        return f"unless_empty[{_target(self.op)}]"

    def __call__(self, *_: Any) -> Any:
        raise AssertionError("it is an op or nothing when the program is bound")


@dataclass(frozen=True)
class Collective:
    """One collective of a program. nbytes: what a rank hands to it; us: its modelled time; tensors: how many it moves.

    spec: how they lie before it; a tuple where they are several.
    """

    kind: str
    axis: str
    nbytes: int
    us: float
    tensors: int
    spec: Spec | tuple[Spec, ...]
    name: str

    def __str__(self):
        return f"{self.kind:<14} {self.axis:<6} {self.nbytes:>12,} bytes {self.us:>10.1f} us  {self._what()}"

    def _what(self) -> str:
        return f"{self.tensors} tensors" if isinstance(self.spec, tuple) else str(self.spec)


@dataclass(frozen=True)
class Program:
    """A graph of local ops and moves, with what goes in and what comes out.

    inputs: a (name, spec) per placeholder, spec None for a number. outputs: a (name, spec) per result. gathered:
    the ops that had to run on whole tensors because no rule is known, with the bytes they gather.
    """

    name: str
    mesh: DeviceMesh
    graph: fx.Graph
    constants: dict[str, torch.Tensor]
    inputs: tuple[tuple[str, Spec | None], ...]
    outputs: tuple[tuple[str, Spec | None], ...]
    gathered: tuple[tuple[str, int], ...] = ()

    def steps(self) -> Iterator[tuple[fx.Node, Step | Bucket]]:
        """The moves with their nodes, in order."""
        for node in self.graph.nodes:
            if isinstance(node.target, (Step, Bucket)):
                yield node, node.target

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """What is sent, in order."""
        return tuple(
            Collective(
                s.kind, ",".join(map(self.mesh.axis_name, s.axes)), s.nbytes, s.cost, s.tensors, s.before, node.name
            )
            for node, s in self.steps()
            if s.sends
        )

    def comm_time(self, topology: MeshTopoInfo | None = None) -> float:
        """Modelled microseconds of all collectives, one after the other, under the mesh's links or other ones."""
        if topology is None:
            return sum(c.us for c in self.collectives)
        return sum(s.priced(topology) for _, s in self.steps() if s.sends)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the text: equal on all ranks, or they are not running one program."""
        return hashlib.sha256(str(self).encode()).hexdigest()

    def __str__(self):
        return "\n".join(_lines(self))

    def __repr__(self):
        return f"<Program {self.name}: {len(self.graph.nodes)} nodes, {len(self.collectives)} collectives>"


# ---- printing ---------------------------------------------------------------------------------

MARGIN = 72


def _lines(program: Program) -> Iterator[str]:
    placeholders = [n for n in program.graph.nodes if n.op == "placeholder"]
    names = {n: f"{n.name}" for n in program.graph.nodes}
    yield f"def {program.name}("
    for node, (name, spec) in zip(placeholders, program.inputs, strict=True):
        yield _margin(f"    {names[node]},", f"{spec or 'number'}   {name}")
    yield "):"
    for node in program.graph.nodes:
        if node.op == "output":
            yield "    return ("
            for value, (name, spec) in zip(node.args[0], program.outputs, strict=True):
                yield _margin(f"        {value},", f"{spec or 'number'}   {name}")
            yield "    )"
        elif node.op != "placeholder":
            yield _margin(f"    {node.name} = {_expression(program, node)}", _note(node))


def _margin(code: str, note: str) -> str:
    return f"{code:<{MARGIN}}  # {note}" if note else code


def _note(node: fx.Node) -> str:
    spec = node.meta.get("spec")
    if isinstance(node.target, Bucket):
        text = f"{node.target.tensors} tensors"
    else:
        text = ", ".join(map(str, spec)) if isinstance(spec, tuple) else str(spec) if spec else ""
    if isinstance(node.target, (Step, Bucket)) and node.target.sends:
        text += f"   {node.target.nbytes:,} bytes, {node.target.cost:.1f} us"
    return text


def _expression(program: Program, node: fx.Node) -> str:
    if node.op == "get_attr":
        return f"constant({_constant(program.constants[node.target])})"
    if isinstance(node.target, (Step, Bucket)):
        return node.target.show(program.mesh, _value(node.args[0]))
    if getattr(node.target, "__name__", "") == "getitem":
        return f"{node.args[0]}[{node.args[1]}]"
    args = [*map(_value, node.args), *(f"{k}={_value(v)}" for k, v in node.kwargs.items())]
    return f"{_target(node.target)}({', '.join(args)})"


def _constant(value: torch.Tensor) -> str:
    """Its numbers where they are few, else a hash of them: part of what ranks compare."""
    if value.numel() <= 8:
        return str(value.tolist())
    return f"<{hashlib.sha256(str(value.tolist()).encode()).hexdigest()[:16]}>"


def _target(target: Any) -> str:
    if isinstance(target, _torch.OpOverload):
        name = str(target)
        return name.removesuffix(".default")
    return getattr(target, "__name__", str(target))


def _value(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value, value))}]"
    return str(value) if isinstance(value, (fx.Node, torch.dtype, torch.device)) else repr(value)
