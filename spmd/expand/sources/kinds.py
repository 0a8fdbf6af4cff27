"""Kinds of Python values: what is in a value, whether it is still the same, and how to put it back.

    kinds_of(dict)              (ITEMS,)                what it holds under its keys
    kinds_of(Trainer)           (ATTRIBUTES,)           an object is its attributes, ...
    kinds_of(PointWithSlots)    (SLOTS,)                ... what it has in slots,
    kinds_of(io.StringIO)       (ATTRIBUTES, STATE)     ... and what its class keeps in C, as `copy` sees it

A row knows nothing of steps, modules or packages: in whose package a class is says nothing about whether its objects
change. Contents are compared by identity, numbers of arrays and buffers by their bytes. Left out: what a class keeps in
C and tells neither copies nor the garbage collector (`UNKNOWN`).
"""

from __future__ import annotations

import contextvars
import ctypes
import datetime
import enum
import functools
import gc
import hashlib
import io
import logging
import numbers
import operator
import pathlib
import random
import re
import threading
import types
import warnings
import weakref
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from spmd import _torch
from spmd.expand.sources.layout import COMPARED_BY_VALUE, hides, is_set, items_of, put, slots_of
from spmd.mesh import DeviceMesh
from spmd.tensor.annotations.block_function import BlockFunction

Step = tuple[str, Any]
"""How a value is found in another one: ("attribute", "rate"), ("key", 3), ("variable", "model"), ("", None)."""

NOTHING = object()
"""In the place of what is not there."""


@dataclass(frozen=True, eq=False)
class Kind:
    """What is in values of one kind.

    contents: what is in a value now, as a copy. same: whether two contents are. put: gives a value such contents; None
    where nothing can. inside: the values in contents, each with how it is found.
    """

    name: str
    contents: Callable[[Any], Any]
    same: Callable[[Any, Any], bool] = operator.eq
    put: Callable[[Any, Any], None] | None = None
    inside: Callable[[Any], Iterable[tuple[Step, Any]]] = lambda contents: ()

    def __repr__(self) -> str:
        return self.name


# ---- containers -------------------------------------------------------------------------------


def is_same(x: Any, y: Any) -> bool:
    """Whether two values are one object, or equal values of a kind that is compared by value.

    >>> is_same(0.0, -0.0), is_same((1, "a"), (1, "a")), is_same([1], [1])
    (False, True, False)
    """
    if x is y or type(x) is not type(y):
        return x is y
    if type(x) is tuple:
        return len(x) == len(y) and all(map(is_same, x, y))
    return isinstance(x, (*COMPARED_BY_VALUE, range)) and (x == y if type(x) is not float else repr(x) == repr(y))


def _same_list(old: Sequence[Any], new: Sequence[Any]) -> bool:
    return len(old) == len(new) and (all(map(is_, old, new)) or all(map(is_same, old, new)))


def _same_items(old: dict, new: dict) -> bool:
    return _same_list(list(old.values()), list(new.values())) and _same_list(list(old), list(new))


def _same_set(old: set, new: set) -> bool:
    return len(old) == len(new) and set(map(id, old)) == set(map(id, new))


def _put_in(x: Any, contents: Any) -> None:
    put([(x, contents)])


def _in_dict(contents: dict) -> Iterator[tuple[Step, Any]]:
    for key, value in contents.items():
        yield ("key", key), value
        if type(key) not in LEAVES:
            yield ("", None), key


def _in_list(contents: Iterable[Any]) -> Iterable[tuple[Step, Any]]:
    return [(("key", i), x) for i, x in enumerate(contents)]


def _in_any(contents: Iterable[Any]) -> Iterable[tuple[Step, Any]]:
    return [(("", None), x) for x in contents]


ITEMS = Kind("items", lambda x: dict(items_of(x)), _same_items, _put_in, _in_dict)
ELEMENTS = Kind("elements", list, _same_list, _put_in, _in_list)
MEMBERS = Kind("members", set, _same_set, _put_in, _in_any)
FIXED = Kind("fixed", tuple, lambda old, new: True, None, _in_list)


# ---- objects ----------------------------------------------------------------------------------


def _attributes(x: Any) -> dict[str, Any]:
    return dict(vars(x))


def _put_attributes(x: Any, contents: dict[str, Any]) -> None:
    put([(vars(x), contents)])


def _in_attributes(contents: dict[str, Any]) -> Iterable[tuple[Step, Any]]:
    return [(("attribute", name), x) for name, x in contents.items() if type(x) not in LEAVES]


ATTRIBUTES = Kind("attributes", _attributes, _same_items, _put_attributes, _in_attributes)


def _of_optimizer(x: Optimizer) -> dict[str, Any]:
    return {name: value for name, value in vars(x).items() if name not in _torch.NOTED_IN_OPTIMIZERS}


