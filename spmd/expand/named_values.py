"""The plain values that a step's code names besides its arguments: globals, variables around it, attributes of objects.

    SCALE = 0.5
    def step(model, x):
        return model(x) * SCALE * config.rates["loss"]      # SCALE, config.rates["loss"]

A trace reads them once, so they are guards, like the attributes of modules. What the code names is read off its
bytecode: a variable, and the attributes and constant keys that follow it. So an attribute counts where it is read of
this object, and not where another object has one of the same name. Where that ends at a list, a dict, a small array or
an object that is a record, all plain values in it count: a loop or a function may read any. Of any other object that
the code passes on, or that Python's operators read, these attributes count that code of the step names somewhere. So do
values of default arguments, functions of libraries, and what functions import when they run. Of an object of Python's
library all counts that it holds, of one of another package that it is the same, and what code names of it. Left out:
values that are found in other ways.
"""

from __future__ import annotations

import argparse
import contextvars
import dataclasses
import enum
import functools
import gc
import os
import sys
import types
import weakref
from array import array
from collections import ChainMap, UserDict, UserList, defaultdict, deque
from collections.abc import Iterable, Iterator
from logging import Logger
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from spmd.expand.bytecode import Import, imports_in, instructions
from spmd.expand.closed_over import REFLECTING, Search, absolute, names_in, package_of
from spmd.expand.guards import ById, bytes_of_array, digest_of_items, guard_key, parts_of
from spmd.expand.reads import Reads
from spmd.expand.sources.kinds import ATTRIBUTES, ELEMENTS, ITEMS, MEMBERS, kinds_of
from spmd.expand.sources.layout import hides, is_set, items_of, slots_of

PLAIN = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, enum.Enum, range,
    torch.memory_format, torch.layout, type(...),
)  # fmt: skip

Chain = tuple[tuple[str, Any], ...]
"""A variable and what follows it: ("global", "config"), ("attribute", "rates"), ("key", "loss")."""

_VARIABLES = {"LOAD_GLOBAL": "global", "LOAD_NAME": "global", "LOAD_DEREF": "around", "LOAD_FAST": "local"}


@functools.lru_cache(maxsize=1024)
def chains_in(code: types.CodeType) -> tuple[Chain, ...]:
    """The chains in the code of a function and of the functions inside it, in order.

    >>> for chain in chains_in((lambda: math.inf + sizes["x"]).__code__):
    ...     print(chain)
    (('global', 'math'), ('attribute', 'inf'))
    (('global', 'sizes'), ('key', 'x'))
    (('global', 'math'),)
    (('global', 'sizes'),)
    """
    found: dict[Chain, None] = {}
    chain: Chain = ()
    key: Chain = ()
    imported = imports_in(code)
    for name, value, _ in instructions(code):
        if name == "LOAD_CONST" and chain and not key:
            key = (("key", value),)
            continue
        if name == "LOAD_ATTR" and chain and not key:
            chain += (("attribute", value),)
        elif name == "BINARY_SUBSCR" and key:
            chain += key
        else:
            if name != "STORE_ATTR" or len(chain) > 1:  # what sets an attribute reads nothing of the object
                found[chain] = None
            chain = ((_VARIABLES[name], value),) if name in _VARIABLES else ()
            if name in ("LOAD_FAST", "LOAD_DEREF", "LOAD_NAME") and value in imported:
                chain = (("import", imported[value]),)
        key = ()
    found |= dict.fromkeys((("import", each),) for each in imported.values() if each.name)
    found |= dict.fromkeys((("global", name),) for name in names_in(code).globals)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found |= dict.fromkeys(chains_in(inner))
    return tuple(each for each in found if each)


def named_values(search: Search) -> dict[str, Any]:
    """The plain values that functions of a search name, by the text that names them, and those of its classes."""
    found, plain, reads = _Found(), PlainValues(search), search.reads
    for kind, names in search.classes.items():
        for name in sorted(names):
            found.add(f"{kind.__qualname__}.{name}", kind, plain.of(_attribute(kind, name, reads)))
    for fn, owner in search.methods_and_functions():
        for chain in chains_in(fn.__code__):
            text, place, value = _followed(fn, owner, chain, search)
            if value is not owner or not isinstance(owner, type):
                text = text if owner is None else f"{name_of(owner)}: {text}"
                found.add(text, place, plain.of_variable(value, fn))
        for name, value in _defaults(fn):
            found.add(f"{fn.__qualname__}: default {name}", fn, plain.of(value))
        found.add(f"{fn.__qualname__}: code", fn, fn.__code__)
    for function in search.cached:
        reads.keyed(function, _identities_of_results)
        found.add(f"what {function.__name__}() gave", function, plain.of(changeable_results(function)))
    return found.values


