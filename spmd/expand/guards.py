"""Guards: the Python values that a trace read, as frozen keys that a later call can be compared with.

    guard_key([1, {"rate": 0.5}])     equal for equal lists; later changes of the list do not change the key
    guard_key(F.gelu)                 equal only for the very same function

A program is used again where every value that its trace read has the same key as before.
"""

from __future__ import annotations

import copyreg
import ctypes
import functools
import marshal
import random
import sys
import types
import weakref
from array import array
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from hashlib import blake2b
from itertools import chain
from logging import Logger
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from spmd import _torch
from spmd.expand.modules import OF_ALL_MODULES
from spmd.expand.reads import Reads
from spmd.expand.sources.kinds import BUFFER, STATE, Kind, kinds_of
from spmd.expand.sources.layout import COMPARED_BY_VALUE, hides, items_of, slots_of
from spmd.tensor.annotations.block_function import BlockFunction

COMPARED_BY_ID = (
    torch.Tensor, nn.Module, Optimizer, type, types.ModuleType, types.CodeType, BlockFunction, Logger,
)  # fmt: skip
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
MAX_DEPTH = 32
"""How deep to look into objects within objects. What is deeper is compared by identity."""


class ById:
    """An object compared by identity. It is kept alive, so that no other object can get its address."""

    def __init__(self, value: object):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


Apart = Collection[tuple[int, Any]]
NONE: Apart = frozenset()


def _but_for(box: dict | list, keys: frozenset) -> tuple:
    """What else than these keys a dict or list has, by identity."""
    pairs = items_of(box) if isinstance(box, dict) else enumerate(box)
    return tuple([(k, ById(v)) for k, v in pairs if k not in keys])


def guard_key(value: Any, reads: Reads | None = None, apart: Apart = NONE) -> Hashable:
    """A hashable key of a value: numbers by type and value, arrays, containers and plain objects by their contents.

    A function is the same as long as its code, its defaults and its attributes are. reads: where to note which
    containers and objects these are. apart: what is no part of the key, by the identities of dicts and lists and by
    key.

    >>> guard_key([1]) == guard_key([1]), guard_key([1]) == guard_key([True]), guard_key([1]) == guard_key((1,))
    (True, False, False)
    """
    kind = type(value)
    if kind is float:
        return float, repr(value)  # NaN equals NaN, and 0.0 does not equal -0.0
    if kind in _WHOLE_IN_THEMSELVES:
        return kind, value
    return _Walk(reads, apart).key(value)


