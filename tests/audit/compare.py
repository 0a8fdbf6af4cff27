"""The first difference between two worlds that ought to be equal: a step's on one device, and the compiled step's.

    Audit().differs({"model": one, "counts": [1, {"k": 2}]}, {"model": other, "counts": [1, {"k": 3}]})
    "counts[1]['k']: 2, and compiled 3"

Both graphs of objects are walked side by side, and everything in them is met: attributes, slots, defaults, closures,
the globals that code names, caches, queues, iterators, arrays by their bytes, generators by their state; and what no
row below knows by `gc.get_referents`. This walker shares no code with spmd, whose own walkers it is to find faults in.

Tensors are compared by their values. A `DTensor` stands for the tensor that it is a part of: that is what a compiled
step makes of parameters, buffers, gradients and the state of optimisers. What is left out, and why, is in `LEFT_OUT`.
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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

import spmd
from spmd import DTensor, LocalTensor

TRACED = {
    "FunctionalTensor", "FakeTensor", "FakeTensorMode", "SymInt", "SymFloat", "SymBool", "Told", "Proxy",
    "BatchedTensor",
}  # fmt: skip
"""Classes of what stands for values while a step is captured. After a call none of them may be left anywhere."""

ATOMS = (
    int, float, complex, str, bytes, bool, type(None), type(...), type(NotImplemented), range, slice, types.CodeType,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, np.generic, np.dtype, Path,
)  # fmt: skip

_INSTALLED = (sysconfig.get_paths()[kind] for kind in ("stdlib", "purelib", "platlib"))
LIBRARIES = tuple(str(Path(file).resolve()) + "/" for file in (*_INSTALLED, Path(spmd.__file__).parent))
"""Folders of code whose own state is not compared."""

LEFT_OUT = {
    "parameters, buffers, gradients and state of optimisers are DTensors": "a call makes them such, by design",
    "_opt_called of optimisers": "a note that they were called, by which torch's schedules choose a warning",
    "ids of hooks": "torch numbers the hooks of a process; their order is compared",
    "globals of Python, torch, spmd and installed packages": "they are no part of the step's state; 150,000 objects",
    "which tuple of equal values it is": "tuples cannot be changed, and torch makes new ones",
}
"""What may differ, and why."""


def is_library(module: str | None) -> bool:
    """Whether a module is Python's, torch's, spmd's or of an installed package: its own globals are not followed."""
    there = sys.modules.get(module or "")
    file = getattr(there, "__file__", None)
    if there is None or module in ("__main__", None):
        return module in ("builtins",) or module is None
    return file is None or file.startswith(LIBRARIES)


class Difference(Exception):
    """Found; its text says where and what."""


