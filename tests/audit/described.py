"""All that can be reached from some Python values, as a flat table by path, and the first difference of two tables.

    one = described({"model": model, "counts": [1, {"k": 2}]})
    other = described({"model": same_model, "counts": [1, {"k": 3}]})
    difference(one, other)                 "counts[1]['k']: 2 on one device, and compiled 3"

Everything is met: attributes, slots, defaults, closures, the globals that code names, caches, queues, iterators, arrays
by their bytes, generators by their state; and what no row below knows by `gc.get_referents`. That two are one object is
noted, too. This walker shares no code with spmd, whose own walkers it is to find faults in.

Tensors are compared by their values. A `DTensor` stands for the tensor that it is a part of: that is what a compiled
step makes of parameters, buffers, gradients and the state of optimisers. What may differ, and why, is in `LEFT_OUT`.
"""

from __future__ import annotations

import array
import collections
import contextvars
import ctypes
import enum
import functools
import gc
import io
import itertools
import mmap
import random
import sys
import sysconfig
import threading
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

import spmd
from spmd import CompiledStep, DeviceMesh, DTensor, LocalTensor, LocalTensorMode

LEFT_OUT = {
    "parameters, buffers, gradients and state of optimisers are DTensors": "a call makes them such, by design",
    "whether a tensor that is returned is one of those that were given": "`spmd.compile` says when it is a copy",
    "requires_grad of what is no leaf": "a program hands out values, and no graph of how they were computed",
    "_opt_called of optimisers": "a note that they were called, by which torch's schedules choose a warning",
    "the order in which an optimiser's state of a parameter was filled": "torch looks it up, and loads it, by name",
    "empty entries of an optimiser's state": "its `defaultdict` makes them where they are read",
    "ids of hooks": "torch numbers the hooks of a process; their order is compared",
    "globals of Python, torch, spmd and installed packages": "they are no part of the step's state; 150,000 objects",
    "which tuple of equal values it is": "tuples cannot be changed, and torch makes new ones",
    "which tensors share memory": "alias tests ask it (tests/expand/random_aliases.py)",
    "compiled steps, meshes and modes": "their caches are their own; one device has none",
}
"""What may differ, and why."""

TRACED = {
    "FunctionalTensor", "FakeTensor", "FakeTensorMode", "SymInt", "SymFloat", "SymBool", "Told", "Proxy",
    "BatchedTensor",
}  # fmt: skip
"""Classes of what stands for values while a step is captured. After a call none of them may be left anywhere."""

ATOMS = (
    int, float, complex, str, bytes, bool, type(None), type(...), type(NotImplemented), range,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, np.generic, np.dtype, Path,
)  # fmt: skip
"""Plain values, which are compared as they are."""

