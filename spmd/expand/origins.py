"""Where the values of a captured step come from: the module, the lines of code, and what they are called by.

    mm   origin: blocks.0.mlp.up, at model.py:31, model.py:52, train.py:14 (innermost first)
    mm   the same, backward: autograd made it for the mm above

Noted while the step runs, once an op: which module is called, by hooks of torch's on all modules; which lines, from the
stack; and for an op of a backward pass the number of autograd's node that runs, which was noted in the forward pass.

A **site** is a value that has a name: what a module is given and gives, and what a line of the step makes.
`placements=` of `spmd.compile` names sites. A hook of autograd finds the gradient of each.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from spmd import _torch
from spmd.comm.user_line import is_library
from spmd.expand.modules import named_within
from spmd.expand.state import named_leaves

ORIGIN, SITES, GRADIENT_OF = "origin", "sites", "gradient of"
"""In the metadata of a node: its `Origin`; the sites whose value it is; those whose gradient it is."""


class Line(NamedTuple):
    """A line of code. It prints as `model.py:31`."""

    file: str
    number: int

    @property
    def text(self) -> str:
        """The code on it."""
        return linecache.getline(self.file, self.number).strip()

    def is_at(self, where: str) -> bool:
        """Whether it is the line that is written so: `model.py:31`, with as much of the path before it as one likes."""
        file, _, number = where.rpartition(":")
        return str(self.number) == number and f"{os.sep}{self.file}".endswith(f"{os.sep}{file}")

    def __str__(self):
        return f"{os.path.basename(self.file)}:{self.number}"


class Origin(NamedTuple):
    """Where a value comes from.

    module: the path of the innermost module that was called; empty outside of all. lines: of the user's code, innermost
    first. backward: whether autograd made it, for the op that was made there.
    """

    module: str = ""
    lines: tuple[Line, ...] = ()
    backward: bool = False


@dataclass(frozen=True, eq=False)
class Site:
    """A value with names: `model.blocks.0.mlp.output`, `model.blocks.0.mlp.input.0`, or a line. path: of the module."""

    names: tuple[str, ...]
    path: str = ""
    line: Line | None = None

    @property
    def is_input(self) -> bool:
        """Whether it is what a module is given. What it gives is called by the module's path first."""
        return self.line is None and self.names[0] != self.path


@functools.lru_cache(maxsize=1 << 14)
def _line(file: str, number: int) -> Line:
    return Line(file, number)


