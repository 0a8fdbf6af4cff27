"""What a compiled step keeps, its captures and programs: so many at most, by the keys of the calls they are for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Recent(Generic[T]):
    """Values by key; the one used last goes last. A value may have several keys, and several values one key.

    >>> kept = Recent(2)
    >>> [kept.keep(value, keys) for value, keys in [("x", "ab"), ("y", "b"), ("z", "c")]]
    [False, False, True]
    >>> list(kept), list(kept.of("ab"))
    (['y', 'z'], ['y'])
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: dict[Hashable, list[T]] = {}
        self._used: dict[int, T] = {}

    def __iter__(self) -> Iterator[T]:
        return iter(self._used.values())

    def __len__(self) -> int:
        return len(self._used)

    def of(self, keys: Iterable[Hashable]) -> Iterator[T]:
        """The values with one of these keys."""
        return (value for key in keys for value in self._of.get(key, ()))

    def find(self, keys: Iterable[Hashable], is_right: Callable[[T], bool]) -> T | None:
        """A value with one of these keys that is right."""
        found = next(filter(is_right, self.of(keys)), None)
        if found is not None:
            self.use(found)
        return found

    def use(self, value: T) -> None:
        """Note that a value that is kept is used now."""
        if id(value) in self._used:
            self._used[id(value)] = self._used.pop(id(value))

    def keep(self, value: T, keys: Iterable[Hashable]) -> bool:
        """Keep a value. If there are too many, the one that was not used for longest is forgotten: then True."""
        is_full = len(self._used) >= self._most
        if is_full:
            self._forget(next(iter(self._used.values())))
        self._used[id(value)] = value
        for key in keys:
            self._of.setdefault(key, []).append(value)
        return is_full

    def _forget(self, value: T) -> None:
        del self._used[id(value)]
        others = {key: [v for v in values if v is not value] for key, values in self._of.items()}
        self._of = {key: values for key, values in others.items() if values}
