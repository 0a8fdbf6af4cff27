"""All Python values that a step can reach, as they were before a capture, to be compared and put back.

    before = Reached([("", step), ("trainer", trainer)], is_foreign)
    step(trainer)                               # sets trainer.args.step, a slot
    [str(x) for x in before.changes()]          # ["trainer.args.step"]
    before.put_back()

A capture runs the step's Python code, and undoes what it knows of. Whatever differs behind it is a write that nobody
knows: it would have happened once, and in no later call. So this asks none of those who know: it goes from value to
value by what Python itself says that each holds (`kinds`). It ends at Python modules, of which it looks at what code
names, at classes and functions of torch and of Python, and at tensors, which have guards of their own.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from spmd.expand.closed_over import OURS, names_in, package_of
from spmd.expand.sources.kinds import (
    ATTRIBUTES,
    CACHE,
    CLASS,
    ELEMENTS,
    ITEMS,
    ITERATOR,
    LEAVES,
    MEMBERS,
    NOTHING,
    OF_CLASS,
    SLOTS,
    VARIABLES,
    Kind,
    Step,
    is_same,
    kinds_of,
)

_OF_THEMSELVES = {dict, list, tuple, set, types.FunctionType, types.CellType, types.MethodType, types.ModuleType}
_NAMES = ("attribute", "slot", "variable", "default")
_THROUGH = {"attribute": lambda name: ("__dict__", name), "key": lambda name: (name,)}
_IN_MODULES = re.compile(r"\._(?:modules|parameters|buffers)\['([^']+)'\]")
_OFTEN_EMPTY = {dict, list, set, OrderedDict}
_MUTABLE = frozenset({ITEMS, ELEMENTS, MEMBERS, ATTRIBUTES})
_OF_PYTHON = sys.stdlib_module_names


NONE_NAMED: Mapping[int, Collection[str]] = types.MappingProxyType({})


@dataclass(frozen=True, eq=False)
class Change:
    """A place that has another value now. path: as the user would write it. box: what has the place. old, new: the
    values, or NOTHING. before, contents: all that the box had, and has."""

    path: str
    kind: Kind
    box: Any
    step: Step
    old: Any
    new: Any
    before: Any
    contents: Any

    def __str__(self) -> str:
        return self.path


class Reached:
    """The values that are reached from some roots, by name, with what was in them. is_foreign: whether a Python module
    is no user's, by its name. named: of objects of the user, by identity, the attributes that code has; into others
    nobody looks, as into what a trainer holds for its data, where other threads may be at work.
    """

    def __init__(
        self, roots: Iterable[tuple[str, Any]], is_foreign: Callable[[str | None], bool],
        named: Mapping[int, Collection[str]] = NONE_NAMED, attributes: Collection[str] = (),
    ) -> None:  # fmt: skip
        """attributes: the names in all code that was found, which are looked at in Python modules that values hold."""
        self._is_foreign, self._named, self._attributes = is_foreign, named, tuple(attributes)
        self.tensors: dict[int, torch.Tensor] = {}
        self._inner: set[int] = set()
        self._ways: dict[int, tuple[int, Step]] = {}
        roots = list(roots)
        self._names = {id(x): name for name, x in reversed(roots)}
        self._held: list[tuple[Kind, Any, Any]] = []
        self._empty: list[Any] = []
        self._alive = [x for _, x in roots]
        self._walk()

    # ---- on the way ---------------------------------------------------------------------------
    def _walk(self) -> None:
        seen = self._seen = set[int]()
        left = list(reversed(self._alive))
        while left:
            x = left.pop()
            if id(x) in seen:
                continue
            seen.add(id(x))
            if isinstance(x, types.ModuleType):
                left += self._new(x, self._of_module("", x, self._attributes, seen), seen)
                continue
            if type(x) in _OFTEN_EMPTY and not x:
                self._empty.append(x)
                continue
            for kind in kinds_of(type(x)):
                if kind is CLASS:
                    if self._is_foreign(x.__module__):
                        continue
                    left += self._new(x, [(("class", None), base) for base in (*x.__mro__[1:], type(x))], seen)
                contents = kind.contents(x)
                self._held.append((kind, x, contents))
                inside = kind.inside(contents)
                if id(x) in self._named and kind is not OF_CLASS:
                    inside = [each for each in inside if each[0][1] in self._named[id(x)]]
                left += self._new(x, inside, seen)
            if type(x) is types.FunctionType:
                left += self._new(x, self._globals(x, seen), seen)

    def _new(self, of: Any, inside: Any, seen: set[int]) -> list[Any]:
        found = []
        if self._is_of_library(of):
            self._inner.add(id(of))
        for step, value in inside:
            if isinstance(value, torch.Tensor):
                self.tensors[id(value)] = value
                self._ways.setdefault(id(value), (id(of), step))
                continue
            if type(value) in LEAVES or value is NOTHING or id(value) in seen or _is_ours(type(value)):
                continue
            self._ways.setdefault(id(value), (id(of), step))
            found.append(value)
        return found

    def _is_of_library(self, x: Any) -> bool:
        """Whether an object keeps its attributes for itself: no code of the user names them."""
        if type(x) in _OF_THEMSELVES or isinstance(x, (nn.Module, type)):
            return False
        return self._is_foreign(type(x).__module__)

    def _globals(self, fn: types.FunctionType, seen: set[int]) -> Iterator[tuple[Step, Any]]:
        """What a function finds by its names: of the user's all, of others what holds values."""
        if package_of(fn.__module__) in OURS:
            return
        if self._is_foreign(fn.__module__):
            for name in fn.__code__.co_names:
                if (value := fn.__globals__.get(name)) is not None and _MUTABLE.intersection(kinds_of(type(value))):
                    yield ("variable", name), value
            return
        names = names_in(fn.__code__)
        self._note_variables(fn.__globals__, seen)
        for name in names.globals:
            value = fn.__globals__.get(name)
            yield ("variable", name), value
            if isinstance(value, types.ModuleType):
                yield from self._of_module(name, value, names.attributes, seen)

    def _of_module(self, name: str, module: Any, attributes: tuple[str, ...], seen: set[int]) -> Iterator[Any]:
        """What code names of a Python module."""
        if package_of(module.__name__) in OURS or module.__name__ in _OF_PYTHON:
            return
        self._note_variables(vars(module), seen)
        for attribute in attributes:
            if (value := vars(module).get(attribute)) is not None:
                yield ("variable", f"{name}.{attribute}".lstrip(".")), value

    def _note_variables(self, variables: dict[str, Any], seen: set[int]) -> None:
        if id(variables) not in seen:
            seen.add(id(variables))
            self._held.append((VARIABLES, variables, VARIABLES.contents(variables)))

    # ---- behind -------------------------------------------------------------------------------
    def changes(self) -> list[Change]:
        """The places that differ now."""
        found: list[Change] = []
        for kind, x, old in (*self._filled(), *self._held):
            if kind is not CACHE and not kind.same(old, new := kind.contents(x)):
                found += self._between(kind, x, old, new)
        return found

    def knows(self, x: Any) -> bool:
        """Whether a value was reached."""
        return id(x) in self._seen

    def put_back(self) -> None:
        """Put everything back that can be."""
        for kind, x, old in (*self._filled(), *self._held):
            if kind.put is not None and not kind.same(old, kind.contents(x)):
                kind.put(x, old)

    def _filled(self) -> list[tuple[Kind, Any, Any]]:
        """The containers that were empty and are not now."""
        return [(kinds_of(type(x))[0], x, type(x)()) for x in self._empty if x] if any(self._empty) else []

    def _between(self, kind: Kind, x: Any, old: Any, new: Any) -> Iterator[Change]:
        """Each place of a value with places that differs, or the value as a whole."""
        if not isinstance(old, dict) or kind.name == "function":
            yield Change(self.path(x), kind, x, ("", None), old, new, old, new)
            return
        what = "variable" if kind is VARIABLES else "key" if kind is ITEMS else "slot" if kind is SLOTS else "attribute"
        for name in {**old, **new}:
            one, other = old.get(name, NOTHING), new.get(name, NOTHING)
            if not is_same(one, other):
                yield Change(_text(self.path(x), (what, name)), kind, x, (what, name), one, other, old, new)

    def steps_from(self, change: Change, owners: Collection[int]) -> tuple[int, tuple[Any, ...]] | None:
        """The nearest of these owners, by identity, that reaches what has changed, and the steps from its attributes
        (`counters`); None where there is none, or no such steps."""
        steps = [change.step]
        at = id(change.box)
        while at not in owners:
            if at not in self._ways:
                return None
            at, step = self._ways[at]
            steps.append(step)
        named = [each for each in reversed(steps) if each != ("", None)]
        if not all(what in ("attribute", "key") for what, _ in named) or named[0][0] != "attribute":
            return None
        first, *rest = named
        return at, (first[1], *(part for what, name in rest for part in _THROUGH[what](name)))

    def path_of_tensor(self, x: torch.Tensor) -> str | None:
        """How the user would write a tensor that was reached; None for another one."""
        return self.path(x) if id(x) in self.tensors else None

    def root_of(self, x: Any) -> int:
        """From which root a value was reached first, by identity: itself where it is one that no earlier one reaches.
        """
        at = id(x)
        while at in self._ways:
            at, _ = self._ways[at]
        return at

    def iterators(self) -> list[tuple[Any, Step]]:
        """The iterators, each with how it is found, by the last name on the way to it."""
        return [(x, self._last_name(x)) for kind, x, _ in self._held if kind is ITERATOR]

    def _last_name(self, x: Any) -> Step:
        at = id(x)
        while at in self._ways and at not in self._names:
            at, step = self._ways[at]
            if step[0] in _NAMES and at not in self._inner:
                return step
        return "variable", self._names.get(at, "")

    def path(self, x: Any) -> str:
        """How the user would write a value."""
        steps: list[Step] = []
        at = id(x)
        while at not in self._names and at in self._ways:
            at, step = self._ways[at]
            steps.append(step)
        text = self._names.get(at, "")
        for step in reversed(steps):
            text = _text(text, step)
        return _IN_MODULES.sub(r".\1", text)


@functools.lru_cache(maxsize=4096)
def _is_ours(kind: type) -> bool:
    """Whether its objects are of spmd, as those that note what a trace reads."""
    return package_of(kind.__module__) == "spmd"


def _text(of: str, step: Step) -> str:
    what, name = step
    if what in ("attribute", "slot"):
        return f"{of}.{name}" if of else str(name)
    if what == "key":
        name = os.fsdecode(name) if isinstance(name, bytes) else name
        return f"{of}[{name!r}]" if isinstance(name, (str, int)) else f"{of}[...]"
    if what == "default":
        return f"{of}: default {name}" if of else f"default {name}"
    if what == "class":
        return f"type({of})"
    return str(name) if what == "variable" else of
