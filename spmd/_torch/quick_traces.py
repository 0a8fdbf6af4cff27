"""Ops of a trace under functionalisation, for which torch's two modes do nothing but the usual.

    mm(x, y)    functionalised by torch's code in C++, noted as a node, run on fake tensors, and wrapped

Each mode flattens the call, asks whether the op is taken apart, has effects or is a constant, and walks over what it
gives. The answers follow from the op: they are found once for each, and calls do without them.

The modes are torch's own. What is not as usual goes torch's way: ops that are taken apart or are not torch's own,
tensors that are not of the trace or known as constants, numbers that only the run knows.
"""

from __future__ import annotations

import contextvars
import functools
import types as python_types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses import functional_tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import proxy_tensor
from torch.utils import _python_dispatch

from spmd._torch.fakes import detached_fake
from spmd._torch.functionalize import FunctionalTensor, functional
from spmd._torch.graphs import create_node
from spmd._torch.modes import dispatched_in_python, no_function_modes, no_modes
from spmd._torch.quick_views import are_sizes

_FUNCTIONALIZE = torch._C.DispatchKey.Functionalize


class _Unusual(Exception):
    """A call that goes torch's way."""


# ---- ops --------------------------------------------------------------------------------------

_UNUSUAL_TAGS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_QUESTIONS = {*FunctionalTensor.metadata_fns, torch.ops.aten.is_nonzero.default}


@functools.cache
def _is_usual(op: Any) -> bool:
    """Whether an op is one of torch's own that is not taken apart, and asks nothing of values."""
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten" or op in _QUESTIONS:
        return False
    return not op._can_decompose() and _UNUSUAL_TAGS.isdisjoint(op.tags) and "lift" not in op._opname


@functools.cache
def _is_recorded(op: Any) -> bool:
    """Whether a trace notes a call of the op and runs it, and nothing else."""
    return _is_usual(op) and not op._schema.is_mutable


@functools.cache
def _gives(op: Any) -> str:
    """What functionalisation gives for an op: "new" tensors, its "first" operand, which it writes, or what "torch" has
    to find out of views."""
    arguments, returns = op._schema.arguments, op._schema.returns
    if not any(x.alias_info for x in (*arguments, *returns)):
        return "new"
    written = [x.name for x in arguments if x.alias_info is not None and x.alias_info.is_write]
    same = len(returns) == 1 and returns[0].alias_info is not None and returns[0].alias_info.is_write
    return "first" if same and written == [arguments[0].name] else "torch"


@functools.cache
def _is_functionalised(op: Any) -> bool:
    """Whether torch's code in C++ functionalises an op, with nothing around it."""
    if not _is_usual(op):
        return False
    return not op._schema.is_mutable or torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), _FUNCTIONALIZE)


# ---- the trace --------------------------------------------------------------------------------


def record_quickly(mode: proxy_tensor.ProxyTorchDispatchMode) -> None:
    """Let the mode of a trace that begins record what is as usual in a fraction of the time."""
    mode.__torch_dispatch__ = python_types.MethodType(functools.partial(_recorded, mode.__torch_dispatch__), mode)


