"""What ops gave in a trace, on tensors whose sizes are symbols: the same op on the same shapes gives it again.

    mm(f32[x0*x1, 64], f32[64, 256])    the first time torch finds the shape, in milliseconds; then in 30 us

torch has such a cache, for all traces of a process. Its keys and its results are made of expressions; for each result
it makes a second tensor to compare; and to make one with symbols for sizes means questions to each of them. Here sizes
are the nodes of one trace (`SizeNode`), of which there is one for each expression, and a tensor is made as a view of
memory without bytes: nothing is asked then.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import fake_tensor

from spmd._torch.modes import no_function_modes
from spmd._torch.quick_views import QUICK_VIEWS, are_sizes

FakeTensor = fake_tensor.FakeTensor


class _CannotKeep(Exception):
    """An op whose results are not kept."""


@dataclass(frozen=True)
class _Made:
    """A tensor that an op gave. viewed: the number of the tensor among the operands of which it is a view."""

    shape: tuple
    stride: tuple
    offset: Any
    dtype: torch.dtype
    device: torch.device
    viewed: int | None


@dataclass(frozen=True)
class _Known:
    """What an op gave. kind: of several tensors, in what they are; None for one."""

    kind: type | None
    made: tuple[_Made, ...]


class FakeResults:
    """Of one fake mode: the results of ops by their operands. hits, misses: how often one was known."""

    def __init__(self) -> None:
        self._found: dict[tuple, _Known | None] = {}
        self.hits = self.misses = 0

    def clear(self) -> None:
        """Forget all results. To be called when the trace is complete: its symbols live on."""
        self._found.clear()

    def of(self, mode: fake_tensor.FakeTensorMode, op: Any, types: Any, args: tuple, kwargs: dict) -> Any:
        """The result of an op. mode: that of its operands, which finds it where it is not known."""
        quick = QUICK_VIEWS.get(op)
        if quick is not None and not kwargs and type(args[0]) is FakeTensor:
            with no_function_modes():
                made = quick(*args) if _is_plain(args[0], mode) else NotImplemented
                if made is not NotImplemented:
                    return _view_of(mode, args[0], *made)
        tensors: list[FakeTensor] = []
        try:
            with no_function_modes():
                key = _key(mode, op, args, kwargs, tensors)
                known = self._found.get(key, _CannotKeep)
        except (_CannotKeep, TypeError):  # an operand that is no key
            return mode._dispatch_impl(op, types, args, kwargs)
        if known is None:
            return mode._dispatch_impl(op, types, args, kwargs)
        if known is not _CannotKeep:
            self.hits += 1
            with no_function_modes():
                return _again(mode, known, tensors)
        self.misses += 1
        out = mode._dispatch_impl(op, types, args, kwargs)
        with no_function_modes():
            self._found[key] = _kept(op, out, tensors)
        return out


# ---- keys -------------------------------------------------------------------------------------

_NEVER = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_ASKED_OF_TENSORS = {*fake_tensor._DISPATCH_META_HANDLERS, *fake_tensor._DISPATCH_HANDLE_DIRECTLY}
"""What is no op, but a question: for the device, the sizes."""


@functools.cache
def is_kept(op: Any) -> bool:
    """Whether an op is one of torch whose results follow from the shapes of its operands, and writes nothing."""
    if not isinstance(op, torch._ops.OpOverload) or op.namespace not in ("aten", "prims") or op in _ASKED_OF_TENSORS:
        return False
    is_lift = "lift" in op._opname  # of a constant, whose value is kept
    return not op._schema.is_mutable and _NEVER.isdisjoint(op.tags) and not is_lift


def _key(mode: Any, op: Any, args: tuple, kwargs: dict, tensors: list[FakeTensor]) -> tuple:
    """All that a result depends on. tensors: those among the operands are added."""
    key: list[Any] = [op, torch.get_default_dtype(), torch.is_inference_mode_enabled()]
    _describe(args, mode, key, tensors)
    if kwargs:
        key.append(tuple(kwargs))
        _describe(kwargs.values(), mode, key, tensors)
    return tuple(key)


def _describe(values: Any, mode: Any, key: list[Any], tensors: list[FakeTensor]) -> None:
    for x in values:
        kind = type(x)
        key.append(kind)
        if kind is FakeTensor:
            _describe_tensor(x, mode, key, tensors)
        elif kind is torch.SymInt:
            key.append(_size(x).node)
        elif isinstance(x, (list, tuple)):
            key.append(len(x))
            _describe(x, mode, key, tensors)
        elif isinstance(x, (torch.Tensor, torch.SymFloat, torch.SymBool, dict, torch.Generator)):
            raise _CannotKeep
        else:
            key.append(x)


def _is_plain(x: FakeTensor, mode: Any) -> bool:
    """Whether all that an op reads of x is its shape, strides, dtype and device."""
    bits = x.requires_grad or x.is_conj() or x.is_neg()
    return x.layout is torch.strided and not bits and x.fake_mode is mode and x.constant is None


def _describe_tensor(x: FakeTensor, mode: Any, key: list[Any], tensors: list[FakeTensor]) -> None:
    if not _is_plain(x, mode):
        raise _CannotKeep
    tensors.append(x)
    key += [x.dtype, x.fake_device, x.ndim]
    for n in (*x.shape, *x.stride(), x.storage_offset()):
        key.append(n if type(n) is int else _size(n).node)


def _size(n: Any) -> Any:
    """A size that is a number, or an expression of sizes."""
    if are_sizes((n,)):
        return n
    raise _CannotKeep


# ---- results ----------------------------------------------------------------------------------


def _kept(op: Any, out: Any, tensors: list[FakeTensor]) -> _Known | None:
    """What is known of a result, to make it again; None where it cannot be made again."""
    kind = type(out) if isinstance(out, (tuple, list)) else None
    several = (out,) if kind is None else out
    if not several or any(type(x) is not FakeTensor for x in several):
        return None
    try:
        made = tuple(_made(x, tensors) for x in several)
    except _CannotKeep:
        return None
    memories = {x.untyped_storage()._cdata for x in several}
    if any((x.viewed is not None) != op.is_view for x in made) or (len(memories) < len(several) and not op.is_view):
        return None  # what shares memory otherwise than the schema says
    return _Known(kind, made)


def _made(x: FakeTensor, tensors: list[FakeTensor]) -> _Made:
    if not _is_plain(x, x.fake_mode) or any(x is each for each in tensors):
        raise _CannotKeep
    memory = x.untyped_storage()._cdata
    shared = [i for i, each in enumerate(tensors) if each.untyped_storage()._cdata == memory]
    if len(shared) > 1 or (shared and len(tensors) > 1) or (not shared and x.storage_offset() != 0):
        raise _CannotKeep
    shape, stride = tuple(map(_size, x.shape)), tuple(map(_size, x.stride()))
    viewed = shared[0] if shared else None
    if viewed is not None and tensors[viewed].dtype is not x.dtype:  # the same bits, as numbers of another kind
        raise _CannotKeep
    return _Made(shape, stride, _size(x.storage_offset()), x.dtype, x.fake_device, viewed)


def _again(mode: Any, known: _Known, tensors: list[FakeTensor]) -> Any:
    """New tensors like those that an op gave."""
    with fake_tensor.in_kernel_invocation_manager(mode):
        bare = [_bare(x, tensors) for x in known.made]
    out = [FakeTensor(mode, each, x.device) for each, x in zip(bare, known.made, strict=True)]
    return out[0] if known.kind is None else getattr(known.kind, "_make", known.kind)(out)


def _bare(x: _Made, tensors: Sequence[FakeTensor]) -> torch.Tensor:
    if x.viewed is None:
        return without_memory(x.shape, x.stride, x.dtype)
    return torch.as_strided(tensors[x.viewed], x.shape, x.stride, x.offset)


def _view_of(mode: Any, x: FakeTensor, shape: Sequence[Any], stride: Sequence[Any], offset: Any) -> FakeTensor:
    with fake_tensor.in_kernel_invocation_manager(mode):
        bare = torch.as_strided(x, shape, stride, offset)
    return FakeTensor(mode, bare, x.fake_device)


def without_memory(shape: Sequence[Any], stride: Sequence[Any], dtype: torch.dtype) -> torch.Tensor:
    """A tensor on the meta device, in memory of its own that has no bytes: to count them is to ask for each size."""
    return torch.empty(0, dtype=dtype, device="meta").as_strided(shape, stride)
