"""Bounded caches that count their hits.

    plans = Cache(maxsize=1024)
    plans.get((src, dst), lambda: make_plan(src, dst))      # made once, then found
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

_decided_by_rules: weakref.WeakSet[Cache] = weakref.WeakSet()


class Cache:
    """A dictionary that forgets its oldest entries and counts hits and misses. Threads may share it.

    >>> c = Cache(2)
    >>> [c.get(k, lambda k=k: k * 2) for k in (1, 2, 1, 3, 1)]
    [2, 4, 2, 6, 2]
    >>> c
    Cache(2 of 2 entries, 1 hits, 4 misses)
    """

    def __init__(self, maxsize: int, decided_by_rules: bool = False):
        """decided_by_rules: `forget_decisions` empties it, because other rules would give other entries."""
        self.maxsize = maxsize
        if decided_by_rules:
            _decided_by_rules.add(self)
        self.hits = self.misses = 0
        self.entries: dict[Hashable, Any] = {}  # read directly where a call of `get` is too slow
        self._lock = threading.Lock()

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The entry under the key. If there is none, `make` makes it and the cache keeps it."""
        found = self.entries.get(key)
        if found is not None:
            self.hits += 1
            return found
        made = make()  # two threads may do this at once: they make the same entry
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


def forget_decisions() -> None:
    """Forget how calls are run, so that each is decided again. Unless a rule has changed, only time depends on it."""
    for cache in list(_decided_by_rules):
        cache.clear()


def frozen(value: Any) -> Hashable:
    """A hashable value in place of an argument. Two such values are equal if the arguments cannot be told apart.

    Numbers keep their type: 1, 1.0 and True are different arguments, and so are 0.0 and -0.0. NaN equals itself.

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