def _recorded(record: Callable, mode: Any, op: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
    if op is torch.ops.prim.device.default:
        return op(*args)
    if not _is_recorded(op) or op in _taken_apart(mode) or mode.emulate_precision_casts:
        return record(op, types, args, kwargs)
    tracer, kwargs = mode.tracer, kwargs or {}
    try:
        with no_function_modes():
            given = tuple([_argument(x, tracer) for x in args])
            named = {key: _argument(x, tracer) for key, x in kwargs.items()}
    except _Unusual:
        return record(op, types, args, kwargs)
    name = tracer.graph._target_to_str(op.overloadpacket.__name__)
    node = create_node(tracer.graph, "call_function", op, given, named, name)
    before, tracer.enable_thunkify = tracer.enable_thunkify, True
    try:
        out = op(*args, **kwargs)
    finally:
        tracer.enable_thunkify = before
    _track(out, torch.fx.Proxy(node, tracer), tracer)
    return out


def _taken_apart(mode: Any) -> Mapping[Any, Callable]:
    """The ops that a trace decomposes. torch 2.13 asks the mode, 2.12 the context, and 2.11 the module."""
    if hasattr(mode, "decomposition_table"):
        return mode.decomposition_table
    table = proxy_tensor.CURRENT_DECOMPOSITION_TABLE
    return table.get() if isinstance(table, contextvars.ContextVar) else table


def _argument(x: Any, tracer: torch.fx.Tracer) -> Any:
    """An operand as an argument of a node."""
    kind = type(x)
    if kind is FakeTensor:
        slot = tracer.tensor_tracker.get(x)
        if slot is None or slot.constant is not None:
            raise _Unusual
        return slot.proxy.node
    if kind in _PLAIN:
        return x
    if kind in _SYMBOLS:
        found = proxy_tensor.fetch_sym_proxy(tracer)(x)
        return found.node if isinstance(found, torch.fx.Proxy) else found
    if kind is list or kind is tuple:
        return kind([_argument(each, tracer) for each in x])
    raise _Unusual


_SYMBOLS = {torch.SymInt, torch.SymFloat, torch.SymBool}
_PLAIN = {
    int, float, bool, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
}  # fmt: skip


def _track(out: Any, proxy: torch.fx.Proxy, tracer: torch.fx.Tracer) -> None:
    """Let a proxy stand for what an op has given."""
    with no_function_modes():
        if not _has_known_layout(out):
            proxy_tensor.track_tensor_tree(out, proxy, constant=None, tracer=tracer)
            return
        tracer.tensor_tracker[out] = proxy_tensor._ProxyTensor(proxy, None)
        proxy.node.meta["val"] = detached_fake(out)


def _has_known_layout(x: Any) -> bool:
    """Whether x is a tensor of which nothing is to be noted but itself."""
    if type(x) is not FakeTensor or x.layout is not torch.strided or x.requires_grad:
        return False
    env = x.fake_mode.shape_env
    if env is not None and env.pending_fresh_unbacked_symbols:
        return False
    return are_sizes((*x.shape, *x.stride(), x.storage_offset()))


# ---- functionalisation ------------------------------------------------------------------------


def quick_functional_mode() -> functional_tensor.FunctionalTensorMode:
    """torch's mode of functionalisation, for one trace, which hands what is as usual to its code in C++ at once."""
    mode = functional_tensor.FunctionalTensorMode()
    mode.__torch_dispatch__ = python_types.MethodType(functools.partial(_functionalised, mode.__torch_dispatch__), mode)
    return mode


def _functionalised(plain: Callable, mode: Any, op: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
    if _shapes_in_python(op) and _has_symbols(args[0]):
        with dispatched_in_python():
            return _made_functional(plain, mode, op, types, args, kwargs)
    return _made_functional(plain, mode, op, types, args, kwargs)


@functools.cache
def _shapes_in_python(op: Any) -> bool:
    """Whether an op writes, and torch finds with Python code whether the shapes fit: `clamp_` does, by an `expand`.

    That code is run on tensors without data before the op, outside of all modes. There only the dispatcher in Python
    has kernels that take symbols for sizes.
    """
    is_op = isinstance(op, torch._ops.OpOverload)
    return is_op and op._schema.is_mutable and torch._C.DispatchKey.Meta in op.py_kernels


def _has_symbols(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not all(type(n) is int for n in x.shape)


def _made_functional(plain: Callable, mode: Any, op: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
    if not _is_functionalised(op):
        return plain(op, types, args, kwargs)
    kwargs = kwargs or {}
    try:
        given = [_inner(x) for x in args]
        named = {key: _inner(x) for key, x in kwargs.items()}
    except _Unusual:
        return plain(op, types, args, kwargs)
    with torch._C._ForceDispatchKeyGuard(*_keys()):
        before = torch._functionalize_enable_reapply_views(True)
        try:
            _sync((*given, *named.values()))
            out = op._op_dk(_FUNCTIONALIZE, *given, **named)
        finally:
            torch._disable_functionalization()
            torch._functionalize_enable_reapply_views(before)
    gives = _gives(op)
    if gives == "first":
        return args[0]
    with no_function_modes(), no_modes():
        out = _outer(out, mode)
    return out if gives == "new" else _python_dispatch.return_and_correct_aliasing(op, args, kwargs, out)


def _keys() -> tuple[Any, Any]:
    """The keys of the dispatcher under which functionalisation is the next one."""
    include = torch._C._dispatch_tls_local_include_set() | torch._C.DispatchKeySet(_FUNCTIONALIZE)
    exclude = torch._C._dispatch_tls_local_exclude_set().remove(_FUNCTIONALIZE)
    return include, exclude - FunctionalTensor._extra_dispatch_keys


def _inner(x: Any) -> Any:
    if type(x) is FunctionalTensor:
        return x.elem
    if isinstance(x, torch.Tensor):
        raise _Unusual
    return type(x)([_inner(each) for each in x]) if type(x) in (list, tuple) else x


def _sync(values: Any) -> None:
    """Bring views of what was written up to date: an op of a view would be recorded for the old value otherwise."""
    for x in values:
        if isinstance(x, torch.Tensor):
            torch._functionalize_sync(x)
        elif isinstance(x, (list, tuple)):
            _sync(x)


def _outer(x: Any, mode: Any) -> Any:
    if isinstance(x, (list, tuple)):
        return type(x)([_outer(each, mode) for each in x])
    return functional(x, mode) if isinstance(x, torch.Tensor) and torch._is_functional_tensor(x) else x
