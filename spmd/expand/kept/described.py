"""Values described by their contents, as text that is equal in another process exactly where the values are equal.

    {"rate": 0.5, "act": F.gelu}      "{'rate': 0.5, 'act': function torch._C._nn.gelu}"

A guard (`spmd.expand.guards`) compares within a process, and may go by identity. This goes by content: a function is
its place, what is bound to it and its code, a tensor its numbers. No address and no order of a set is in the text.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
import threading
import types
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from spmd import _torch
from spmd.expand.guards import GUARDED_APART, ById, hides, parts_of, slots_of
from spmd.expand.kept.notation import CannotKeep, module_name, spec_text
from spmd.expand.python_state import is_set
from spmd.expand.state import Slot
from spmd.mesh import DeviceMesh
from spmd.tensor.annotations.block_function import BlockFunction
from spmd.tensor.spec import Spec

LONGEST = 200
"""Longer texts of one value are replaced by a digest."""


def described(value: Any) -> str:
    """The value as text. CannotKeep for one that says nothing of its contents.

    >>> described([1, {"b": {2, 1}}]), described(torch.ones(2))
    ("[1, {'b': {1, 2}}]", 'torch.float32[2] 403efa70111d24d5')
    """
    return _described(value, ())


def digest(*parts: str | bytes) -> str:
    """Sixteen hexadecimal digits that are equal for equal parts."""
    found = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        found.update(len(data).to_bytes(8, "little") + data)
    return found.hexdigest()[:16]


def shortened(text: str) -> str:
    """The text, or a digest of it where it is long."""
    return text if len(text) <= LONGEST else f"{text[:40]}... {digest(text)}"


def qualified(x: Any) -> str:
    """The name of a class or function, with its Python module."""
    return f"{module_name(getattr(x, '__module__', None))}.{getattr(x, '__qualname__', type(x).__qualname__)}"


def _described(x: Any, around: tuple[int, ...]) -> str:
    """around: the identities of the values that this one is inside of."""
    if isinstance(x, ById):
        return _described(x.value, around)
    for kinds, text in _TEXTS:
        if isinstance(x, kinds):
            return text(x)
    if id(x) in around:
        return f"itself, {len(around) - around.index(id(x))} up"

    def inner(y: Any) -> str:
        return _described(y, (*around, id(x)))

    for kinds, describe in _CONTAINERS:
        if isinstance(x, kinds):
            return describe(x, inner) + (_own_text(x, inner) if isinstance(x, _WITH_OWN) else "")
    if not hides(type(x)) and (attributes := _attributes(x)) is not None:
        return f"{qualified(type(x))}({_named_texts(attributes, inner)})"
    return _text_of_hidden(x, inner)


def _text_of_hidden(x: Any, inner: Callable[[Any], str]) -> str:
    """An object that has more than its attributes: with what it is made of, or with its own text where that is its
    contents."""
    if (parts := parts_of(x)) is not None:
        return f"{qualified(type(x))} of {inner(parts)}{_own_text(x, inner)}"
    text = repr(x)
    if re.search(r"\b0x[0-9a-f]+", text):
        raise CannotKeep(f"a {qualified(type(x))} says nothing of its contents, so it cannot be compared")
    return text + _own_text(x, inner)


def _own_text(x: Any, inner: Callable[[Any], str]) -> str:
    """The attributes of an object that is more than these; empty where it has none."""
    own = _attributes(x)
    return f" with {_named_texts(own, inner)}" if own else ""


def _named_texts(own: dict[str, Any], inner: Callable[[Any], str]) -> str:
    return ", ".join(f"{name}={inner(value)}" for name, value in own.items())


def _attributes(x: Any) -> dict[str, Any] | None:
    found = {name: getattr(x, name) for name in slots_of(type(x)) if hasattr(x, name)}
    return found | vars(x) if hasattr(x, "__dict__") else found or None


def tensor_text(x: torch.Tensor) -> str:
    """Dtype, shape and numbers of a tensor. The numbers of DTensors differ between ranks, and are left out."""
    spec = getattr(x, "_spec", None)
    if spec is not None or x.is_meta:
        return spec_text(spec) if spec is not None else f"meta {x.dtype} {list(x.shape)}"
    flat = x.detach().cpu().contiguous().view(-1)
    return f"{x.dtype}{list(x.shape)} {digest(flat.view(torch.uint8).numpy().tobytes() if x.numel() else b'')}"


def code_text(code: types.CodeType) -> str:
    """A digest of what a function does, wherever its lines stand."""
    inner = [code_text(c) if isinstance(c, types.CodeType) else _constant_text(c) for c in code.co_consts]
    return digest(code.co_code, *inner, *code.co_names, *code.co_varnames)


def _constant_text(x: Any) -> str:
    """A constant of a function. A set, as of `x in {"a", "b"}`, has another order in each process."""
    if isinstance(x, frozenset):
        return f"set {sorted(map(_constant_text, x))}"
    return f"({', '.join(map(_constant_text, x))})" if type(x) is tuple else repr(x)


def _function(fn: types.FunctionType, inner: Callable[[Any], str]) -> str:
    cells = [inner(c.cell_contents) for c in fn.__closure__ or () if is_set(c)]
    bound = [inner(fn.__defaults__ or ()), inner(fn.__kwdefaults__ or {}), *cells]
    return f"function {qualified(fn)} {digest(code_text(fn.__code__), *bound)}"


def _method(x: types.MethodType, inner: Callable[[Any], str]) -> str:
    return f"{inner(x.__func__)} of {inner(x.__self__)}"


def _builtin(x: types.BuiltinFunctionType, inner: Callable[[Any], str]) -> str:
    of = x.__self__
    is_bound = of is not None and not isinstance(of, (types.ModuleType, type))
    return f"method {x.__name__} of {inner(of)}" if is_bound else f"function {qualified(x)}"


def _module(x: nn.Module, inner: Callable[[Any], str]) -> str:
    tensors = [f"{name}: {list(t.shape)} {t.dtype}" for name, t in (*x.named_parameters(), *x.named_buffers())]
    parts = [f"{name}: {qualified(type(m))} {_attributes_text(m, inner)}" for name, m in x.named_modules()]
    return f"module {digest(*parts, *tensors)}"


def _attributes_text(m: nn.Module, inner: Callable[[Any], str]) -> str:
    """What a module has besides its tensors and modules. Of other tensors the shape: their numbers are inputs."""
    own = {name: v for name, v in vars(m).items() if name not in GUARDED_APART and not (isinstance(v, dict) and not v)}
    texts = {name: f"{v.dtype} {list(v.shape)}" if isinstance(v, torch.Tensor) else inner(v) for name, v in own.items()}
    return ", ".join(f"{name}={text}" for name, text in texts.items())


def _op(x: Any) -> str:
    """An op of torch's, or of a library. CannotKeep for one that is written in Python, which a trace runs."""
    if _torch.is_traced_python(x):
        raise CannotKeep(f"the op {x} is written in Python, and its code is not compared")
    return str(x)


