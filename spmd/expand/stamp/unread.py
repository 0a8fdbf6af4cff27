"""Which attributes of modules are read while a call is traced.

    with Reads(module, {"layer_idx"}) as reads:
        module(x)
    reads.names      {"layer_idx"} if code has read it, be it by `getattr` or `vars`; empty if no code has

A plain attribute that no code reads plays no role in what was traced. Meanwhile the classes of the modules have a
descriptor under its name, and the modules a dict, that note who asks.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

from torch import nn


class Reads:
    """Around a call of a module: names, of those given, that are read of it, of modules inside, or of others of their
    classes. In this thread."""

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        self.names: set[str] = set()
        self._note = _Note(frozenset(names), self.names)
        self._modules = [m for m in module.modules() if not self._note.known.isdisjoint(vars(m))]
        self._held: list[tuple[nn.Module, dict[str, Any]]] = []
        self._classes: list[tuple[type, str]] = []

    def __enter__(self) -> Reads:
        for m in self._modules:
            self._held.append((m, vars(m)))
            for name in self._note.known & vars(m).keys():
                self._watch_class(type(m), name)
            m.__dict__ = _NotingDict(self._note, vars(m))
        return self

    def _watch_class(self, kind: type, name: str) -> None:
        if isinstance(vars(kind).get(name), _Noted):
            return
        if any(name in vars(base) and (base, name) not in self._classes for base in kind.__mro__):
            self.names.add(name)  # the class itself says what is read
            return
        setattr(kind, name, _Noted(name, self._note))
        self._classes.append((kind, name))

    def __exit__(self, *error: Any) -> None:
        self._note.known = frozenset()
        for kind, name in self._classes:
            delattr(kind, name)
        for m, own in self._held:
            now = dict(vars(m))
            m.__dict__ = own
            if list(own) != list(now) or any(own[name] is not now[name] for name in now):
                own.clear()
                own.update(now)


class _Note:
    """Notes names, of those known, in the thread that made it."""

    def __init__(self, known: frozenset[str], names: set[str]) -> None:
        self.known, self._names, self._thread = known, names, threading.get_ident()

    def one(self, name: Any) -> None:
        if isinstance(name, str) and name in self.known and threading.get_ident() == self._thread:
            self._names.add(name)

    def all(self) -> None:
        for name in self.known:
            self.one(name)


class _Noted:
    """In a class: notes that an attribute of its objects is read or set."""

    def __init__(self, name: str, note: _Note) -> None:
        self.name, self.note = name, note

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        self.note.one(self.name)
        if owner is None or not dict.__contains__(vars(owner), self.name):
            raise AttributeError(f"{kind.__name__!r} object has no attribute {self.name!r}")
        return dict.__getitem__(vars(owner), self.name)

    def __set__(self, owner: Any, value: Any) -> None:
        self.note.one(self.name)
        dict.__setitem__(vars(owner), self.name, value)

    def __delete__(self, owner: Any) -> None:
        self.note.one(self.name)
        dict.pop(vars(owner), self.name, None)


class _NotingDict(dict):
    """What a module holds: notes what is read or set in it, but by the attributes of the module."""

    def __init__(self, note: _Note, own: dict[str, Any]) -> None:
        super().__init__(own)
        self.note = note


def _of_one(name: str) -> Any:
    plain = getattr(dict, name)

    def method(self: _NotingDict, key: Any, *rest: Any) -> Any:
        self.note.one(key)
        return plain(self, key, *rest)

    return method


def _of_all(name: str) -> Any:
    plain = getattr(dict, name)

    def method(self: _NotingDict, *rest: Any, **more: Any) -> Any:
        self.note.all()
        return plain(self, *rest, **more)

    return method


for _name in ("__getitem__", "__setitem__", "__delitem__", "__contains__", "get", "pop", "setdefault"):
    setattr(_NotingDict, _name, _of_one(_name))
for _name in (
    "__iter__", "__reversed__", "__len__", "__eq__", "__ne__", "__or__", "__ror__", "__ior__", "__repr__", "clear",
    "copy", "items", "keys", "popitem", "update", "values",
):  # fmt: skip
    setattr(_NotingDict, _name, _of_all(_name))
