"""A program as text, and back: one line a node, with the spec in the margin, as programs print.

    w = input('model.up.weight', 'parameter')                    # f32[8@tp, 4]
    linear = aten.linear(x, w)                                   # f32[6@dp, 8@tp]
    all_reduce = all_reduce('dp')(sum_1)                         # f32[]
    output('result 0', all_reduce)                               # f32[]

A target that is no op, such as a move or a recipe, is a value of the notation (`spmd.expand.kept.notation`). The specs
of a move are those of its operand and of its result. Constants are tensors, and are kept apart. Before the line of a
loop its body stands, a program of its own, indented.

The text has no coordinate and no size of a mesh. So it can be read for a mesh with the same axes and other numbers of
ranks, as long as nothing in it was made for a number of ranks (`made_for_ranks`).
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from spmd._torch import pytree
from spmd.expand.constraints import PINNED
from spmd.expand.kept.notation import (
    CannotKeep,
    Reader,
    dotted,
    found_at,
    module_name,
    move_text,
    named,
    parsed,
    spec_text,
    written,
)
from spmd.expand.kept.trees import as_tree, as_value
from spmd.expand.local_map import BlockCall, LocalMapGradientOp, LocalMapOp
from spmd.expand.local_ops import LocalCount
from spmd.expand.loops.loop import Loop
from spmd.expand.nodes import LINE, added
from spmd.expand.places.reads import PARAMETER
from spmd.expand.program import Program
from spmd.mesh import DeviceMesh
from spmd.tensor.annotations.block_function import BlockFunction
from spmd.tensor.recipes import blocks
from spmd.tensor.recipes.recipe import Recipe
from spmd.tensor.redistribute.bucket import Bucket
from spmd.tensor.redistribute.moves import Move
from spmd.tensor.redistribute.plan import Step
from spmd.tensor.spec import Spec

MARGIN = 88
INDENT = "    "
"""Before the lines of a body."""

PLAIN_CALL = re.compile(r"((?:aten|operator)\.[\w.]+)\(([\w., =+-]*)\) *$")
"""A line that calls an op of torch, or of numbers, on names and numbers alone."""

PLAIN_INPUT = re.compile(r"input\('([^'\\]*)', '(\w*)'\) *$")
"""A line of an input: its name and its kind."""

PLAIN_OUTPUT = re.compile(r"output\('([^'\\]*)', (\w+)\) *$")
"""A line of an output: its name, and the value."""

NOTES = {"of": PARAMETER, "pinned by": PINNED, "at": LINE}
"""What may stand in the margin behind the spec: the parameter that is gathered, what was said of the value, and the
user's line."""

NO_NOTES: Mapping[str, Any] = {}


# ---- writing ----------------------------------------------------------------------------------


def program_text(program: Program) -> str:
    """The program as text. CannotKeep for a program with something that another process could not make."""
    return "\n".join([*_heads(program), *_body(program), ""])


HEADS = ("name", "gathered", "places", "certificate", "owed")
"""The fields of a program that stand in lines of their own."""


def _heads(program: Program) -> Iterator[str]:
    for name in HEADS:
        yield f"{name}: {written(getattr(program, name))}"


def _body(program: Program) -> Iterator[str]:
    kinds = iter(program.kinds or ("",) * len(program.inputs))
    names = iter(program.inputs)
    for node in program.graph.nodes:
        if node.op == "output":
            for value, (name, spec) in zip(node.args[0], program.outputs, strict=True):
                yield _line(f"output({name!r}, {written(value)})", spec)
            continue
        if node.op == "placeholder":
            code = f"input({next(names)[0]!r}, {next(kinds)!r})"
        elif node.op == "get_attr":
            code = f"constant({node.target!r})"
        else:
            if isinstance(node.target, Loop):
                yield from (f"{INDENT}{line}" for line in (*_heads(node.target.body), *_body(node.target.body)))
            code = f"{_target(node, program.mesh)}({_arguments(node)})"
        yield _line(f"{node.name} = {code}", node.meta["spec"], node.meta)


