"""Numbers that stay symbols in a trace, such as a learning rate.

torch.fx.experimental.symbolic_shapes imports sympy, which takes as long as a third of torch: only a capture needs it,
so it is imported by the first one, and not with spmd.
"""

from __future__ import annotations

import ast
import math
import operator
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


# ---- conditions as text -----------------------------------------------------------------------


class Conditions:
    """The conditions of a trace on its numbers, as text: what is left of `Symbols` in a saved program.

    names: the name of each number, by what it is called in the conditions. They are Python expressions of arithmetic
    and comparisons: "n0 > 0.5".

    >>> Conditions({"n0": "lr"}, ("n0 > 0.5",)).still_hold({"lr": 0.25})
    False
    """

    def __init__(self, names: dict[str, str], texts: tuple[str, ...]):
        self.names, self.texts = names, texts
        self._trees = [ast.parse(text, mode="eval").body for text in texts]

    @classmethod
    def of(cls, symbols: Symbols | Conditions) -> Conditions:
        """The conditions of a trace."""
        if isinstance(symbols, Conditions):
            return symbols
        from torch.utils._sympy.printers import PythonPrinter  # imports sympy: see above

        names = {symbol: f"n{i}" for i, symbol in enumerate(symbols._symbols.values())}
        short = {symbol: type(symbol)(name) for symbol, name in names.items()}
        texts = [PythonPrinter().doprint(guard.expr.xreplace(short)) for guard in symbols.env.guards]
        return cls(dict(zip(names.values(), symbols._symbols, strict=True)), tuple(dict.fromkeys(texts)))

    def still_hold(self, values: dict[str, float]) -> bool:
        """Whether all conditions hold for these numbers."""
        given = {short: values[name] for short, name in self.names.items()}
        return all(bool(_arithmetic(tree, given)) for tree in self._trees)


_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow, ast.USub: operator.neg,
    ast.UAdd: operator.pos, ast.Not: operator.not_, ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt,
    ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge, ast.BitAnd: operator.and_, ast.BitOr: operator.or_,
}  # fmt: skip
_FUNCTIONS = {"min": min, "max": max, "abs": abs, "float": float, "int": int, "round": round}


def _arithmetic(e: ast.expr, names: dict[str, float]) -> Any:
    """The value of a syntax tree of arithmetic. ValueError for one of anything else."""
    match e:
        case ast.Constant(value):
            return value
        case ast.Name(name) if name in names:
            return names[name]
        case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_arithmetic(left, names), _arithmetic(right, names))
        case ast.UnaryOp(op, operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_arithmetic(operand, names))
        case ast.BoolOp(op, values):
            found = (_arithmetic(v, names) for v in values)
            return all(found) if isinstance(op, ast.And) else any(found)
        case ast.Compare(left, ops, rest):
            found = [_arithmetic(v, names) for v in (left, *rest)]
            pairs = zip(ops, found, found[1:], strict=False)
            return all(_OPERATORS[type(op)](a, b) for op, a, b in pairs)
        case ast.Call(ast.Name(name), args) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_arithmetic(a, names) for a in args))
        case ast.Call(ast.Attribute(ast.Name("math"), name), args):
            return getattr(math, name)(*(_arithmetic(a, names) for a in args))
        case ast.Attribute(ast.Name("math"), name):
            return getattr(math, name)
    raise ValueError(f"{ast.unparse(e)!r} is no arithmetic of {', '.join(names)}")
