"""Numbers that stay symbols in a trace, such as a learning rate.

torch.fx.experimental.symbolic_shapes imports sympy, which takes as long as a third of torch: only a capture needs it,
so it is imported by the first one, and not with spmd.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch.utils._pytree import tree_leaves

from spmd._torch.fakes import UNKNOWN_SHAPE, FakeTensorMode


def _symbolic_shapes() -> ModuleType:
    from torch.fx.experimental import symbolic_shapes  # heavy, and only captures need it: see above

    return symbolic_shapes


def unknown_value_errors() -> tuple[type[Exception], ...]:
    """UNKNOWN_SHAPE, and the error where Python code asks an unknown value for a branch or a size: for `except`."""
    return (*UNKNOWN_SHAPE, _symbolic_shapes().GuardOnDataDependentSymNode)


class _SymbolSafeFakes(FakeTensorMode):
    """Fake tensors that remember small constants, such as a step count of 0, until a symbolic float meets them.

    torch would go on computing with the constant and get NaN.
    """

    def dispatch(self, func, types, args=(), kwargs=None):
        leaves = tree_leaves((args, kwargs))
        if any(isinstance(x, torch.SymFloat) for x in leaves):
            for x in leaves:
                if isinstance(x, fake_tensor.FakeTensor):
                    x.constant = None
        return super().dispatch(func, types, args, kwargs or {})


class Symbols:
    """Numbers that stay symbols in a trace, and the guards on them: the conditions that the trace relies on.

    A Python branch on a symbol is decided by its present value and recorded; `still_hold` says whether other values
    take the same branches.
    """

    def __init__(self):
        self.env = _symbolic_shapes().ShapeEnv()
        self._symbols: dict[str, Any] = {}

    def fake_mode(self) -> FakeTensorMode:
        return _SymbolSafeFakes(shape_env=self.env)

    def number(self, name: str, value: float):
        """A SymFloat that stands for the number of this name."""
        from torch._dynamo.source import ConstantSource  # a second to import, and only captures need it

        source = ConstantSource(name)
        dynamic = _symbolic_shapes().DimDynamic.DYNAMIC
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
    """The SymInt, SymFloat or SymBool of a node, by the type that the node has."""
    kind = torch.SymInt if node.is_int() else torch.SymFloat if node.is_float() else torch.SymBool
    return kind(node)


def is_symbol(value: Any) -> bool:
    """Whether a value in a trace is a symbolic number."""
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