_LOCKS = type(threading.Lock()), type(threading.RLock())
_WITH_OWN = tuple, list, dict, set, frozenset, functools.partial

_TEXTS: list[tuple[Any, Callable[[Any], str]]] = [
    ((bool, int, str, bytes, type(None), complex), repr),
    (float, float.__repr__),
    (Slot, str),
    (Spec, spec_text),
    (DeviceMesh, lambda x: f"mesh {x.device_type} {x.axis_names} {x.shape} {list(x.ranks)}"),
    (torch.Tensor, tensor_text),
    (np.ndarray, lambda x: f"array {x.dtype} {x.shape} {digest(np.ascontiguousarray(x).tobytes())}"),
    ((torch.dtype, torch.device, torch.memory_format, torch.layout, torch.Size), str),
    ((_torch.OpOverload, _torch.OpOverloadPacket), _op),
    (logging.Logger, lambda x: f"logger {x.name}"),
    (_LOCKS, lambda x: f"{qualified(type(x))}"),
    (types.CodeType, lambda x: f"code {code_text(x)}"),
    (type, lambda x: f"type {qualified(x)}"),
    (types.ModuleType, lambda x: f"module {module_name(x.__name__)}"),
]
"""Values that contain no others."""

_CONTAINERS: list[tuple[Any, Callable[[Any, Callable[[Any], str]], str]]] = [
    (tuple, lambda x, inner: f"({', '.join(map(inner, x))})"),
    (list, lambda x, inner: f"[{', '.join(map(inner, x))}]"),
    (defaultdict, lambda x, inner: f"{inner(x.default_factory)} or {inner(dict(x))}"),
    (dict, lambda x, inner: f"{{{', '.join(f'{inner(k)}: {inner(v)}' for k, v in x.items())}}}"),
    ((set, frozenset), lambda x, inner: f"{{{', '.join(sorted(map(inner, x)))}}}"),
    (types.FunctionType, _function),
    (types.MethodType, _method),
    (_torch.CustomOp, lambda x, inner: f"op {x} {inner(_torch.functions_of_custom_op(x))}"),
    (types.BuiltinFunctionType, _builtin),
    (functools.partial, lambda x, inner: f"partial {inner(x.func)} {inner(x.args)} {inner(x.keywords)}"),
    (BlockFunction, lambda x, inner: f"local_map {inner(x.func)} {inner((x.ins, x.outs, x.grads, x.redistributes))}"),
    (nn.Module, _module),
    (Optimizer, lambda x, inner: f"optimiser {qualified(type(x))}"),
]
"""Values that contain others, and how they are described by the descriptions of these."""
