"""Guards: the Python values that a trace read, as frozen keys that a later call can be compared with.

    guard_key([1, {"rate": 0.5}])     equal for equal lists; later changes of the list do not change the key
    guard_key(F.gelu)                 equal only for the very same function

A program is used again where every value that its trace read has the same key as before.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from spmd.expand.reads import Reads
from spmd.tensor.annotations.block_function import BlockFunction

COMPARED_BY_VALUE = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.memory_format,
)  # fmt: skip
COMPARED_BY_ID = (
    torch.Tensor, nn.Module, Optimizer, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType,
    BlockFunction,
)  # fmt: skip
CONTAINERS = (dict, list, tuple, set, frozenset, deque)
MAX_DEPTH = 8
"""How deep to look into objects within objects. What is deeper is compared by identity."""


class ById:
    """An object compared by identity. It is kept alive, so that no other object can get its address."""

    def __init__(self, value: object):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def guard_key(value: Any, depth: int = MAX_DEPTH, reads: Reads | None = None) -> Hashable:
    """A hashable key of a value: numbers by type and value, containers and plain objects by their contents.

    reads: where to note which containers and objects these are.

    >>> guard_key([1]) == guard_key([1]), guard_key([1]) == guard_key([True]), guard_key([1]) == guard_key((1,))
    (True, False, False)
    """
    kind = type(value)
    if kind is float:
        return float, repr(value)  # NaN equals NaN, and 0.0 does not equal -0.0
    if isinstance(value, COMPARED_BY_VALUE):
        return (kind, value, *_own_attributes(value, depth, reads))
    if depth == 0 or isinstance(value, COMPARED_BY_ID):
        return ById(value)
    if isinstance(value, functools.partial):
        return kind, *(guard_key(v, depth - 1, reads) for v in (value.func, value.args, value.keywords))
    if isinstance(value, types.MethodType):  # its attributes are those of its function
        return kind, ById(value.__func__), ById(value.__self__)
    if isinstance(value, CONTAINERS):
        if reads is not None and not isinstance(value, (tuple, frozenset)):
            reads.box(value)
        if isinstance(value, dict):
            pairs = value.items()
            inside = tuple((guard_key(k, depth - 1, reads), guard_key(v, depth - 1, reads)) for k, v in pairs)
            return (kind, inside, *_own_attributes(value, depth, reads))
        parts = (guard_key(v, depth - 1, reads) for v in value)
        inside = frozenset(parts) if isinstance(value, (set, frozenset)) else tuple(parts)
        return (kind, inside, *_own_attributes(value, depth, reads))
    return (kind, *attributes) if (attributes := _own_attributes(value, depth, reads)) else ById(value)


def _own_attributes(value: Any, depth: int, reads: Reads | None) -> tuple:
    """The keys of an object's dict and slots, as far as it has them. None of objects of exactly a class of Python."""
    if type(value) in _WITHOUT_ATTRIBUTES or depth == 0:
        return ()
    found: tuple = ()
    if hasattr(value, "__dict__"):
        if reads is not None:
            reads.object(value)
        found = (guard_key(vars(value), depth - 1, reads),)
    # a class with a hash of its own makes values, which do not change
    slots = slots_of(type(value)) if type(value).__hash__ in (object.__hash__, None) else ()
    for name in slots:
        if reads is not None:
            reads.slot(value, name)
        if hasattr(value, name):
            found += ((name, guard_key(getattr(value, name), depth - 1, reads)),)
    return found


_WITHOUT_ATTRIBUTES = frozenset({*COMPARED_BY_VALUE, *CONTAINERS})


@functools.lru_cache(maxsize=4096)
def slots_of(kind: type) -> tuple[str, ...]:
    """The attributes that objects of a class keep in slots, by the names under which they are found."""
    found = []
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        own = [slots] if isinstance(slots, str) else slots
        found += [_mangled(base, name) for name in own if name not in ("__dict__", "__weakref__")]
    return tuple(found)


def _mangled(base: type, name: str) -> str:
    is_private = name.startswith("__") and not name.endswith("__")
    return f"_{base.__name__.lstrip('_')}{name}" if is_private else name


def is_number(value: Any) -> bool:
    """Whether an argument may be a symbol: a program then says itself for which of its values it is right."""
    return isinstance(value, float) or type(value) is int


NOTHING: Mapping[str, Hashable] = types.MappingProxyType({})

GUARDED_APART = {"_parameters", "_buffers", "_modules"}
"""Where a module keeps its tensors and submodules. These have guards of their own."""


def module_guard(
    module: nn.Module, reads: Reads | None = None, of_tensors: Mapping[str, Hashable] = NOTHING
) -> tuple:  # fmt: skip
    """The guard of a module's own attributes, its training flag and its hooks included.

    of_tensors: the guards of the attributes that hold tensors; without one, tensors are compared by identity.
    """
    own = vars(module)
    if reads is not None:
        reads.object(module)
        for k, v in own.items():
            if isinstance(v, dict) and (k in GUARDED_APART or not v or "_hooks" in k):
                reads.box(v)
        for k in of_tensors:
            guard_key(own[k], reads=reads)
    places: dict[int, int] = {}
    return type(module), tuple(
        (k, v) if type(v) is bool
        else (k, of_tensors[k]) if k in of_tensors
        else (k, guard_key(_in_order(v, places) if "_hooks" in k else v, reads=reads))
        for k, v in own.items()
        if v is not None and not (isinstance(v, dict) and not v) and k not in GUARDED_APART  # most are empty
    )  # fmt: skip


def _in_order(hooks: Any, places: dict[int, int]) -> Any:
    """The hooks of a module by their places, and not by torch's numbers, which count all hooks of the process."""
    if not isinstance(hooks, dict) or not all(type(number) is int for number in hooks):
        return hooks
    return {places.setdefault(number, len(places)): hook for number, hook in hooks.items()}


def modes_guard() -> tuple:
    """The guard of the modes around a call: gradients, inference mode, autocast and the default dtype."""
    casts = tuple(
        (device, torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
    )
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), casts, torch.get_default_dtype()