def _put_in_optimizer(x: Optimizer, contents: dict[str, Any]) -> None:
    noted = {name: value for name, value in vars(x).items() if name in _torch.NOTED_IN_OPTIMIZERS}
    put([(vars(x), contents | noted)])


OPTIMIZER = Kind("attributes", _of_optimizer, _same_items, _put_in_optimizer, _in_attributes)
"""What torch notes in optimisers is its own business."""


def _slots(x: Any) -> dict[str, Any]:
    there = ((name, _slot(x, name)) for name in slots_of(type(x)))
    return {name: value for name, value in there if value is not NOTHING}


def _slot(x: Any, name: str) -> Any:
    """What is in a slot, whatever the class does for the name."""
    for base in type(x).__mro__:
        member = vars(base).get(name)
        if isinstance(member, types.MemberDescriptorType):
            try:
                return member.__get__(x)
            except AttributeError:
                return NOTHING
    return NOTHING


def _put_slots(x: Any, contents: dict[str, Any]) -> None:
    for name in slots_of(type(x)):
        if name in contents:
            object.__setattr__(x, name, contents[name])
        elif _slot(x, name) is not NOTHING:
            object.__delattr__(x, name)


def _in_slots(contents: dict[str, Any]) -> Iterable[tuple[Step, Any]]:
    return [(("slot", name), x) for name, x in contents.items() if type(x) not in LEAVES]


SLOTS = Kind("slots", _slots, _same_items, _put_slots, _in_slots)


def _own(kind: type) -> dict[str, Any]:
    """What a class has itself, but for what Python notes in it."""
    return {name: x for name, x in vars(kind).items() if not (name[:2] == name[-2:] == "__")}


def _put_own(kind: type, contents: dict[str, Any]) -> None:
    now = _own(kind)
    for name in now.keys() - contents.keys():
        type.__delattr__(kind, name)
    for name, value in contents.items():
        if now.get(name, NOTHING) is not value:
            type.__setattr__(kind, name, value)


def _set_class(x: Any, contents: tuple[type]) -> None:
    object.__setattr__(x, "__class__", contents[0])


OF_CLASS = Kind(
    "class of an object", lambda x: (type(x),), _same_list, _set_class, lambda contents: [(("class", None), *contents)]
)  # fmt: skip
CLASS = Kind("class", _own, _same_items, _put_own, _in_attributes)


# ---- functions and variables ------------------------------------------------------------------


def _variables(variables: dict[str, Any]) -> dict[str, Any]:
    """The variables of a Python module, but for what Python notes there."""
    return {name: x for name, x in variables.items() if not (name[:2] == name[-2:] == "__")}


def _put_variables(variables: dict[str, Any], contents: dict[str, Any]) -> None:
    for name in _variables(variables).keys() - contents.keys():
        del variables[name]
    variables.update(contents)


VARIABLES = Kind("variables", _variables, _same_items, _put_variables)


def _content(cell: types.CellType) -> tuple[Any]:
    return (cell.cell_contents if is_set(cell) else NOTHING,)


def _set_content(cell: types.CellType, contents: tuple[Any]) -> None:
    if contents[0] is not NOTHING:
        cell.cell_contents = contents[0]
    elif is_set(cell):
        del cell.cell_contents


VARIABLE = Kind("variable", _content, _same_list, _set_content, _in_any)


def _of_function(fn: types.FunctionType) -> dict[str, Any]:
    return {
        "code": fn.__code__, "defaults": fn.__defaults__, "kwdefaults": fn.__kwdefaults__,
        "attributes": None if fn.__dict__.keys() <= _torch.KEPT_ON_FUNCTIONS else fn.__dict__,
        "closure": dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)),
    }  # fmt: skip


def _same_function(old: dict[str, Any], new: dict[str, Any]) -> bool:
    return all(old[name] is new[name] for name in ("code", "defaults", "kwdefaults", "attributes"))


def _put_function(fn: types.FunctionType, contents: dict[str, Any]) -> None:
    fn.__code__, fn.__defaults__, fn.__kwdefaults__ = (contents[x] for x in ("code", "defaults", "kwdefaults"))
    if contents["attributes"] is None:
        fn.__dict__.clear()


def _in_function(contents: dict[str, Any]) -> Iterator[tuple[Step, Any]]:
    yield ("", None), contents["attributes"]
    for name, cell in contents["closure"].items():
        yield ("variable", name), cell
    names, values = contents["code"].co_varnames[: contents["code"].co_argcount], contents["defaults"] or ()
    for name, x in zip(names[len(names) - len(values) :], values, strict=True):
        yield ("default", name), x
    for name, x in (contents["kwdefaults"] or {}).items():
        yield ("default", name), x
    yield ("", None), contents["kwdefaults"]


