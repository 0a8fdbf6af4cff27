"""What a trace of a step has written in Python and would not write again: counted, made again once, or refused by name.

    with undone(step, args, containers, state, search) as found:
        captured = trace(...)
    redo(found.writes)               # (`redo`) behind the program, in the call that the trace was made for

A trace takes back what it knows that the step has set, for these are results of the program. What differs behind it all
the same is put back, too, however the trace ends, so that the next one begins as this one did. Of a number that has
another value the capture begins anew, with the number as one that changes (`CountersFound`). Other plain values are
right for this call alone: they are written once its program has run, and the next call is captured anew. Anything
else, such as a tensor of the trace or an iterator that has moved on, is an error that says what it is, with the line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from spmd import _torch
from spmd.expand.closed_over import Search, is_generator, names_in, refused
from spmd.expand.containers import AROUND, Containers, in_arguments, parted
from spmd.expand.counters import KINDS, CountersFound, is_number_or_symbol, owners_of, path_of_class
from spmd.expand.outside import DRAWS, line_of_path
from spmd.expand.python_state import KeptOfRun, without_symbols
from spmd.expand.sources.kinds import (
    ARRAY,
    CLASS,
    CONTEXT,
    ELEMENTS,
    ITERATOR,
    MEMBERS,
    VARIABLE,
    Kind,
    is_same,
    kinds_of,
)
from spmd.expand.sources.reached import Change, Reached
from spmd.expand.sources.redo import Write
from spmd.expand.state import State


class Found(NamedTuple):
    """What a trace has written, and what it could reach."""

    writes: list[Write]
    before: Reached
    copied: frozenset[int]
    search: Search

    def check_elsewhere(self, written: Iterable[Any]) -> None:
        """Raise RuntimeError for an argument that the step has written, and that other code finds elsewhere, too: a
        trace has a copy of it. written: the containers that were."""
        for x in written:
            if self.before.root_of(x) not in self.copied:
                path = self.before.path(x)
                raise RuntimeError(parted(path) + line_of_path(self.search, path))

    def check_constants(self, constants: Mapping[str, torch.Tensor]) -> None:
        """Raise RuntimeError for a constant of a graph that the step has found somewhere: it may be another one then.
        """
        for x in constants.values():
            if (path := self.before.path_of_tensor(x)) is not None:
                raise RuntimeError(
                    f"the step uses {path}, a tensor that is not among its arguments, nor in a module or optimiser "
                    "among them; pass it as an argument, or keep it in an attribute of a module"
                )


@contextmanager
def undone(
    fn: Callable, args: Mapping[str, Any], containers: Containers, state: State, search: Search
) -> Iterator[Found]:  # fmt: skip
    """Around a trace of fn: all Python values that it reaches are put back. Gives what was found, which has behind it
    what the trace itself has not put back, with plain contents. CountersFound, TypeError or RuntimeError for what is
    none.

    args: the arguments by name. containers: those that they were made of, and those around the step. search: of the
    step.
    """
    inside = [(path.removeprefix(AROUND), x) for path, several in containers.items() for x in several]
    roots = [("", fn), *state.holders.items(), ("os.environ", os.environ._data), *_on_tensors(state)]
    roots += [*inside, *args.items()]  # behind the rest: what is found before them stands elsewhere, too
    named = {id(x): search.attributes_named for x in state.objects.values()}
    before = Reached(roots, search.is_foreign, named, search.attributes_named)
    copied = frozenset([id(x) for several in in_arguments(containers).values() for x in several])
    _check_iterators(before, search)
    writes: list[Write] = []
    try:
        yield Found(writes, before, copied, search)
        changes = before.changes()
        _check_parted(changes, copied, search)
        if counted := _counted(changes, before, state):
            raise CountersFound(counted)
        writes += _plain_writes(changes, before, search)
    finally:
        before.put_back()


def _on_tensors(state: State) -> list[tuple[str, Any]]:
    """What users have set on parameters and buffers: the tensors of a trace have it, too."""
    tensors = {**state.parameters(), **state.buffers()}
    return [(f"{path}.{name}", v) for path, x in tensors.items() for name, v in _torch.user_attributes(x).items()]


def _check_parted(changes: list[Change], copied: Collection[int], search: Search) -> None:
    """Raise where somebody has written what the step was given, which is a copy in a trace, in another way."""
    for change in changes:
        if id(change.box) in copied:
            raise RuntimeError(parted(change.path) + line_of_path(search, change.path))


# ---- numbers ----------------------------------------------------------------------------------


def _counted(changes: list[Change], before: Reached, state: State) -> dict[str, frozenset[Any]]:
    """The numbers that were set, as counters are named."""
    names: dict[str, frozenset[Any]] = {}
    owners = {id(owner): path for path, owner in owners_of(state).items()} if changes else {}
    for change in changes:
        if (counter := _counter(change, before, owners)) is not None:
            path, name = counter
            names[path] = names.get(path, frozenset()) | {name}
    return names


def _counter(change: Change, before: Reached, owners: Mapping[int, str]) -> tuple[str, Any] | None:
    """What has a number that was set, and its name there; None for what is none, or has no name."""
    if type(change.old) not in KINDS or not is_number_or_symbol(change.new):
        return None
    if change.kind is CLASS:
        return path_of_class(change.box), change.step[1]
    if (found := before.steps_from(change, owners.keys())) is None:
        return None
    owner, steps = found
    return owners[owner], steps if len(steps) > 1 else steps[0]


# ---- other values -----------------------------------------------------------------------------


def _plain_writes(changes: list[Change], before: Reached, search: Search) -> Iterator[Write]:
    """The writes that these changes consist of, each with plain contents."""
    boxes: dict[tuple[int, Kind], list[Change]] = {}
    for change in changes:
        if change.kind.put is None or is_generator(change.box):
            raise RuntimeError(_said(change) + line_of_path(search, change.path))
        boxes.setdefault((id(change.box), change.kind), []).append(change)
    for several in boxes.values():
        first = several[0]
        new = _Plain(before, first.path, search).contents(first.kind, first.contents)
        if not first.kind.same(first.before, new):
            yield Write(first.path, first.kind, first.box, first.before, new)


_OF_VALUES = frozenset({ELEMENTS, MEMBERS, VARIABLE, CONTEXT, ARRAY})


def _is_of_bytes(contents: Any) -> bool:
    """Whether these are the contents of an array of numbers."""
    return isinstance(contents, tuple) and len(contents) == 2 and isinstance(contents[1], bytes)


class _Plain:
    """Makes values plain that a trace has left somewhere: numbers in the place of symbols."""

    def __init__(self, before: Reached, path: str, search: Search) -> None:
        self._before, self._path, self._search, self._seen = before, path, search, set[int]()

    def contents(self, kind: Kind, contents: Any) -> Any:
        if isinstance(contents, dict):
            return {self.value(key): self.value(x) for key, x in contents.items()}
        if kind not in _OF_VALUES or not isinstance(contents, (list, set, tuple)) or _is_of_bytes(contents):
            return contents
        return type(contents)(map(self.value, contents))

    def value(self, x: Any) -> Any:
        if isinstance(x, torch.Tensor) and _torch.is_fake(x):
            raise RuntimeError(
                f"the step keeps a tensor in {self._path}, which its program would not; keep it in an attribute of a "
                f"module, or let the step return it{line_of_path(self._search, self._path)}"
            )
        if _torch.is_symbol(x) or not kinds_of(type(x)):
            return self._number(x)
        if isinstance(x, tuple):
            return self._tuple(x)
        if id(x) not in self._seen and not self._before.knows(x):
            self._seen.add(id(x))
            for kind in kinds_of(type(x)):
                self._put_plain(kind, x)
        return x

    def _number(self, x: Any) -> Any:
        try:
            return without_symbols(x)
        except KeptOfRun as error:
            raise RuntimeError(
                f"the step keeps in {self._path} a {error.kind} that is known only when the program runs; let the step "
                f"return it{line_of_path(self._search, self._path)}"
            ) from error

    def _tuple(self, x: tuple) -> tuple:
        inside = [self.value(each) for each in x]
        if all(map(is_same, inside, x)):
            return x
        return x._make(inside) if hasattr(x, "_make") else type(x)(inside)

    def _put_plain(self, kind: Kind, x: Any) -> None:
        """Make what is in a new value plain, in place."""
        old = kind.contents(x)
        new = self.contents(kind, old)
        if kind.put is not None and not kind.same(old, new):
            kind.put(x, new)


def _check_iterators(before: Reached, search: Search) -> None:
    """Raise TypeError for an iterator that code of the step can find: what it takes of it could not be put back."""
    named = [names_in(fn.__code__) for fn in search.functions]
    names = {x for each in named for x in (*each.globals, *each.attributes)}
    names |= {x for fn in search.functions for x in fn.__code__.co_freevars}
    for x, (what, name) in before.iterators():
        if what == "default" or str(name).rpartition(".")[2] in names:
            raise refused(before.path(x), x)


def _said(change: Change) -> str:
    """What is wrong with a write that cannot be made again."""
    if is_generator(change.box):
        return DRAWS.format(change.path)
    if change.kind is ITERATOR:
        return (
            f"the step takes values of {change.path}, a {type(change.box).__name__}, which the capture would take "
            "once; take the next value outside of the step, and pass it as an argument"
        )
    return (
        f"the step changes {change.path}, a {type(change.box).__name__}, which its program would not; return what is "
        "new, or change it between steps"
    )
