"""Ops: their schemas, which arguments they write, and overloads that are the same but for that."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._library import custom_ops

OpOverload = torch._ops.OpOverload
OpOverloadPacket = torch._ops.OpOverloadPacket
CustomOp = custom_ops.CustomOpDef


def functions_of_custom_op(op: CustomOp) -> tuple:
    """The functions of the gradient of a custom op, or None for one that it has not: a trace runs them."""
    return op._backward_fn, op._setup_context_fn


def is_traced_python(op: OpOverload | OpOverloadPacket) -> bool:
    """Whether an op of a library is written in Python in such a way that a trace runs its code, and not the op."""
    of, _, name = str(op).partition(".")
    found = (key.split("/") for key in torch.library._impls if key.startswith(f"{of}/"))
    return of not in ("aten", "prims") and any(
        key.partition(".")[0] == name.partition(".")[0] and how.startswith(("Composite", "Autograd"))
        for _, key, how in found
    )


def arguments(op: OpOverload) -> list:
    """The arguments of the op's schema: each has a name and may have a default_value."""
    return op._schema.arguments


def returns(op: OpOverload) -> list:
    """The results of the op's schema: each has a type, and perhaps a name."""
    return op._schema.returns


def overloads_of(op: Any) -> list[OpOverload]:
    """The overloads of `torch.ops.lib.op`, of one of its overloads, of "lib::op", or of a `custom_op` function.

    An empty list for anything that is not an op.
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


PROFILER_OPS = (
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
)


# ---- what an op writes and shows ---------------------------------------------------------------


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
def aliased(op: OpOverload) -> tuple[str, ...]:
    """The names of the arguments whose memory the results show, or may show: `self` of `view` and of `add_`."""
    if qualified_name(op) in UNDECLARED_VIEWS:
        return UNDECLARED_VIEWS[qualified_name(op)]
    returns = [r.alias_info.before_set for r in op._schema.returns if r.alias_info]
    seen = set().union(*returns)
    return tuple(
        a.name for a in arguments(op)
        # Schemas name the memory of a list of results by a wildcard, and do not name that of a list of arguments.
        if returns and a.alias_info
        and (seen & a.alias_info.before_set or "*" in a.alias_info.after_set or not a.alias_info.before_set)
    )  # fmt: skip


UNDECLARED_VIEWS = {
    "_c10d_functional::wait_tensor": ("tensor",),
    "aten::_unsafe_view": ("self",),
    "aten::set_": ("self", "source"),
}
"""Ops with a result that shows the memory of arguments, which their schemas do not say."""


@functools.cache
def written_positions(op) -> tuple[int, ...]:
    """The positions of the arguments that the op writes into."""
    return tuple(argument_index(op, name) for name in written(op))


@functools.cache
def returned(op) -> tuple[str | None, ...]:
    """For each result: the name of the argument that is written and returned as it, None for a new tensor or a view."""
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
    """Whether the op is written as other ops and has no kernel of its own."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


@functools.cache
def argument_index(op, name: str) -> int:
    """The position of the argument in the op's schema."""
    return next(i for i, a in enumerate(op._schema.arguments) if a.name == name)


def with_argument(op, args: tuple, kwargs: dict, name: str, value: Any) -> tuple[tuple, dict]:
    """The arguments of a call with one of them replaced."""
    i = argument_index(op, name)
    if i < len(args):
        return (*args[:i], value, *args[i + 1 :]), kwargs
    return args, {**kwargs, name: value}


def without_out(op: OpOverload) -> OpOverload | None:
    """`aten.add.Tensor` for `aten.add.out`; None where the op has no `out`, or no variant without it."""
    outs = [a for a in arguments(op) if a.is_out]
    wanted = [(a.name, str(a.type)) for a in arguments(op) if not a.is_out]
    if not outs or any(str(a.type) != "Tensor" for a in outs):
        return None
    return _overload_of(qualified_name(op).split("::")[1], wanted, len(outs))


def out_of_place_variant(op: OpOverload) -> OpOverload | None:
    """`aten.t.default` for `aten.t_.default`; None where there is none of the same arguments."""
    name = qualified_name(op).split("::")[1]
    wanted = [(a.name, str(a.type)) for a in arguments(op)]
    return _overload_of(name.removesuffix("_"), wanted, 1) if name.endswith("_") else None


def _overload_of(name: str, wanted: list[tuple[str, str]], results: int) -> OpOverload | None:
    """The overload that takes these arguments, returns this number of tensors and writes nothing."""
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


@functools.cache
def list_ops() -> tuple[OpOverload, ...]:
    """Every `_foreach_` op and every fused optimiser step that takes plain numbers or tensors; no `out=` variants."""
    found = []
    for full in torch._C._dispatch_get_all_op_names():  # thousands: asked once
        if full.startswith(("aten::_foreach_", "aten::_fused_ada", "aten::_fused_sgd")):
            name, _, overload = full.removeprefix("aten::").partition(".")
            if "out" not in overload:
                found.append(getattr(getattr(torch.ops.aten, name), overload or "default"))
    return tuple(found)


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


pack_padded_sequence = torch._VF._pack_padded_sequence
"""The op of `torch.nn.utils.rnn.pack_padded_sequence`, as a mode of functions sees it."""
