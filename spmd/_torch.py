"""The only file that touches torch's private names.

Every other module imports them from here, so that one page shows what a new version of torch may break.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch._subclasses import fake_tensor, functional_tensor
from torch.distributed import distributed_c10d
from torch.fx.experimental import symbolic_shapes

# Functional collectives as dispatcher ops: plain data in, a new tensor out, legal as targets of an fx graph.
c10d_functional = torch.ops._c10d_functional

# The store through which the default process group met: where ranks can compare notes without a collective.
default_store = distributed_c10d._get_default_store

# Fake tensors: shapes, strides and devices without data.
FakeTensorMode = fake_tensor.FakeTensorMode

# Python functionalisation, the way AOTAutograd does it: in-place writes and views under autograd become new values.
FunctionalTensor = functional_tensor.FunctionalTensor
FunctionalTensorMode = functional_tensor.FunctionalTensorMode

# For subclasses that take part in dispatch only, not in __torch_function__.
disabled_torch_function = torch._C._disabled_torch_function_impl

PROFILER_OPS = (
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
)


def functional(x: torch.Tensor) -> torch.Tensor:
    """x under functionalisation; a FunctionalTensorMode must be active."""
    return FunctionalTensor.to_functional(x)


def settled(x: torch.Tensor) -> torch.Tensor:
    """The present value of a functional tensor, all writes to it and its views done."""
    torch._sync(x)
    return torch._from_functional_tensor(x.elem)


# ---- schemas ----------------------------------------------------------------------------------


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


@functools.cache
def in_place_variant(op):
    """`aten.add_.Tensor` for `aten.add.Tensor`; None where there is none of the same arguments."""
    namespace, name = op._schema.name.split("::")
    packet = getattr(getattr(torch.ops, namespace), name + "_", None)
    overload = getattr(packet, op._overloadname, None) if packet is not None else None
    if overload is None:
        return None
    same = [a.name for a in overload._schema.arguments] == [a.name for a in op._schema.arguments]
    return overload if same and writes_first(overload) else None


# ---- symbols ----------------------------------------------------------------------------------


class Symbols:
    """Numbers that stay symbols in a trace, and the conditions on them that the trace took for granted.

    A Python branch on a symbol is decided by its present value and noted; `still_hold` says whether other values
    would have gone the same way.
    """

    def __init__(self):
        self.env = symbolic_shapes.ShapeEnv()
        self._symbols: dict[str, Any] = {}

    def fake_mode(self) -> FakeTensorMode:
        return FakeTensorMode(shape_env=self.env)

    def number(self, name: str, value: float):
        """A SymFloat that stands for the number of this name."""
        from torch._dynamo.source import ConstantSource  # a second to import, and only captures need it

        source = ConstantSource(name)
        dynamic = symbolic_shapes.DimDynamic.DYNAMIC
        symbol = self.env.create_symbol(value, source=source, dynamic_dim=dynamic)
        self._symbols[name] = symbol
        return self.env.create_symfloatnode(symbol, hint=value, source=source)

    def still_hold(self, values: dict[str, float]) -> bool:
        """Whether every branch taken on the symbols would be taken again with these values."""
        at = {symbol: values[name] for name, symbol in self._symbols.items()}
        return all(bool(guard.expr.xreplace(at)) for guard in self.env.guards)


def number_key(value: Any) -> bool:
    """Whether a value in a trace is a symbolic number."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