def _identities_of_results(function: Any) -> tuple[int, ...]:
    return tuple(map(id, changeable_results(function)))


def changeable_results(function: Any) -> list[Any]:
    """What a function with a cache has given that others may change since: lists, dicts, sets and objects."""
    held = gc.get_referents(function)
    boxes = [x for x in held if type(x) is dict and x is not vars(function)]
    results = boxes[0].values() if function.cache_parameters()["maxsize"] is None and boxes else held
    kinds = {ITEMS, ELEMENTS, MEMBERS, ATTRIBUTES}
    return [
        x for x in results
        if not kinds.isdisjoint(kinds_of(type(x))) and not isinstance(x, (types.FunctionType, *_WITHOUT))
        and all(x is not box for box in (*boxes, vars(function)))
    ]  # fmt: skip


def _followed(fn: types.FunctionType, owner: Any, chain: Chain, search: Search) -> tuple[str, Any, Any]:
    """The text of a chain, what has its variable, and the value at its end, or as far as it can be followed."""
    (kind, name), *rest = chain
    reads = search.reads
    value, place = _variable(fn, owner, kind, name, search)
    text = name.name or name.module if kind == "import" else name
    for kind, part in rest:
        is_method = kind == "attribute" and isinstance(value, (*CONTAINERS, CONTEXT))
        if is_method or isinstance(value, np.ndarray):
            break  # an element, or a method that may read all of it
        inside = _attribute(value, part, reads) if kind == "attribute" else _item(value, part, reads)
        if inside is NOTHING:
            break
        text += f".{part}" if kind == "attribute" else f"[{part!r}]"
        value = inside
    return text, place, value