_INSTALLED = (sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib"))
LIBRARIES = tuple(str(Path(file).resolve()) + "/" for file in (*_INSTALLED, Path(spmd.__file__).parent))
"""Folders of code whose own state is not compared."""

Found = Iterable[tuple[str, Any]]
Table = dict[str, Any]


def is_library(module: str | None) -> bool:
    """Whether a module is Python's, torch's, spmd's or of an installed package: its own globals are not followed."""
    if module is None or module == "builtins":
        return True
    file = getattr(sys.modules.get(module), "__file__", None)
    return module != "__main__" and module in sys.modules and (file is None or file.startswith(LIBRARIES))


@dataclass(frozen=True)
class Same:
    """An object that was met before, at another path."""

    path: str

    def __repr__(self) -> str:
        return f"the object at {self.path}"


@dataclass(frozen=True, eq=False)
class Whole:
    """A tensor of one device."""

    value: torch.Tensor
    is_parameter: bool
    requires_grad: bool | None


class Left(Exception):
    """Something that is nobody's value was left; its text says where and what."""


def described(roots: Table) -> Table:
    """All that is in these values, by path. Raises `Left` for what a capture has left behind, or where simulated ranks
    have different tensors."""
    walk = Walk()
    walk.run({name: x for name, x in roots.items() if name != RETURNED})
    walk.run({name: x for name, x in roots.items() if name == RETURNED})  # whose names come last
    return walk.table


def difference(want: Table, got: Table, rtol: float = 1e-8, atol: float = 1e-10) -> str:
    """The first place at which two tables differ, with both values; empty where there is none."""
    own = {path for path in want.keys() ^ got.keys() if path.startswith(RETURNED)}  # of copies of what was given
    for path, a in want.items():
        if path in own:
            continue
        if path not in got:
            return f"{path}: {_short(a)} on one device, and nothing if compiled"
        b = got[path]
        if path.startswith(RETURNED):
            a, b = (_returned(x, table) for x, table in ((a, want), (b, got)))
        if not _equal(a, b, rtol, atol):
            return f"{path}: {_apart(a, b)}"
    more = [path for path in got if path not in want and path not in own]
    return f"{more[0]}: {_short(got[more[0]])} if compiled, and nothing on one device" if more else ""


RETURNED = "returned"
"""Where a step's result is among the values that are described."""


def _returned(x: Any, table: Table) -> Any:
    """What a step returns of the tensors that it was given is a copy if compiled, and no parameter."""
    there = table[x.path] if isinstance(x, Same) else x
    return Whole(there.value, False, None) if isinstance(there, Whole) else x


def left_behind(roots: Table) -> str:
    """Where a capture has left something behind in these values; empty where it has not."""
    try:
        Walk(check_ranks=False).run(roots)
    except Left as found:
        return str(found)
    return ""


# ---- the walk -------------------------------------------------------------------------------------


class Walk:
    """table: what was found, by path, the shortest path of each first. unknown: the types of which nothing is known,
    with the first path of each."""

    def __init__(self, check_ranks: bool = True) -> None:
        self.table: Table = {}
        self.unknown: dict[type, str] = {}
        self._met: dict[int, tuple[str, Any]] = {}
        self._check_ranks = check_ranks

    def run(self, roots: Table) -> None:
        found = collections.deque(roots.items())
        while found:
            found.extend(self._inside(*found.popleft()))

    @classmethod
    def tensors_in(cls, roots: Table) -> list[torch.Tensor]:
        """All tensors that are met."""
        walk = cls(check_ranks=False)
        walk.run(roots)
        return [x for _, x in walk._met.values() if isinstance(x, torch.Tensor)]

    def _inside(self, path: str, x: Any) -> Found:
        """Note a value, and give what is in it."""
        if not TRACED.isdisjoint(kind.__name__ for kind in type(x).__mro__):
            raise Left(f"{path}: a {type(x).__name__} was left there, which stood for a value in a capture")
        if isinstance(x, ATOMS):
            self.table[path] = x if is_library(type(x).__module__) else (_name(type(x)), repr(x))
            return ()
        if id(x) in self._met and not isinstance(x, MADE_ANEW):
            self.table.setdefault(path, Same(self._met[id(x)][0]))  # a global may be met by several functions
            return ()
        self._met[id(x)] = path, x  # kept alive, so that no other gets its id
        look = next((look for kinds, look in ROWS if isinstance(x, kinds)), Walk._by_referents)
        self.table.setdefault(path, _name(type(x)))
        kind = type(x)
        of_kind = () if is_library(kind.__module__) else [(f"class {_name(kind)}", kind)]
        return [*look(self, path, x), *self._attributes(path, x), *of_kind]

    def _attributes(self, path: str, x: Any) -> Found:
        """Those in `__dict__`, and those in slots."""
        if isinstance(x, WITHOUT_ATTRIBUTES):
            return
        own = getattr(x, "__dict__", None)
        own = {**(_own_of(x, own) if isinstance(own, dict) else {}), **dict(_slot_values(x))}
        if own:
            self.table[f"{path} attributes"] = tuple(sorted(own))
            yield from ((f"{path}.{name}", y) for name, y in own.items())

    def _tensors(self, path: str, x: torch.Tensor) -> Found:
        value = whole(path, x) if self._check_ranks else x
        is_parameter = isinstance(x, nn.Parameter)
        self.table[path] = Whole(value, is_parameter, x.requires_grad if x.is_leaf else None)
        yield f"{path}.grad", x.grad if x.is_leaf else None
        own = attributes_of(x)
        if own:
            yield from self._dicts(f"{path} attributes", own, f"{path}.{{}}")

    def _dicts(self, path: str, x: Any, text: str = "") -> Found:
        """The values by keys, whose order counts. Keys that are no plain values are known by their order."""
        text = text or path.replace("{", "{{").replace("}", "}}") + "[{!r}]"
        if isinstance(x, collections.defaultdict) and path.endswith(".state"):
            x = {key: value for key, value in x.items() if value}
        shown = [key if isinstance(key, PLAIN_KEYS) else f"key {i}" for i, key in enumerate(x)]
        self.table[path] = _name(type(x)), *map(str, sorted(shown) if IN_STATE in path else shown)
        for name, (key, value) in zip(shown, x.items(), strict=True):
            if not isinstance(key, PLAIN_KEYS):
                yield f"{path} {name}", key
            yield text.format(name), value

    def _sequences(self, path: str, x: Any) -> Found:
        self.table[path] = f"{_name(type(x))} of {len(x)}"
        return [(f"{path}[{i}]", y) for i, y in enumerate(x)]

    def _sets(self, path: str, x: Any) -> Found:
        plain = sorted(repr(y) for y in x if isinstance(y, ATOMS))
        met = sorted(self._met[id(y)][0] for y in x if id(y) in self._met)
        self.table[path] = f"{_name(type(x))} of {len(x)}: {', '.join(plain)} {', '.join(met)}"
        return ()

    def _bytes(self, path: str, x: Any) -> Found:
        self.table[path] = bytes(x)
        return ()

    def _arrays(self, path: str, x: np.ndarray) -> Found:
        self.table[path] = str(x.shape) if x.dtype.hasobject else x
        return [(f"{path}[{i}]", y) for i, y in enumerate(x.ravel().tolist())] if x.dtype.hasobject else ()

    def _codes(self, path: str, x: types.CodeType) -> Found:
        self.table[path] = f"code of {x.co_name}", x.co_code
        return ()

    def _functions(self, path: str, x: types.FunctionType) -> Found:
        self.table[path] = f"function {x.__qualname__}"
        yield f"{path}.__code__", x.__code__
        yield f"{path}.__defaults__", x.__defaults__
        yield f"{path}.__kwdefaults__", x.__kwdefaults__
        around = zip(x.__code__.co_freevars, x.__closure__ or (), strict=True)
        yield from ((f"{path}, variable {name}", y) for name, y in around)
        if not is_library(x.__module__):
            names = sorted(_names_of(x.__code__) & x.__globals__.keys())
            yield from ((f"global {x.__module__}.{name}", x.__globals__[name]) for name in names)

    def _cells(self, path: str, x: types.CellType) -> Found:
        self.table[path] = "variable"
        return [(f"{path} =", y) for y in gc.get_referents(x)]

    def _classes(self, path: str, x: type) -> Found:
        self.table[path] = f"class {_name(x)}"
        if not is_library(x.__module__):
            yield from self._dicts(f"class {_name(x)}", own_of(x), f"{_name(x)}.{{}}")
            yield from ((f"class {_name(base)}", base) for base in x.__bases__ if base is not object)

    def _modules(self, path: str, x: types.ModuleType) -> Found:
        """Of a module the user's code names what it uses, which other rows find; its attributes are met here."""
        self.table[path] = f"module {x.__name__}"
        return () if is_library(x.__name__) else self._dicts(f"module {x.__name__}", own_of(x), f"{x.__name__}.{{}}")

    def _iterators(self, path: str, x: Any) -> Found:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            found = x.__reduce_ex__(2)
        return [(f"{path} state", list(found[1:]) if isinstance(found, tuple) else found)]

    def _generators(self, path: str, x: types.GeneratorType) -> Found:
        frame = x.gi_frame
        self.table[path] = "generator at", frame and frame.f_lasti
        return [] if frame is None else [(f"{path}, variable {name}", y) for name, y in frame.f_locals.items()]

    def _random(self, path: str, x: Any) -> Found:
        state = x.bit_generator.state if isinstance(x, np.random.Generator) else None
        return [(f"{path} state", state or (x.getstate() if isinstance(x, random.Random) else x.get_state()))]

    def _partials(self, path: str, x: functools.partial) -> Found:
        return [(f"{path}.{name}", getattr(x, name)) for name in ("func", "args", "keywords")]

    def _methods(self, path: str, x: Any) -> Found:
        self.table[path] = f"method {x.__name__}"
        yield f"{path}.__self__", None if isinstance(x.__self__, types.ModuleType) else x.__self__
        yield f"{path}.__func__", getattr(x, "__func__", None)

    def _weak(self, path: str, x: weakref.ReferenceType) -> Found:
        return [(f"{path}()", x())]

    def _context_variables(self, path: str, x: contextvars.ContextVar) -> Found:
        return [(f"{path}.get()", x.get("no value"))]

    def _texts(self, path: str, x: Any) -> Found:
        self.table[path] = "closed" if x.closed else (x.getvalue(), x.tell())
        return ()

    def _locks(self, path: str, x: Any) -> Found:
        self.table[path] = repr(x).partition(" object")[0]
        return ()

    def _caches(self, path: str, x: Any) -> Found:
        self.table[path] = f"cache of {_name(x)}"
        return self._by_referents(path, x) if not is_library(x.__module__) else ()

    def _nothing(self, path: str, x: Any) -> Found:
        return ()

    def _by_referents(self, path: str, x: Any) -> Found:
        """What Python's collector finds in it, in its order."""
        known = {id(type(x)), id(getattr(x, "__dict__", None)), *(id(y) for _, y in _slot_values(x))}
        found = [y for y in gc.get_referents(x) if id(y) not in known]
        if not found and not hasattr(x, "__dict__") and not _slots(type(x)):
            self.unknown.setdefault(type(x), path)
        return [(f"{path} <{i}>", y) for i, y in enumerate(found)]


Look = Callable[[Walk, str, Any], Found]
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_OF_CTYPES = ctypes._SimpleCData, ctypes.Array, ctypes.Structure
_ITERATORS = (
    *(type(iter(x)) for x in ([], (), {}, "", b"", set(), range(0), {}.values(), {}.items(), bytearray())),
    type(reversed([])), type(iter(int, 1)), type(iter(collections.deque())), enumerate, zip, map, filter,
    *(x for x in vars(itertools).values() if isinstance(x, type)),
)  # fmt: skip
ROWS: list[tuple[tuple[type, ...], Look]] = [
    ((torch.Tensor,), Walk._tensors),
    ((CompiledStep, DeviceMesh, LocalTensorMode), Walk._nothing),
    ((types.CodeType,), Walk._codes),
    ((types.FunctionType,), Walk._functions),
    ((types.CellType,), Walk._cells),
    ((type,), Walk._classes),
    ((types.ModuleType,), Walk._modules),
    ((collections.deque, list, tuple), Walk._sequences),
    ((dict, types.MappingProxyType), Walk._dicts),
    ((set, frozenset), Walk._sets),
    ((np.ndarray,), Walk._arrays),
    ((bytearray, memoryview, array.array, mmap.mmap, *_OF_CTYPES), Walk._bytes),
    (_GENERATORS, Walk._random),
    (_ITERATORS, Walk._iterators),
    ((types.GeneratorType,), Walk._generators),
    ((functools.partial,), Walk._partials),
    ((functools._lru_cache_wrapper,), Walk._caches),
    ((types.MethodType, types.BuiltinMethodType, types.MethodWrapperType), Walk._methods),
    ((weakref.ReferenceType,), Walk._weak),
    ((contextvars.ContextVar,), Walk._context_variables),
    ((io.StringIO, io.BytesIO), Walk._texts),
    ((type(threading.Lock()), type(threading.RLock())), Walk._locks),
    ((threading.local, enum.Enum, nn.Module, torch.optim.Optimizer), Walk._nothing),  # their attributes are all
]  # fmt: skip
"""What is looked at in a value of a kind, besides its attributes; the first row that fits."""

PLAIN_KEYS = (*ATOMS, tuple, enum.Enum)

WITHOUT_ATTRIBUTES = (
    type, types.ModuleType, torch.Tensor, CompiledStep, DeviceMesh, LocalTensorMode, RemovableHandle, *_OF_CTYPES
)  # fmt: skip
"""Kinds of which the row says all: attributes of ctypes say where the bytes lie."""

MADE_ANEW = tuple, frozenset, types.BuiltinMethodType, types.MethodType, types.MethodWrapperType, types.CellType
"""Kinds of which it says nothing that two are one object: they cannot be changed, or are made when asked for."""

IN_STATE = ".state['key "
"""In the paths of what an optimiser keeps for a parameter."""

OF_DTENSOR = {"_spec", "_local_tensor", "_memory", "_copy", "_offset", "_is_param"}
OF_LOCAL_TENSOR = {"_locals", "ranks", "_is_param"}


def _own_of(owner: Any, own: dict) -> dict:
    """The attributes of an object; those of modules as users write them, and hooks by their order."""
    if isinstance(owner, nn.Module):
        boxes = "_parameters", "_buffers", "_modules"
        own = {**own, **own["_parameters"], **own["_buffers"], **own["_modules"]}
        own = {name: x for name, x in own.items() if name not in boxes}
    if isinstance(owner, (nn.Module, torch.optim.Optimizer)):
        own = {name: x for name, x in own.items() if name != "_opt_called"}
        return {name: list(x.values()) if "hook" in name and isinstance(x, dict) else x for name, x in own.items()}
    return own


def attributes_of(x: torch.Tensor) -> dict[str, Any]:
    """What users have set on a tensor."""
    made = OF_DTENSOR if isinstance(x, DTensor) else OF_LOCAL_TENSOR if isinstance(x, LocalTensor) else ()
    return {name: y for name, y in vars(x).items() if name not in made}


def own_of(x: Any) -> dict[str, Any]:
    """The attributes of a class or a module that are the user's: not those that Python makes."""
    made = (types.GetSetDescriptorType, types.MemberDescriptorType)
    return {name: y for name, y in vars(x).items() if not name.startswith("__") and not isinstance(y, made)}


@functools.cache
def _slots(kind: type) -> tuple[tuple[str, Any], ...]:
    """The slots of a class, by name."""
    return tuple(
        (name, x)
        for base in kind.__mro__
        for name, x in vars(base).items()
        if isinstance(x, types.MemberDescriptorType) and "__slots__" in vars(base)
    )


def _slot_values(x: Any) -> Iterator[tuple[str, Any]]:
    for name, slot in _slots(type(x)):
        try:
            yield name, slot.__get__(x)
        except AttributeError:
            continue


def _names_of(code: types.CodeType) -> set[str]:
    """The names of globals and attributes in code, and in the functions that it makes."""
    inner = (_names_of(x) for x in code.co_consts if isinstance(x, types.CodeType))
    return set(code.co_names).union(*inner)


def whole(path: str, x: torch.Tensor) -> torch.Tensor:
    """The tensor of one device that a tensor of simulated ranks stands for. The ranks must agree on it."""
    with torch.no_grad():  # and not `detach`, of which a DTensor would take note
        x = x.full_tensor() if isinstance(x, DTensor) else x
    x = x.detach()
    try:
        return x.reconcile() if isinstance(x, LocalTensor) else x
    except Exception as error:
        raise Left(f"{path}: the ranks have different tensors: {str(error).splitlines()[0]}") from error


# ---- two tables -----------------------------------------------------------------------------------


def _equal(a: Any, b: Any, rtol: float, atol: float) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, Whole):
        alike = (a.is_parameter, a.value.dtype, a.value.shape) == (b.is_parameter, b.value.dtype, b.value.shape)
        grad = a.requires_grad is None or b.requires_grad is None or a.requires_grad == b.requires_grad
        return alike and grad and _close(a.value, b.value, rtol, atol)
    if isinstance(a, np.ndarray):
        same = (a.dtype, a.shape) == (b.dtype, b.shape)
        return same and bool(np.allclose(a, b, rtol, atol, True) if a.dtype.kind in "fc" else (a == b).all())
    if isinstance(a, (float, complex)):
        return a == b or (a != a and b != b) or abs(a - b) <= atol + rtol * abs(a)
    return bool(a == b)


