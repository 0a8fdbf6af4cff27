"""Values as text, and back: the notation of saved programs.

    spec('f32[8@dp, 16@tp] +sum@pp')      a spec, as it prints; with strides, unless contiguous: f32[8, 4]{1,8}
    all_to_all('tp'), halo('tp', dim=2, intervals=((-1, 5), (3, 9)))     a move, by its kind and its axes
    LocalShape(spec=spec('f32[8@dp, 4]'))                                 a frozen value of spmd, by its fields
    aten.add.Tensor, operator.mul, torch.bfloat16, inf                    ops, functions of numbers, dtypes, numbers
    type('transformers.modeling_outputs:CausalLMOutput')                  a class or function, by where it is found

The text is that of Python expressions. `Reader` parses it and walks the syntax tree: nothing is evaluated or unpickled,
and only what is listed here is made. Reading what was written gives an equal value.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import importlib
import math
import operator
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from spmd import _torch
from spmd.comm.chunk import Packed
from spmd.expand.captured import Argument
from spmd.expand.choose.certificate import Certificate
from spmd.expand.containers import There
from spmd.expand.draws import Draws
from spmd.expand.local_ops import LocalCount, LocalShape, UnlessEmpty, op_text
from spmd.expand.objects import Counted
from spmd.expand.passes.passes import (
    Buckets,
    Chunks,
    FewerMoves,
    FusedUpdates,
    NumbersLate,
    Offload,
    Overlap,
    Schedule,
)
from spmd.expand.places.fully_shard import FullyShard
from spmd.expand.places.places import Places
from spmd.expand.precision import MixedPrecision
from spmd.expand.state import Slot
from spmd.expand.views import View
from spmd.mesh import DeviceMesh
from spmd.tensor.placement import Partial, Replicate, Shard
from spmd.tensor.recipes.random import Draw
from spmd.tensor.recipes.recipe import Recipe
from spmd.tensor.recipes.windows import Windows
from spmd.tensor.redistribute.halo import HaloPlan
from spmd.tensor.redistribute.moves import Move
from spmd.tensor.redistribute.plan import Plan, Step
from spmd.tensor.rules.index_counts import Counts
from spmd.tensor.spec import Spec, contiguous, parse_spec


class Leaf(NamedTuple):
    """Stands for a leaf in the structure of arguments or results (`spmd.expand.kept.trees`)."""


class Branch(NamedTuple):
    """Children in a container of another kind than list, tuple and dict, in such a structure."""

    kind: str
    context: Any
    children: tuple


VALUES = {
    kind.__name__: kind
    for kind in (
        Argument, Draws, Certificate, LocalCount, LocalShape, UnlessEmpty, FullyShard, Places, MixedPrecision, Slot,
        Partial, Replicate, Shard, Draw, Recipe, Windows, HaloPlan, Plan, Step, Counts, Packed, Leaf, Branch,
        FewerMoves, Chunks, NumbersLate, Buckets, Schedule, Overlap, FusedUpdates, Offload, Counted, View, There,
    )
}  # fmt: skip
"""Frozen values that are written by their fields."""

RECIPES = "spmd.tensor.recipes."
"""The modules whose functions may be named: what a recipe does with the blocks of a rank."""

TORCH_VALUES = (torch.dtype, torch.layout, torch.memory_format)


class CannotKeep(ValueError):
    """A value that has no text: it would not be the same in another process."""


# ---- writing ----------------------------------------------------------------------------------


def written(value: Any) -> str:
    """The value as text. CannotKeep for what another process could not make again.

    >>> written([1, (2.5, None), {"a": torch.float32}]), written(float("-inf"))
    ("[1, (2.5, None), {'a': torch.float32}]", '-inf')
    """
    return _writer(type(value))(value)


@lru_cache(maxsize=1024)
def _writer(kind: type) -> Callable[[Any], str]:
    """What writes values of a type."""
    for kinds, write in _WRITERS:
        if issubclass(kind, kinds):
            return write
    if dataclasses.is_dataclass(kind) and kind.__name__ in VALUES:
        fields = dataclasses.fields(kind)
        return lambda value: f"{kind.__name__}({_fields(value, fields)})"
    return _no_text


def _no_text(value: Any) -> str:
    raise CannotKeep(f"a {type(value).__name__} has no text by which another process could make it: {value!r:.80}")


def spec_text(spec: Spec) -> str:
    """The spec as it prints, with its strides if they are not those of a contiguous tensor."""
    text = str(spec)
    if spec.stride == contiguous(spec.shape):
        return text
    head, bracket, rest = text.partition("]")
    return f"{head}{bracket}{{{','.join(map(str, spec.stride))}}}{rest}"


def move_text(move: Move, mesh: DeviceMesh) -> str:
    """The move by its kind, its axes and what else it says."""
    axes = ",".join(map(mesh.axis_name, move.axes))
    more = _fields(move, [f for f in dataclasses.fields(move) if f.name != "axes"])
    return f"{move.kind}({', '.join(filter(None, [repr(axes), more]))})"


def _step_text(step: Step) -> str:
    return f"Step({move_text(step.move, step.before.mesh)}, {written(step.before)}, {written(step.after)})"


def _fields(value: Any, fields) -> str:
    """The fields that differ from their defaults."""
    said = [(f.name, getattr(value, f.name)) for f in fields if f.init]
    defaults = {f.name: f.default for f in fields}
    return ", ".join(f"{name}={written(x)}" for name, x in said if not _is_default(x, defaults[name]))


def _is_default(x: Any, default: Any) -> bool:
    return type(x) is type(default) and x == default


def _tuple_text(value: tuple) -> str:
    if hasattr(value, "_fields") and type(value).__name__ in VALUES:
        return f"{type(value).__name__}({', '.join(map(written, value))})"
    if type(value) is not tuple:
        raise CannotKeep(f"a tuple of type {type(value).__name__} is not among the values that can be kept")
    return f"({', '.join(map(written, value))}{',' if len(value) == 1 else ''})"


def _dict_text(value: dict) -> str:
    return f"{{{', '.join(f'{written(k)}: {written(v)}' for k, v in value.items())}}}"


def _function_text(value: Any) -> str:
    module = getattr(value, "__module__", None) or ""
    if module.startswith(RECIPES):
        return f"recipes.{module.removeprefix(RECIPES)}.{value.__name__}"
    if getattr(operator, value.__name__, None) is value:
        return f"operator.{value.__name__}"
    if getattr(torch, value.__name__, None) is value:
        return f"function('torch:{value.__name__}')"
    return f"function({place_of(value)!r})"


def _set_text(value: frozenset | set) -> str:
    inside = ", ".join(sorted(map(written, value)))  # sorted, for the order of a set depends on the process
    return f"{'frozen' if isinstance(value, frozenset) else ''}set([{inside}])"


_WRITERS: list[tuple[Any, Callable[[Any], str]]] = [
    ((bool, str, bytes, type(None), types.EllipsisType), lambda x: "..." if x is ... else repr(x)),
    (int, int.__repr__),
    (float, float.__repr__),
    (complex, lambda x: f"complex({x.real!r}, {x.imag!r})"),
    (torch.fx.Node, lambda x: x.name),
    (Spec, lambda x: f"spec({spec_text(x)!r})"),
    (torch.Size, lambda x: f"torch.Size({tuple(x)!r})"),
    (tuple, _tuple_text),
    (list, lambda x: f"[{', '.join(map(written, x))}]"),
    (dict, _dict_text),
    ((set, frozenset), _set_text),
    (slice, lambda x: f"builtins.slice({', '.join(map(written, (x.start, x.stop, x.step)))})"),
    (torch.device, repr),
    (TORCH_VALUES, str),
    (_torch.OpOverload, op_text),
    (Step, _step_text),
    (type, lambda x: f"type({place_of(x)!r})"),
    ((types.FunctionType, types.BuiltinFunctionType), _function_text),
]
"""How values of these types are written; the first that fits counts."""


# ---- classes and functions by place -----------------------------------------------------------

MAIN = "__main__"


def module_name(name: str | None) -> str:
    """The name of a Python module as another script knows it: a script has the name of its file."""
    if name != MAIN:
        return name or ""
    main = sys.modules.get(MAIN)
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is not None:
        return spec.name
    return file.replace("\\", "/").rpartition("/")[2].removesuffix(".py") if file else MAIN


def place_of(x: Any) -> str:
    """Where a class or function is found: 'module:name'. CannotKeep for one that has no place, such as a local one."""
    where, name = getattr(x, "__module__", None) or builtins.__name__, getattr(x, "__qualname__", "")
    try:
        found = _attribute(sys.modules[where], name)
    except (KeyError, AttributeError):
        found = None
    if found is not x:
        raise CannotKeep(f"{where}.{name} is not found under this name; define it at the top level of a module")
    return f"{module_name(where)}:{name}"


def found_at(place: str) -> Any:
    """What is at a place. ValueError where there is nothing of this name."""
    module, _, name = place.partition(":")
    try:
        return _attribute(sys.modules[MAIN] if module == module_name(MAIN) else importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"a saved step names {place}, which is not there: {error}") from error


def _attribute(x: Any, name: str) -> Any:
    for part in name.split("."):
        x = getattr(x, part)
    return x


def lines_of(said: Mapping[str, Any]) -> str:
    """Values by name, a line each."""
    return "".join(f"{name}: {written(value)}\n" for name, value in said.items())


# ---- reading ----------------------------------------------------------------------------------


def read_lines(text: str, reader: Reader, names: Iterable[str]) -> dict[str, Any]:
    """The values that `lines_of` wrote. ValueError where one of these names is missing."""
    lines = (line.partition(": ") for line in text.splitlines())
    said = {name: reader.value(value) for name, _, value in lines}
    if missing := [name for name in names if name not in said]:
        raise ValueError(f"a part of a saved step has no line {missing[0]!r}")
    return said


class Reader:
    """Makes values of their text, on a mesh. names: what bare names stand for, such as the nodes of a graph."""

    def __init__(self, mesh: DeviceMesh, names: Mapping[str, Any] | None = None):
        self.mesh, self.names = mesh, names if names is not None else {}
        self.specs: dict[str, Spec] = {}
        self.calls = _calls() | {"spec": self.spec}

    def value(self, text: str) -> Any:
        """The value of this text. ValueError for text that is not of this notation."""
        return self.of(parsed(text))

    def of(self, e: ast.expr) -> Any:
        """The value of a syntax tree."""
        read = _READERS.get(type(e))
        if read is None:
            raise ValueError(f"a saved step has {ast.unparse(e)!r:.80}, which is no value")
        return read(self, e)

    def spec(self, text: str) -> Spec:
        """The spec of this text on the reader's mesh."""
        found = self.specs.get(text)
        if found is None:
            found = self.specs[text] = self._parsed_spec(text)
        return found

    def _parsed_spec(self, text: str) -> Spec:
        head, brace, rest = text.partition("{")
        strides, _, rest = rest.partition("}")
        found = parse_spec(head + rest, self.mesh)
        if not brace:
            return found
        return found.with_tensor(found.shape, stride=[int(s) for s in strides.split(",") if s])

    def _name(self, e: ast.Name) -> Any:
        if e.id in self.names:
            return self.names[e.id]
        if e.id in ("inf", "nan"):
            return float(e.id)
        raise ValueError(f"a saved step names {e.id!r}, which it does not define before")

    def _call(self, e: ast.Call) -> Any:
        name = dotted(e.func)
        args = [self.of(a) for a in e.args]
        kwargs = {k.arg: self.of(k.value) for k in e.keywords}
        if name in self.calls:
            return self.calls[name](*args, **kwargs)
        if name in _moves():
            axes = tuple(map(self.mesh.axis, filter(None, args[0].split(","))))
            return _moves()[name](axes, **kwargs)
        raise ValueError(f"a saved step makes a {name!r}, which is no value that can be kept")

    def _negative(self, e: ast.UnaryOp) -> Any:
        if not isinstance(e.op, ast.USub):
            raise ValueError(f"a saved step has {ast.unparse(e)!r}, which is no value")
        return -self.of(e.operand)


