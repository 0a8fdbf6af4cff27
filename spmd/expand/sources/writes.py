"""What a trace of a step has written in Python and no program would write again: counted, or refused by name.

    with undone(step, arguments, state):
        captured = trace(...)

A trace takes back what it knows that the step has set, for these are results of the program. What differs behind it all
the same is put back, too, however the trace ends, so that the next one begins as this one did. Of a number that has
another value the capture begins anew, with the number as one that changes (`CountersFound`). Anything else is an error
that says what it is, and which line names it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from spmd import _torch
from spmd.expand.closed_over import Search, search_of
from spmd.expand.counters import KINDS, CountersFound, is_number_or_symbol, owners_of, path_of_class
from spmd.expand.outside import line_of_path
from spmd.expand.sources.kinds import CLASS, ITERATOR
from spmd.expand.sources.reached import Change, Reached
from spmd.expand.state import State


@contextmanager
def undone(fn: Callable, given: Mapping[str, Any], state: State) -> Iterator[None]:
    """Around a trace of fn: all Python values that it reaches are put back. CountersFound, or RuntimeError, for those
    that the trace itself has not put back.

    given: the arguments by name, and what else the step is given.
    """
    search = search_of(fn, state.holders)
    before = Reached({"": fn, **state.holders, **given}, search.is_foreign)
    changes: list[Change] = []
    try:
        yield
        changes = before.changes()
    finally:
        before.put_back()
    if changes:
        raise _error(changes, before, state, search)


def _error(changes: list[Change], before: Reached, state: State, search: Search) -> BaseException:
    counted = {id(each): _counter(each, before, state) for each in changes}
    other = next((each for each in changes if counted[id(each)] is None), None)
    if other is not None:
        return RuntimeError(f"{_said(other)}{line_of_path(search, other.path)}")
    names: dict[str, frozenset[Any]] = {}
    for path, name in counted.values():
        names[path] = names.get(path, frozenset()) | {name}
    return CountersFound(names)


def _counter(change: Change, before: Reached, state: State) -> tuple[str, Any] | None:
    """What has a number that was set, and its name there, as counters are named; None for what is none."""
    if type(change.old) not in KINDS or not is_number_or_symbol(change.new):
        return None
    if change.kind is CLASS:
        return path_of_class(change.box), change.step[1]
    owners = {id(owner): path for path, owner in owners_of(state).items()}
    found = before.steps_from(change, owners.keys())
    if found is None:
        return None
    owner, steps = found
    return owners[owner], steps if len(steps) > 1 else steps[0]


def _said(change: Change) -> str:
    """What is wrong with a write that no program makes."""
    if change.kind is ITERATOR:
        return (
            f"the step takes values of {change.path}, a {type(change.box).__name__}, which the capture would take "
            "once; take the next value outside of the step, and pass it as an argument"
        )
    if isinstance(change.new, torch.Tensor) or _torch.is_symbol(change.new):
        return (
            f"the step keeps {_what(change.new)} in {change.path}, which its program would not; keep it in an "
            "attribute of a module, or let the step return it"
        )
    return (
        f"the step changes {change.path}, a Python value outside of modules, which its program would not; return what "
        "is new, or change it between steps"
    )


def _what(x: Any) -> str:
    return "a tensor" if isinstance(x, torch.Tensor) else "a number"