class Audit:
    """One comparison: of the world of one device, and of the compiled one.

    rtol: how far floats may be apart, relatively: ranks add in another order. unknown: types that could be compared by
    nothing but their type, with the first place of each.
    """

    def __init__(self, rtol: float = 1e-8, atol: float = 1e-10) -> None:
        self.rtol, self.atol = rtol, atol
        self.unknown: dict[type, str] = {}
        self._met: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._there: dict[int, tuple[str, Any]] = {}
        self._back: dict[int, tuple[str, Any]] = {}

    def differs(self, want: Any, got: Any) -> str:
        """The first difference, with its path; empty where there is none."""
        try:
            pairs = collections.deque(self._dicts("", want, got, "{}"))
            while pairs:
                pairs.extend(self._inside(*pairs.popleft()))
        except Difference as found:
            return str(found)
        return ""

    def _inside(self, path: str, a: Any, b: Any) -> Iterable[tuple[str, Any, Any]]:
        """Compare two values themselves; the pairs that are in them."""
        check_not_traced(path, b)
        if isinstance(a, ATOMS) or isinstance(b, ATOMS):
            return self._atoms(path, a, b)
        if a is b:
            return ()
        if self._is_known(path, a, b):
            return ()
        if isinstance(a, torch.Tensor):
            return self._tensors(path, a, b)
        if type(a) is not type(b) and _name(type(a)) != _name(type(b)):
            _differ(path, a, b)
        for kinds, look in ROWS:
            if isinstance(a, kinds):
                return [*look(self, path, a, b), *self._attributes(path, a, b)]
        return [*self._by_referents(path, a, b), *self._attributes(path, a, b)]

    def _is_known(self, path: str, a: Any, b: Any) -> bool:
        """Whether these two were met before. One that was met with another partner is a difference of identity."""
        if (id(a), id(b)) in self._met:
            return True
        self._met[id(a), id(b)] = a, b  # kept alive, so that no other gets their ids
        if not isinstance(a, MADE_ANEW):
            partner, back = self._there.setdefault(id(a), (path, b)), self._back.setdefault(id(b), (path, a))
            if partner[1] is not b:
                raise Difference(f"{path}: is the object at {partner[0]} on one device, and not if compiled")
            if back[1] is not a:
                raise Difference(f"{path}: is the object at {back[0]} if compiled, and not on one device")
        return False

    # ---- kinds ------------------------------------------------------------------------------------

    def _atoms(self, path: str, a: Any, b: Any) -> Iterable:
        if type(a) is not type(b):
            if isinstance(a, type) and isinstance(b, type) and _name(a) == _name(b):
                return ()
            _differ(path, a, b)
        if isinstance(a, types.CodeType):
            same = a.co_code == b.co_code and a.co_name == b.co_name
        elif isinstance(a, (float, complex)):
            same = a == b or (a != a and b != b) or abs(a - b) <= self.atol + self.rtol * abs(a)
        else:
            same = bool(a == b)
        if not same:
            _differ(path, a, b)
        return ()

    def _tensors(self, path: str, a: torch.Tensor, b: Any) -> Iterable[tuple[str, Any, Any]]:
        if not isinstance(b, torch.Tensor):
            _differ(path, a, b)
        whole = whole_of(path, b)
        mine = whole_of(path, a)
        for what in ("dtype", "shape"):
            if getattr(mine, what) != getattr(whole, what):
                _differ(f"{path}.{what}", getattr(mine, what), getattr(whole, what))
        if a.requires_grad != b.requires_grad:
            _differ(f"{path}.requires_grad", a.requires_grad, b.requires_grad)
        if isinstance(a, nn.Parameter) != isinstance(b, nn.Parameter):
            _differ(f"{path}: is a parameter", isinstance(a, nn.Parameter), isinstance(b, nn.Parameter))
        if not _are_close(mine, whole, self.rtol, self.atol):
            _differ(path, mine, whole)
        if a.is_leaf and b.is_leaf:
            yield f"{path}.grad", a.grad, b.grad
        yield from self._dicts(f"{path}", _own_of_tensor(a), _own_of_tensor(b), ".{}")

    def _dicts(self, path: str, a: Any, b: Any, text: str = "[{!r}]") -> Iterable[tuple[str, Any, Any]]:
        """Pairs of values, by keys, which have one order. Keys that are no plain values are paired by their order."""
        a, b = dict(a), dict(b)
        plain, others = _plain_keys(a)
        if (plain, len(others)) != ((of_b := _plain_keys(b))[0], len(of_b[1])):
            raise Difference(f"{path}: {_keys_apart(list(a), list(b))}")
        yield from ((path + text.format(key), a[key], b[key]) for key in plain)
        for i, (x, y) in enumerate(zip(others, of_b[1], strict=True)):
            yield f"{path} key {i}", x, y
            yield f"{path}[key {i}]", a[x], b[y]

    def _sequences(self, path: str, a: Any, b: Any) -> Iterable[tuple[str, Any, Any]]:
        if len(a) != len(b):
            raise Difference(f"{path}: has {len(a)} items, and compiled {len(b)}: {_short(list(b))}")
        return [(f"{path}[{i}]", x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))]

    def _sets(self, path: str, a: Any, b: Any) -> Iterable[tuple[str, Any, Any]]:
        mine, theirs = ({x for x in each if isinstance(x, ATOMS)} for each in (a, b))
        if mine != theirs or len(a) != len(b):
            _differ(path, a, b)
        partners = {id(self._there[id(x)][1]) for x in a if id(x) in self._there}
        if not partners <= {id(y) for y in b}:
            raise Difference(f"{path}: holds other objects than on one device")
        return ()

    def _bytes(self, path: str, a: Any, b: Any) -> Iterable:
        if bytes(a) != bytes(b):
            _differ(path, a, b)
        return ()

    def _arrays(self, path: str, a: np.ndarray, b: np.ndarray) -> Iterable[tuple[str, Any, Any]]:
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            _differ(path, (a.dtype, a.shape), (b.dtype, b.shape))
        if a.dtype.hasobject:
            return self._sequences(path, a.ravel().tolist(), b.ravel().tolist())
        close = np.allclose(a, b, self.rtol, self.atol, equal_nan=True) if a.dtype.kind in "fc" else (a == b).all()
        return () if close else _differ(path, a, b)

    def _functions(self, path: str, a: Any, b: Any) -> Iterable[tuple[str, Any, Any]]:
        yield f"{path}.__code__", a.__code__, b.__code__
        yield f"{path}.__defaults__", a.__defaults__, b.__defaults__
        yield f"{path}.__kwdefaults__", a.__kwdefaults__, b.__kwdefaults__
        for name, x, y in zip(a.__code__.co_freevars, a.__closure__ or (), b.__closure__ or (), strict=True):
            yield f"{path}: variable {name}", x, y
        if not is_library(a.__module__):
            yield from self._globals(a, b)

    def _globals(self, a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
        """The globals that the code of a user's function names."""
        mine, theirs = a.__globals__, b.__globals__
        for name in sorted(names_of(a.__code__)):
            if (name in mine) != (name in theirs):
                raise Difference(f"global {name}: is {'not ' * (name not in theirs)}there after the compiled step")
            if name in mine:
                yield f"global {name}", mine[name], theirs[name]

    def _cells(self, path: str, a: Any, b: Any) -> Iterable[tuple[str, Any, Any]]:
        x, y = (next(iter(gc.get_referents(cell)), _EMPTY) for cell in (a, b))
        return [(path, x, y)]

    def _classes(self, path: str, a: type, b: type) -> Iterable[tuple[str, Any, Any]]:
        if is_library(a.__module__):
            if a is not b:
                _differ(path, a, b)
            return ()
        return self._dicts(_name(a), _own(a), _own(b), ".{}")

    def _modules(self, path: str, a: types.ModuleType, b: types.ModuleType) -> Iterable[tuple[str, Any, Any]]:
        return () if is_library(a.__name__) else self._dicts(a.__name__, _own(a), _own(b), ".{}")

    def _iterators(self, path: str, a: Any, b: Any) -> Iterable[tuple[str, Any, Any]]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return [(f"{path}: {_name(type(a))}", _reduced(a), _reduced(b))]

    def _generators(self, path: str, a: Any, b: Any) -> Iterable[tuple[str, Any, Any]]:
        x, y = a.gi_frame, b.gi_frame
        if (x is None) != (y is None) or (x is not None and x.f_lasti != y.f_lasti):
            raise Difference(f"{path}: the generator is at another place than on one device")
        return () if x is None else self._dicts(path, x.f_locals, y.f_locals, ": variable {}")

    def _random(self, path: str, a: Any, b: Any) -> Iterable[tuple[str, Any, Any]]:
        return [(f"{path}: state", _random_state(a), _random_state(b))]

    def _partials(self, path: str, a: Any, b: Any) -> Iterable[tuple[str, Any, Any]]:
        return [(f"{path}.{name}", getattr(a, name), getattr(b, name)) for name in ("func", "args", "keywords")]

    def _methods(self, path: str, a: Any, b: Any) -> Iterable[tuple[str, Any, Any]]:
        yield f"{path}.__name__", a.__name__, b.__name__
        yield f"{path}.__self__", a.__self__, b.__self__
        if isinstance(a, types.MethodType):
            yield f"{path}.__func__", a.__func__, b.__func__

    def _weak(self, path: str, a: Any, b: Any) -> Iterable[tuple[str, Any, Any]]:
        return [(f"{path}()", a(), b())]

    def _context_variables(self, path: str, a: Any, b: Any) -> Iterable[tuple[str, Any, Any]]:
        return [(f"{path}.get()", a.get(_EMPTY), b.get(_EMPTY))]

    def _texts(self, path: str, a: Any, b: Any) -> Iterable[tuple[str, Any, Any]]:
        if a.closed or b.closed:
            return [(f"{path}.closed", a.closed, b.closed)]
        return [(f"{path}.getvalue()", a.getvalue(), b.getvalue()), (f"{path}.tell()", a.tell(), b.tell())]

    def _locks(self, path: str, a: Any, b: Any) -> Iterable[tuple[str, Any, Any]]:
        return [(path, repr(a).partition(" object")[0], repr(b).partition(" object")[0])]

    def _cached(self, path: str, a: Any, b: Any) -> Iterable[tuple[str, Any, Any]]:
        yield f"{path}.cache_info()", tuple(a.cache_info()), tuple(b.cache_info())
        yield from self._by_referents(path, a, b)

    def _nothing(self, path: str, a: Any, b: Any) -> Iterable:
        return ()

    def _by_referents(self, path: str, a: Any, b: Any) -> Iterable[tuple[str, Any, Any]]:
        """What Python's collector finds in them, in its order; in what holds nothing there is nothing to compare."""
        mine, theirs = (_referents(each) for each in (a, b))
        if len(mine) != len(theirs):
            raise Difference(f"{path}: holds {len(mine)} values, and compiled {len(theirs)} ({_name(type(a))})")
        if not mine and not hasattr(a, "__dict__") and not _slots(type(a)) and type(a) is not object:
            self.unknown.setdefault(type(a), path)
        return [(f"{path} <{i}>", x, y) for i, (x, y) in enumerate(zip(mine, theirs, strict=True))]

    def _attributes(self, path: str, a: Any, b: Any) -> Iterable[tuple[str, Any, Any]]:
        """Those in `__dict__`, and those in slots."""
        if isinstance(a, WITHOUT_ATTRIBUTES):
            return
        own = getattr(a, "__dict__", None)
        if isinstance(own, dict):
            yield from self._dicts(path, _kept(a, own), _kept(b, vars(b)), ".{}")
        if _slots(type(a)):
            yield from self._dicts(path, dict(_slot_values(a)), dict(_slot_values(b)), ".{}")


Look = Callable[[Audit, str, Any, Any], Iterable[tuple[str, Any, Any]]]
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_OF_CTYPES = ctypes._SimpleCData, ctypes.Array, ctypes.Structure
_ITERATORS = (
    *(type(iter(x)) for x in ([], (), {}, "", b"", set(), range(0), {}.values(), {}.items(), bytearray())),
    type(reversed([])), type(iter(int, 1)), enumerate, zip, map, filter,
    *(x for x in vars(itertools).values() if isinstance(x, type)),
    type(iter(collections.deque())), collections.deque,
)  # fmt: skip
ROWS: list[tuple[tuple[type, ...], Look]] = [
    ((types.FunctionType,), Audit._functions),
    ((types.CellType,), Audit._cells),
    ((type,), Audit._classes),
    ((types.ModuleType,), Audit._modules),
    ((collections.deque, list, tuple), Audit._sequences),
    ((collections.OrderedDict, dict, types.MappingProxyType), Audit._dicts),
    ((set, frozenset), Audit._sets),
    ((np.ndarray,), Audit._arrays),
    ((bytearray, memoryview, array.array, mmap.mmap, *_OF_CTYPES), Audit._bytes),
    (_GENERATORS, Audit._random),
    (_ITERATORS, Audit._iterators),
    ((types.GeneratorType,), Audit._generators),
    ((functools.partial,), Audit._partials),
    ((functools._lru_cache_wrapper,), Audit._cached),
    ((types.MethodType, types.BuiltinMethodType, types.MethodWrapperType), Audit._methods),
    ((weakref.ReferenceType,), Audit._weak),
    ((contextvars.ContextVar,), Audit._context_variables),
    ((io.StringIO, io.BytesIO), Audit._texts),
    ((type(threading.Lock()), type(threading.RLock())), Audit._locks),
    ((threading.local, enum.Enum, nn.Module, torch.optim.Optimizer), Audit._nothing),  # their attributes are all
]  # fmt: skip
"""What is looked at in a value of a kind, besides its attributes; the first row that fits."""

_EMPTY = "empty"

WITHOUT_ATTRIBUTES = type, types.ModuleType, *_OF_CTYPES
"""Kinds of which the row says all: attributes of ctypes say where the bytes lie."""

MADE_ANEW = tuple, frozenset, types.BuiltinMethodType, types.MethodType, types.MethodWrapperType, types.CellType
"""Kinds of which it says nothing that two are one object: they cannot be changed, or are made when asked for."""


def check_not_traced(path: str, x: Any) -> None:
    """Nothing that stands for a value in a capture is left."""
    if not TRACED.isdisjoint(kind.__name__ for kind in type(x).__mro__):
        raise Difference(f"{path}: a dead {type(x).__name__} was left there")


def whole_of(path: str, x: torch.Tensor) -> torch.Tensor:
    """The tensor of one device that a tensor of simulated ranks stands for. The ranks must agree on it."""
    x = x.detach()
    x = x.full_tensor() if isinstance(x, DTensor) else x
    if isinstance(x, LocalTensor):
        try:
            return x.reconcile()
        except Exception as error:
            raise Difference(f"{path}: the ranks have different tensors: {str(error).splitlines()[0]}") from error
    return x


def names_of(code: types.CodeType) -> set[str]:
    """The names of globals and attributes in code, and in the functions that it makes."""
    inner = (names_of(x) for x in code.co_consts if isinstance(x, types.CodeType))
    return set(code.co_names).union(*inner)


def _are_close(a: torch.Tensor, b: torch.Tensor, rtol: float, atol: float) -> bool:
    if a.is_floating_point() or a.is_complex():
        low = a.dtype in (torch.float32, torch.float16, torch.bfloat16, torch.complex64)
        return torch.allclose(a, b, 1e-4 if low else rtol, 1e-5 if low else atol, equal_nan=True)
    return torch.equal(a, b)


def _own_of_tensor(x: torch.Tensor) -> dict[str, Any]:
    own = getattr(x, "__dict__", {})
    return {name: y for name, y in own.items() if not (isinstance(x, DTensor) and name in OF_DTENSOR)}


OF_DTENSOR = {"_spec", "_local_tensor", "_memory", "_copy", "_offset", "_is_param"}


def _kept(owner: Any, own: dict) -> dict:
    """The attributes of an object, with hooks by their order, whose keys count the hooks of the process."""
    if isinstance(owner, RemovableHandle):
        return {}
    if isinstance(owner, nn.Module):
        own = {**own, **own["_parameters"], **own["_buffers"], **own["_modules"]}
        own = {name: x for name, x in own.items() if name not in ("_parameters", "_buffers", "_modules")}
    if isinstance(owner, (nn.Module, torch.optim.Optimizer)):
        own = {name: x for name, x in own.items() if name != "_opt_called"}
        return {name: list(x.values()) if "hook" in name and isinstance(x, dict) else x for name, x in own.items()}
    return own


def _own(x: Any) -> dict[str, Any]:
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
        if isinstance(x, types.MemberDescriptorType) and not is_library(base.__module__)
    )


