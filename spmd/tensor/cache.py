"""A bounded cache that counts its hits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable
from typing import Any


class Cache:
    """A dictionary that forgets its oldest entries and counts hits and misses. Threads may share it.

    >>> c = Cache(2)
    >>> [c.get(k, lambda k=k: k * 2) for k in (1, 2, 1, 3, 1)]
    [2, 4, 2, 6, 2]
    >>> c
    Cache(2 of 2 entries, 1 hits, 4 misses)
    """

    def __init__(self, maxsize: int):
        self.maxsize = maxsize
        self.hits = self.misses = 0
        self.entries: dict[Hashable, Any] = {}  # for who cannot wait for a call of `get`
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What is kept under the key; made, and kept, where there is nothing."""
        found = self.entries.get(key)
        if found is not None:
            self.hits += 1
            return found
        made = make()  # by two threads at once, perhaps: they make the same
        with self._lock:
            self.misses += 1
            while len(self.entries) >= self.maxsize:
                del self.entries[next(iter(self.entries))]
            self.entries[key] = made
        return made

    def clear(self) -> None:
        with self._lock:
            self.entries.clear()
            self.hits = self.misses = 0

    def __len__(self):
        return len(self.entries)

    def __repr__(self):
        return f"Cache({len(self.entries)} of {self.maxsize} entries, {self.hits} hits, {self.misses} misses)"


def frozen(value: Any) -> Hashable:
    """A hashable stand-in for an argument, equal where the arguments cannot be told apart.

    Numbers keep their type, for 1, 1.0 and True are not one argument, nor are 0.0 and -0.0; NaN equals itself.

    >>> frozen([1, True, 1.0]) == frozen([1, 1, 1]), frozen(0.0) == frozen(-0.0)
    (False, False)
    """
    kind = type(value)
    if isinstance(value, (list, tuple)):
        return (list, *map(frozen, value))
    if isinstance(value, dict):
        return (dict, *((k, frozen(v)) for k, v in value.items()))
    if kind is int or kind is bool:
        return kind, value
    if kind is float or kind is complex:
        return kind, repr(value)
    return value
