"""What a trace takes for granted about Python: the values it read, in a form that can be compared later.

    likeness([1, {"rate": 0.5}])      equal for equal lists, and for no list that is changed afterwards
    likeness(F.gelu)                  equal for the very same function only

A program is used again where all that its trace saw is alike.
"""

from __future__ import annotations

import types
from collections.abc import Hashable
from typing import Any

import torch
from torch import nn

from spmd.tensor.local_map import LocalMap

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, torch.memory_format)
OPAQUE = (torch.Tensor, nn.Module, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, LocalMap)
DEPTH = 8
"""How far into objects within objects to look; what is deeper is taken as it is."""


class Same:
    """An object compared by identity, and kept alive, so that no other can have its place in memory."""

    def __init__(self, value: object):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def likeness(value: Any, depth: int = DEPTH) -> Hashable:
    """A frozen picture of a value: numbers with their types, containers and plain objects by what is in them.

    >>> likeness([1]) == likeness([1]), likeness([1]) == likeness([True]), likeness([1]) == likeness((1,))
    (True, False, False)
    """
    kind = type(value)
    if kind is float:
        return float, repr(value)  # NaN is like NaN, and 0.0 not like -0.0
    if isinstance(value, PLAIN):
        return kind, value
    if depth == 0 or isinstance(value, OPAQUE):
        return Same(value)
    if isinstance(value, dict):
        return kind, tuple((likeness(k, depth - 1), likeness(v, depth - 1)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return kind, tuple(likeness(v, depth - 1) for v in value)
    if isinstance(value, (set, frozenset)):
        return kind, frozenset(likeness(v, depth - 1) for v in value)
    if hasattr(value, "__dict__"):
        return kind, likeness(vars(value), depth - 1)
    return Same(value)


STRUCTURE = {"_parameters", "_buffers", "_modules"}
"""Where a module keeps its tensors and parts, which are looked at by themselves."""


def attributes(module: nn.Module) -> tuple:
    """The likeness of a module's own attributes, training flag and hooks among them."""
    own = vars(module).items()
    return type(module), tuple(
        (k, v) if type(v) is bool else (k, likeness(v)) for k, v in own if k not in STRUCTURE and not _nothing(v)
    )


def _nothing(value: Any) -> bool:
    """An empty dict or None: most of what a module has."""
    return value is None or (isinstance(value, dict) and not value)


def ambient() -> tuple:
    """What the surroundings of a call decide: gradients, autocast and default dtype."""
    casts = tuple(
        (device, torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)) for device in ("cpu", "cuda")
    )
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), casts, torch.get_default_dtype()
