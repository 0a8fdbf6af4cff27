"""The only file that touches torch's private names.

Every other module imports them from here, so that one page shows what a new version of torch may break.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.nn
from torch._C import _distributed_c10d as c10d
from torch._library import custom_ops
from torch._library import utils as custom_op_utils
from torch._subclasses import fake_tensor, functional_tensor
from torch.distributed import distributed_c10d
from torch.fx import _symbolic_trace
from torch.fx.experimental import proxy_tensor, symbolic_shapes
from torch.utils import _python_dispatch, _pytree

# Functional collectives as dispatcher ops: plain data in, a new tensor out, legal as targets of an fx graph.
c10d_functional = torch.ops._c10d_functional

# The store through which the default process group met: where ranks can compare notes without a collective.
default_store = distributed_c10d._get_default_store

def new_group(ranks: Sequence[int], name: str) -> dist.ProcessGroup:
    """The process group of these ranks, in this order and of this name, made by its members alone.

    The public new_group has every rank of the job take part, or else names groups by how many a rank has made, which
    differs between ranks; and torch 2.11 sorts the ranks.
    """
    world = dist.group.WORLD
    backend, store = distributed_c10d._world.pg_map[world]
    # A group of NCCL would be split off its parent's communicator, which takes all ranks of the parent: this one
    # starts from a communicator of its own.
    device, world.bound_device_id = world.bound_device_id, None
    try:
        with _careful_gloo():
            group, _ = distributed_c10d._new_process_group_helper(
                len(ranks), ranks.index(dist.get_rank()), list(ranks), distributed_c10d.Backend(backend), store,
                group_name=name, timeout=group_timeout(), device_id=None,
            )  # fmt: skip
    finally:
        world.bound_device_id = device
    distributed_c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


@contextlib.contextmanager
def _careful_gloo() -> Iterator[None]:
    """Inside, gloo gives its groups one thread, so that their collectives run one after the other.

    torch's gives them two, and two all-gathers at once in one group now and then corrupt the heap (torch 2.13): the
    process dies, in malloc, much later. Ranks that wait in one order lose little by it.
    """
    gloo = getattr(distributed_c10d, "ProcessGroupGloo", None)
    if gloo is None:
        yield
        return

    class OneThread(gloo):
        def __init__(self, store, rank, size, timeout):
            like = gloo(dist.HashStore(), 0, 1, timeout=timeout).options  # the network devices that torch would take
            like._threads = 1
            super().__init__(store, rank, size, like)

    distributed_c10d.ProcessGroupGloo = OneThread
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = gloo


def is_careful(group: dist.ProcessGroup) -> bool:
    """Whether its collectives may be on their way together: not so in a group of gloo with several threads."""
    for device in group._device_types:
        backend = group._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)
        if getattr(getattr(backend, "options", None), "_threads", 1) > 1:
            return False
    return True


def default_rank() -> int | None:
    """The rank in the default process group, None before there is one: dist.get_rank without its ceremony."""
    group = distributed_c10d._world.default_pg
    return None if group is None else group.rank()


def group_timeout() -> datetime.timedelta:
    """How long collectives of the job may take: what init_process_group was told, where the backend says so."""
    world = dist.group.WORLD
    for device in world._device_types:
        options = getattr(world._get_backend(device), "options", None)
        if options is not None:
            return options._timeout
    return distributed_c10d.default_pg_timeout


def is_group(name: str) -> bool:
    """Whether torch knows a group, or a placeholder of one, by this name."""
    try:
        return c10d._resolve_process_group(name) is not None
    except RuntimeError:
        return False


def group_called(name: str) -> dist.ProcessGroup:
    """The group, or the placeholder, of this name."""
    return c10d._resolve_process_group(name)


def register_group(name: str, group: dist.ProcessGroup) -> None:
    """Let dispatcher ops find the group by this name."""
    c10d._register_process_group(name, group)


def forget_group(name: str) -> None:
    """Undo register_group; nothing to do for an unknown name."""
    c10d._unregister_process_group(name)


def replace_group(name: str, group: dist.ProcessGroup) -> None:
    """Let the name mean this group from now on."""
    if is_group(name):
        if group_called(name) is group:
            return
        forget_group(name)
    register_group(name, group)


class GroupToBe(dist.ProcessGroup):
    """Stands for a process group of n ranks until the first collective on it, which makes the group.

    make: gives the group itself, and puts it in this one's place.
    """

    def __init__(self, make: Callable[[], dist.ProcessGroup], n: int) -> None:
        super().__init__(0, n)
        self.make = make


def _handed_on(method: str) -> Callable:
    return lambda self, *args, **kwargs: getattr(self.make(), method)(*args, **kwargs)


for _method in ("allreduce allreduce_coalesced allgather allgather_coalesced allgather_into_tensor_coalesced "
                "_allgather_base all_gather_single all_gather_single_coalesced reduce_scatter _reduce_scatter_base "
                "reduce_scatter_tensor_coalesced reduce_scatter_single reduce_scatter_single_coalesced alltoall "
                "alltoall_base all_to_all_single broadcast reduce gather scatter send recv recv_anysource barrier "
                ).split():  # fmt: skip
    if hasattr(dist.ProcessGroup, _method):
        setattr(GroupToBe, _method, _handed_on(_method))


def direct(op: OpOverload) -> Callable:
    """The op without the Python around it: the same call in less time."""
    return op._op


def constant_in_dynamo(fn: Callable) -> Callable:
    """Decorates a function whose result Dynamo takes for a constant: torch.compiler's mark without importing Dynamo."""
    fn._dynamo_marked_constant = True
    return fn


