"""Programs: a single-device function expanded for a mesh, the same for all ranks.

    print(program)                the program as code, with specs in the margin
    program.collectives           the collectives it sends: kind, axis, bytes, modelled time
    program.comm_time()           modelled microseconds of all collectives, one after the other
    program.timeline()            when a rank computes and sends what: step time, exposed communication, a bound
    program.memory()              what a rank needs at most, when, and what is alive then
    program.verify()              raises if a value does not follow from its operands (after each pass)

A program is an fx graph of local ops and moves. Each node has its spec in `node.meta["spec"]`: a `Spec`, a tuple of
specs for an op with several results, None for a number. A move is one node with a `Step` of a plan as its target. It is
not yet written as chunks and waits. A size that differs between ranks is a `LocalShape`, a number of indices a
`LocalCount`. `spmd.expand.bind` turns a program into plain torch code for one rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import fx

from spmd.comm import C10dTransport
from spmd.expand.choose.certificate import Certificate
from spmd.expand.code import code_for
from spmd.expand.constraints import PINNED
from spmd.expand.local_map import LocalMapGradientOp, LocalMapOp
from spmd.expand.local_ops import op_text
from spmd.expand.loops.loop import Loop
from spmd.expand.memory import Memory, memory_of_run
from spmd.expand.passes.report import Report
from spmd.expand.places.places import Places
from spmd.expand.sent_by_blocks import sent_by
from spmd.expand.timeline.alive import most_beside_inputs
from spmd.expand.timeline.timeline import Timeline, timeline_of
from spmd.expand.timeline.work import Work, given_back
from spmd.expand.verify import verify_graph
from spmd.mesh import DeviceMesh, MeshTopoInfo, as_rank
from spmd.tensor.redistribute.bucket import Bucket
from spmd.tensor.redistribute.plan import Step
from spmd.tensor.spec import Spec

if TYPE_CHECKING:
    from spmd.expand.explain.explanation import Explanation


class Reasons(Protocol):
    """What a program was made of, to explain it by."""

    def explain(self, of: str) -> Explanation:
        """As `Program.explain`."""


@dataclass(frozen=True)
class Collective:
    """One collective of a program.

    nbytes: the bytes that a rank puts in. us: its modelled time. tensors: how many tensors it moves. spec: the spec
    before it; a tuple for several tensors; None for one that a function of blocks sends. name: of its node.
    """

    kind: str
    axis: str
    nbytes: int
    us: float
    tensors: int
    spec: Spec | tuple[Spec, ...] | None
    name: str

    def __str__(self):
        return f"{self.kind:<14} {self.axis:<6} {self.nbytes:>12,} bytes {self.us:>10.1f} us  {self._spec_text()}"

    def _spec_text(self) -> str:
        if self.spec is None:
            return f"in {self.name}"
        return f"{self.tensors} tensors" if isinstance(self.spec, tuple) else str(self.spec)


@dataclass(frozen=True)
class Program:
    """A graph of local ops and moves, with the names and specs of its inputs and outputs.

    inputs: a (name, spec) for each placeholder; the spec of a number is None. outputs: a (name, spec) for each result.
    gathered: the ops whose work the ranks of an axis do not share, though they shared an operand: no rule knows how, or
    a cheaper row would leave all to one. With each the bytes, whole, of the operands that are gathered for it. What is
    gathered for an op whose work is shared - a weight, the matrix that `inv` solves for rows - is in `collectives`.
    places: of the parameters, by name. certificate: how good the placements are, where they were chosen together.
    owed: the results whose reductions the user has asked to leave. kinds: for each input what it is: parameter, buffer,
    grad, optimizer, hyper, argument, or draws (where random numbers begin). spare: bytes that passes may let it need
    more: of the body of a loop, what the whole program needs elsewhere. reasons: for `explain`. reports: what each pass
    did.
    """

    name: str
    mesh: DeviceMesh
    graph: fx.Graph
    constants: dict[str, torch.Tensor]
    inputs: tuple[tuple[str, Spec | None], ...]
    outputs: tuple[tuple[str, Spec | None], ...]
    gathered: tuple[tuple[str, int], ...] = ()
    places: Mapping[str, Places] = field(default_factory=dict)
    certificate: Certificate | None = None
    owed: frozenset[str] = frozenset()
    kinds: tuple[str, ...] = ()
    spare: int = field(default=0, compare=False, repr=False)
    reasons: Reasons | None = field(default=None, compare=False, repr=False)
    reports: tuple[Report, ...] = field(default=(), compare=False, repr=False)

    def explain(self, of: str) -> Explanation:
        """Why a part of the program is as it is: what runs there and how, what it costs, and what else there could be.

        of: the path of a module or the name of a parameter, or a pattern of them ("blocks.*.mlp.up"); a line of the
        step's code ("model.py:31"); or a piece of such a line ("self.up(").

        What else a value could be is tried: a program is made for each of its other layouts, which takes as long as it
        takes to choose placements. The result is a value that prints.

        ValueError for a name that nothing in the step has, and for a program that was loaded, which has no reasons.
        """
        if self.reasons is None:
            raise ValueError(
                "explain: this program was loaded, and what is kept of a program has no reasons; compile it anew, with "
                "no cache"
            )
        return self.reasons.explain(of)

    def steps(self) -> Iterator[tuple[fx.Node, Step | Bucket]]:
        """The moves with their nodes, in order."""
        for node in self.graph.nodes:
            if isinstance(node.target, (Step, Bucket)):
                yield node, node.target

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """The collectives that the program sends, in order: its moves, and what functions of blocks send.

        The latter are those of the first rank, whose blocks are the largest; where sizes depend on data, the most that
        it may send. To find them their code is traced once.
        """
        return tuple(found for node in self.graph.nodes for found in self._sent_by(node))

    @cached_property
    def moved(self) -> tuple[Collective, ...]:
        """The collectives that are moves, which passes see: all but those that functions of blocks send."""
        loops = (node for node in self.graph.nodes if isinstance(node.target, Loop))
        in_loops = tuple(found for node in loops for found in node.target.body.moved * node.target.times)
        return tuple(found for node, _ in self.steps() for found in self._sent_by(node)) + in_loops

    def _sent_by(self, node: fx.Node) -> tuple[Collective, ...]:
        step = node.target
        if isinstance(step, Loop):
            return step.body.collectives * step.times
        if isinstance(step, (Step, Bucket)):
            at, said = self.axes_text(step.axes), (step.nbytes, step.cost, step.tensors, step.before)
            return (Collective(step.kind, at, *said, node.name),) if step.sends else ()
        if not isinstance(step, (LocalMapOp, LocalMapGradientOp)):
            return ()
        return tuple(
            Collective(s.kind, self.axes_text(s.axes), s.nbytes, s.us(self.mesh.topology), s.tensors, None, node.name)
            for s in sent_by(step)
        )

    def axes_text(self, axes: Iterable[int]) -> str:
        """The names of some axes of the mesh."""
        return ",".join(map(self.mesh.axis_name, axes))

    def comm_time(self, topology: MeshTopoInfo | None = None) -> float:
        """Modelled microseconds of all collectives, one after the other, on the mesh's topology or on another one."""
        if topology is None:
            return sum(c.us for c in self.collectives)
        blocks = [n.target for n in self.graph.nodes if isinstance(n.target, (LocalMapOp, LocalMapGradientOp))]
        loops = [n.target for n in self.graph.nodes if isinstance(n.target, Loop)]
        moved = sum(s.priced(topology) for _, s in self.steps() if s.sends)
        in_loops = sum(loop.times * loop.body.comm_time(topology) for loop in loops)
        return moved + in_loops + sum(s.us(topology) for op in blocks for s in sent_by(op))

    @cached_property
    def work(self) -> Work:
        """Its nodes as tasks, which can be replayed."""
        return Work.of(self)

    @cached_property
    def beside_inputs(self) -> int:
        """The most bytes that are alive while it runs, beside its inputs."""
        return most_beside_inputs(self)

    @cached_property
    def given_back(self) -> tuple[int, ...]:
        """Of the body of a loop: the outputs that are in the memory of inputs."""
        return given_back(self)

    def timeline(self, topology: MeshTopoInfo | None = None) -> Timeline:
        """When the rank with the largest blocks computes, sends and waits, modelled on the mesh's topology or another.

        Nothing is run, and no process group is needed.
        """
        return timeline_of(self, topology)

    def memory(self, coordinate: tuple[int, ...] | None = None) -> Memory:
        """The memory that the rank at the coordinate needs while it runs the program, with what is alive at its peak.

        The default is the first rank, which has the largest blocks. No process group is needed.
        """
        at = coordinate or (0,) * self.mesh.ndim
        with as_rank(self.mesh.rank_at(at)):
            code = code_for(self, at, C10dTransport())
        inputs = [(name, kind) for (name, _), kind in zip(self.inputs, self.kinds, strict=True)]
        apart = self.mesh.topology.machine.host is not None
        return memory_of_run(code.module, at, torch.device(self.mesh.device_type), inputs, apart)

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the text. If it differs between ranks, they do not run the same program."""
        return hashlib.sha256(str(self).encode()).hexdigest()

    def verify(self, ask_torch: bool = True) -> Program:
        """The program itself, if each value in it follows from its operands; else a `ProgramFault` is raised.

        A pass over programs may be followed by it: `my_pass(program).verify()`. A compiled step does so. ask_torch: see
        `spmd.expand.verify`.
        """
        verify_graph(self.graph, self.constants, self.inputs, self.outputs, self.owed, ask_torch)
        return self

    def __str__(self):
        return "\n".join(_lines(self))

    def __repr__(self):
        return f"<Program {self.name}: {len(self.graph.nodes)} nodes, {len(self.moved)} collectives>"


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
        elif isinstance(node.target, Loop):
            yield from _loop_lines(program, node)
        elif node.op != "placeholder":
            yield _margin(f"    {node.name} = {_code(program, node)}", _margin_note(node))


def _loop_lines(program: Program, node: fx.Node) -> Iterator[str]:
    """The body as a function, and the loop as calls of it."""
    loop = node.target
    yield f"    # the body of {node.name}, {loop.times} times"
    yield from (f"    {line}" for line in _lines(replace(loop.body, name=f"{node.name}_body")))
    rounds = [f"({', '.join([n.name for n in loop.of_round(node.args, i)])})" for i in range(loop.times)]
    once = node.args[: loop.invariants + loop.carried]
    yield f"    {node.name} = {node.name}_body({', '.join([n.name for n in once])}, each of ({', '.join(rounds)}))"


def _margin(code: str, note: str) -> str:
    return f"{code:<{MARGIN}}  # {note}" if note else code


def _margin_note(node: fx.Node) -> str:
    spec = node.meta.get("spec")
    if isinstance(node.target, Bucket):
        text = f"{node.target.tensors} tensors"
    else:
        text = ", ".join(map(str, spec)) if isinstance(spec, tuple) else str(spec) if spec else ""
    if isinstance(node.target, (Step, Bucket)) and node.target.sends:
        text += f"   {node.target.nbytes:,} bytes, {node.target.cost:.1f} us"
    return f"{text}   {PINNED} {node.meta[PINNED]}" if PINNED in node.meta else text


def _code(program: Program, node: fx.Node) -> str:
    if node.op == "get_attr":
        return f"constant({_constant_text(program.constants[node.target])})"
    if isinstance(node.target, (Step, Bucket)):
        return node.target.show(program.mesh, _value_text(node.args[0]))
    if getattr(node.target, "__name__", "") == "getitem":
        return f"{node.args[0]}[{node.args[1]}]"
    args = [*map(_value_text, node.args), *(f"{k}={_value_text(v)}" for k, v in node.kwargs.items())]
    return f"{op_text(node.target)}({', '.join(args)})"


def _constant_text(value: torch.Tensor) -> str:
    """The numbers of a small constant, a hash of those of a large one. Ranks compare this text."""
    if value.numel() <= 8:
        return str(value.tolist())
    return f"<{hashlib.sha256(str(value.tolist()).encode()).hexdigest()[:16]}>"


def _value_text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_value_text, value))}]"
    return str(value) if isinstance(value, (fx.Node, torch.dtype, torch.device)) else repr(value)
