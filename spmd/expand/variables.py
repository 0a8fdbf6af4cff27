"""Where Python keeps a value that code can set: an attribute, an item, a global, a variable of the function around."""

from __future__ import annotations

import contextvars
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import is_
from typing import Any

from spmd.expand.bytecode import instructions
from spmd.expand.closed_over import Search
from spmd.expand.sources.layout import is_set


@dataclass(frozen=True, eq=False)
class Place:
    """of: the object or class of which it is an attribute, the dict or list that has it under a key, such as that of
    globals, the cell of a variable, or the variable of the context. A value that is not there is None. module: the one
    that reaches it, where that is not `of` itself. around: for a list that each step makes anew, the dict or list that
    has it, and the key. made: the lists that were put there.

    >>> class Average:
    ...     def __init__(self):
    ...         self.updates = 3
    >>> Place(Average(), "updates").value
    3
    """

    of: Any
    name: Any
    module: Any = None
    around: tuple[Any, Any] | None = None
    made: list[list] = field(default_factory=list, repr=False)

    @property
    def value(self) -> Any:
        if isinstance(self.of, types.CellType):
            return self.of.cell_contents if is_set(self.of) else None
        if isinstance(self.of, contextvars.ContextVar):
            return self.of.get(None)
        if isinstance(self.of, list):
            return self._names[self.name] if self.name < len(self._names) else None
        return self._names.get(self.name)

    @property
    def _list(self) -> list:
        """The list that is there now in the place of the one that was."""
        box, key = self.around
        return box[key]

    def _renew(self, value: Any) -> None:
        """Put another list there with this value; one that was there before, where that has it."""
        box, key = self.around
        new = [*self._list]
        new[self.name] = value
        known = (x for x in (self.of, *self.made) if len(x) == len(new) and all(map(is_, x, new)))
        box[key] = next(known, new)
        self.made.append(box[key])

    def set(self, value: Any) -> None:
        if self.around is not None:
            return self._renew(value)
        if isinstance(self.of, types.CellType):
            self.of.cell_contents = value
        elif isinstance(self.of, contextvars.ContextVar):
            self.of.set(value)
        elif isinstance(self.of, type):
            setattr(self.of, self.name, value)
        else:
            self._names[self.name] = value

    @property
    def _names(self) -> Any:
        if self.around is not None:
            return self._list
        return self.of if isinstance(self.of, (dict, list)) else vars(self.of)

    @property
    def key(self) -> tuple[int, Any]:
        """The same for all places that are one."""
        if isinstance(self.of, type):  # whose dict is made anew for each who asks
            return id(self.of), self.name
        return (id(self.of), "") if isinstance(self.of, types.CellType) else (id(self._names), self.name)


def assigned_variables(search: Search) -> Iterator[tuple[str, Place]]:
    """The variables around the functions of the user that they assign to, or delete, by name."""
    for fn in search.functions:
        stored = {i.value for i in instructions(fn.__code__) if i.name in ASSIGNING}
        cells = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
        for name in sorted(stored):
            if name in cells:
                yield name, Place(cells[name], name)
            elif name in fn.__globals__:
                yield name, Place(fn.__globals__, name)


ASSIGNING = ("STORE_GLOBAL", "STORE_DEREF", "DELETE_GLOBAL", "DELETE_DEREF")