# A mode that sees every op below autograd.
TorchDispatchMode = _python_dispatch.TorchDispatchMode

# Inside, ops are not seen by the modes around.
no_modes = _python_dispatch._disable_current_modes

# Inside, an op on a subclass runs on what it wraps for torch: of a wrapper without data, its shape alone.
no_dispatch = torch._C._DisableTorchDispatch

# Nested arguments as flat lists, and back.
pytree = _pytree


class FakeTensorMode(fake_tensor.FakeTensorMode):
    """Fake tensors: shapes, strides and devices without data, in any thread.

    A torch built for CUDA puts a stand-in where no device is, which ends with the thread that put it there; simulated
    ranks are threads, and the next one to come would crash.
    """

    avoid_device_init = False


def forgetful_fakes() -> FakeTensorMode:
    """A mode that keeps nothing of what it finds: torch's cache of shapes has no bound."""
    mode = FakeTensorMode()
    mode.cache_enabled = False
    return mode


# Python functionalisation, the way AOTAutograd does it: in-place writes and views under autograd become new values.
FunctionalTensor = functional_tensor.FunctionalTensor
FunctionalTensorMode = functional_tensor.FunctionalTensorMode

# What a fake tensor raises where a result's shape or value is in the data, or where the op has no shape function.
UNKNOWN_SHAPE = (
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.DataDependentOutputException,
    fake_tensor.UnsupportedOperatorException,
)

# The same where Python code asks a value for a branch or a size.
UNKNOWN_VALUE = (*UNKNOWN_SHAPE, symbolic_shapes.GuardOnDataDependentSymNode)


def check_has_shapes(op: Any) -> None:
    """Raise what fake tensors raise for an op without a shape function: of a custom op it would be any RuntimeError."""
    custom = custom_ops._maybe_get_opdef(op)
    if custom is not None and custom._abstract_fn is None and not custom_op_utils.can_generate_trivial_fake_impl(op):
        raise fake_tensor.UnsupportedOperatorException(op)


@contextlib.contextmanager
def quiet_fakes() -> Iterator[None]:
    """What an op on fake tensors raises in this thread is not logged as well: a user's mistake is one error."""
    here = threading.get_ident()
    log = logging.getLogger(fake_tensor.__name__)

    def of_other_threads(record: logging.LogRecord) -> bool:
        return record.thread != here

    log.addFilter(of_other_threads)
    try:
        yield
    finally:
        log.removeFilter(of_other_threads)


# For subclasses that take part in dispatch only, not in __torch_function__.
disabled_torch_function = torch._C._disabled_torch_function_impl


# A tensor of a subclass, with a shape and no data: wrapper_tensor without its conveniences.
new_wrapper = torch.Tensor._make_wrapper_subclass


def wrapper_tensor(
    cls: type, like: torch.Tensor, shape, stride, requires_grad: bool, dtype: torch.dtype | None = None, keys=None
) -> torch.Tensor:
    """A tensor of the subclass with this shape and no data, of the device of `like` and, by default, of its dtype."""
    return torch.Tensor._make_wrapper_subclass(
        cls, shape, strides=stride, dtype=dtype or like.dtype, device=like.device, layout=like.layout,
        requires_grad=requires_grad, _extra_dispatch_keys=keys or NO_KEYS,
    )  # fmt: skip


NO_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)

# The name of a dispatch key above all of torch's own that see a tensor, and which no kernel of torch uses.
_FIRST = "TESTING_ONLY_GenericWrapper"