def _line(code: str, spec: Any, notes: Mapping[str, Any] = NO_NOTES) -> str:
    """A line with its margin: the spec, and the notes."""
    found = [f"   {word} {notes[key]}" for word, key in NOTES.items() if notes.get(key)]
    return f"{code:<{MARGIN}}  # {_specs_text(spec)}{''.join(found)}"


def _specs_text(spec: Any) -> str:
    """A spec, `number`, or several of them with a semicolon behind each."""
    if isinstance(spec, tuple):
        return " ".join(f"{_specs_text(s)};" for s in spec)
    return "number" if spec is None else spec_text(spec)


def _arguments(node: fx.Node) -> str:
    return ", ".join([*map(written, node.args), *(f"{name}={written(x)}" for name, x in node.kwargs.items())])


def _target(node: fx.Node, mesh: DeviceMesh) -> str:
    """What is called, in the place of a function's name."""
    target = node.target
    if isinstance(target, Step):
        return move_text(target.move, mesh) + _before([target], [node.args[0]])
    if isinstance(target, Bucket):
        return f"bucket({move_text(target.steps[0].move, mesh)})" + _before(target.steps, node.args[0])
    if isinstance(target, Loop):
        return f"loop({', '.join([f'{name}={getattr(target, name)}' for name in _LOOP])})"
    if isinstance(target, LocalMapOp):
        return _local_map_text(target)
    if isinstance(target, LocalMapGradientOp):
        (forward,) = [n for n in node.graph.nodes if n.target is target.of]
        return f"gradients_of({forward.name!r})"
    return written(target)


def _before(steps: Any, operands: Any) -> str:
    """The specs before moves, where they are not those of their operands: a move may see other strides."""
    specs = tuple(step.before for step in steps)
    alike = all(spec is n.meta["spec"] for spec, n in zip(specs, operands, strict=True))
    return "" if alike else f".seen_as({written(specs)})"


# ---- functions of blocks ----------------------------------------------------------------------

_LOOP = ("times", "invariants", "carried", "items", "last", "every")
_CALL = ("ins", "needs_grad", "statics", "positions")
_OP = ("outs", "differentiable", "cotangents", "scales", "grads")
_FUNCTION = ("outs", "ins", "grads", "redistributes")


def _local_map_text(op: LocalMapOp) -> str:
    call, function = op.call, op.call.function
    said = {
        "function": _place_of_block_function(function.func),
        "placements": tuple(getattr(function, name) for name in _FUNCTION),
        "tree": as_value(call.tree),
        **{name: getattr(call, name) for name in _CALL},
    }
    said |= {f"of_{name}": getattr(op, name) for name in _OP}
    return f"local_map({', '.join(f'{name}={written(x)}' for name, x in said.items())})"


def _place_of_block_function(fn: Any) -> str:
    """Where a function of blocks is found: under its name, or under that of the `local_map` made of it."""
    module = sys.modules.get(getattr(fn, "__module__", None) or "")
    for name, value in vars(module).items() if module else ():
        if value is fn or (isinstance(value, BlockFunction) and value.func is fn):
            return f"{module_name(module.__name__)}:{name}"
    name = getattr(fn, "__qualname__", type(fn).__name__)
    raise CannotKeep(f"local_map of {name}: another process has to find it; define it at the top level of a module")


def _local_map(mesh: DeviceMesh, function: str, placements: tuple, tree: Any, said: dict[str, Any]) -> LocalMapOp:
    found = found_at(function)
    func = found.func if isinstance(found, BlockFunction) else found
    outs, ins, grads, redistributes = placements
    block_function = BlockFunction(func, outs, ins, grads, None, redistributes)
    call = BlockCall(block_function, mesh, *(said[name] for name in _CALL), as_tree(tree))
    return LocalMapOp(call, *(said[f"of_{name}"] for name in _OP))


