"""Places in a tensor that a value tells which only the run knows: what they become in a trace.

    x.narrow(0, i, 4)       x.index_select(0, i + arange(4)), and an assert that i is one of its places
    x.select(0, i), x[i]    x.index_select(0, i), without the dim
    x[i] = y                x.index_copy_(0, i, y)
    x[:n]                   an error: only the run knows how many there are

On one device the first three show the memory of x. Here they are values of their own, and so a step that writes into
them, or into x, and reads the other one afterwards is an error (`spmd.expand.constrained_writes`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from spmd import _torch
from spmd.expand.constrained_writes import ConstrainedWrites
from spmd.expand.user_code import at_user_line, current_frames, short_place
from spmd.expand.value_sizes import of_unknown_size

aten = torch.ops.aten


class ValuePlaces:
    """The functions that take such places, each with one of the same arguments, which gives NotImplemented where torch
    knows the places. writes: where to note what is a copy of what."""

    def __init__(self, writes: ConstrainedWrites) -> None:
        self._writes = writes
        self._got: list[tuple[torch.Tensor, tuple, torch.Tensor, torch.Tensor]] = []
        self.functions: dict[Any, Callable[..., Any]] = {
            torch.narrow: self._narrow, torch.Tensor.narrow: self._narrow,
            torch.select: self._select, torch.Tensor.select: self._select,
            torch.Tensor.__getitem__: self._get, torch.Tensor.__setitem__: self._set,
            torch.tensor_split: _tensor_split, torch.Tensor.tensor_split: _tensor_split,
        }  # fmt: skip

    def _narrow(self, input: torch.Tensor, dim: int, start: Any, length: Any) -> Any:
        return self._places(input, dim, start, length, "narrow") if _takes(input, dim, start) else NotImplemented

    def _select(self, input: torch.Tensor, dim: int, index: Any) -> Any:
        if not _takes(input, dim, index):
            return NotImplemented
        return self._places(input, dim, index, 1, "select").squeeze(dim)

    def _places(self, x: torch.Tensor, dim: int, start: Any, length: Any, what: str) -> torch.Tensor:
        """So many indices of a dim, as a copy."""
        first = _first(x, dim, start, length, what)
        places = first.reshape(1)
        if type(length) is not int or length != 1:
            places = places + torch.arange(length, device=places.device)
        made = x.index_select(dim, places)
        self._writes.note_copy(x, made, _WRITES.format(what=what))
        return made

    def _get(self, x: torch.Tensor, index: Any) -> Any:
        if (found := _unknown_in(x, index)) is None:
            return NotImplemented
        items, at, dim = found
        part, rest = self._places(x, dim, items[at], 1, "an index"), (*items[:at], 0, *items[at + 1 :])
        found = self._get(part, rest)
        found = part[rest] if found is NotImplemented else found
        self._got.append((x, items, found, part))
        return found

    def _set(self, x: torch.Tensor, index: Any, value: Any) -> Any:
        if (found := _unknown_in(x, index)) is None:
            return NotImplemented
        items, at, dim = found
        for given, its, got, copy in self._got:
            if given is x and got is value and _are_one(its, items):
                self._writes.written_back(given, copy)
        place = _first(x, dim, items[at], 1, "an index").reshape(1)
        part, rest = x.index_select(dim, place), (*items[:at], 0, *items[at + 1 :])
        if self._set(part, rest, value) is NotImplemented:
            part[rest] = value
        x.index_copy_(dim, place, part)
        return None


def _tensor_split(input: torch.Tensor, tensor_indices_or_sections: Any = None, dim: int = 0, **kwargs: Any) -> Any:
    """At places that the trace knows, though they are in a tensor; an error at others."""
    places = kwargs.get("indices", kwargs.get("sections", tensor_indices_or_sections))
    if not (_is_traced(input) and _is_traced(places)):
        return NotImplemented
    known = _torch.known_constant(_torch.from_functional(places), _torch.proxy_mode().tracer)
    if known is None:
        raise _at_value("tensor_split", "give the places as numbers, as a list")
    with _torch.no_modes():
        return input.tensor_split(known.tolist(), dim)


_WRITES = (
    "the step writes in place into {{0}}, and reads {{1}} afterwards: at a place that only the run knows, {what} gives "
    "a copy. Write with x[i] = y or x.index_copy_(dim, places, y), and read again what was written{{line}}"
)


def _is_traced(x: Any) -> bool:
    return type(x) is _torch.FunctionalTensor


def _is_unknown(x: Any) -> bool:
    """Whether it is one whole number that only the run knows."""
    if not _is_traced(x):
        return isinstance(x, torch.SymInt) and _torch.is_unbacked(x)
    if x.ndim or x.dtype.is_floating_point or x.dtype.is_complex or x.dtype in (torch.bool, torch.uint8):
        return False
    inner = _torch.from_functional(x)
    return _torch.known_constant(inner, _torch.proxy_mode().tracer) is None


def _takes(x: Any, dim: Any, place: Any) -> bool:
    """Whether a dim of a tensor of the trace is asked for such a place."""
    return _is_traced(x) and type(dim) is int and -x.ndim <= dim < x.ndim and _is_unknown(place)


def _first(x: torch.Tensor, dim: int, start: Any, length: Any, what: str) -> torch.Tensor:
    """The first of some indices, counted from the front. An assert says that they are there."""
    if not isinstance(start, torch.Tensor):
        start = aten.scalar_tensor.default(start, dtype=torch.int64, device=x.device)
    start, size = start.detach().to(x.device, torch.int64), x.shape[dim]
    first = torch.where(start < 0, start + size, start)
    inside = torch.logical_and(first >= 0, first <= size - length)
    aten._assert_async.msg(inside, f"{what}{short_place(current_frames())}: it is out of the range of dim {dim}")
    return first


def _unknown_in(x: torch.Tensor, index: Any) -> tuple[tuple, int, int] | None:
    """The items of an index, the first of them that is such a place, and its dim; None where there is none."""
    items = index if isinstance(index, tuple) else (index,)
    if not _is_traced(x):
        return None
    for item in items:
        if isinstance(item, slice) and any(map(_is_unknown, (item.start, item.stop, item.step))):
            raise _at_value("a slice", "write x.narrow(dim, i, n), in which i may be one, or torch.where")
    at = next((i for i, item in enumerate(items) if _is_unknown(item)), None)
    dims = list(map(_dims_of, items))
    if at is None or None in dims:
        return None
    before = sum(dims[:at])
    if any(item is Ellipsis for item in items[:at]):
        before += x.ndim - sum(dims)
    return (items, at, before) if sum(dims) <= x.ndim else None


def _are_one(items: tuple, others: tuple) -> bool:
    """Whether two indices are one."""
    return len(items) == len(others) and all(
        x is y or (not isinstance(x, torch.Tensor) and not isinstance(y, torch.Tensor) and x == y)
        for x, y in zip(items, others, strict=True)
    )


def _dims_of(item: Any) -> int | None:
    """How many dims an item of an index is for; None where that takes longer to say."""
    if item is None or item is Ellipsis or isinstance(item, bool):
        return 0
    if isinstance(item, (int, slice, torch.SymInt)):
        return 1
    if isinstance(item, torch.Tensor):
        return item.ndim if item.dtype in (torch.bool, torch.uint8) else 1
    return None


def _at_value(what: str, instead: str) -> NotImplementedError:
    return of_unknown_size(f"{what} at a value in a tensor", instead)


# ---- numbers of ops ----------------------------------------------------------------------------


def check_numbers(op: _torch.OpOverload, args: tuple, kwargs: dict[str, Any]) -> None:
    """Refuse a whole number that only the run knows where an op takes sizes, places or counts."""
    for argument, x in zip(op._schema.arguments, args, strict=False):
        _check_number(op, argument, x)
    if kwargs:
        for argument in op._schema.arguments:
            _check_number(op, argument, kwargs.get(argument.name))


def _check_number(op: _torch.OpOverload, argument: Any, x: Any) -> None:
    inside = x if isinstance(x, (tuple, list)) else (x,)
    if any(map(_torch.is_unbacked, inside)) and "int" in str(argument.type).lower():
        raise NotImplementedError(
            f"{op}: takes as {argument.name} a value in a tensor, which only the run knows; give a number, or write it "
            "with places as tensors, as x.narrow(dim, i, n), x.index_select(dim, i + torch.arange(n)) or torch.where "
            f"take them{at_user_line(current_frames())}"
        )
