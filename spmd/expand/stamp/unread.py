"""Which attributes of modules are read while a call is traced.

    with Reads(module, {"layer_idx"}) as reads:
        module(x)
    reads.names      {"layer_idx"} if code has read it, be it by `getattr` or `vars`; empty if no code has

A plain attribute that no code reads plays no role in what was traced. Meanwhile the classes of the modules have a
descriptor under its name, and the modules a dict, that note who asks. Several may be on at once, also of one name.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn


class Reads:
    """Around a call of a module: names, of those given, that are read of it, of modules inside, or of others of their
    classes. In this thread.

    but_by: of what code it is not heard, by its frame; then other threads are heard, too.
    """

    def __init__(
        self, module: Any, names: Iterable[str], but_by: Callable[[types.FrameType], bool] | None = None
    ) -> None:
        self.names: set[str] = set()
        self._note = _Note(frozenset(names), self.names, but_by)
        of = module.modules() if isinstance(module, nn.Module) else [module]
        self._modules = [m for m in of if not self._note.known.isdisjoint(vars(m))]
        self._held: list[tuple[nn.Module, dict[str, Any]]] = []
        self._classes: list[tuple[type, str]] = []

    def __enter__(self) -> Reads:
        for m in self._modules:
            self._held.append((m, vars(m)))
            for name in self._note.known & vars(m).keys():
                self._watch_class(type(m), name)
            m.__dict__ = _NotingDict((self._note, *getattr(vars(m), "notes", ())), vars(m))
        return self

    def _watch_class(self, kind: type, name: str) -> None:
        if any(name in vars(base) and not isinstance(vars(base)[name], _Noted) for base in kind.__mro__):
            self.names.add(name)  # the class itself says what is read
            return
        if (kind, name) not in self._classes:
            if name not in vars(kind):
                setattr(kind, name, _Noted(name))
            vars(kind)[name].notes.append(self._note)
            self._classes.append((kind, name))

    def __exit__(self, *error: Any) -> None:
        self._note.known = frozenset()
        for kind, name in self._classes:
            vars(kind)[name].notes.remove(self._note)
            if not vars(kind)[name].notes:
                delattr(kind, name)
        for m, own in self._held:
            now = dict(dict.items(vars(m)))
            m.__dict__ = own
            if list(dict.keys(own)) != list(now) or any(dict.__getitem__(own, name) is not now[name] for name in now):
                dict.clear(own)
                dict.update(own, now)


class _Note:
    """Notes names, of those known, in the thread that made it, or of all code but some."""

    def __init__(
        self, known: frozenset[str], names: set[str], but_by: Callable[[types.FrameType], bool] | None
    ) -> None:  # fmt: skip
        self.known, self._names, self._but_by, self._thread = known, names, but_by, threading.get_ident()

    def one(self, name: Any) -> None:
        if isinstance(name, str) and name in self.known and self._hears():
            self._names.add(name)

    def all(self) -> None:
        for name in self.known:
            self.one(name)

    def _hears(self) -> bool:
        if self._but_by is None:
            return threading.get_ident() == self._thread
        frame = sys._getframe(1)
        while frame.f_code.co_filename == __file__:
            frame = frame.f_back
        return not self._but_by(frame)


class _Noted:
    """In a class: notes that an attribute of its objects is read or set."""

    def __init__(self, name: str) -> None:
        self.name, self.notes = name, []

    def _note(self) -> None:
        for note in self.notes:
            note.one(self.name)

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        self._note()
        if owner is None or not dict.__contains__(vars(owner), self.name):
            raise AttributeError(f"{kind.__name__!r} object has no attribute {self.name!r}")
        return dict.__getitem__(vars(owner), self.name)

    def __set__(self, owner: Any, value: Any) -> None:
        self._note()
        dict.__setitem__(vars(owner), self.name, value)

    def __delete__(self, owner: Any) -> None:
        self._note()
        dict.pop(vars(owner), self.name, None)


class _NotingDict(dict):
    """What a module holds: notes what is read or set in it, but by the attributes of the module."""

    def __init__(self, notes: tuple[_Note, ...], own: dict[str, Any]) -> None:
        super().__init__(dict.items(own))
        self.notes, self.own = notes, own


def held_in(box: Any) -> Any:
    """What a module holds when nothing is noted: this container, or the dict that one that notes stood for."""
    while type(box) is _NotingDict:
        box = box.own
    return box


def _of_one(name: str) -> Any:
    plain = getattr(dict, name)

    def method(self: _NotingDict, key: Any, *rest: Any) -> Any:
        for note in self.notes:
            note.one(key)
        return plain(self, key, *rest)

    return method


def _of_all(name: str) -> Any:
    plain = getattr(dict, name)

    def method(self: _NotingDict, *rest: Any, **more: Any) -> Any:
        for note in self.notes:
            note.all()
        return plain(self, *rest, **more)

    return method


for _name in ("__getitem__", "__setitem__", "__delitem__", "__contains__", "get", "pop", "setdefault"):
    setattr(_NotingDict, _name, _of_one(_name))
for _name in (
    "__iter__", "__reversed__", "__len__", "__eq__", "__ne__", "__or__", "__ror__", "__ior__", "__repr__", "clear",
    "copy", "items", "keys", "popitem", "update", "values",
):  # fmt: skip
    setattr(_NotingDict, _name, _of_all(_name))