_READERS: dict[type, Callable[[Reader, Any], Any]] = {
    ast.Constant: lambda r, e: e.value,
    ast.Name: Reader._name,
    ast.Attribute: lambda r, e: named(dotted(e)),
    ast.Call: Reader._call,
    ast.UnaryOp: Reader._negative,
    ast.Tuple: lambda r, e: tuple([r.of(x) for x in e.elts]),
    ast.List: lambda r, e: [r.of(x) for x in e.elts],
    ast.Dict: lambda r, e: {r.of(k): r.of(v) for k, v in zip(e.keys, e.values, strict=True)},
}


def parsed(text: str) -> ast.expr:
    """The syntax tree of an expression. ValueError for other text."""
    try:
        return ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise ValueError(f"a saved step has a line that cannot be read: {text!r:.80}") from error


def dotted(e: ast.expr) -> str:
    """The text of a dotted name; empty for another expression."""
    if isinstance(e, ast.Name):
        return e.id
    return f"{dotted(e.value)}.{e.attr}" if isinstance(e, ast.Attribute) else ""


@lru_cache(maxsize=1)
def _calls() -> dict[str, Callable]:
    return VALUES | {
        "complex": complex, "set": set, "frozenset": frozenset, "builtins.slice": slice, "torch.Size": torch.Size,
        "device": torch.device, "type": found_at, "function": found_at,
    }  # fmt: skip


@lru_cache(maxsize=1)
def _moves() -> dict[str, type[Move]]:
    """The classes of moves by kind."""
    found, open_ = {}, [Move]
    while open_:
        open_ += (kind := open_.pop()).__subclasses__()
        if isinstance(getattr(kind, "kind", None), str):
            found[kind.kind] = kind
    return found


@lru_cache(maxsize=4096)
def named(name: str) -> Any:
    """An op, a dtype, a function of numbers or of a recipe, by its dotted name."""
    root, _, rest = name.partition(".")
    if root == "recipes":
        module, _, function = rest.rpartition(".")
        return getattr(importlib.import_module(RECIPES + module), function)
    if root in ("operator", "math"):
        return getattr(operator if root == "operator" else math, rest)
    if root == "torch":
        found = getattr(torch, rest, None)
        if isinstance(found, TORCH_VALUES):
            return found
        raise ValueError(f"a saved step names {name}, which is no dtype, layout or memory format")
    packet, _, overload = rest.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, root), packet), overload or "default")
    except AttributeError as error:
        raise ValueError(f"no op {name} is registered here; import the module that defines it") from error
