"""The graph of a rank as one Python function: a line for each op, and what is not read any more is freed.

    def run(w, x):
        mm = op0(x, w)
        mm = op1(mm)
        return (mm,)

What a line reads for the last time is free behind it: its variable is that of the result, or is deleted. A line less to
compile, for a third of all. What the lines call is a variable of the function's module, and an op of torch the quickest
function that runs it, such as `torch.mm`: a call by hand looks up `torch.ops.aten.mm.default` in five steps, and goes
through a Python call.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import fx

from spmd import _torch
from spmd.expand.collector import collector_off


@dataclass(frozen=True)
class Function:
    """A function as text. names: what its lines name beside their own variables: ops, values and constants.
    constants: by name, under which name the module has them."""

    text: str
    names: dict[str, Any]
    constants: dict[str, str]

    @classmethod
    def of(cls, module: fx.GraphModule) -> Function:
        """The code of the module as a function of its inputs."""
        writer = _Writer(module)
        return cls("\n".join(writer.lines()), writer.names, writer.constants)

    def made(self, title: str) -> Callable[..., Any]:
        """The function. title: of its code, in tracebacks."""
        names = {name: _torch.quick_function(x) if _is_op(x) else x for name, x in self.names.items()}
        with collector_off():
            exec(compile(self.text, f"<{title}>", "exec"), names)
        return names["run"]


def as_function(module: fx.GraphModule) -> Callable[..., Any]:
    """The code of the module as a function of its inputs.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> _ = graph.output((graph.call_function(operator.add, (x, [1])),))
    >>> as_function(fx.GraphModule({}, graph))([2])
    ([2, 1],)
    """
    return Function.of(module).made(type(module).__name__)


def _is_op(x: Any) -> bool:
    return isinstance(x, _torch.OpOverload)


class _Writer:
    """Writes the lines. names, constants: as those of a `Function`. _variables: of nodes that are no inputs."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module = module
        self.names: dict[str, Any] = {}
        self.constants: dict[str, str] = {}
        self._named: dict[int | str, str] = {}
        self._variables: dict[fx.Node, str] = {}
        self._taken = {n.name for n in module.graph.nodes}

    def lines(self) -> Iterator[str]:
        last = _last_reads(self.module.graph)
        yield f"def run({', '.join(n.name for n in self.module.graph.find_nodes(op='placeholder'))}):"
        for node in self.module.graph.nodes:
            if node.op == "output":
                yield f"    return {self._text(node.args[0])}"
            elif node.op != "placeholder":
                yield from self._line(node, last.get(node, []))

    def _line(self, node: fx.Node, done: list[fx.Node]) -> Iterator[str]:
        """The line of a node, and what is deleted behind it. done: what is not read any more."""
        call, free = self._call(node), [self._variables[n] for n in done if n is not node]
        name = self._variables[node] = free.pop(0) if free else node.name
        yield f"    {name} = {call}"
        if node in done:
            free.append(name)
        if free:
            yield f"    del {', '.join(free)}"

    def _call(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            name = self._variable(getattr(self.module, node.target), "constant")
            self.constants[name] = node.target
            return name
        arguments = [self._text(x) for x in node.args]
        if node.target is operator.getitem:
            return f"{arguments[0]}[{arguments[1]}]"
        named = [f"{name}={self._text(x)}" for name, x in node.kwargs.items()]
        if node.op == "call_method":
            return f"{arguments[0]}.{node.target}({', '.join([*arguments[1:], *named])})"
        return f"{self._variable(node.target, 'op')}({', '.join([*arguments, *named])})"

    def _text(self, x: Any) -> str:
        """An argument: the variable of a node, or a value that is a variable of the module."""
        if isinstance(x, fx.Node):
            return self._variables.get(x, x.name)
        if isinstance(x, (list, tuple)) and _has_node(x):
            inside = ", ".join(map(self._text, x))
            return f"[{inside}]" if isinstance(x, list) else f"({inside},)"
        if isinstance(x, slice) and _has_node(x):
            return f"slice({', '.join(map(self._text, (x.start, x.stop, x.step)))})"
        assert not _has_node(x), f"{x!r} holds a node in a way that no line can be written for"
        return repr(x) if type(x) in (int, bool, type(None)) else self._variable(x, "value")

    def _variable(self, x: Any, kind: str) -> str:
        """The variable of the module that is this object, or one that holds equal plain values."""
        key = repr(x) if _is_plain(x) else id(x)
        if key not in self._named:
            numbers = (f"{kind}{i}" for i in itertools.count(len(self.names)))
            self._named[key] = name = next(n for n in numbers if n not in self._taken)
            self.names[name] = x
        return self._named[key]


def _last_reads(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node what is read there for the last time; a node that nobody reads is its own last reader.

    What the caller gives or gets is not among it.
    """
    last: dict[fx.Node, list[fx.Node]] = {}
    read = set(graph.find_nodes(op="placeholder"))
    for node in reversed(graph.nodes):
        if node.op == "output":
            read.update(node.all_input_nodes)
        elif node.op != "placeholder":
            done = [n for n in dict.fromkeys((node, *node.all_input_nodes)) if n not in read]
            read.update(done)
            if done:
                last[node] = done
    return last


def _has_node(x: Any) -> bool:
    found: list[fx.Node] = []
    fx.map_arg(x, found.append)
    return bool(found)


def _is_plain(x: Any) -> bool:
    """Whether x is a plain value, or a list or tuple of such: what it is written as says all of it."""
    return type(x) in (str, float, int, bool, type(None)) or (type(x) in (list, tuple) and all(map(_is_plain, x)))