def _close(a: torch.Tensor, b: torch.Tensor, rtol: float, atol: float) -> bool:
    if not a.is_floating_point() and not a.is_complex():
        return torch.equal(a, b)
    eps = torch.finfo(a.dtype).eps
    return torch.allclose(a, b, max(rtol, 1e4 * eps if eps < 1e-4 else 4 * eps), max(atol, 4 * eps), equal_nan=True)


def _apart(a: Any, b: Any) -> str:
    """In the user's words."""
    if isinstance(a, tuple) and isinstance(b, tuple) and (lost := [x for x in a if x not in b]):
        return f"compiled it lacks {_short(lost)}"
    if isinstance(a, tuple) and isinstance(b, tuple) and (new := [x for x in b if x not in a]):
        return f"compiled it has {_short(new)}, too"
    if isinstance(a, Whole) and isinstance(b, Whole):
        a, b = (_said(a), a.value), (_said(b), b.value)
        a, b = (x[0] for x in (a, b)) if a[0] != b[0] else (x[1] for x in (a, b))
    return f"{_short(a)} on one device, and compiled {_short(b)}"


def _said(x: Whole) -> str:
    kind = "parameter" if x.is_parameter else "tensor"
    grad = "" if x.requires_grad is None else f" with requires_grad={x.requires_grad}"
    return f"a {kind} of {str(x.value.dtype)[6:]} {list(x.value.shape)}{grad}"


def _name(kind: Any) -> str:
    return kind.__qualname__


def _short(x: Any) -> str:
    text = " ".join(repr(x).split())
    return text if len(text) <= 100 else f"{text[:100]}..."