# The keys that tensors carry whose ops `run_first` may take.
FIRST_KEYS = next(
    keys for keys in (torch._C.DispatchKeySet.from_raw_repr(1 << bit) for bit in range(62)) if _FIRST in str(keys)
)


def has_first(x: torch.Tensor) -> bool:
    """Whether the tensor carries FIRST_KEYS."""
    return bool(torch._C._dispatch_keys(x).raw_repr() & FIRST_KEYS.raw_repr())


def without_first() -> contextlib.AbstractContextManager:
    """Inside, ops on tensors with FIRST_KEYS go on to where all others begin."""
    return torch._C._ExcludeDispatchKeyGuard(FIRST_KEYS)


def as_one(op: OpOverload) -> Callable:
    """A composite op with the derivative that torch has for it as one op, for functions of `run_first`.

    torch takes such an op apart above autograd for all tensors but nested ones; of those autograd sees it whole, and
    its kernel for them does for others. What autograd is not to see, inside of a dispatch or of inference mode, comes
    whole too. Where more than autograd looks on (functorch, forward AD, autocast), and for complex numbers, of which
    the derivatives of some say nothing, the op is taken apart as always.
    """

    def run(x: torch.Tensor, *rest: Any) -> Any:
        keys = None if x.is_complex() or _is_seen_by_more(x) else _WHOLE.get(x.device.type)
        if keys is None:
            with without_first():
                return op(x, *rest)
        below = torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)
        return op.redispatch(keys[below], x, *rest)

    return run


def apart(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """A composite op, for functions of `run_first`: the ops that it is made of may be run first in their turn."""
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):  # which may cast for the op itself
        with without_first():
            return op(*args, **kwargs)
    return op.decompose(*args, **kwargs)


def _is_seen_by_more(x: torch.Tensor) -> bool:
    return (
        torch._C._are_functorch_transforms_active() or in_forward_ad() or torch.is_autocast_enabled(x.device.type)
    )


def _keys(*names: str) -> torch._C.DispatchKeySet:
    sets = [torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)) for name in names]
    return functools.reduce(lambda a, b: a | b, sets)


# By device, what is left to dispatch on of an op that comes whole, and of one that autograd is not to see.
_WHOLE = {
    device: (_keys(name, "Python", "AutogradNestedTensor"), _keys(name, "Python"))
    for device, name in (("cpu", "CPU"), ("cuda", "CUDA"), ("meta", "Meta"))
}

_first = torch.library.Library("aten", "IMPL")
_any_other = torch.library.Library("_", "IMPL")
_any_other.fallback(torch.library.fallthrough_kernel, _FIRST)


def run_first(functions: Mapping[Any, Callable]) -> None:
    """On tensors with FIRST_KEYS run these functions for these aten ops, before autograd and all else."""
    for op, function in functions.items():
        _first.impl(f"{op._schema.name}.{op._overloadname}".removesuffix(".default"), function, _FIRST)


PROFILER_OPS = (
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
)


def functional(x: torch.Tensor) -> torch.Tensor:
    """x under functionalisation; a FunctionalTensorMode must be active."""
    return FunctionalTensor.to_functional(x)


@contextlib.contextmanager
def data_is_written() -> Iterator[None]:
    """Inside, `x.data = y` lets a functional tensor show the memory of y, which it otherwise would not notice.

    Views of x go on showing what x was, and writes into y are seen in x, as in torch.
    """

    def write(x: torch.Tensor, y: torch.Tensor) -> None:
        if x.shape != y.shape or x.dtype != y.dtype:
            raise RuntimeError(
                f"x.data = y changes a {x.dtype} tensor of {list(x.shape)} to {y.dtype} {list(y.shape)}, which a "
                "compiled step cannot; do it outside the step"
            )
        same = isinstance(y, FunctionalTensor) and x.stride() == y.stride()
        with torch.no_grad():
            x.elem = (y if same else torch.empty_like(x).copy_(y)).elem

    FunctionalTensor.data = property(torch.Tensor.data.__get__, write)
    try:
        yield
    finally:
        del FunctionalTensor.data


def settled(x: torch.Tensor) -> torch.Tensor:
    """The present value of a functional tensor, all writes to it and its views done."""
    torch._sync(x)
    return torch._from_functional_tensor(x.elem)


# Inside, ops skip autograd: cheaper than no_grad where an op's gradient is written in Python, as collectives' are.
below_autograd = torch._C._AutoDispatchBelowAutograd