class _Found:
    """Values by text. Where two places have values of one text, the later ones are numbered."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._places: dict[str, list[Any]] = {}

    def add(self, text: str, place: Any, plain: Any) -> None:
        if plain is NOTHING:
            return
        places = self._places.setdefault(text, [])
        at = next((i for i, each in enumerate(places) if each is place), len(places))
        if at == len(places):
            places.append(place)
            self.values[f"{text} ({at + 1})" if at else text] = plain


def _defaults(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """The arguments of a function that have a value by default, with the value."""
    names, values = fn.__code__.co_varnames[: fn.__code__.co_argcount], fn.__defaults__ or ()
    yield from zip(names[len(names) - len(values) :], values, strict=True)
    yield from (fn.__kwdefaults__ or {}).items()


def name_of(owner: Any) -> str:
    return (owner if isinstance(owner, type) else type(owner)).__qualname__


# ---- what a part of a chain is ----------------------------------------------------------------

NOTHING = object()


def _variable(fn: types.FunctionType, owner: Any, kind: str, name: Any, search: Search) -> tuple[Any, Any]:
    """The value of a variable, and what has it."""
    code, reads = fn.__code__, search.reads
    if kind == "import":
        return _imported(fn, name, search)
    if kind == "local" or name in code.co_cellvars:  # which lambdas, and loops in brackets, share
        is_self = owner is not None and code.co_argcount and code.co_varnames[0] == name
        return (owner if is_self else NOTHING), owner
    if kind == "global":
        if reads.is_changing(fn.__globals__, name):
            return NOTHING, None
        reads.item(fn.__globals__, name)
        return _builtin(fn, name, reads) if name not in fn.__globals__ else (fn.__globals__[name], fn.__globals__)
    if name not in code.co_freevars:
        return NOTHING, None
    cell = fn.__closure__[code.co_freevars.index(name)]
    if reads.is_changing(cell, ""):
        return NOTHING, None
    reads.cell(cell)
    return (cell.cell_contents if is_set(cell) else NOTHING), cell


def _builtin(fn: types.FunctionType, name: str, reads: Reads) -> tuple[Any, Any]:
    """What a name is that a function finds among the builtins, unless it is what Python has there."""
    reads.item(fn.__builtins__, name)
    found = fn.__builtins__.get(name, NOTHING)
    is_pythons = isinstance(found, (type, types.BuiltinFunctionType)) and found.__module__ == "builtins"
    return (NOTHING if is_pythons and found.__name__ == name else found), fn.__builtins__


def _imported(fn: types.FunctionType, what: Import, search: Search) -> tuple[Any, Any]:
    there = search.module_named(full := absolute(fn, what))
    if there is None or not what.name:
        return NOTHING if there is None else there, sys.modules
    found = _attribute(there, what.name, search.reads)
    inside = search.module_named(f"{full}.{what.name}") if found is NOTHING else None
    return found if inside is None else inside, there


def _attribute(x: Any, name: str, reads: Reads) -> Any:
    """An attribute of an object, of its class, or of a Python module."""
    if isinstance(x, (torch.Tensor, nn.Module, Optimizer)):
        return NOTHING
    if type(x).__dictoffset__ == 0 and name in slots_of(type(x)):
        reads.slot(x, name)
        return getattr(x, name, NOTHING)
    if not hasattr(x, "__dict__"):
        return NOTHING
    owners = (*x.__mro__, *type(x).__mro__) if isinstance(x, type) else (x, *type(x).__mro__)
    if not isinstance(x, type):
        reads.place(x)
    for owner in owners:
        own = vars(owner)
        if reads.is_changing(owner if isinstance(owner, type) else own, name):
            return NOTHING
        reads.item(own, name)
        if name in own:
            return own[name]
    return NOTHING


CONTAINERS, CONTEXT = (dict, list, set, tuple, frozenset, deque), contextvars.ContextVar
MOST_NESTED = 6
"""What lies deeper counts as a whole, whatever code names of it."""

RECORDS = types.SimpleNamespace, argparse.Namespace
"""Classes whose objects are their attributes; so are those of dataclasses."""

_BY_CONTENTS = bytearray, memoryview, array
_WITHOUT = (
    torch.Tensor, nn.Module, Optimizer, types.MethodType, property, classmethod, staticmethod, Logger, type(os.environ),
)  # fmt: skip
"""What has guards of its own, or code that is looked through."""


class PlainValues:
    """The plain values in values, as copies that later changes do not reach. search: says what code of the step names,
    and whose the classes are."""

    def __init__(self, search: Search) -> None:
        self.search, self.reads = search, search.reads
        self._inside: set[int] = set()

    def of_variable(self, x: Any, fn: types.FunctionType) -> Any:
        """The same of what a variable of a function has: where its code asks for names, all of a Python module of the
        user."""
        if not isinstance(x, types.ModuleType):
            return self.of(x)
        if self.search.is_foreign(x.__name__) or REFLECTING.isdisjoint(fn.__code__.co_names):
            return NOTHING
        found = {}
        for name, value in vars(x).items():
            if not name.startswith("__") and (plain := self.of(value)) is not NOTHING:
                self.reads.item(vars(x), name)
                found[name] = plain
        return found

    def of(self, x: Any, depth: int = MOST_NESTED) -> Any:
        """Of a value: of what is not plain in it the class. NOTHING for one that is neither plain nor holds any."""
        if isinstance(x, (*PLAIN, np.generic)):
            return x
        if isinstance(x, _WITHOUT) or x is NOTHING:
            return NOTHING
        if isinstance(x, np.ndarray):
            return self._array(x)
        if isinstance(x, CONTEXT):
            self.reads.look_ups.append((_value_in_context, x))
            return self.of(_value_in_context(x, NOTHING), depth)
        if isinstance(x, (types.FunctionType, types.BuiltinFunctionType)):
            return self._function(x)
        if isinstance(x, type):
            return NOTHING if self.search.is_foreign(x.__module__) else x
        if isinstance(x, _BY_CONTENTS):
            self.reads.keyed(x, guard_key)
            return type(x), bytes(x)
        if id(x) in self._inside:
            return NOTHING
        if not depth:
            return self._whole(x)
        self._inside.add(id(x))
        try:
            return self._parts(x, depth - 1)
        finally:
            self._inside.discard(id(x))

    def _parts(self, x: Any, depth: int) -> Any:
        if isinstance(x, slice):
            return slice, *(self._or_class(each, depth) for each in (x.start, x.stop, x.step))
        if isinstance(x, functools.partial):
            self.reads.box(x.keywords)
            return functools.partial, *(self._or_class(each, depth) for each in (x.func, x.args, x.keywords))
        if isinstance(x, CONTAINERS):
            return self._items(x, depth)
        if isinstance(x, RECORDS) or dataclasses.is_dataclass(x):
            return self._attributes(x, list(getattr(x, "__dict__", slots_of(type(x)))), depth)
        if self.search.is_foreign(type(x).__module__):
            return self._of_library(x, depth)
        if isinstance(x, _COLLECTIONS) or (hides(type(x)) and parts_of(x) is not None):
            return self._whole(x)
        there = (*slots_of(type(x)), *getattr(x, "__dict__", ()))
        return self._attributes(x, [name for name in there if name in self.search.attributes_named], depth)

    def _array(self, x: np.ndarray) -> Any:
        if x.dtype.hasobject:
            return self._whole(x)
        self.reads.keyed(x, guard_key)
        return x.dtype.str, x.shape, bytes_of_array(x)

    def _function(self, x: Any) -> Any:
        """A function of a library is itself; of the user's, which are looked through, the code."""
        if isinstance(x, types.FunctionType) and not self.search.is_foreign(x.__module__):
            return x.__code__
        is_method = isinstance(x, types.BuiltinFunctionType) and not isinstance(x.__self__, (type(None), _MODULE, type))
        return self._whole(x) if is_method else x

    def _items(self, x: Any, depth: int) -> Any:
        if not isinstance(x, (tuple, frozenset)):
            self.reads.box(x)
        if isinstance(x, (list, tuple, dict)) and type(x) in _PLAIN_CONTAINERS and digest_of_items(x) is not None:
            return type(x)(x)
        if isinstance(x, dict):
            inside: Any = {_key(k): self._or_class(v, depth) for k, v in items_of(x)}
        elif isinstance(x, (set, frozenset)):
            inside = frozenset(map(_key, x))
        else:
            inside = tuple([self._or_class(v, depth) for v in x])
        if type(x) in _PLAIN_CONTAINERS:
            return type(x)(inside)
        own = self._attributes(x, list(getattr(x, "__dict__", ())), depth)
        made = (self._or_class(x.default_factory, depth),) if isinstance(x, defaultdict) else ()
        return type(x), inside, own, *made

    def _attributes(self, x: Any, names: Iterable[str], depth: int) -> Any:
        """The class of an object, and the plain values of these of its attributes and slots."""
        own, found = getattr(x, "__dict__", {}), {}
        fixed = [name for name in names if not self.reads.is_changing(own, name)]
        self.reads.kind_of(x)
        for name in fixed:
            if name in own:
                self.reads.item(own, name)
            else:
                self.reads.slot(x, name)
            value = own[name] if name in own else getattr(x, name, NOTHING)
            found[name] = self._or_class(value, depth)
        return type(x), found

    def _of_library(self, x: Any, depth: int) -> Any:
        """An object of a library's class: itself, if it is a value, such as a fraction, a path, a length of time; of
        Python's own library all that it holds; of another which one it is, with what code names of it."""
        kind = type(x)
        if isinstance(x, _OF_PYTHON):
            return x
        if kind.__hash__ not in (None, object.__hash__) and not hasattr(x, "__dict__") and not isinstance(x, _WEAK):
            return x
        if package_of(kind.__module__) in sys.stdlib_module_names or isinstance(x, _COLLECTIONS):
            return self._whole(x)
        names = [name for name in getattr(x, "__dict__", ()) if name in self.search.attributes_named]
        return ById(x), self._attributes(x, names, depth)

    def _whole(self, x: Any) -> Any:
        """An object as it is, of which it is noted what it holds."""
        guard_key(x, self.reads)
        return x

    def _or_class(self, x: Any, depth: int) -> Any:
        plain = self.of(x, depth)
        if plain is not NOTHING:
            return plain
        return torch.Tensor if isinstance(x, torch.Tensor) else type(x)  # a call may place it


