"""Numbers of a trace whose floats compute as Python's do: op by op, as written.

    (k + 1) - k     two nodes, and not 1: at 1e16 it is 0

Ints that sizes depend on are those of torch, which simplifies them. Whatever a float takes part in is `Computed`, and
so is what follows from a truth value. Where Python raises for the present values, it is raised in the step; that it
does or does not is a condition of the trace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.sym_node import SymNode, to_node, wrap_node
from torch.utils._thunk import Thunk

from spmd._torch.computed import FUNCTIONS, MATH, OF_SYMBOLS, Computed, outcome
from spmd._torch.handlers import is_caught
from spmd._torch.read_numbers import ErrorOfRun


class NumberNode(SymNode):
    """The node of a number of a trace, with what a node of torch has."""

    def __init__(self, like: SymNode):
        self.__dict__.update(vars(like))

    @property
    def is_computed(self) -> bool:
        """Whether it is computed as Python does, and never simplified."""
        return self.pytype is float or type(self._expr) is Computed

    @property
    def expr(self) -> Any:
        return self._expr if self.is_computed else super().expr

    @property
    def operand(self) -> Any:
        """What stands for it in what is computed of it."""
        if self.constant is not None:
            return self.constant
        expr = self.expr
        if self.pytype is bool and type(expr) is not Computed and (read := _read_of_tensor(expr)) is not None:
            return Computed("eq", read, 1)
        return expr

    def maybe_as_float(self) -> float | None:
        return self.constant

    def wrap_int(self, num: int) -> SymNode:
        return NumberNode(super().wrap_int(num))

    def wrap_float(self, num: float) -> SymNode:
        return NumberNode(super().wrap_float(num))

    def wrap_bool(self, num: bool) -> SymNode:
        return NumberNode(super().wrap_bool(num))

    # ---- asked for a value ----------------------------------------------------------------------

    def guard_bool(self, file: str, line: int) -> bool:
        if self.pytype is not bool and self.is_computed:
            return self.ne(to_node(self, 0.0 if self.pytype is float else 0)).guard_bool(file, line)
        return super().guard_bool(file, line)

    def guard_int(self, file: str, line: int) -> int:
        return int(self.settled()) if self.is_computed else super().guard_int(file, line)

    def guard_float(self, file: str, line: int) -> float:
        return float(self.settled()) if self.is_computed else super().guard_float(file, line)

    def settled(self) -> Any:
        """The present value, which the trace takes for granted from now on."""
        if self.constant is not None:
            return self.constant
        if (value := self.value) is None:
            self.shape_env.evaluate_expr(Computed("eq", self.operand, 0), None)  # raises
        if self.pytype is bool:
            return bool(self.shape_env.evaluate_expr(self.operand, value))
        self.shape_env.evaluate_expr(is_now(self.operand, value), True)
        return value

    def expect_true(self, file: str, line: int) -> bool:
        if not self.is_computed:
            return super().expect_true(file, line)
        return self.guard_bool(file, line) if self.is_known else True

    @property
    def value(self) -> Any:
        """The present value; None where only the run knows it."""
        return self._hint if self._hint is not None else self.shape_env.known(self.operand)

    @property
    def is_known(self) -> bool:
        """Whether the trace may ask for its value."""
        return self.constant is not None or self.value is not None


def is_now(x: Any, value: Any) -> Computed:
    """The condition that a number has this value."""
    if value != value:
        return Computed("ne", x, x)
    if value or type(value) is int:
        return Computed("eq", x, value)
    return Computed("eq", Computed("repr", x), repr(value))  # zero has a sign


def _read_of_tensor(condition: Any) -> Any:
    """The symbol of a truth value that is read of a tensor: torch says that it is 1."""
    args = getattr(condition, "args", ())
    is_one = type(condition).__name__ == "Equality" and args[1] == 1 and args[0].is_Symbol
    return args[0] if is_one and args[0].name.startswith("u") else None


def number(env: Any, expr: Any, kind: type, value: Any, constant: Any = None) -> NumberNode:
    """The node of a number of this type. value: the present one; None where only the run knows it."""
    import sympy  # a third of torch, and only captures need it

    node = NumberNode(SymNode(sympy.S.Zero, env, int, 0))
    node.__dict__.update(_expr=expr, pytype=kind, _hint=value, constant=constant)
    return node


# ---- what is computed -------------------------------------------------------------------------


def applied(op: str, *nodes: SymNode, options: tuple = ()) -> SymNode:
    """What a function gives for numbers. options: further arguments, which are plain."""
    function = FUNCTIONS[op]
    nodes = tuple(x if isinstance(x, NumberNode) else NumberNode(x) for x in nodes)
    _check(op, nodes)
    args = tuple(map(wrap_node, nodes))
    mode = proxy_tensor.get_proxy_mode()
    with proxy_tensor.disable_proxy_modes_tracing():
        operands = [x.operand for x in nodes]
        known = all(x.hint is not None for x in nodes)
        value = function.run(*(x.hint for x in nodes), *options) if known else None
        kind = function.gives or _common(nodes[-2:])
        if kind is not str and value is not None:
            value = kind(value)
        out = number(nodes[0].shape_env, Computed(op, *operands, *options), kind, value)
    if mode is not None:
        mode.tracer.symnode_tracker[wrap_node(out)] = Thunk(
            functools.partial(_recorded, mode.tracer, function.target, (*args, *options), out)
        )
    return out


def _common(nodes: tuple[NumberNode, ...]) -> type:
    kinds = {x.pytype for x in nodes}
    return float if float in kinds else int if int in kinds or len(nodes) == 1 else bool


def _recorded(tracer: Any, target: Callable, args: tuple, out: SymNode) -> torch.fx.Proxy:
    """A node of a graph for what is computed, made when something that is recorded needs it."""
    fetch = proxy_tensor.fetch_sym_proxy(tracer)
    given = [fetch(x) if isinstance(x, proxy_tensor.py_sym_types) else x for x in args]
    given = [x.node if isinstance(x, torch.fx.Proxy) else x for x in given]
    node = tracer.create_node("call_function", target, tuple(given), {})
    node.meta["val"] = wrap_node(out)
    return torch.fx.Proxy(node, tracer)


_DIVISIONS = {"truediv", "floordiv", "mod"}
_WHOLE = {"math.trunc", "math.floor", "math.ceil", "whole"}
_NEVER_RAISE = {f"math.{name}" for name in ("atan", "atan2", "tanh", "erf", "erfc", "fabs", "asinh")}


def _check(op: str, nodes: tuple[NumberNode, ...]) -> None:
    """Raise what Python raises for the present values. Whether it does becomes a condition of the trace."""
    may_raise = _errors_of(op)
    deciding = nodes[-1:] if op in _DIVISIONS else nodes
    if not may_raise or (op in _DIVISIONS and nodes[-1].constant):
        return
    if not all(x.is_known for x in deciding):
        _refuse_if_caught(op, nodes[0].shape_env)
    elif op in _DIVISIONS:
        _check_divisor(op, *nodes)
    else:
        _check_outcome(op, nodes)


def check_step(op: str, number: NumberNode, other: NumberNode) -> None:
    """The same for a division of ints by the step. Shapes of ops divide by sizes, too, and take none to be 0."""
    if op in _DIVISIONS and proxy_tensor.get_proxy_mode() is not None:
        _check(op, (number, other))


def _refuse_if_caught(op: str, env: Any) -> None:
    """Raise ErrorOfRun where code of the user catches what the run may raise: the program would raise it."""
    if is_caught(_errors_of(op)):
        env.refused.append(ErrorOfRun(f"{op.removeprefix('math.')} of a number in a tensor"))
        raise env.refused[-1]


@functools.lru_cache(maxsize=256)
def _errors_of(op: str) -> tuple[type[Exception], ...]:
    """What a function may raise."""
    if op in _DIVISIONS:
        return (ZeroDivisionError,)
    if op in _WHOLE:
        return OverflowError, ValueError
    if op == "pow":
        return ZeroDivisionError, OverflowError
    return (OverflowError, ValueError) if op.removeprefix("math.") in MATH and op not in _NEVER_RAISE else ()


def _check_divisor(op: str, number: NumberNode, divisor: NumberNode) -> None:
    if divisor.constant is None and divisor.ne(to_node(divisor, divisor.pytype(0))).guard_bool("", 0):
        return
    FUNCTIONS[op].run(number.pytype(1), divisor.pytype(0))  # raises


def _check_outcome(op: str, nodes: tuple[NumberNode, ...]) -> None:
    values = [x.value for x in nodes]
    now, operands = outcome(op, *values), [x.operand for x in nodes]
    nodes[0].shape_env.evaluate_expr(Computed("eq", Computed("outcome", op, *operands), now), True)
    if now == "complex":
        raise NotComputed(FUNCTIONS[op].run(*[x.settled() for x in nodes]))
    FUNCTIONS[op].run(*values)  # raises, where it does


class NotComputed(Exception):
    """A function gives a complex number for the present values, which the trace takes for granted."""

    def __init__(self, value: complex):
        super().__init__(f"{value!r} is no float")
        self.value = value


# ---- the methods of a node --------------------------------------------------------------------

_BINARY = {
    "add": "add", "sub": "sub", "mul": "mul", "mod": "mod", "float_truediv": "truediv", "int_truediv": "truediv",
    "int_floordiv": "floordiv", "float_pow": "pow", "pow_by_natural": "pow", "lshift": "lshift", "rshift": "rshift",
    "and_": "and_", "or_": "or_", "sym_and": "and_", "sym_or": "or_", "bitwise_and": "and_", "bitwise_or": "or_",
    "bitwise_xor": "xor", "eq": "eq", "ne": "ne", "gt": "gt", "lt": "lt", "le": "le", "ge": "ge", "sym_min": "min",
    "sym_max": "max",
}  # fmt: skip
_UNARY = {
    "abs": "abs", "pos": "pos", "neg": "neg", "trunc": "math.trunc", "ceil": "math.ceil", "floor": "math.floor",
    "sym_not": "not", "sym_float": "float", "is_integer": "is_integer",
}  # fmt: skip
_UNARY |= {f"sym_{name}": f"math.{name}" for name in OF_SYMBOLS}
_FLOATS = {"truediv", "float"}
"""What gives a float of ints."""
_OF_BITS = {"and_", "or_", "xor"}


def _as_number(x: Any) -> Any:
    return NumberNode(x) if type(x) is SymNode else x


def _as_int(x: NumberNode) -> NumberNode:
    """A truth value as 0 or 1."""
    if x.pytype is not bool:
        return x
    return applied("pos", x) if x.constant is None else _as_number(to_node(x, int(x.constant)))


def _binary(name: str, op: str) -> Callable:
    plain = getattr(SymNode, name)

    @functools.wraps(plain)
    def run(self: NumberNode, other: SymNode) -> Any:
        other = _as_number(other)
        if op not in _OF_BITS and self.pytype is not other.pytype:  # torch compares a truth value with no number
            self, other = _as_int(self), _as_int(other)
        if op in _FLOATS or self.is_computed or other.is_computed:
            return applied(op, self, other)
        check_step(op, self, other)
        return _as_number(plain(self, other))

    return run


def _unary(name: str, op: str) -> Callable:
    plain = getattr(SymNode, name)

    @functools.wraps(plain)
    def run(self: NumberNode) -> Any:
        return applied(op, self) if op in _FLOATS or self.is_computed else _as_number(plain(self))

    return run


for _name, _op in _BINARY.items():
    setattr(NumberNode, _name, _binary(_name, _op))
for _name, _op in _UNARY.items():
    setattr(NumberNode, _name, _unary(_name, _op))


def _round(self: NumberNode, ndigits: int | None = None) -> Any:
    if not self.is_computed:
        return _as_number(SymNode.round(self, ndigits))
    return applied("whole", self) if ndigits is None else applied("round", self, options=(ndigits,))


def _if_else(self: NumberNode, one: SymNode, other: SymNode) -> Any:
    one, other = _as_number(one), _as_number(other)
    if self.is_computed or one.is_computed or other.is_computed:
        return applied("ite", self, one, other)
    return _as_number(SymNode.sym_ite(self, one, other))


def _sum(self: NumberNode, args: list[SymNode]) -> Any:
    args = list(map(_as_number, args))
    return functools.reduce(NumberNode.add, args) if any(x.is_computed for x in args) else _as_number(
        SymNode.sym_sum(self, args)
    )


NumberNode.round, NumberNode.sym_ite, NumberNode.sym_sum = _round, _if_else, _sum