def in_backward() -> bool:
    """Whether this thread is in a backward pass of autograd."""
    return torch._C._current_graph_task_id() != -1


def carry(key: str, value: Any) -> None:
    """Keep a value for this thread, and for the threads in which autograd runs the backward passes it starts."""
    if value is not None:
        torch._C._stash_obj_in_tls(key, value)
    elif torch._C._is_key_in_tls(key):
        torch._C._remove_obj_from_tls(key)


def carried(key: str) -> Any:
    """What `carry` kept under the key; None for nothing."""
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None


def in_forward_ad() -> bool:
    """Whether a level of forward-mode AD is open, in this process, so that tensors may have tangents."""
    return torch.autograd.forward_ad._current_level >= 0


# Whether a tensor is one of autograd's zeros without memory, which no kernel can read: tangents of what has none.
is_nothing = torch.Tensor._is_zerotensor


def last_node() -> int:
    """The number of the node that autograd made last in this thread: inside a mode, that of the op being run."""
    return torch.autograd._get_sequence_nr() - 1


def running_node() -> int | None:
    """The number of the node whose backward runs in this thread; None outside of a backward pass."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def is_tracing(x: torch.Tensor) -> bool:
    """Whether ops on x are being written down: by Dynamo, AOTAutograd or make_fx, on fake or meta tensors."""
    if torch.compiler.is_dynamo_compiling():
        return True
    if x.is_meta or isinstance(x, (fake_tensor.FakeTensor, functional_tensor.FunctionalTensor)):
        return True
    return in_trace()


def in_trace() -> bool:
    """Whether ops of this thread are being written down, or run on fake tensors."""
    mode = torch._C._get_dispatch_mode
    return mode(_FAKE) is not None or mode(_PROXY) is not None or mode(_FUNCTIONAL) is not None


_FAKE, _PROXY, _FUNCTIONAL = (getattr(torch._C._TorchDispatchModeKey, k) for k in ("FAKE", "PROXY", "FUNCTIONAL"))


def untraced() -> contextlib.AbstractContextManager:
    """Inside, ops run on the data and no trace takes note of them."""
    return _python_dispatch._disable_current_modes() if is_any_mode_on() else contextlib.nullcontext()


def is_any_mode_on() -> bool:
    """Whether ops go through a dispatch mode: of a trace, or a user's."""
    return bool(torch._C._len_torch_dispatch_stack())


def guard_on(function: Callable[[], Any]) -> None:
    """Where Dynamo is tracing: what it compiles holds as long as this function of a module gives what it gives now."""
    dynamo = sys.modules.get("torch._dynamo.symbolic_convert")
    tx = getattr(dynamo.tls, "current_tx", None) if dynamo is not None else None
    if tx is not None:
        _guard_on(function, tx)


def _guard_on(function: Callable[[], Any], tx: Any) -> None:
    from torch._dynamo import guards, source  # a second to import, but here that has been done

    called = source.CallFunctionNoArgsSource(
        source.AttrSource(tx.import_source(function.__module__), function.__name__)
    )
    guards.install_guard(called.make_guard(guards.GuardBuilder.EQUALS_MATCH))


# ---- schemas ----------------------------------------------------------------------------------

OpOverload = torch._ops.OpOverload


def arguments(op: OpOverload) -> list:
    """The arguments of the op's schema: each has a name and may have a default_value."""
    return op._schema.arguments


def returns(op: OpOverload) -> list:
    """The results of the op's schema: each has a type, and perhaps a name."""
    return op._schema.returns


def overloads_of(op: Any) -> list[OpOverload]:
    """The overloads that are meant by `torch.ops.lib.op`, one of its overloads, "lib::op", or a `custom_op` function.

    An empty list for what is no op that torch knows.
    """
    if isinstance(op, OpOverload):
        return [op]
    if isinstance(op, custom_ops.CustomOpDef):
        return [op._opoverload]
    if isinstance(op, str):
        namespace, _, name = op.partition("::")
        op = getattr(getattr(torch.ops, namespace), name, None) if name.isidentifier() else None
    if not isinstance(op, torch._ops.OpOverloadPacket):
        return []
    return [getattr(op, name) for name in op.overloads()]


def qualified_name(op: OpOverload) -> str:
    """`aten::add_` for `aten.add_.Tensor`."""
    return op._schema.name


def overload_name(op: OpOverload) -> str:
    """`Tensor` for `aten.add_.Tensor`; "default" where there is none."""
    return op._overloadname



