"""What a step may not change: settings of torch, and the random numbers of Python and numpy.

    def step(model, x):
        return model(x) * random.random()      # would be drawn once, while the step is captured

A capture runs the step's Python code, and a program does not. So such a change is an error, which names it and the line
of the step that does; and it is taken back, as it is where the capture ends with any other error. Values that a step
keeps in Python are the business of `spmd.expand.sources`.
"""

from __future__ import annotations

import random
import re
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
from spmd.expand.user_code import is_users


@contextmanager
def unchanged(fn: Callable, given: Given = NONE_GIVEN, modules: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Around a capture of fn: what it changes outside is put back, and is an error unless there is one already.

    given: the leaves of its arguments, by path. modules: those among them, which may have generators of random numbers
    as attributes.
    """
    search = search_of(fn, given)
    settings, numbers = Settings.now(), RandomNumbers.now([*_generators_of(modules), *search.generators])
    left = drawn = ""
    try:
        yield
        left, drawn = settings.changed(), numbers.changed()
    finally:
        settings.restore()
        numbers.restore()
    if left:
        raise RuntimeError(
            f"the step leaves {left} changed, which its program would not; change it before the step, or for a part of "
            "it, as with torch.no_grad()"
        )
    if drawn:
        raise RuntimeError(f"{DRAWS.format(drawn)}{line_of_path(search, drawn)}")


def changed_outside(search: Search, path: str) -> RuntimeError:
    """The error of a step that changes what is at a path."""
    return RuntimeError(
        f"the step changes {path}, a Python value outside of modules, which its program would not; return what is new, "
        f"or change it between steps{line_of_path(search, path)}"
    )


# ---- lines ------------------------------------------------------------------------------------


def line_of_path(search: Search, path: str) -> str:
    """The first line of the user's functions that names the last part of a path that any names; without one, where the
    first of them begins."""
    names = re.findall(r"[^\W\d]\w*", path)
    lines = (line_naming(search.functions, {name}) for name in (*names[-1:], *names[:1], *reversed(names[1:-1])))
    return next(filter(None, lines), "") or "".join(_at(fn, fn.__code__.co_firstlineno) for fn in search.functions[:1])


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
