"""All that code can reach besides what it is given: globals, variables around functions, attributes, classes.

    CONTEXT.layer = i                          # between two calls of equal modules
    Reach.of(codes, functions, values)         # goes through CONTEXT, and finds its `layer`, if the code names one

The code of a call of a module does what it does by its arguments and by what it reaches. `key` has all that is reached:
plain values by value, containers and objects by their contents, functions, tensors and modules by identity. Two calls
whose code reaches equal values take the same way. `unseen` says what keeps something that Python code cannot look at,
such as an iterator; nothing can be said of a call that reaches it. What was reached can be put back (`Held`).

Of objects, classes and modules of Python, what counts is under the names that the code has; all of it where the code
computes names. Torch's own objects are taken to be what they are.
"""

from __future__ import annotations

import _abc
import functools
import re
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Hashable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from logging import Logger
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from spmd import _torch
from spmd.expand.bytecode import instructions
from spmd.expand.guards import GUARDED_APART, ById
from spmd.expand.python_state import copied, differs
from spmd.expand.sources.layout import KNOWN_SIZES, Contents, hides, is_set, put, slots_of

MOST_VALUES = 20_000
"""Code that reaches more is not looked at."""

MOST_NESTED = 100
MOST_NUMBERS = 64
"""A tensor outside of the trace with more numbers is compared by identity and version alone."""

BY_VALUE = {
    bool, int, str, bytes, type(None), type(...), type(NotImplemented), range, torch.dtype, torch.device, torch.Size,
    torch.memory_format, torch.layout,
}  # fmt: skip
BY_TEXT = {float, complex, slice}
BY_IDENTITY = (
    Logger, Enum, Optimizer, type(torch.ops.aten.relu), type(torch.ops.aten.relu.default), types.CodeType,
)  # fmt: skip
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_BUILT_IN = frozenset({*CONTAINERS, OrderedDict})
LIBRARIES = ("torch", "spmd", "numpy")
"""Packages whose functions do what they do by their arguments, and by modes that are looked at elsewhere."""


class Names(NamedTuple):
    """The names in code, and in the functions inside it."""

    globals: frozenset[str]
    attributes: frozenset[str]
    imports: frozenset[str]


@functools.lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> Names:
    globals_, attributes, imports = set(), {code.co_name}, set()
    for name, value, _ in instructions(code):
        if name in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "DELETE_GLOBAL"):
            globals_.add(value)
        elif name == "IMPORT_NAME":
            imports.add(value)
        elif name.endswith("_ATTR") or name == "IMPORT_FROM":
            attributes.add(value)
    for x in code.co_consts:
        if isinstance(x, types.CodeType):
            inner = names_of(x)
            globals_ |= inner.globals
            attributes |= inner.attributes
            imports |= inner.imports
        elif isinstance(x, str) and x.isidentifier():
            attributes.add(x)  # it may be a name for getattr
    return Names(*map(frozenset, (globals_, attributes, imports)))


