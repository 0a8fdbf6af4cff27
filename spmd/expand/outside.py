"""What a step may not change: Python values around it, and the random numbers of Python and numpy.

    losses = []
    def step(model, x):
        losses.append(model(x).sum())      # would run once, while the step is captured, and append a traced tensor

A capture runs the step's Python code, and a program does not. So a change to a list, a dict, a variable or an object of
the user outside of modules is an error, which names it and the line of the step that does; and it is taken back, as it
is where the capture ends with any other error. What code finds by names is seen, as in `spmd.expand.closed_over`.
"""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from spmd.expand.bytecode import instructions
from spmd.expand.closed_over import NONE_GIVEN, Given, Search, is_generator, search_of
from spmd.expand.counters import KINDS as NUMBERS
from spmd.expand.counters import CountersFound, Names, is_number_or_symbol, path_of_class
from spmd.expand.python_state import Container, Contents, copied, differs, put
from spmd.expand.user_code import is_users
from spmd.expand.variables import Place, assigned_variables


@contextmanager
def unchanged(fn: Callable, given: Given = NONE_GIVEN, modules: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Around a capture of fn: what it changes outside is put back, and is an error unless there is one already.

    given: the leaves of its arguments, by path. modules: those among them, which may have generators of random numbers
    as attributes.
    """
    search = search_of(fn, given)
    classes = Classes.now(search)
    search.boxes += classes.boxes()
    watched = Boxes.now(search.boxes), Variables.now(search), classes
    settings, numbers = Settings.now(), RandomNumbers.now([*_generators_of(modules), *search.generators])
    changed, left, drawn, counted = [], "", "", {}
    try:
        yield
        counted = classes.numbers_set()
        changed = [name for each in watched for name in each.changed()]
        left, drawn = settings.changed(), numbers.changed()
    finally:
        for each in (*watched, settings, numbers):
            each.restore()
    if counted:
        raise CountersFound(counted)
    if changed:
        raise changed_outside(search, changed[0])
    if left:
        raise RuntimeError(
            f"the step leaves {left} changed, which its program would not; change it before the step, or for a part of "
            "it, as with torch.no_grad()"
        )
    if drawn:
        raise RuntimeError(f"{DRAWS.format(drawn)}{_line(search, drawn)}")


def changed_outside(search: Search, path: str) -> RuntimeError:
    """The error of a step that changes what is at a path."""
    return RuntimeError(
        f"the step changes {path}, a Python value outside of modules, which its program would not; return what is new, "
        f"or change it between steps{_line(search, path)}"
    )


# ---- variables --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Boxes:
    """The contents of containers, with the names of these."""

    names: list[str]
    before: Contents

    @classmethod
    def now(cls, boxes: list[tuple[str, Container]]) -> Boxes:
        return cls([name for name, _ in boxes], [(box, copied(box)) for _, box in boxes])

    def changed(self) -> list[str]:
        return [name for name, (box, old) in zip(self.names, self.before, strict=True) if differs(box, old)]

    def restore(self) -> None:
        put([(box, old) for box, old in self.before if differs(box, old)])


@dataclass(frozen=True)
class Variables:
    """The values of variables around functions."""

    before: list[tuple[str, Place, Any]]

    @classmethod
    def now(cls, search: Search) -> Variables:
        contexts = [(name, Place(variable, name)) for name, variable in search.contexts]
        return cls([(name, where, where.value) for name, where in (*assigned_variables(search), *contexts)])

    def changed(self) -> list[str]:
        return [name for name, where, old in self.before if where.value is not old]

    def restore(self) -> None:
        for _, where, old in self.before:
            if where.value is not old:
                where.set(old)


@dataclass(frozen=True)
class Classes:
    """The attributes of classes of the user, and of those that they are made of."""

    before: list[tuple[type, dict[str, Any]]]

    @classmethod
    def now(cls, search: Search) -> Classes:
        bases = dict.fromkeys(base for kind in search.classes for base in kind.__mro__)
        return cls([(kind, _attributes(kind)) for kind in bases if not search.is_foreign(kind.__module__)])

    def boxes(self) -> list[tuple[str, Container]]:
        """The lists, dicts and sets among them."""
        named = ((f"{kind.__qualname__}.{name}", x) for kind, own in self.before for name, x in own.items())
        return [(name, x) for name, x in named if isinstance(x, Container)]

    def changed(self) -> list[str]:
        return [f"{kind.__qualname__}.{name}" for kind, name, _ in self._differing()]

    def numbers_set(self) -> Names:
        """Where numbers are others now."""
        found: dict[str, frozenset[str]] = {}
        for kind, name, old in self._differing():
            if type(old) in NUMBERS and is_number_or_symbol(vars(kind).get(name)):
                path = path_of_class(kind)
                found[path] = found.get(path, frozenset()) | {name}
        return found

    def restore(self) -> None:
        for kind, name, old in self._differing():
            delattr(kind, name) if old is _NONE else setattr(kind, name, old)

    def _differing(self) -> list[tuple[type, str, Any]]:
        """What is another value now, or new, or gone, with what it was."""
        pairs = [(kind, old, _attributes(kind)) for kind, old in self.before]
        return [
            (kind, name, old.get(name, _NONE))
            for kind, old, now in pairs
            for name in {**old, **now}
            if now.get(name, _NONE) is not old.get(name, _NONE)
        ]


_NONE = object()


def _attributes(kind: type) -> dict[str, Any]:
    """What a class has itself, by name, but for what Python notes in it."""
    return {name: x for name, x in vars(kind).items() if not name.startswith("__")}


def _line(search: Search, path: str) -> str:
    """The first line of the user's functions that names the value; without one, where the first of them begins."""
    names = {path.rpartition(".")[2], path.partition(".")[0]} - {""}
    first = "".join(_at(fn, fn.__code__.co_firstlineno) for fn in search.functions[:1])
    return line_naming(search.functions, names) or first


def line_naming(functions: Iterable[types.FunctionType], names: Collection[str]) -> str:
    """For an error: the first line of these functions that has one of the names; empty where none has.

    Code that others have written for the user's classes, as dataclasses do, has no line of the user's.
    """
    for fn in functions:
        if not is_users(fn.__code__.co_filename):
            continue
        for i in instructions(fn.__code__):
            if isinstance(i.value, str) and i.value in names:
                return _at(fn, i.line)
    return ""


def _at(fn: types.FunctionType, line: int) -> str:
    return f"\n  at {fn.__code__.co_filename}:{line}, in {fn.__name__}"


# ---- random numbers ---------------------------------------------------------------------------

DRAWS = (
    "the step draws random numbers of Python or numpy, from {}, which the program would freeze; use torch's, or pass "
    "them as arguments"
)


@dataclass(frozen=True)
class RandomNumbers:
    """The states of generators, with their names: those of Python and of numpy where it is imported, and others."""

    states: list[tuple[str, Any, Any]]

    @classmethod
    def now(cls, others: Iterable[tuple[str, Any]] = ()) -> RandomNumbers:
        numpy = sys.modules.get("numpy")
        own = [("random", random), *([("numpy.random", numpy.random)] if numpy else ())]
        return cls([(name, each, _state_of(each)) for name, each in (*own, *others)])

    def changed(self) -> str:
        """The name of the first generator that was drawn from, or seeded; empty where there is none."""
        return next((name for name, each, old in self.states if _plain(_state_of(each)) != _plain(old)), "")

    def restore(self) -> None:
        for _, each, old in self.states:
            if _plain(_state_of(each)) != _plain(old):
                _set_state(each, old)


def _state_of(generator: Any) -> Any:
    """The state of a generator, or of the module that has one."""
    if hasattr(generator, "getstate"):
        return generator.getstate()
    return generator.get_state(legacy=False) if hasattr(generator, "get_state") else generator.bit_generator.state


def _set_state(generator: Any, state: Any) -> None:
    if hasattr(generator, "setstate"):
        generator.setstate(state)
    elif hasattr(generator, "set_state"):
        generator.set_state(state)
    else:
        generator.bit_generator.state = state


def _plain(state: Any) -> Any:
    """A state that can be compared."""
    if isinstance(state, dict):
        return {name: _plain(x) for name, x in state.items()}
    return state.tobytes() if hasattr(state, "tobytes") else state


def _generators_of(modules: Iterable[nn.Module]) -> Iterator[tuple[str, Any]]:
    for module in modules:
        yield from ((f"{type(module).__name__}.{name}", x) for name, x in vars(module).items() if is_generator(x))


# ---- settings of torch ------------------------------------------------------------------------

SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch.set_grad_enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch.set_default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.use_deterministic_algorithms": (
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms
    ),
    "torch.set_float32_matmul_precision": (
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision
    ),
    "torch.autograd.set_detect_anomaly": (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
}  # fmt: skip
"""Settings of torch for the process or the thread, by the function that sets them."""


@dataclass(frozen=True)
class Settings:
    """Torch's settings."""

    before: dict[str, Any]

    @classmethod
    def now(cls) -> Settings:
        return cls({name: get() for name, (get, _) in SETTINGS.items()})

    def changed(self) -> str:
        """The first one that is another now; empty where there is none."""
        return next((name for name, (get, _) in SETTINGS.items() if get() != self.before[name]), "")

    def restore(self) -> None:
        for name, (get, put_back) in SETTINGS.items():
            if get() != self.before[name]:
                put_back(self.before[name])