def _slot_values(x: Any) -> Iterator[tuple[str, Any]]:
    for name, slot in _slots(type(x)):
        try:
            yield name, slot.__get__(x)
        except AttributeError:
            continue


def _referents(x: Any) -> list[Any]:
    """What is in a value besides its class and what `_attributes` meets by name."""
    named = {id(type(x)), id(getattr(x, "__dict__", None)), *(id(y) for _, y in _slot_values(x))}
    return [y for y in gc.get_referents(x) if id(y) not in named]


def _reduced(x: Any) -> Any:
    found = x.__reduce_ex__(2)
    return found if isinstance(found, str) else [*found[1:]]


def _random_state(x: Any) -> Any:
    if isinstance(x, random.Random):
        return x.getstate()
    if isinstance(x, np.random.Generator):
        return x.bit_generator.state
    return x.get_state()


def _plain_keys(x: dict) -> tuple[list, list]:
    plain = [key for key in x if isinstance(key, (*ATOMS, tuple, enum.Enum))]
    return plain, [key for key in x if not isinstance(key, (*ATOMS, tuple, enum.Enum))]


def _name(kind: type) -> str:
    return kind.__qualname__


def _keys_apart(a: list, b: list) -> str:
    lost, new = [x for x in a if x not in b], [x for x in b if x not in a]
    if lost or new:
        return f"compiled it lacks {_short(lost)} and has {_short(new)} besides"
    return f"has the keys {_short(a)}, and compiled {_short(b)}"


def _short(x: Any) -> str:
    try:
        text = repr(x)
    except Exception as error:  # a dead tensor cannot always be shown
        text = f"a {type(x).__name__} that cannot be shown ({type(error).__name__})"
    text = " ".join(text.split())
    return text if len(text) <= 100 else f"{text[:100]}..."


def _differ(path: str, a: Any, b: Any) -> Any:
    raise Difference(f"{path}: {_short(a)}, and compiled {_short(b)}")