class Code(NamedTuple):
    """Code that runs, and the globals that it has."""

    code: types.CodeType
    variables: dict[str, Any]

    def __hash__(self) -> int:
        return hash((self.code, id(self.variables)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Code) and self.code is other.code and self.variables is other.variables


class Reach:
    """What some code reaches. key: of all of it. unseen: what cannot be looked at; empty if all can. tensors: those
    that are reached and are not the module's own. finds_given: whether one of these is. held: what can be put back."""

    def __init__(self, names: set[str], whole: bool, own: Mapping[int, int]) -> None:
        self.names, self.whole, self._own = names, whole, own
        self.key: list[Hashable] = []
        self.unseen = ""
        self.tensors: list[torch.Tensor] = []
        self.finds_given = False
        self.held = Held([], [])
        self.codes: set[types.CodeType] = set()
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []
        self._depth = 0

    @classmethod
    def of(
        cls, codes: Iterable[Code], modules: Iterable[nn.Module], *, functions: Iterable[Any] = (), whole: bool = False,
        own: Mapping[int, int] | None = None, unread: Collection[str] = (),
    ) -> Reach:  # fmt: skip
        """What code reaches, with what modules keep as attributes. functions: to be looked through as values.

        whole: whether the code computes names of attributes. own: numbers for the modules and tensors, by identity,
        that are compared by their place and not by identity. unread: names of attributes of the modules that play no
        role.
        """
        codes = sorted(codes, key=lambda c: (c.code.co_filename, c.code.co_firstlineno, c.code.co_name))
        names = {name for c in codes for name in names_of(c.code).attributes}
        found = cls(names, whole or "__dict__" in names, own or {})
        for c in codes:
            found._globals(c)
        for module in modules:
            found._attributes_of_module(module, unread)
        for fn in functions:
            found.value(fn)
        return found

    def finds(self, codes: Iterable[Code]) -> bool:
        """Whether all this code belongs to functions that were reached, or to those that they make."""
        known, left = set(), [*self.codes]
        while left:
            code = left.pop()
            if code not in known:
                known.add(code)
                left += [x for x in code.co_consts if isinstance(x, types.CodeType)]
        return all(c.code in known for c in codes)

    # ---- roots ----------------------------------------------------------------------------------
    def _globals(self, c: Code) -> None:
        names = names_of(c.code)
        for name in sorted(names.globals):
            if name in c.variables:
                self.held.variables.append((c.variables, name, c.variables[name]))
                self.key.append(name)
                self.value(c.variables[name])
        for name in sorted(names.imports):
            self.value(sys.modules.get(name))

    def _attributes_of_module(self, module: nn.Module, unread: Collection[str]) -> None:
        self._class(type(module))
        self.value(type(module).forward)
        for name, x in vars(module).items():
            if name not in GUARDED_APART and name not in unread and not (name == "forward" and _is_ours(x)):
                self.key.append(name)
                self.value(x)

    # ---- values ---------------------------------------------------------------------------------
    def value(self, x: Any) -> None:
        """Go through a value."""
        kind = type(x)
        if kind in BY_VALUE:
            self.key.append((kind, x))
        elif kind in BY_TEXT or _torch.is_symbol(x):
            self.key.append((kind, repr(x)))
        elif id(x) in self._own:
            self.key.append(("own", self._own[id(x)]))
            self.finds_given = self.finds_given or isinstance(x, torch.Tensor)
        elif id(x) in self._seen:
            self.key.append(("again", self._seen[id(x)]))
        elif len(self._seen) >= MOST_VALUES or self._depth >= MOST_NESTED:
            self.unseen = self.unseen or "more values than are looked at"
        else:
            self._seen[id(x)] = len(self._seen)
            self._alive.append(x)
            self._depth += 1
            self._inside(x)
            self._depth -= 1

    def _inside(self, x: Any) -> None:
        if type(x) in _BUILT_IN:
            return self._container(x)
        for kind, look in _LOOKS:
            if isinstance(x, kind):
                return look(self, x)
        return self._object(x)

    def _identity(self, x: Any) -> None:
        self.key.append(ById(x))

    def _tensor(self, x: torch.Tensor) -> None:
        self.tensors.append(x)
        self.key.append((ById(x), x.requires_grad))
        if not isinstance(x, _torch.FunctionalTensor) and type(x) in (torch.Tensor, nn.Parameter):
            with _torch.untraced():
                few = x.device.type == "cpu" and x.numel() <= MOST_NUMBERS and not _torch.is_fake(x)
                self.key.append((x._version, repr(x.tolist()) if few else None))

    def _container(self, x: Any) -> None:
        if type(x) not in KNOWN_SIZES and (hidden := hides(type(x))):
            self.unseen = self.unseen or hidden
        self.key.append((type(x), len(x)))
        if not isinstance(x, (tuple, frozenset)):
            self.held.boxes.append((x, copied(x)))
        for each in x.items() if isinstance(x, dict) else x:
            if isinstance(x, dict):
                self.value(each[0])
                self.value(each[1])
            else:
                self.value(each)
        if type(x) is defaultdict:
            self.value(x.default_factory)
        if type(x) not in KNOWN_SIZES:
            self._own_attributes(x)

    def _view(self, x: types.MappingProxyType) -> None:
        self.key.append(type(x))
        self.value(dict(x))

    def _module_of_python(self, x: types.ModuleType) -> None:
        self._identity(x)
        own = vars(x)
        if x.__name__.startswith("numpy.random"):
            self.unseen = self.unseen or "numpy's random numbers"
        for name in sorted(self.names & own.keys()):
            value = own[name]
            if _is_library(x.__name__) and not isinstance(value, (types.ModuleType, *BY_VALUE, float)):
                self.key.append((name, ById(value)))
                if isinstance(value, torch.Generator):
                    self.unseen = self.unseen or "a generator of random numbers"
            else:
                self.key.append(name)
                self.held.variables.append((own, name, value))
                self.value(value)

    def _function(self, x: types.FunctionType) -> None:
        self._identity(x)
        self.codes.add(x.__code__)
        self.key.append(ById(x.__code__))
        is_library = _is_library(x.__module__) or package(x.__module__) in sys.stdlib_module_names
        cells = [c for c in x.__closure__ or () if is_set(c)]
        values = [c.cell_contents for c in cells]
        if not is_library:
            self.held.cells.extend(zip(cells, values, strict=True))
            values += [x.__defaults__, x.__kwdefaults__, vars(x)]
        for value in values:
            if not is_library or isinstance(value, (types.FunctionType, types.MethodType, functools.partial)):
                self.value(value)

    def _method(self, x: types.MethodType) -> None:
        self.key.append(types.MethodType)
        self.value(x.__func__)
        self.value(x.__self__)

    def _builtin(self, x: types.BuiltinFunctionType) -> None:
        if x.__self__ is None or isinstance(x.__self__, (types.ModuleType, type)):
            self._identity(x)
        else:
            self.key.append(x.__name__)
            self.value(x.__self__)

    def _variable_of_context(self, x: ContextVar) -> None:
        """What a variable has in this context."""
        self._identity(x)
        value = x.get(_UNSET)
        self.key.append(value is _UNSET)
        if value is not _UNSET:
            self.held.of_context.append((x, value))
            self.value(value)
            return
        try:
            self.held.of_context.append((x, x.get()))  # once it is set, it cannot be as if it had not been
        except LookupError:
            self.unseen = self.unseen or "a ContextVar without a value"

    def _lock(self, x: Any) -> None:
        """A lock is held or free; its text says so, and who holds it."""
        self.key.append((ById(x), repr(x)))

    def _partial(self, x: functools.partial) -> None:
        self.key.append(type(x))
        for each in (x.func, x.args, x.keywords, vars(x)):
            self.value(each)

    def _property(self, x: Any) -> None:
        self.key.append(type(x))
        for name in ("fget", "fset", "func", "__func__"):
            self.value(getattr(x, name, None))

    def _weak(self, x: weakref.ref) -> None:
        self.value(x())

    def _type(self, x: type) -> None:
        self._identity(x)
        self._class(x)

    def _class(self, x: type) -> None:
        """What classes of the user have under the names of the code."""
        for base in x.__mro__:
            if _is_library(base.__module__) or package(base.__module__) in sys.stdlib_module_names:
                continue
            own = vars(base)
            for name in sorted(own.keys() if self.whole else self.names & own.keys()):
                if name == "_abc_impl":  # what was registered; the rest are caches of isinstance
                    self.key.append(len(_abc._get_dump(base)[0]))
                elif name not in _OF_EVERY_CLASS:
                    self.key.append(name)
                    if not isinstance(own[name], (types.FunctionType, property, staticmethod, classmethod)):
                        self.held.attributes.append((base, name, own[name]))
                    self.value(own[name])

    def _module(self, x: nn.Module) -> None:
        """A module that is not the one that is called, nor in it."""
        self._identity(x)
        self._class(type(x))
        own = vars(x)
        for name in sorted(own.keys() - GUARDED_APART if self.whole else self.names & own.keys() - GUARDED_APART):
            if not (name == "forward" and _is_ours(own[name])):
                self.key.append(name)
                self.value(own[name])
        self.key.append(x.training)
        for each in own["_modules"].values():
            self.value(each)
        for name in sorted(self.names & (own["_parameters"].keys() | own["_buffers"].keys())):
            self.value(own["_parameters"].get(name, own["_buffers"].get(name)))

    def _object(self, x: Any) -> None:
        if (array := _array(x)) is not None:
            self.key.append(array)
            return
        if package(type(x).__module__) == "spmd":
            self._identity(x)
            return
        if hidden := hides(type(x)):
            self.unseen = self.unseen or hidden
        self.key.append(type(x))
        self._class(type(x))
        self._own_attributes(x)

    def _own_attributes(self, x: Any) -> None:
        own = getattr(x, "__dict__", {})
        is_library = _is_library(type(x).__module__)
        is_whole = self.whole or is_library or package(type(x).__module__) in sys.stdlib_module_names
        names = own.keys() if is_whole else self.names
        if own and not is_library:
            self.held.boxes.append((own, copied(own)))
        for name in sorted(set(names) & own.keys()):
            self.key.append(name)
            self.value(own[name])
        for name in slots_of(type(x)):
            if hasattr(x, name):
                self.key.append(name)
                self.held.attributes.append((x, name, getattr(x, name)))
                self.value(getattr(x, name))


_LOOKS = (
    (torch.Tensor, Reach._tensor), (nn.Module, Reach._module), (BY_IDENTITY, Reach._identity),
    (CONTAINERS, Reach._container), (types.MappingProxyType, Reach._view),
    (types.ModuleType, Reach._module_of_python), (types.FunctionType, Reach._function),
    (types.MethodType, Reach._method), ((types.BuiltinFunctionType, types.BuiltinMethodType), Reach._builtin),
    (functools.partial, Reach._partial), (ContextVar, Reach._variable_of_context),
    ((type(threading.Lock()), type(threading.RLock())), Reach._lock),
    ((property, functools.cached_property, staticmethod, classmethod), Reach._property),
    (weakref.ref, Reach._weak), (type, Reach._type),
    ((types.WrapperDescriptorType, types.MethodDescriptorType, types.GetSetDescriptorType), Reach._identity),
    ((types.MemberDescriptorType, types.ClassMethodDescriptorType, types.GenericAlias), Reach._identity),
    ((types.UnionType, re.Pattern, TypeVar, ParamSpec), Reach._identity),
)  # fmt: skip

_UNSET = object()
_OF_EVERY_CLASS = {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "__abstractmethods__"}


@functools.lru_cache(maxsize=4096)
def package(module: Any) -> str:
    """The package of the name of a module."""
    return module.partition(".")[0] if isinstance(module, str) else ""


def _is_library(module: Any) -> bool:
    return package(module) in LIBRARIES


def _is_ours(forward: Any) -> bool:
    """Whether the forward of a module is the one that stamps it."""
    return getattr(getattr(forward, "__code__", None), "co_filename", "").endswith("stamp/blocks.py")


def _array(x: Any) -> Hashable | None:
    """The contents of an array of numpy, or of a number of it."""
    if package(type(x).__module__) != "numpy" or not hasattr(x, "tobytes"):
        return None
    few = x.size <= MOST_NUMBERS and x.dtype != object
    return (type(x), x.dtype.str, x.shape, x.tobytes()) if few else None


# ---- to put back ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """What was reached and can change: containers with copies of their contents, variables of modules of Python,
    variables around functions, attributes of classes and of objects with slots, and values of the context."""

    boxes: Contents
    variables: list[tuple[dict[str, Any], str, Any]]
    cells: list[tuple[types.CellType, Any]] = field(default_factory=list)
    attributes: list[tuple[Any, str, Any]] = field(default_factory=list)
    of_context: list[tuple[ContextVar, Any]] = field(default_factory=list)

    def put_back(self) -> None:
        """Give all of it the contents that it had."""
        put([(box, old) for box, old in self.boxes if differs(box, old)])
        for variables, name, old in self.variables:
            variables[name] = old
        for cell, old in self.cells:
            cell.cell_contents = old
        for owner, name, old in self.attributes:
            if (vars(owner).get(name) if isinstance(owner, type) else getattr(owner, name, None)) is not old:
                setattr(owner, name, old)
        for variable, old in self.of_context:
            if variable.get() is not old:
                variable.set(old)
