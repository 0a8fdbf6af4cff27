"""What a step may not change: Python values around it, and the random numbers of Python and numpy.

    losses = []
    def step(model, x):
        losses.append(model(x).sum())      # would run once, while the step is captured, and append a traced tensor

A capture runs the step's Python code, and a program does not. So a change to a list, a dict, a variable or an object of
the user outside of modules is an error, which names it and the line of the step that does; and it is taken back, as it
is where the capture ends with any other error. What code finds by names is seen, as in `spmd.expand.closed_over`.
"""

from __future__ import annotations

import dis
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn

from spmd.expand.closed_over import Search, is_generator, search_of
from spmd.expand.python_state import Contents, copied, differs, is_set, put


@contextmanager
def unchanged(fn: Callable, modules: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Around a capture of fn: what it changes outside is put back, and is an error unless there is one already.

    modules: those that it is given, which may have generators of random numbers as attributes.
    """
    search = search_of(fn)
    numbers = RandomNumbers.now([*search.generators, *_generators_of(modules)])
    boxes: Contents = [(box, copied(box)) for _, box in search.boxes]
    variables = [(name, where, where.get()) for name, where in _assigned(search)]
    changed: list[str] = []
    try:
        yield
        changed = [name for (name, _), (box, old) in zip(search.boxes, boxes, strict=True) if differs(box, old)]
        changed += [name for name, where, old in variables if where.get() is not old]
        drawn = numbers.changed()
    finally:
        put([(box, old) for box, old in boxes if differs(box, old)])
        for _, where, old in variables:
            if where.get() is not old:
                where.set(old)
        numbers.restore()
    if changed:
        raise RuntimeError(
            f"the step changes {changed[0]}, a Python value outside of modules, which its program would not; return "
            f"what is new, or change it between steps{_line(search, changed[0])}"
        )
    if drawn:
        raise RuntimeError(f"{DRAWS.format(drawn)}{_line(search, drawn)}")


# ---- variables --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Global:
    """A variable of a module of Python."""

    of: dict[str, Any]
    name: str

    def get(self) -> Any:
        return self.of.get(self.name)

    def set(self, value: Any) -> None:
        self.of[self.name] = value


@dataclass(frozen=True)
class _Cell:
    """A variable of the function around."""

    cell: types.CellType

    def get(self) -> Any:
        return self.cell.cell_contents if is_set(self.cell) else None

    def set(self, value: Any) -> None:
        if is_set(self.cell):
            self.cell.cell_contents = value


def _assigned(search: Search) -> Iterator[tuple[str, _Global | _Cell]]:
    """The variables around the functions of the user that they assign to."""
    for fn in search.functions:
        stored = {i.argval for i in dis.get_instructions(fn.__code__) if i.opname in ("STORE_GLOBAL", "STORE_DEREF")}
        cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
        for name in sorted(stored):
            if name in cells:
                yield name, _Cell(cells[name])
            elif name in fn.__globals__:
                yield name, _Global(fn.__globals__, name)


def _line(search: Search, path: str) -> str:
    """The first line of the user's functions that names the value; without one, where the first of them begins."""
    names = {path.rpartition(".")[2], path.partition(".")[0]} - {""}
    for fn in search.functions:
        line = fn.__code__.co_firstlineno
        for i in dis.get_instructions(fn.__code__):
            line = i.starts_line or line
            if isinstance(i.argval, str) and i.argval in names:
                return _at(fn, line)
    return "".join(_at(fn, fn.__code__.co_firstlineno) for fn in search.functions[:1])


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