FUNCTION = Kind("function", _of_function, _same_function, _put_function, _in_function)
METHOD = Kind("method", lambda x: (x.__func__, x.__self__), _same_list, None, _in_any)
BUILTIN_METHOD = Kind("method", lambda x: (x.__self__,), _same_list, None, _in_any)
PARTIAL = Kind("partial", lambda x: (x.func, x.args, x.keywords), _same_list, None, _in_any)


def _in_context(x: contextvars.ContextVar) -> tuple[Any]:
    try:
        return (x.get(),)
    except LookupError:
        return (NOTHING,)


def _put_in_context(x: contextvars.ContextVar, contents: tuple[Any]) -> None:
    x.set(None if contents[0] is NOTHING else contents[0])


CONTEXT = Kind("context", _in_context, _same_list, _put_in_context, _in_any)
REFERENCE = Kind("reference", lambda x: (x(),), _same_list, None, _in_any)


# ---- what C keeps -----------------------------------------------------------------------------

MOST_COPIED = 1 << 20
"""Bytes of an array that are copied. Of more there is a digest, and they cannot be put back."""


def _buffer(x: Any) -> tuple[Any, bytes]:
    """The shape of an array and its bytes, or a digest of these."""
    head = (x.shape, x.dtype.str) if isinstance(x, np.ndarray) else ()
    data = np.ascontiguousarray(x).tobytes() if isinstance(x, np.ndarray) else bytes(memoryview(x).cast("B"))
    return head, data if len(data) <= MOST_COPIED else hashlib.blake2b(data).digest()


def _put_buffer(x: Any, contents: tuple[Any, bytes]) -> None:
    _, data = contents
    if isinstance(x, bytearray):
        x[:] = data
    elif isinstance(x, array):
        x[:] = array(x.typecode, data)
    elif isinstance(x, np.ndarray):
        x[...] = np.frombuffer(data, x.dtype).reshape(x.shape)
    else:
        memoryview(x).cast("B")[:] = data


def _array(x: np.ndarray) -> list[Any] | tuple[Any, bytes] | None:
    """What an array holds; nothing of one that nobody can write, as a file that is mapped for reading."""
    if x.dtype.hasobject:
        return x.reshape(-1).tolist()
    return _buffer(x) if x.flags.writeable else None


BUFFER = Kind("buffer", _buffer, operator.eq, _put_buffer)


def _same_array(old: Any, new: Any) -> bool:
    return _same_list(old, new) if isinstance(old, list) and isinstance(new, list) else old == new


ARRAY = Kind("array", _array, _same_array, lambda x, contents: None if contents is None else _put_array(x, contents))


def _put_array(x: np.ndarray, contents: Any) -> None:
    if isinstance(contents, list):
        x.reshape(-1)[:] = contents
    else:
        _put_buffer(x, contents)


