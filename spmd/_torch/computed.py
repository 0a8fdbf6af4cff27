"""What a trace knows of a number that it computes: the function, and what it is applied to. Nothing is simplified.

    k * 0 - k     Computed("sub", (Computed("mul", (zf0, 0)), zf0))

Algebra takes `k * 0` for 0, and `k - k`, where Python has NaN for an infinite k. So floats of a trace are computed as
they are written, by Python's own functions (`FUNCTIONS`), and conditions on them are Python text (`text_of`). Ints that
sizes depend on are expressions of sympy, and stand here as they are; so do the symbols of numbers.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import math
import operator
import weakref
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import torch

MOST_PARTS = 2000
"""How many functions the text of a condition has at most: a number that is made of itself again and again has a text
that doubles each time."""


class Function(NamedTuple):
    """A function of numbers. run: Python's. gives: the type of what it gives; None for that of its operands. text: an
    operator of Python, or the name of a function. target: what stands for it in a graph."""

    run: Callable
    gives: type | None
    text: Any
    target: Callable


def _float32(x: Any) -> float:
    return ctypes.c_float(x).value


def is_integer(x: float) -> bool:
    """As a method of floats, which has no place."""
    return x.is_integer()


def outcome(name: str, *numbers: Any) -> str:
    """The name of the type that a function gives for these numbers, or of the error that it raises.

    >>> outcome("pow", 2.0, 0.5), outcome("pow", -2.0, 0.5), outcome("math.exp", 800.0)
    ('float', 'complex', 'OverflowError')
    """
    try:
        return type(FUNCTIONS[name].run(*numbers)).__name__
    except (ArithmeticError, ValueError) as error:
        return type(error).__name__


_ARITHMETIC = {
    "add": ast.Add(), "sub": ast.Sub(), "mul": ast.Mult(), "floordiv": ast.FloorDiv(), "mod": ast.Mod(),
    "pow": ast.Pow(), "lshift": ast.LShift(), "rshift": ast.RShift(), "and_": ast.BitAnd(), "or_": ast.BitOr(),
    "xor": ast.BitXor(), "neg": ast.USub(), "pos": ast.UAdd(),
}  # fmt: skip
_COMPARISONS = {
    "eq": ast.Eq(), "ne": ast.NotEq(), "lt": ast.Lt(), "le": ast.LtE(), "gt": ast.Gt(), "ge": ast.GtE(),
}  # fmt: skip
MATH = (
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "atan2", "copysign", "cos", "cosh", "degrees", "erf", "erfc",
    "exp", "exp2", "expm1", "fabs", "fmod", "hypot", "lgamma", "log", "log10", "log1p", "log2", "pow", "radians", "sin",
    "sinh", "sqrt", "tan", "tanh",
)  # fmt: skip
"""The functions of `math` of floats that stay in a trace, by name."""

OF_SYMBOLS: dict[str, Callable] = {
    name: getattr(torch, f"_sym_{name}")
    for name in ("acos", "asin", "atan", "cos", "cosh", "log2", "sin", "sinh", "sqrt", "tan", "tanh")
}
"""By the names that they have in `math`, those that torch has for symbols."""


def _functions() -> dict[str, Function]:
    found = {}
    for name, text in _ARITHMETIC.items():
        found[name] = Function(getattr(operator, name), None, text, getattr(operator, name))
    for name, text in _COMPARISONS.items():
        found[name] = Function(getattr(operator, name), bool, text, getattr(operator, name))
    found["truediv"] = Function(operator.truediv, float, ast.Div(), operator.truediv)
    found["not"] = Function(operator.not_, bool, ast.Not(), torch.sym_not)
    for name in ("min", "max"):
        plain = getattr(builtins, name)
        found[name] = Function(plain, None, name, getattr(torch, f"sym_{name}"))
        found[f"{name} of both"] = Function(plain, None, name, plain)  # an int stays one, beside a float
    for name in ("trunc", "floor", "ceil"):
        found[f"math.{name}"] = Function(getattr(math, name), int, f"math.{name}", getattr(math, name))
    for name in MATH:
        if (function := getattr(math, name, None)) is not None:  # exp2 is of Python 3.11
            found[f"math.{name}"] = Function(function, float, f"math.{name}", OF_SYMBOLS.get(name, function))
    for name in ("isnan", "isinf", "isfinite"):
        found[f"math.{name}"] = Function(getattr(math, name), bool, f"math.{name}", getattr(math, name))
    found |= {
        "abs": Function(abs, None, "abs", operator.abs), "round": Function(round, None, "round", round),
        "whole": Function(round, int, "round", round), "float": Function(float, float, "float", torch.sym_float),
        "float32": Function(_float32, float, "float32", _float32), "repr": Function(repr, str, "repr", repr),
        "is_integer": Function(is_integer, bool, "is_integer", is_integer),
        "outcome": Function(outcome, str, "outcome", outcome),
        "ite": Function(lambda c, a, b: a if c else b, None, "ite", torch.sym_ite),
    }  # fmt: skip
    return found


FUNCTIONS = _functions()

CALLED = {
    function.text: function.run for function in FUNCTIONS.values() if isinstance(function.text, str)
} | {"int": int, "bool": bool}  # fmt: skip
"""The functions that conditions call, by the names that they have there."""


class Computed:
    """A number that is computed: one object for each function of the same operands.

    It has what torch asks of an expression of sympy.
    """

    is_number = is_symbol = is_Symbol = False
    _made: weakref.WeakValueDictionary[tuple, Computed] = weakref.WeakValueDictionary()

    op: str
    args: tuple[Any, ...]
    free_symbols: frozenset[Any]
    parts: int

    def __new__(cls, op: str, *args: Any) -> Computed:
        key = op, *((type(x), repr(x)) if isinstance(x, (int, float, str)) else x for x in args)
        found = cls._made.get(key)
        if found is None:
            found = cls._made[key] = super().__new__(cls)
            found.op, found.args = op, args
            found.free_symbols = frozenset().union(*(getattr(x, "free_symbols", ()) for x in args))
            found.parts = 1 + sum(x.parts for x in args if type(x) is Computed)
        return found

    def __str__(self) -> str:
        return text_of(self, str) if self.parts <= MOST_PARTS else f"{self.op} of {self.parts} numbers"

    __repr__ = __str__


def value_of(x: Any, leaf: Callable[[Any], Any]) -> Any:
    """The value of a number. leaf: says that of an expression of sympy. What `leaf` raises is passed on."""
    known: dict[int, Any] = {}

    def value(x: Any) -> Any:
        if type(x) is not Computed:
            return x if isinstance(x, (int, float, str)) else leaf(x)
        if id(x) not in known:
            known[id(x)] = FUNCTIONS[x.op].run(*map(value, x.args))
        return known[id(x)]

    return value(x)


def text_of(x: Any, leaf: Callable[[Any], str]) -> str:
    """A number as Python text. leaf: says that of an expression of sympy. OverflowError for one of too many parts.

    >>> text_of(Computed("mul", Computed("add", 2, -0.5), math.inf), str)
    '(2 + -0.5) * math.inf'
    """
    return ast.unparse(_tree(x, leaf)) if type(x) is Computed else leaf(x)


def _tree(x: Any, leaf: Callable[[Any], str]) -> ast.expr:
    if type(x) is not Computed:
        return _constant(x) if isinstance(x, (int, float, str)) else ast.parse(leaf(x), mode="eval").body
    if x.parts > MOST_PARTS:
        raise OverflowError(f"a condition on a number that is computed by {x.parts} functions")
    form, parts = FUNCTIONS[x.op].text, [_tree(each, leaf) for each in x.args]
    if isinstance(form, ast.cmpop):
        return ast.Compare(parts[0], [form], parts[1:])
    if isinstance(form, ast.operator):
        return ast.BinOp(parts[0], form, parts[1])
    if isinstance(form, ast.unaryop):
        return ast.UnaryOp(form, parts[0])
    return ast.Call(ast.parse(form, mode="eval").body, parts, [])


def _constant(x: Any) -> ast.expr:
    if type(x) is float and not math.isfinite(x):
        found = ast.parse("math.nan" if math.isnan(x) else "math.inf", mode="eval").body
        return found if x != -math.inf else ast.UnaryOp(ast.USub(), found)
    if not isinstance(x, str) and math.copysign(1, x) < 0:
        return ast.UnaryOp(ast.USub(), ast.Constant(-x))
    return ast.Constant(x)


# ---- conditions as text -----------------------------------------------------------------------

_IN_TEXTS = (
    ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Constant, ast.Load, ast.operator, ast.unaryop,
    ast.boolop, ast.cmpop,
)  # fmt: skip
_OF_TORCH = {"torch.sym_float": float, "torch.sym_int": int, "torch.sym_not": operator.not_}


def _is_function(e: ast.expr) -> bool:
    name = ast.unparse(e)
    return name in CALLED or name in _OF_TORCH or (name.startswith("math.") and hasattr(math, name[5:]))


TARGETS = frozenset(function.target for function in FUNCTIONS.values())
"""What stands for these functions in a graph."""


def checked(text: str, names: Collection[str]) -> str:
    """The text, if it is one of arithmetic, comparisons and functions of numbers. ValueError for any other."""

    def check(e: ast.AST) -> None:
        if isinstance(e, ast.Call) and _is_function(e.func) and not e.keywords:
            for each in e.args:
                check(each)
        elif isinstance(e, ast.Attribute) and ast.unparse(e) in ("math.inf", "math.nan", "math.pi", "math.e"):
            return
        elif isinstance(e, _IN_TEXTS):
            for each in ast.iter_child_nodes(e):
                check(each)
        elif not (isinstance(e, ast.Name) and e.id in names):
            raise ValueError(f"{ast.unparse(e)!r} is no arithmetic of {', '.join(names)}")

    check(ast.parse(text, mode="eval").body)
    return text


def compiled(texts: Collection[str], names: Collection[str]) -> Callable[..., bool]:
    """A function of numbers of these names that says whether all of these conditions hold. They are checked before."""
    code = f"lambda {', '.join(names)}: {' and '.join(f'({checked(text, names)})' for text in texts) or 'True'}"
    return eval(code, {"__builtins__": {}, **NAMES})


NAMES = {"math": math, "torch": torch} | {name: run for name, run in CALLED.items() if "." not in name}
"""What texts call, by name."""