class _Walk:
    """A way through one value. An object that is met again is named by the number of those met before it."""

    def __init__(self, reads: Reads | None, apart: Apart) -> None:
        self.reads, self.apart = reads, apart
        self._met: dict[int, Hashable] = {}
        self._depth = 0
        self._alive: list[Any] = []  # what is made on the way: another object at its address would be taken for it

    def key(self, x: Any) -> Hashable:
        kind = type(x)
        if kind is float:
            return float, repr(x)
        if kind is ById:
            return x
        if isinstance(x, COMPARED_BY_VALUE):
            return (kind, x, *self._attributes(x))
        if isinstance(x, COMPARED_BY_ID):
            return ById(x)
        if id(x) in self._met:
            return self._met[id(x)]
        if self._depth == MAX_DEPTH:
            return ById(x)
        self._depth += 1
        self._met[id(x)] = "met before", len(self._met)
        found = self._inside(x)
        if isinstance(x, (tuple, frozenset)):
            self._met[id(x)] = found  # Python may share equal ones
        self._depth -= 1
        return found

    def _inside(self, x: Any) -> Hashable:
        for kinds, look in _LOOKS:
            if isinstance(x, kinds):
                return look(self, x)
        return self._object(x)

    def _container(self, x: Any) -> Hashable:
        left_out = self._left_out(x)
        if self.reads is not None and not isinstance(x, (tuple, frozenset)):
            self.reads.keyed(x, functools.partial(_but_for, keys=left_out)) if left_out else self.reads.box(x)
        if len(x) > MANY and not left_out and (told := digest_of_items(x)) is not None:
            return (type(x), f"{len(x)} items {told}", *self._attributes(x))
        if isinstance(x, dict):
            inside: Any = tuple([(self.key(k), self.key(v)) for k, v in items_of(x) if k not in left_out])
        elif left_out:
            inside = tuple([self.key(v) for i, v in enumerate(x) if i not in left_out])
        else:
            inside = (frozenset if isinstance(x, (set, frozenset)) else tuple)([self.key(v) for v in x])
        return (type(x), inside, *self._attributes(x))

    def _left_out(self, x: Any) -> frozenset:
        """The keys or places in a dict or list that are no part of the key."""
        return frozenset([key for box, key in self.apart if box == id(x)]) if self.apart else frozenset()

    def _function(self, x: types.FunctionType) -> Hashable:
        """A function, with what can be set anew in it."""
        if self.reads is not None:
            self.reads.function(x)
        bound = (self.key(v) for v in (x.__defaults__, x.__kwdefaults__) if v)
        return (ById(x), ById(x.__code__), *bound, *(self._attributes(x) if vars(x) else ()))

    def _method(self, x: types.MethodType) -> Hashable:  # its attributes are those of its function
        return type(x), self.key(x.__func__), self.key(x.__self__)

    def _builtin(self, x: types.BuiltinFunctionType) -> Hashable:
        if x.__self__ is None or isinstance(x.__self__, (types.ModuleType, type)):
            return ById(x)
        return type(x), x.__name__, self.key(x.__self__)

    def _partial(self, x: functools.partial) -> Hashable:
        return (type(x), *map(self.key, (x.func, x.args, x.keywords)), *self._attributes(x))

    def _array(self, x: np.ndarray | np.generic) -> Hashable:
        inside = x.tolist() if x.dtype.hasobject else bytes_of_array(x)
        return type(x), x.dtype, x.shape, self.key(inside) if isinstance(x, np.generic) else self._by_key(x, inside)

    def _bytes(self, x: bytearray | memoryview | array) -> Hashable:
        return type(x), getattr(x, "typecode", getattr(x, "format", "")), self._by_key(x, bytes(x))

    def _view(self, x: types.MappingProxyType) -> Hashable:
        return type(x), self._by_key(x, x.copy())

    def _weak(self, x: weakref.ref) -> Hashable:
        """What a weak reference refers to now; neither the key nor what was read keeps it alive."""
        there = x()
        return type(x), ById(x) if isinstance(there, COMPARED_BY_ID) else self._by_key(x, there)

    def _factory(self, x: defaultdict) -> Hashable:
        return (*self._container(x), self.key(x.default_factory))

    def _by_key(self, x: Any, inside: Any) -> Hashable:
        """The key of what is inside of x, where x alone, by a key of its own, can tell later whether it is the same."""
        reads, self.reads = self.reads, None
        if reads is not None:
            reads.keyed(x, guard_key)
        self._alive.append(inside)
        found = self.key(inside)
        self.reads = reads
        return found

    def _object(self, x: Any) -> Hashable:
        kind = type(x)
        attributes = self._attributes(x)
        if attributes and not hides(kind):
            return (kind, *attributes)
        parts = state_of(x) or parts_of(x)
        return (kind, ById(x) if parts is None else self._by_key(x, parts), *attributes)

    def _attributes(self, x: Any) -> tuple:
        """The keys of an object's dict and slots, as far as it has them. None of objects of just a class of Python."""
        if type(x) in _WITHOUT_ATTRIBUTES:
            return ()
        found: tuple = ()
        if hasattr(x, "__dict__"):
            left_out = self._left_out(vars(x))
            if self.reads is not None:
                self.reads.object(x, without=left_out)
            found = (tuple([(k, self.key(v)) for k, v in vars(x).items() if k not in left_out]),)
        # a class with a hash of its own makes values, which do not change
        slots = slots_of(type(x)) if type(x).__hash__ in (object.__hash__, None) else ()
        for name in slots:
            if self.reads is not None:
                self.reads.slot(x, name)
            if hasattr(x, name):
                found += ((name, self.key(getattr(x, name))),)
        return found


def state_of(x: Any) -> Hashable:
    """What an object keeps in C, as a key."""
    kept = _kept_in_c(type(x))
    return tuple([kind.contents(x)[0] if kind is STATE else kind.contents(x) for kind in kept]) if kept else ()


@functools.lru_cache(maxsize=4096)
def _kept_in_c(kind: type) -> tuple[Kind, ...]:
    return tuple(each for each in kinds_of(kind) if each in (STATE, BUFFER))


_WITHOUT_ATTRIBUTES = frozenset({*COMPARED_BY_VALUE, *CONTAINERS})
_WHOLE_IN_THEMSELVES = frozenset({*COMPARED_BY_VALUE} - {float})
_LOOKS: tuple[tuple[Any, Callable[[_Walk, Any], Hashable]], ...] = (
    (defaultdict, _Walk._factory), (CONTAINERS, _Walk._container),
    (types.FunctionType, _Walk._function), (types.MethodType, _Walk._method),
    (types.BuiltinFunctionType, _Walk._builtin), (functools.partial, _Walk._partial),
    ((np.ndarray, np.generic), _Walk._array), ((bytearray, memoryview, array), _Walk._bytes),
    (types.MappingProxyType, _Walk._view), (weakref.ref, _Walk._weak),
)  # fmt: skip


def parts_of(x: Any) -> Any:
    """What an object of Python's library holds that its attributes do not say; None where Python cannot see it, and of
    what gives something else each time that it is asked.

    >>> import operator
    >>> parts_of(operator.methodcaller("get", "a")), parts_of(object())
    ((<class 'operator.methodcaller'>, ('get', 'a')), None)
    """
    kind = type(x)
    if issubclass(kind, _OF_CTYPES):
        return bytes(x)
    of_library = kind.__module__.partition(".")[0] in sys.stdlib_module_names and kind is not object
    if not of_library or isinstance(x, (Iterator, random.Random, *COMPARED_BY_ID)):
        return None
    try:
        parts = copyreg.dispatch_table[kind](x) if kind in copyreg.dispatch_table else x.__reduce_ex__(4)
    except Exception:  # it cannot be made again, as a lock or a file
        return None
    return parts if isinstance(parts, str) else tuple(tuple(p) if isinstance(p, Iterator) else p for p in parts)