# ---- reading ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Targets:
    """A bucket or a move before its specs are known. seen_as: the specs before, where they are not the operands'."""

    moves: tuple[Move, ...]
    is_bucket: bool = False
    seen_as: tuple[Spec, ...] = ()

    def of(self, operands: Any, after: Any) -> Step | Bucket:
        before = self.seen_as or [n.meta["spec"] for n in operands]
        if not self.is_bucket:
            return Step(self.moves[0], before[0], after)
        return Bucket(tuple(Step(self.moves[0], b, a) for b, a in zip(before, after, strict=True)))


def read_program(text: str, constants: dict[str, torch.Tensor], mesh: DeviceMesh) -> Program:
    """The program of a text, on this mesh. ValueError for a line that cannot be read, with its number."""
    reading = _Reading(mesh, constants)
    for number, line in enumerate(text.splitlines()):
        try:
            reading.line(line)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise ValueError(f"line {number + 1}, {line[:60]!r}: {error}") from error
    return reading.program()


@dataclass
class _Reading:
    """A program while it is read."""

    mesh: DeviceMesh
    constants: dict[str, torch.Tensor]
    graph: fx.Graph = field(default_factory=fx.Graph)
    nodes: dict[str, fx.Node] = field(default_factory=dict)
    heads: dict[str, Any] = field(default_factory=dict)
    inputs: list[tuple[str, Spec | None]] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    outputs: list[tuple[str, Spec | None]] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    body: list[str] = field(default_factory=list)

    def __post_init__(self):
        self.reader = Reader(self.mesh, self.nodes)

    def line(self, line: str) -> None:
        if line.startswith(INDENT):
            self.body.append(line.removeprefix(INDENT))
            return
        name, colon, value = line.partition(": ")
        if colon and name in HEADS:
            self.heads[name] = self.reader.value(value)
            return
        code, _, margin = line.rpartition("  # ")
        notes = {}
        for word, key in reversed(NOTES.items()):
            margin, _, notes[key] = margin.partition(f"   {word} ")
        spec = self._specs(margin)
        if code.startswith("output("):
            self._output(code, spec)
            return
        name, _, expression = code.partition(" = ")
        node = self._plain(name, expression, spec) or self._node(name, parsed(expression.strip()), spec)
        node.meta.update((key, note) for key, note in notes.items() if note)

    def _output(self, code: str, spec: Any) -> None:
        found = PLAIN_OUTPUT.match(code)
        if found and found[2] in self.nodes:
            name, value = found[1], self.nodes[found[2]]
        else:
            name, value = map(self.reader.of, parsed(code).args)
        self.outputs.append((name, spec))
        self.values.append(value)

    def _specs(self, text: str) -> Any:
        if ";" in text:
            return tuple([self._specs(part.strip()) for part in text.split(";")[:-1]])
        return None if text == "number" else self.reader.spec(text)

    def _plain(self, name: str, expression: str, spec: Any) -> fx.Node | None:
        """The node of an input, or of an op on names and numbers, as most are: what a syntax tree would say, without
        making one."""
        if found := PLAIN_INPUT.match(expression):
            return self._input(name, *found.groups(), spec)
        found = PLAIN_CALL.match(expression)
        if found is None:
            return None
        target, arguments = found.groups()
        args, kwargs = [], {}
        for token in arguments.split(", ") if arguments else ():
            key, is_named, value = token.partition("=")
            if is_named:
                kwargs[key] = self._token(value)
            else:
                args.append(self._token(token))
        return self._made(name, "call_function", named(target), tuple(args), kwargs, spec)

    def _input(self, name: str, given: str, kind: str, spec: Any) -> fx.Node:
        self.inputs.append((given, spec))
        self.kinds.append(kind)
        return self._made(name, "placeholder", name, (), {}, spec)

    def _token(self, token: str) -> Any:
        """A node, or a number."""
        node = self.nodes.get(token)
        if node is not None:
            return node
        if token not in self.numbers:
            self.numbers[token] = self.reader.value(token)
        return self.numbers[token]

    def _node(self, name: str, e: ast.expr, spec: Any) -> fx.Node:
        function = dotted(e.func)
        args = tuple(self.reader.of(a) for a in e.args)
        if function == "input":
            return self._input(name, *args, spec)
        if function == "constant":
            return self._made(name, "get_attr", *args, (), {}, spec)
        kwargs = {k.arg: self.reader.of(k.value) for k in e.keywords}
        target = self._target(e.func)
        if isinstance(target, _Targets):
            target = target.of(args[0] if target.is_bucket else args[:1], spec)
        return self._made(name, "call_function", target, args, kwargs, spec)

    def _made(self, name: str, op: str, target: Any, args: tuple, kwargs: dict[str, Any], spec: Any) -> fx.Node:
        node = added(self.graph, op, target, args, kwargs, name)
        if node.name != name:
            raise ValueError(f"two values are named {name}")
        node.meta["spec"] = spec
        self.nodes[name] = node
        return node

    def _target(self, e: ast.expr) -> Any:
        """What a line calls."""
        if isinstance(e, ast.Call):
            if isinstance(e.func, ast.Attribute) and e.func.attr == "seen_as":
                return replace(self._target(e.func.value), seen_as=self.reader.of(e.args[0]))
            name = dotted(e.func)
            if name == "loop":
                body, self.body = read_program("\n".join(self.body), {}, self.mesh), []
                return Loop(body, **{k.arg: self.reader.of(k.value) for k in e.keywords})
            if name == "bucket":
                return _Targets((self.reader.of(e.args[0]),), is_bucket=True)
            if name == "gradients_of":
                return LocalMapGradientOp(self.nodes[self.reader.of(e.args[0])].target)
            if name == "local_map":
                said = {k.arg: self.reader.of(k.value) for k in e.keywords}
                return _local_map(self.mesh, said.pop("function"), said.pop("placements"), said.pop("tree"), said)
        found = self.reader.of(e)
        return _Targets((found,)) if isinstance(found, Move) else found

    def program(self) -> Program:
        missing = [name for name in HEADS if name not in self.heads]
        if missing:
            raise ValueError(f"it has no line {missing[0]!r}: a part of the text is missing")
        self.graph.output(tuple(self.values))
        return Program(
            mesh=self.mesh, graph=self.graph, constants=self.constants, inputs=tuple(self.inputs),
            outputs=tuple(self.outputs), kinds=tuple(self.kinds) if any(self.kinds) else (), **self.heads,
        )  # fmt: skip


# ---- other numbers of ranks -------------------------------------------------------------------

MADE_FOR_BLOCKS = {function for function in vars(blocks).values() if callable(function)}


def made_for_ranks(program: Program) -> fx.Node | None:
    """The first node that was made for the numbers of ranks of the program's mesh; None if there is none."""
    for node in program.graph.nodes:
        target = node.target
        if isinstance(target, Loop) and made_for_ranks(target.body) is not None:
            return node
        steps = target.steps if isinstance(target, Bucket) else (target,) if isinstance(target, Step) else ()
        moves = [step.move for step in steps]
        if isinstance(target, (LocalMapOp, LocalMapGradientOp)) or any(hasattr(m, "intervals") for m in moves):
            return node
        if isinstance(target, Recipe) and (target.halos or target.sums or target.local in MADE_FOR_BLOCKS):
            return node
        if any(isinstance(x, LocalCount) for x in pytree.tree_leaves((node.args, node.kwargs))):
            return node  # a rank's part of the indices of a packed dim, as the blocks divide
    return None


__all__ = ["made_for_ranks", "program_text", "read_program"]