def _reduced(x: Any) -> tuple[Any, ...]:
    """What an object would be copied by."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 on, for the iterators of itertools
        found = x.__reduce_ex__(2)
    return found if isinstance(found, tuple) else (found,)


def _state(x: Any) -> tuple[Any, tuple[Any, ...]]:
    """The state that copies of an object get, as a key, and as it is. Of one that cannot be copied, what it holds."""
    try:
        found = _reduced(x)
    except Exception:  # each class has its own words for it
        return tuple(map(id, gc.get_referents(x))), ()
    return _plain_state(found[1:3]), found


def _plain_state(x: Any) -> Any:
    """A state that can be compared: containers as tuples, arrays by their bytes, other objects by identity."""
    if isinstance(x, (tuple, list)):
        return tuple(map(_plain_state, x))
    if isinstance(x, dict):
        return tuple([(name, _plain_state(y)) for name, y in x.items()])
    if isinstance(x, np.ndarray):
        return x.dtype.str, x.shape, x.tobytes()
    return (type(x), x) if isinstance(x, COMPARED_BY_VALUE) else id(x)


def _set_state(x: Any, contents: tuple[Any, tuple[Any, ...]]) -> None:
    x.__setstate__(contents[1][2])


STATE = Kind("state", _state, lambda old, new: old[0] == new[0], _set_state)


def _position(x: Any) -> tuple[Any, ...]:
    """How far an iterator is, and what it is of."""
    if isinstance(x, types.GeneratorType):
        return x.gi_frame is None, getattr(x.gi_frame, "f_lasti", None), *gc.get_referents(x)
    flat: list[Any] = []
    for each in _reduced(x)[1:3]:
        flat += each if isinstance(each, tuple) else [each]
    return tuple(flat)


ITERATOR = Kind("iterator", _position, _same_list, None, _in_list)
CACHE = Kind(
    "cache", lambda x: (x.cache_info().misses, x.cache_info().currsize), operator.eq, lambda x, _: x.cache_clear(),
)  # fmt: skip
WRAPPER = Kind("wrapper", lambda x: (x.__wrapped__,), _same_list, None, _in_any)
REFERENTS = Kind("referents", gc.get_referents, _same_list, None, _in_list)
UNKNOWN = Kind("unknown", lambda x: None)


# ---- the table --------------------------------------------------------------------------------

LEAVES = frozenset({
    *COMPARED_BY_VALUE, type(...), type(NotImplemented), object, range, slice, types.CodeType, types.FrameType,
    types.TracebackType, types.GetSetDescriptorType, types.MemberDescriptorType, types.WrapperDescriptorType,
    types.MethodDescriptorType, types.ClassMethodDescriptorType, re.Pattern, torch.layout, type(threading.Lock()),
    type(threading.RLock()), np.dtype, np.ufunc, operator.attrgetter, operator.itemgetter, operator.methodcaller,
})  # fmt: skip
"""Classes of values that hold nothing that code could set."""

STOPS = (
    torch.Tensor, logging.Logger, logging.Handler, io.IOBase, threading.Thread, DeviceMesh, BlockFunction,
    enum.EnumType, torch.dtype, torch.device, torch.Generator, np.generic, numbers.Number,
    datetime.date, datetime.timedelta, pathlib.PurePath,
)  # fmt: skip
"""The same with their subclasses."""

_MEMORY = (io.StringIO, io.BytesIO)
_BUFFERS = (bytearray, array, memoryview, ctypes.Array, ctypes.Structure, ctypes.Union, ctypes.c_int.__base__)
_RANDOM = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)

_ROWS: tuple[tuple[Any, Kind], ...] = (
    (dict, ITEMS), ((list, deque), ELEMENTS), (set, MEMBERS), ((tuple, frozenset), FIXED), (types.CellType, VARIABLE),
    (types.FunctionType, FUNCTION), (types.MethodType, METHOD), (functools.partial, PARTIAL),
    ((types.BuiltinFunctionType, types.MethodWrapperType), BUILTIN_METHOD), (contextvars.ContextVar, CONTEXT),
    (weakref.ref, REFERENCE), (types.MappingProxyType, REFERENTS), ((staticmethod, classmethod, property), REFERENTS),
    (np.ndarray, ARRAY), (_BUFFERS, BUFFER), ((*_RANDOM, *_MEMORY), STATE), (types.GeneratorType, ITERATOR),
)  # fmt: skip
"""The first row that fits tells what a class of C keeps."""


@functools.lru_cache(maxsize=4096)
def kinds_of(kind: type) -> tuple[Kind, ...]:
    """The rows for the objects of a class; none where there is nothing to look at.

    >>> kinds_of(dict), kinds_of(int), kinds_of(torch.nn.Linear), kinds_of(io.StringIO)
    ((items,), (), (class of an object, attributes), (attributes, state))
    """
    if kind in LEAVES or (issubclass(kind, STOPS) and not issubclass(kind, _MEMORY)):
        return ()
    if issubclass(kind, type):
        return (CLASS,)
    if issubclass(kind, types.ModuleType):
        return ()
    if issubclass(kind, Optimizer):
        return (OPTIMIZER, OF_CLASS)
    found = [OF_CLASS] if kind.__flags__ & _IS_MUTABLE_BASE else []
    found += [ATTRIBUTES] if _has_attributes(kind) else []
    found += [SLOTS] if slots_of(kind) else []
    if kind is functools._lru_cache_wrapper:
        return (CACHE, WRAPPER)
    row = next((row for classes, row in _ROWS if issubclass(kind, classes)), None)
    if row is not None or issubclass(kind, threading.local):
        return (*found, row) if row else tuple(found)
    if issubclass(kind, Iterator) and kind.__module__ in ("builtins", "itertools"):
        return (*found, ITERATOR)
    return tuple(found) if not hides(kind) else (*found, _hidden(kind))


def _has_attributes(kind: type) -> bool:
    """Whether objects of a class have a dict, which is not that of another row."""
    return issubclass(kind, threading.local) or (kind.__dictoffset__ != 0 and kind not in _WITHOUT)


_IS_MUTABLE_BASE = 1 << 9
"""The flag of classes that Python code has made: their objects can get another class."""

_WITHOUT = {types.FunctionType, OrderedDict}


def _hidden(kind: type) -> Kind:
    """The row of a class that keeps in C what Python does not see."""
    if "__reduce__" in _defined(kind) or "__reduce_ex__" in _defined(kind) or "__getstate__" in _defined(kind):
        return STATE
    return REFERENTS if kind.__flags__ & _IS_COLLECTED else UNKNOWN


def _defined(kind: type) -> set[str]:
    return {name for base in kind.__mro__ if base is not object for name in vars(base)}


_IS_COLLECTED = 1 << 14
"""The flag of classes whose objects the garbage collector knows: it can tell what they refer to."""