@functools.cache
def writes_first(op) -> bool:
    """Whether the op writes into its first argument and returns it: `add_`."""
    args, returns = op._schema.arguments, op._schema.returns
    return bool(
        args and returns
        and args[0].alias_info is not None and args[0].alias_info.is_write
        and returns[0].alias_info is not None and returns[0].alias_info.is_write
    )  # fmt: skip


@functools.cache
def is_view(op) -> bool:
    """Whether the result shows the memory of the first argument: `view`, `slice`, `split`."""
    returns = op._schema.returns
    return any(r.alias_info is not None and not r.alias_info.is_write for r in returns)


@functools.cache
def written(op) -> tuple[str, ...]:
    """The names of the arguments that the op writes into: `self` of `add_`, `out` of `add.out`."""
    hidden = ("running_mean", "running_var") if qualified_name(op) in UNDECLARED_WRITES else ()
    return tuple(a.name for a in arguments(op) if a.name in hidden or (a.alias_info and a.alias_info.is_write))


UNDECLARED_WRITES = {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"}
"""Ops that update their running statistics, which their schemas do not say."""


@functools.cache
def shown(op: OpOverload) -> tuple[str, ...]:
    """The names of the arguments whose memory the results show, or may show: `self` of `view` and of `add_`."""
    if qualified_name(op) in UNDECLARED_VIEWS:
        return UNDECLARED_VIEWS[qualified_name(op)]
    returns = [r.alias_info.before_set for r in op._schema.returns if r.alias_info]
    seen = set().union(*returns)
    return tuple(
        a.name for a in arguments(op)
        # Schemas name what a list of results shows by a wildcard, and do not say what a list of arguments is.
        if returns and a.alias_info
        and (seen & a.alias_info.before_set or "*" in a.alias_info.after_set or not a.alias_info.before_set)
    )  # fmt: skip


UNDECLARED_VIEWS = {
    "_c10d_functional::wait_tensor": ("tensor",),
    "aten::_unsafe_view": ("self",),
    "aten::set_": ("self", "source"),
}
"""Ops with a result that is the memory of arguments, which their schemas do not say."""


@functools.cache
def written_places(op) -> tuple[int, ...]:
    """Where the arguments stand that the op writes into."""
    return tuple(argument_index(op, name) for name in written(op))


@functools.cache
def returned(op) -> tuple[str | None, ...]:
    """For each result the name of the written argument that it is, None for a new tensor or a view."""
    writing = [a for a in arguments(op) if a.alias_info and a.alias_info.is_write]
    names = {alias: a.name for a in writing for alias in a.alias_info.before_set}
    aliases = [r.alias_info.before_set if r.alias_info else () for r in op._schema.returns]
    return tuple(next((names[alias] for alias in of if alias in names), None) for of in aliases)


@functools.cache
def returns_tensors(op) -> bool:
    """Whether any of the results is a tensor or a list of them; `item` and `allclose` return Python values."""
    return any("Tensor" in str(r.type) for r in op._schema.returns)


@functools.cache
def returns_many(op) -> bool:
    """Whether the op returns a tuple or a list, and not one tensor."""
    return [str(r.type) for r in op._schema.returns] != ["Tensor"]


@functools.cache
def is_composite(op) -> bool:
    """Whether the op is made of others and has no kernel of its own."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


@functools.cache
def argument_index(op, name: str) -> int:
    """The place of the argument in the op's schema."""
    return next(i for i, a in enumerate(op._schema.arguments) if a.name == name)


def with_argument(op, args: tuple, kwargs: dict, name: str, value: Any) -> tuple[tuple, dict]:
    """The arguments of a call with one of them replaced."""
    i = argument_index(op, name)
    if i < len(args):
        return (*args[:i], value, *args[i + 1 :]), kwargs
    return args, {**kwargs, name: value}


def without_out(op: OpOverload) -> OpOverload | None:
    """`aten.add.Tensor` for `aten.add.out`; None where the op has no `out`, or where no op is the same without."""
    outs = [a for a in arguments(op) if a.is_out]
    wanted = [(a.name, str(a.type)) for a in arguments(op) if not a.is_out]
    if not outs or any(str(a.type) != "Tensor" for a in outs):
        return None
    return _overload_of(qualified_name(op).split("::")[1], wanted, len(outs))


def not_in_place(op: OpOverload) -> OpOverload | None:
    """`aten.t.default` for `aten.t_.default`; None where no op is the same but for the writing."""
    name = qualified_name(op).split("::")[1]
    wanted = [(a.name, str(a.type)) for a in arguments(op)]
    return _overload_of(name.removesuffix("_"), wanted, 1) if name.endswith("_") else None


def _overload_of(name: str, wanted: list[tuple[str, str]], results: int) -> OpOverload | None:
    """The overload that takes these arguments, gives so many tensors and writes nothing."""
    packet = getattr(torch.ops.aten, name, None)
    for overload in packet.overloads() if packet is not None else ():
        op = getattr(packet, overload)
        if (
            [(a.name, str(a.type)) for a in arguments(op)] == wanted
            and [str(r.type) for r in op._schema.returns] == ["Tensor"] * results
            and not written(op)
        ):
            return op
    return None


def returns_nothing(op: OpOverload) -> bool:
    """Whether the op only writes: `_foreach_add_`."""
    return not op._schema.returns


def list_ops() -> list[OpOverload]:
    """Every `_foreach_` op and every fused optimiser step that takes plain numbers or tensors; no `out=` variants."""
    found = []
    for full in torch._C._dispatch_get_all_op_names():
        name, _, overload = full.removeprefix("aten::").partition(".")
        if full.startswith(("aten::_foreach_", "aten::_fused_ada", "aten::_fused_sgd")) and "out" not in overload:
            found.append(getattr(getattr(torch.ops.aten, name), overload or "default"))
    return found


@functools.cache
def in_place_variant(op):
    """`aten.add_.Tensor` for `aten.add.Tensor`; None where there is none of the same arguments."""
    namespace, name = qualified_name(op).split("::")
    packet = getattr(getattr(torch.ops, namespace), name + "_", None)
    overload = getattr(packet, op._overloadname, None) if packet is not None else None
    if overload is None:
        return None
    same = [a.name for a in overload._schema.arguments] == [a.name for a in op._schema.arguments]
    return overload if same and writes_first(overload) else None


# ---- symbols ----------------------------------------------------------------------------------


class _SymbolSafeFakes(FakeTensorMode):
    """Fake tensors that remember small constants, such as a step count of 0, until a symbolic float meets them.

    torch would go on computing with the constant and get NaN.
    """

    def dispatch(self, func, types, args=(), kwargs=None):
        leaves = pytree.tree_leaves((args, kwargs))
        if any(isinstance(x, torch.SymFloat) for x in leaves):
            for x in leaves:
                if isinstance(x, fake_tensor.FakeTensor):
                    x.constant = None
        return super().dispatch(func, types, args, kwargs or {})


class Symbols:
    """Numbers that stay symbols in a trace, and the conditions on them that the trace took for granted.

    A Python branch on a symbol is decided by its present value and noted; `still_hold` says whether other values
    would have gone the same way.
    """

    def __init__(self):
        self.env = symbolic_shapes.ShapeEnv()
        self._symbols: dict[str, Any] = {}

    def fake_mode(self) -> FakeTensorMode:
        return _SymbolSafeFakes(shape_env=self.env)

    def number(self, name: str, value: float):
        """A SymFloat that stands for the number of this name."""
        from torch._dynamo.source import ConstantSource  # a second to import, and only captures need it

        source = ConstantSource(name)
        dynamic = symbolic_shapes.DimDynamic.DYNAMIC
        # By default 0.0 and 1.0 would be no symbols but constants, without a condition that says so.
        symbol = self.env.create_symbol(
            value, source=source, dynamic_dim=dynamic, positive=None, do_not_specialize_zero_one=True
        )
        self._symbols[name] = symbol
        return self.env.create_symfloatnode(symbol, hint=value, source=source)

    def still_hold(self, values: dict[str, float]) -> bool:
        """Whether every branch taken on the symbols would be taken again with these values."""
        at = {symbol: values[name] for name, symbol in self._symbols.items()}
        return all(bool(guard.expr.xreplace(at)) for guard in self.env.guards)


def symbolic_number(node: Any) -> Any:
    """The SymInt, SymFloat or SymBool of a node, by what the node says it is."""
    kind = torch.SymInt if node.is_int() else torch.SymFloat if node.is_float() else torch.SymBool
    return kind(node)


def is_symbol(value: Any) -> bool:
    """Whether a value in a trace is a symbolic number."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))


# ---- traces by make_fx ------------------------------------------------------------------------


# What writes down the ops of this thread, with its `tracer`; None outside a make_fx.
proxy_mode = proxy_tensor.get_proxy_mode


# Inside, ops run and are not written down.
not_traced = proxy_tensor.disable_proxy_modes_tracing

# The values are what the nodes of these proxies give: later ops on them refer to the nodes.
track = proxy_tensor.track_tensor_tree


def traced(x: torch.Tensor, by: torch.fx.Tracer) -> torch.fx.Proxy | torch.Tensor:
    """What stands for x in the graph; x itself, a constant, where the trace has not met it."""
    return proxy_tensor.get_proxy_slot(x, by, x, lambda slot: slot.proxy)


def traced_tensors(by: torch.fx.Tracer) -> list[tuple[torch.Tensor, torch.fx.Node]]:
    """The tensors of the trace that are alive, each with the last node that gave or wrote it."""
    return [(x, slot.proxy.node) for x, slot in by.tensor_tracker.items()]


def forget_value(x: torch.Tensor, by: torch.fx.Tracer) -> None:
    """A trace remembers what `torch.tensor(1.0)` holds, so that `.item()` is a constant: no longer, x is written."""
    if (constant := getattr(x, "constant", None)) is not None:
        x.fake_mode.fake_tensor_converter.invalidate_constant_aliases(constant)
    for other, slot in by.tensor_tracker.items():
        if slot.constant is not None and memory_of(other) == memory_of(x):
            slot.constant = None


def in_symbolic_trace() -> bool:
    """Whether a torch.fx.Tracer runs this code in this thread: symbolic_trace, and the unpickling of a GraphModule."""
    if not _symbolic_trace._is_fx_tracing_flag:  # of all threads
        return False
    frame = sys._getframe()
    while frame is not None and frame.f_code is not torch.fx.Tracer.trace.__code__:
        frame = frame.f_back
    return frame is not None


def is_faking(*tensors: torch.Tensor) -> bool:
    """Whether ops have no data to work on: a fake mode is on, or one of the tensors is fake."""
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    return fake or any(isinstance(x, fake_tensor.FakeTensor) for x in tensors)


def memory_of(x: torch.Tensor) -> int | None:
    """The same for two tensors alive that share memory, fake ones too; None for a tensor without memory of its own."""
    try:
        return x.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return None


# Whether x is what a transform of torch.func shows of a tensor.
is_stand_in = torch._C._functorch.is_functorch_wrapped_tensor


def is_transformed(x: torch.Tensor) -> bool:
    """Whether x is a stand-in of torch.func or of functionalisation, whose memory is not what in-place ops write."""
    return isinstance(x, FunctionalTensor) or torch._is_functional_tensor(x) or is_stand_in(x)


# ---- process groups under the dispatcher ------------------------------------------------------


def unboxed_group(boxed: torch.ScriptObject) -> dist.ProcessGroup:
    """The process group that a dispatcher op was given."""
    return c10d.ProcessGroup.unbox(boxed)


def unboxed_reduce_op(boxed: torch.ScriptObject) -> str:
    """The reduction that a dispatcher op was given: "sum", "premul_sum"."""
    return c10d.ReduceOp.RedOpType(boxed.op()).name.lower()


FakeWork = c10d.FakeWork


def register_work(x: torch.Tensor, work: dist.Work) -> None:
    """Let wait_tensor of x, or of any tensor of its memory, wait for this work; of several works, for all."""
    c10d._register_work(x, work)


def works_in_flight() -> int:
    """How many tensors have work that nobody has waited for."""
    return c10d._get_work_registry_size()


# ---- torch.distributed in a simulation --------------------------------------------------------


@dataclasses.dataclass
class Distributed:
    """What torch.distributed knows of process groups, and the functions that a simulation has of its own."""

    default_pg: dist.ProcessGroup | None = None
    pg_map: dict = dataclasses.field(default_factory=dict)
    pg_names: dict = dataclasses.field(default_factory=dict)
    pg_group_ranks: dict = dataclasses.field(default_factory=dict)
    pg_backend_config: dict = dataclasses.field(default_factory=dict)
    group_count: int = 0
    tags_to_pg: dict = dataclasses.field(default_factory=dict)
    pg_to_tag: dict = dataclasses.field(default_factory=dict)
    pg_coalesce_state: dict = dataclasses.field(default_factory=dict)
    comms: list = dataclasses.field(default_factory=list)
    functions: dict[str, Callable] = dataclasses.field(default_factory=dict)

    def clear(self) -> None:
        """Forget all groups."""
        self.default_pg = None
        for table in (self.pg_map, self.pg_names, self.pg_group_ranks, self.pg_backend_config):
            table.clear()

    def add_outside(self) -> None:
        """Let torch say what is wrong with a group of the process, which has none of the simulated ranks."""
        outside = distributed_c10d._world
        self.pg_map.update(outside.pg_map)
        self.pg_names.update(outside.pg_names)
        self.pg_group_ranks.update({group: _Elsewhere(ranks) for group, ranks in outside.pg_group_ranks.items()})
        self.pg_backend_config.update(outside.pg_backend_config)

    def add(self, group: dist.ProcessGroup, ranks: Mapping, backend: str) -> None:
        """Let torch.distributed know the group."""
        self.pg_map[group] = (backend, self.store)
        self.pg_names[group], self.pg_group_ranks[group] = group.group_name, ranks
        self.pg_backend_config[group] = f"cpu:{backend}"

    @functools.cached_property
    def store(self) -> dist.Store:
        """The store of all groups."""
        return dist.HashStore()


class _Elsewhere(dict):
    """The places of ranks in a group of the process: no simulated rank has one, and -1 is what torch says then."""

    def __contains__(self, rank: object) -> bool:
        return True

    def __getitem__(self, rank: object) -> int:
        return -1


class _DistributedHere(distributed_c10d._World):
    """The tables of the simulation that this code is in; elsewhere the process's own."""

    def __init__(self, outside: Any) -> None:
        super().__init__()
        self.outside = outside


def _here(name: str) -> property:
    def read(self: _DistributedHere) -> Any:
        return getattr(_simulated.get() or self.outside, name)

    def write(self: _DistributedHere, value: Any) -> None:
        setattr(_simulated.get() or self.outside, name, value)

    return property(read, write)


for _field in dataclasses.fields(Distributed):
    if hasattr(distributed_c10d._World, _field.name):
        setattr(_DistributedHere, _field.name, _here(_field.name))

_simulated: ContextVar[Distributed | None] = ContextVar("spmd_simulated_distributed", default=None)
_hooks_lock, _hooks_in_use, _unhook = threading.Lock(), 0, contextlib.ExitStack()


@contextlib.contextmanager
def simulated_distributed(known: Distributed) -> Iterator[None]:
    """Inside the block, in this thread only, torch.distributed has these tables and functions.

    What is process-wide while any such block is open: torch's table of tables, at the point where torch lets it be
    replaced, and the functions of these names. Both ask where they are called from, and elsewhere do what they did.
    """
    _hook(known.functions)
    known.add_outside()
    token = _simulated.set(known)
    try:
        yield
    finally:
        _simulated.reset(token)
        known.clear()  # which must not keep a group of the process alive
        _unhook_if_last()


def _hook(names: Iterable[str]) -> None:
    global _hooks_in_use
    with _hooks_lock:
        _hooks_in_use += 1
        if _hooks_in_use == 1:
            _replace(distributed_c10d, "_world", _DistributedHere(distributed_c10d._world))
            for name in names:
                here = _PART_THAT_DIFFERS.get(name, name)
                function = _function_here(name, getattr(distributed_c10d, here))
                for module in (distributed_c10d, dist):
                    if hasattr(module, here):
                        _replace(module, here, function)


_PART_THAT_DIFFERS = {"new_group": "_new_group_with_tag"}
"""What a public function calls by this name, so that it also holds where the function was imported by its own."""


def _unhook_if_last() -> None:
    global _hooks_in_use
    with _hooks_lock:
        _hooks_in_use -= 1
        if not _hooks_in_use:
            _unhook.close()


def _replace(module: Any, name: str, value: Any) -> None:
    _unhook.callback(setattr, module, name, getattr(module, name))
    setattr(module, name, value)


def _function_here(name: str, outside: Callable) -> Callable:
    @functools.wraps(outside)
    def call(*args: Any, **kwargs: Any) -> Any:
        known = _simulated.get()
        return outside(*args, **kwargs) if known is None else known.functions[name](*args, **kwargs)

    return call


# ---- random numbers ---------------------------------------------------------------------------


class Twister:
    """A generator of torch's CPU kernels that starts from a state given as words, not from a seed of 32 bits.

    `get_state` is a C struct: seed, left and seeded, next, the 624 words of the Mersenne twister in 64 bits each, and
    what is kept of normal numbers.
    """

    words = 624

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(5489)  # the seed is the first word of the state
        self._state = self._generator.get_state()
        fields = self._state.numpy().view(np.uint64)
        self._words = fields[3 : 3 + self.words]
        assert fields[0] == self._words[0] == 5489 and self._words[-1] and len(fields) == 632, "another layout"

    def started(self, state: np.ndarray) -> torch.Generator:
        """The generator at the start of the numbers that follow from these `words` words of 32 bits."""
        self._words[:] = state
        self._generator.set_state(self._state)
        return self._generator