_OF_PYTHON = (
    type(NotImplemented), types.WrapperDescriptorType, types.MethodDescriptorType, types.GetSetDescriptorType,
    types.MemberDescriptorType, types.ClassMethodDescriptorType,
)  # fmt: skip
"""What Python itself has, and never changes."""
_WEAK = weakref.ReferenceType
_COLLECTIONS = UserDict, UserList, ChainMap
"""Collections that are objects of Python, whose methods read what code does not name."""
_PLAIN_CONTAINERS = {dict, list, tuple, set, frozenset}
_MODULE = types.ModuleType


def _value_in_context(variable: contextvars.ContextVar, otherwise: Any) -> Any:
    try:
        return variable.get()  # what it has by default, too
    except LookupError:
        return otherwise


def _key(x: Any) -> Any:
    """A key of a dict, or an item of a set."""
    if isinstance(x, (*PLAIN, np.generic)):
        return x
    return type(x)(map(_key, x)) if type(x) in (tuple, frozenset) else ById(x)


def _item(x: Any, key: Any, reads: Reads) -> Any:
    if type(x) is dict:
        reads.item(x, key)
        return x.get(key, NOTHING)
    if type(x) not in (list, tuple) or type(key) is not int or not -len(x) <= key < len(x):
        return NOTHING
    if type(x) is list:
        reads.box(x)
    return x[key]