_OF_CTYPES = tuple(kind.__base__ for kind in (ctypes.c_int, ctypes.Array, ctypes.Structure, ctypes.Union))

MANY = 100
"""Of a container with more items these are compared by a digest, where they are numbers and texts."""


def digest_of_items(x: Any) -> str | None:
    """A digest of a list, tuple or dict of numbers and texts; None for others."""
    if not isinstance(x, (list, tuple, deque, dict)):
        return None
    inside = [*items_of(x)] if isinstance(x, dict) else [*x]
    kinds = {*map(type, chain.from_iterable(inside) if isinstance(x, dict) else inside)}
    return blake2b(marshal.dumps(inside, 2), digest_size=16).hexdigest() if kinds <= _NUMBERS_AND_TEXTS else None


_NUMBERS_AND_TEXTS = {bool, int, float, complex, str, bytes, type(None)}


def bytes_of_array(x: np.ndarray | np.generic) -> bytes:
    """The numbers of an array, or a digest of many."""
    return x.tobytes() if x.nbytes <= MANY * MANY else blake2b(np.ascontiguousarray(x), digest_size=16).digest()


def is_number(value: Any) -> bool:
    """Whether an argument may be a symbol: a program then says itself for which of its values it is right."""
    return isinstance(value, float) or type(value) is int


def plain_number(value: float) -> float:
    """The same number as one of Python's, also where its class is another, as that of numpy's floats."""
    return value if type(value) is int else float(value)


NOTHING: Mapping[str, Hashable] = types.MappingProxyType({})

class ModuleGuard(NamedTuple):
    """The guard of all attributes of an object: its class, and each attribute by name."""

    kind: type
    attributes: tuple[tuple[str, Hashable], ...]


GUARDED_APART = {"_parameters", "_buffers", "_modules"}
"""Where a module keeps its tensors and submodules. These have guards of their own."""


def module_guard(
    module: Any, reads: Reads | None = None, of_tensors: Mapping[str, Hashable] = NOTHING,
    without: Collection[str] = (), apart: Apart = NONE,
) -> ModuleGuard:  # fmt: skip
    """The guard of a module's own attributes, its training flag and its hooks included; or of another object's.

    of_tensors: the guards of the attributes that hold tensors; without one, tensors are compared by identity. without:
    names that are no guards. apart: as in `guard_key`.
    """
    own = vars(module)
    if reads is not None:
        reads.object(module, without)
        for k, v in own.items():
            if isinstance(v, dict) and (k in GUARDED_APART or not v or "_hooks" in k):
                reads.box(v)
        for k in of_tensors:
            guard_key(own[k], reads, apart)
    places: dict[int, int] = {}
    found: list[tuple[str, Hashable]] = []
    for k, v in own.items():  # most are torch's own: None, flags, and dicts that are empty
        if k in GUARDED_APART or k in without:
            continue
        if k in OF_ALL_MODULES and (v is None or (isinstance(v, dict) and not v)):
            continue
        if type(v) is bool:
            found.append((k, v))
        elif k in of_tensors:
            found.append((k, of_tensors[k]))
        elif type(v) is set and not v and reads is None:
            found.append((k, _EMPTY_SET))
        else:
            found.append((k, guard_key(in_order_of_hooks(v, places) if "_hooks" in k else v, reads, apart)))
    if hidden := state_of(module):
        found.append(("what its class keeps", hidden))
        if reads is not None:
            reads.keyed(module, state_of)
    return ModuleGuard(type(module), tuple(found))


_PLAIN_DICTS = dict, OrderedDict
_EMPTY_SET = guard_key(set())


def in_order_of_hooks(hooks: Any, places: dict[int, int] | None = None) -> Any:
    """The hooks of a module or an optimiser by their places, and not by torch's numbers, which count all hooks of the
    process. places: those of hooks that were met before."""
    places = {} if places is None else places
    if not isinstance(hooks, dict) or not all(type(number) is int for number in hooks):
        return hooks
    return {places.setdefault(number, len(places)): hook for number, hook in hooks.items()}


def flags_guard() -> tuple:
    """The guards of what is set around a call, in the order of `FLAGS`: modes, torch's flags, and hooks on all modules
    and optimisers."""
    modes, hooks, replaced = _torch.function_modes(), _torch.hooks_of_all(), _torch.replaced_functions()
    return (
        *_torch.flags(), tuple([(type(mode), guard_key(vars(mode))) for mode in modes]) if modes else (),
        _hooks_guard(hooks) if hooks else (), guard_key(replaced) if replaced else (),
    )  # fmt: skip


FLAGS = (
    *_torch.FLAGS, "modes of torch functions", "hooks on all modules and optimisers",
    "functions of torch that were replaced",
)  # fmt: skip


def _hooks_guard(tables: Mapping[str, dict]) -> Hashable:
    places: dict[int, int] = {}
    return tuple([(name, guard_key(in_order_of_hooks(table, places))) for name, table in tables.items()])