def user_lines(outermost: CodeType | None = None, most: int = 1 << 10) -> tuple[Line, ...]:
    """The lines of the user's code that are running, innermost first, inside of the function of this code."""
    frame, found = sys._getframe(1), []
    while frame is not None and frame.f_code is not outermost and len(found) < most:
        if not is_library(frame.f_code.co_filename):
            found.append(_line(frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


@dataclass
class Origins:
    """Notes origins and sites while a step is captured.

    paths: of the modules, by id. outermost: the code that calls the step. stack: the paths of the modules that run.
    forward: the origin of each of autograd's nodes, by number.
    """

    paths: Mapping[int, str]
    outermost: CodeType
    stack: list[str] = field(default_factory=list)
    forward: dict[int, Origin] = field(default_factory=dict)
    thread: int = field(default_factory=threading.get_ident)

    @classmethod
    def of(cls, modules: Mapping[str, nn.Module], outermost: CodeType) -> Origins:
        """For a step that uses these modules."""
        return cls({id(m): path for path, m in reversed(named_within(modules))}, outermost)

    # ---- ops ------------------------------------------------------------------------------------
    def note(self) -> None:
        """Call after each op: the nodes that it made get their origin."""
        mode = _torch.proxy_mode()
        if mode is None:
            return
        origin = None
        for node in reversed(mode.tracer.graph.nodes):
            if ORIGIN in node.meta or node.op == "placeholder":
                break
            origin = origin or self._now()
            node.meta[ORIGIN] = origin

    def _now(self) -> Origin:
        path = self.stack[-1] if self.stack else ""
        if _torch.in_backward() and not self.stack:
            made = self.forward.get(_torch.running_node_number())
            return Origin(backward=True) if made is None else made._replace(backward=True)
        origin = Origin(path, user_lines(self.outermost))
        if torch.is_grad_enabled():
            self.forward.setdefault(_torch.last_node_number(), origin)
        return origin

    def note_call(self, path: str) -> None:
        """Call where autograd has made one node for a call of the module of this path."""
        self.note_made(Origin(path, user_lines(self.outermost)))

    def note_made(self, origin: Origin) -> None:
        """Call where autograd has made a node for what comes from there."""
        self.forward.setdefault(_torch.last_node_number(), origin)

    # ---- modules --------------------------------------------------------------------------------
    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Inside, calls of modules are noted, and what their lines make."""
        hooks = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, with_kwargs=True, always_call=True),
        )
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextlib.contextmanager
    def outside_modules(self) -> Iterator[None]:
        """Inside, no module runs: for a backward pass within a call."""
        stack, self.stack = self.stack, []
        try:
            yield
        finally:
            self.stack = stack

    def _enter(self, module: nn.Module, args: tuple) -> None:
        if threading.get_ident() == self.thread:
            path = self.paths.get(id(module), self.stack[-1] if self.stack else "")
            self.stack.append(path)
            self._sites(module, "input", args)

    def _leave(self, module: nn.Module, args: tuple, *kwargs_and_result: Any) -> None:
        """torch calls it without the keyword arguments where the module has raised."""
        if threading.get_ident() != self.thread or not self.stack:
            return
        for side, values in zip(("output", "input"), reversed(kwargs_and_result), strict=False):
            self._sites(module, side, values)
        self.stack.pop()

    def _sites(self, module: nn.Module, side: str, values: Any) -> None:
        path = self.paths.get(id(module))
        if path is None:
            return
        for leaf, x in named_leaves(values):
            whole = f"{path}.{side}"
            names = (path,) if side == "output" else ()
            self.site(x, Site((*names, whole, *([f"{whole}.{leaf}"] if leaf else [])), path))

    # ---- sites ----------------------------------------------------------------------------------
    def made(self, out: Any) -> None:
        """Note what a function of torch's gives, which a line of the step calls."""
        values = (out,) if type(out) is _torch.FunctionalTensor else out if type(out) in (tuple, list) else ()
        for x in values:
            if type(x) is _torch.FunctionalTensor:
                for line in user_lines(self.outermost, most=1):
                    self.site(x, Site((str(line),), line=line))

    def site(self, x: Any, site: Site) -> None:
        """Note that a value, and its gradient, have the names of a site."""
        mode = _torch.proxy_mode()
        node = _node_of(x, mode)
        if node is None or (site.line is not None and not _is_made_at(node, site.line)):
            return
        node.meta[SITES] = (*node.meta.get(SITES, ()), site)
        self.listen(x, site)

    def listen(self, x: torch.Tensor, site: Site) -> None:
        """Note the gradient of a value that has the names of a site."""
        if x.requires_grad and torch.is_grad_enabled():
            x.register_hook(lambda gradient: self._note_gradient(gradient, site))

    def _note_gradient(self, gradient: Any, site: Site) -> None:
        node = _node_of(gradient, _torch.proxy_mode())
        if node is not None:
            node.meta[GRADIENT_OF] = (*node.meta.get(GRADIENT_OF, ()), site)


def renamed(meta: Mapping[str, Any], old: str, new: str) -> dict[str, Any]:
    """The metadata that a node of the module of one path would have, were it one of another module."""
    found = dict(meta)
    if ORIGIN in meta:
        found[ORIGIN] = meta[ORIGIN]._replace(module=_moved(meta[ORIGIN].module, old, new))
    for key in (SITES, GRADIENT_OF):
        if key in meta:
            found[key] = tuple(_renamed(site, old, new) for site in meta[key])
    return found


def _renamed(site: Site, old: str, new: str) -> Site:
    """The same object for a line: it has no path, and the gradient of its value is known by the object."""
    if site.line is not None:
        return site
    return Site(tuple(_moved(name, old, new) for name in site.names), _moved(site.path, old, new))


def _moved(path: str, old: str, new: str) -> str:
    """A path in the module of one path, as one in another module."""
    return f"{new}{path[len(old) :]}" if path == old or path.startswith(f"{old}.") else path


def _node_of(x: Any, mode: Any) -> fx.Node | None:
    """The node of a traced tensor; None for anything else."""
    if mode is None or not isinstance(x, _torch.FunctionalTensor):
        return None
    return _torch.node_of(_torch.from_functional(x), mode.tracer)


def moved_to(node: fx.Node, other: fx.Node, keys: Sequence[str]) -> None:
    """Let another node have what this one is noted for, before this one is erased."""
    for key in keys:
        if key in node.meta:
            old = other.meta.get(key)
            new = node.meta[key]
            other.meta[key] = (*old, *new) if isinstance(old, tuple) else new


def _is_made_at(node: fx.Node, line: Line) -> bool:
    origin = node.meta.get(ORIGIN, Origin())
    return origin.lines[:1] == (line,) and not origin.backward


def handed_on(node: fx.Node, line: Line) -> bool:
    """Whether another line reads a value of this one, in a forward pass, or the step returns it."""
    return any(_reads_elsewhere(user, line) for user in node.users)


def _reads_elsewhere(user: fx.Node, line: Line) -> bool:
    origin = user.meta.get(ORIGIN)
    return user.op == "output" or (origin is not None and not origin.backward and origin.lines[:1] != (line,))
