"""Numbers that stay symbols in a trace: a learning rate, a count of steps in a tensor, the norm of a gradient.

torch.fx.experimental.symbolic_shapes imports sympy, which takes as long as a third of torch: only a capture needs it,
so it is imported by the first one, and not with spmd.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import functools
import math
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._subclasses import fake_tensor
from torch.utils._pytree import tree_leaves

from spmd._torch.fake_results import FakeResults, is_kept
from spmd._torch.fakes import UNKNOWN_SHAPE, FakeTensorMode
from spmd._torch.read_numbers import Integer


def _symbolic_shapes() -> ModuleType:
    from torch.fx.experimental import symbolic_shapes  # heavy, and only captures need it: see above

    return symbolic_shapes


def _sympy() -> ModuleType:
    import sympy  # see above

    return sympy


def unknown_value_errors() -> tuple[type[Exception], ...]:
    """UNKNOWN_SHAPE, and the error where Python code asks an unknown value for a branch or a size: for `except`."""
    return (*UNKNOWN_SHAPE, _symbolic_shapes().GuardOnDataDependentSymNode)


class _SymbolSafeFakes(FakeTensorMode):
    """Fake tensors that remember small constants, such as a step count of 0, until a symbolic float meets them.

    torch would go on computing with the constant and get NaN. What is known of the value of a tensor of one number is
    kept as `symbol`, an expression, through sums and comparisons: what is `item()` of it can then decide a branch.
    Ops whose shapes torch takes for unknown, though the arguments tell them, have them. running: how many ops are
    finding their shapes.
    """

    running = 0

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.results = FakeResults()

    def from_tensor(self, tensor, *args, **kwargs):
        own = type(tensor) is fake_tensor.FakeTensor and tensor.fake_mode is self  # an input that is made here already
        return tensor if own and not _has_symbolic_size(tensor) else super().from_tensor(tensor, *args, **kwargs)

    def dispatch(self, func, types, args=(), kwargs=None):
        if func in _SHAPES:
            with self:
                return _SHAPES[func](*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs)) if kwargs else _leaves(args)
        if any(isinstance(x, torch.SymFloat) for x in leaves):
            for x in leaves:
                if isinstance(x, fake_tensor.FakeTensor):
                    x.constant = None
        self.running += 1
        try:
            out = self._shapes(func, types, args, kwargs or {}, leaves)
        finally:
            self.running -= 1
        if func in _FACTORIES and not out.ndim and (value := _expression(_FACTORIES[func](*args))) is not None:
            out.symbol = value
        if any(hasattr(x, "symbol") for x in leaves):
            if func is torch.ops.aten._local_scalar_dense.default:
                self.shape_env.define(out, args[0].symbol)
            elif func in _EXACT and isinstance(out, torch.Tensor):
                _note_value(out, func, args, kwargs or {})
        return out


    def _shapes(self, func, types, args, kwargs, leaves) -> Any:
        """The results of an op, without data."""
        if not any(type(x) is torch.SymInt or _has_symbolic_size(x) for x in leaves):
            return super().dispatch(func, types, args, kwargs)
        if func in _READS_NUMBERS:
            with self:
                return _READS_NUMBERS[func](*args, **kwargs)
        if not is_kept(func):
            return super().dispatch(func, types, args, kwargs)
        return self.results.of(self, func, types, args, kwargs)


def _leaves(args: tuple) -> list[Any]:
    """What operands are made of, as `tree_leaves` gives it: an op has lists of tensors, sizes or numbers at most."""
    found: list[Any] = []
    for x in args:
        if isinstance(x, (list, tuple)):
            found += x
        else:
            found.append(x)
    return found


def _interpolated(x: torch.Tensor, output_size: Any, *_: Any) -> torch.Tensor:
    return x.new_empty((*x.shape[:2], *output_size))


def _like_input(grad: torch.Tensor, output_size: Any, input_size: Any, *_: Any) -> torch.Tensor:
    return grad.new_empty(input_size)


def _between(x: torch.Tensor, end: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x + weight * (end - x)


def _solved(x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    """A solution of equations with the matrices of `by`, which lies column by column."""
    batch = torch.broadcast_shapes(x.shape[:-2], by.shape[:-2])
    return x.new_empty((*batch, x.shape[-1], x.shape[-2])).mT


def number_now(n: Any) -> Any:
    """The present value of a number that may be a symbol. Nothing is taken for granted: only choices may read it."""
    return n.node.hint if isinstance(n, (torch.SymInt, torch.SymFloat, torch.SymBool)) else n


def _transformed(x: torch.Tensor, shape: list[Any], dims: list[int], dtype: torch.dtype) -> torch.Tensor:
    """The result of a Fourier transform. It lies as x does, with the dims that are transformed inside."""
    if x.device.type == "cpu" and not torch.backends.mkl.is_available():
        return x.new_empty(shape, dtype=dtype)
    order = _outermost_first(x, [d for d in range(x.ndim) if d not in dims]) + dims
    return x.new_empty([shape[d] for d in order], dtype=dtype).permute([order.index(d) for d in range(x.ndim)])


def _outermost_first(x: torch.Tensor, dims: list[int]) -> list[int]:
    """Some dims in the order in which they lie in memory now."""
    steps = [number_now(n) for n in x.stride()]
    return sorted(dims, key=lambda d: -steps[d])


def _c2c(x: torch.Tensor, dim: list[int], normalization: int, forward: bool) -> torch.Tensor:
    return _transformed(x, list(x.shape), _outermost_first(x, dim), x.dtype)


def _r2c(x: torch.Tensor, dim: list[int], normalization: int, onesided: bool) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim[-1]] = shape[dim[-1]] // 2 + 1 if onesided else shape[dim[-1]]
    return _transformed(x, shape, list(dim), x.dtype.to_complex())


def _c2r(x: torch.Tensor, dim: list[int], normalization: int, last_dim_size: Any) -> torch.Tensor:
    shape = list(x.shape)
    shape[dim[-1]] = last_dim_size
    return _transformed(x, shape, list(dim), x.dtype.to_real())


_INTERPOLATIONS = (
    "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d",
    "upsample_bicubic2d", "upsample_trilinear3d",
)  # fmt: skip
_READS_NUMBERS = {
    op: decomposition_table[op] for op in (torch.ops.aten.constant_pad_nd.default, torch.ops.aten.rot90.default)
}
_READS_NUMBERS |= {getattr(torch.ops.aten, name).default: _interpolated for name in _INTERPOLATIONS}
_READS_NUMBERS |= {getattr(torch.ops.aten, f"{name}_backward").default: _like_input for name in _INTERPOLATIONS}
_READS_NUMBERS |= {
    torch.ops.aten.lerp.Tensor: _between,
    torch.ops.aten.cholesky_solve.default: lambda x, by, *_: _solved(x, by),
    torch.ops.aten.linalg_solve_triangular.default: lambda by, x, **_: _solved(x, by),
    torch.ops.aten._fft_c2c.default: _c2c, torch.ops.aten._fft_r2c.default: _r2c, torch.ops.aten._fft_c2r.default: _c2r,
}  # fmt: skip
"""Ops whose shapes come from kernels in C++ that make numbers of symbols, with functions that give the shapes."""


def _has_symbolic_size(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in x.shape)


def _note_value(out: torch.Tensor, func: Any, args: tuple, kwargs: dict) -> None:
    """Give the result the expression of its value, where each operand has one."""
    operands = [_expression(x) for x in args]
    if None not in operands and (factor := _expression(kwargs.get("alpha", 1))) is not None:
        expression = _EXACT[func](*operands[:1], *(factor * x for x in operands[1:]))
        if expression is not None:
            out.symbol = expression


def _expression(x: Any) -> Any:
    """The value of an operand, a tensor of one number or a number, as an expression; None where it is not known."""
    constant = getattr(x, "constant", None)
    if isinstance(constant, torch.Tensor) and not constant.ndim:
        x = constant.item()
    if isinstance(x, (torch.SymInt, torch.SymFloat)):
        return x.node.expr
    return _sympy().sympify(x) if type(x) in (int, float) else getattr(x, "symbol", None)


def known_value(x: torch.Tensor) -> Any:
    """What is known of the value of a fake tensor of one number, an expression; None for most."""
    return getattr(x, "symbol", None)


def _compare(name: str) -> Callable[[Any, Any], Any]:
    return lambda x, y: getattr(_sympy(), name)(x, y)


def _exact_ops() -> dict[Any, Callable]:
    """Ops whose results, on whole numbers such as counts, are those of the expression, without rounding."""
    aten = torch.ops.aten
    found = {aten.neg.default: lambda x: -x}
    found |= {getattr(aten, name).default: lambda x: x for name in ("clone", "detach", "alias", "lift_fresh")}
    for kind in ("Tensor", "Scalar"):
        found |= {
            getattr(aten.add, kind): lambda x, y: x + y, getattr(aten.sub, kind): lambda x, y: x - y,
            getattr(aten.mul, kind): lambda x, y: x * y,
        }  # fmt: skip
        found |= {getattr(getattr(aten, name), kind): _compare(name.capitalize()) for name in _COMPARISONS}
    return found


_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_EXACT = _exact_ops()
_FACTORIES: dict[Any, Callable] = {
    torch.ops.aten.ones.default: lambda size: 1, torch.ops.aten.zeros.default: lambda size: 0,
    torch.ops.aten.full.default: lambda size, value: value, torch.ops.aten.scalar_tensor.default: lambda value: value,
}  # fmt: skip
"""Ops that make a tensor of one number, with the number."""


@functools.lru_cache(maxsize=1)
def _environment() -> type:
    """A ShapeEnv that decides branches by the values of tensors that are known. A class, made when it is needed."""

    class Environment(_symbolic_shapes().ShapeEnv):
        def __init__(self) -> None:
            super().__init__(duck_shape=False)  # sizes that happen to be equal are not one symbol
            self.hints: dict[Any, float] = {}
            self.defined: dict[Any, Any] = {}
            self.decided: dict[Any, None] = {}
            self.refused: list[Exception] = []

        def define(self, number: Any, expression: Any) -> None:
            """Note what `item()` of a tensor is an expression of."""
            (symbol,) = number.node.expr.free_symbols
            self.defined[symbol] = _as_number(expression)

        def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return self.evaluated(*args, **kwargs)
            except _symbolic_shapes().GuardOnDataDependentSymNode as error:
                self.refused.append(error)
                raise

        def evaluated(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
            free = getattr(orig_expr, "free_symbols", frozenset())
            if not free & self.defined.keys():
                return super().evaluate_expr(orig_expr, *args, **kwargs)
            expression = orig_expr.xreplace(self.defined)
            if not expression.free_symbols <= self.hints.keys() or not _is_condition(orig_expr):
                return super().evaluate_expr(orig_expr, *args, **kwargs)
            answer = bool(expression.xreplace(self.hints))
            self.decided[expression if answer else _sympy().Not(expression)] = None
            return _sympy().sympify(answer)

    return Environment


def _is_condition(expression: Any) -> bool:
    from sympy.logic.boolalg import Boolean

    return isinstance(expression, Boolean) and not expression.is_Symbol  # sympy takes a symbol for a condition


def _as_number(expression: Any) -> Any:
    """A condition as one or zero: so torch has the `item()` of a bool."""
    return _sympy().Piecewise((1, expression), (0, True)) if _is_condition(expression) else expression


def _ctc_loss(log_probs: torch.Tensor, targets, input_lengths, target_lengths, *_: Any) -> tuple[torch.Tensor, ...]:
    steps, batch, _ = log_probs.shape
    return log_probs.new_empty(batch), log_probs.new_empty((batch, steps, 2 * max(target_lengths, default=0) + 1))


def _diagonal(x: torch.Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> torch.Tensor:
    """torch's kernel in C++ makes numbers of symbols."""
    rest = [n for d, n in enumerate(x.shape) if d not in (dim1 % x.ndim, dim2 % x.ndim)]
    rows, columns = x.shape[dim1] + min(offset, 0), x.shape[dim2] - max(offset, 0)
    length = rows if rows == columns else torch.sym_max(torch.sym_min(rows, columns), 0)
    return x.new_empty((*rest, length))


_SHAPES = {torch.ops.aten._ctc_loss.default: _ctc_loss, torch.ops.aten.diagonal_copy.default: _diagonal}


class Symbols:
    """Numbers that stay symbols in a trace, and the guards on them: the conditions that the trace relies on.

    A Python branch on a symbol is decided by its present value and recorded; `still_hold` says whether other values
    take the same branches. A branch on a value that only the run knows is an error.
    """

    def __init__(self):
        self.env = _environment()()
        self.symbols: dict[str, Any] = {}
        self._answer: tuple[tuple, bool] | None = None
        self._mode = _SymbolSafeFakes(shape_env=self.env)

    def fake_mode(self) -> FakeTensorMode:
        return self._mode

    def forget_ops(self) -> None:
        """To be called when the trace is complete: what its ops gave is not needed any more."""
        self._mode.results.clear()

    @property
    def refused(self) -> list[Exception]:
        """The errors that were raised for branches on values that only the run knows, whoever has caught them."""
        return self.env.refused

    def number(self, name: str, value: float):
        """A SymFloat that stands for the number of this name."""
        symbol, source = self._symbol(name, value)
        return self.env.create_symfloatnode(symbol, hint=value, source=source)

    def noting(self, name: str, value: float) -> Callable[[torch.Tensor], None]:
        """A function to be called with each fake tensor that holds the number of this name, which has this value now.
        """
        symbol = self.symbols[name] if name in self.symbols else self._symbol(name, value)[0]
        return lambda x: setattr(x, "symbol", symbol)

    def _symbol(self, name: str, value: float) -> tuple[Any, Any]:
        from torch._dynamo.source import ConstantSource  # a second to import, and only captures need it

        source = ConstantSource(name)
        dynamic = _symbolic_shapes().DimDynamic.DYNAMIC
        # By default 0.0 and 1.0 would be no symbols but constants, without a condition that says so.
        symbol = self.env.create_symbol(
            value, source=source, dynamic_dim=dynamic, positive=None, do_not_specialize_zero_one=True
        )
        self.symbols[name] = symbol
        self.env.hints[symbol] = _sympy().sympify(value)
        return symbol, source

    @functools.cached_property
    def conditions(self) -> tuple[Any, ...]:
        """What has to hold of the numbers, as expressions. To be asked when the trace is complete."""
        of_numbers = [guard.expr for guard in self.env.guards if guard.expr.free_symbols <= self.env.hints.keys()]
        return (*of_numbers, *self.env.decided)

    @functools.cached_property
    def asked(self) -> frozenset[str]:
        """The names of the numbers that branches were decided by."""
        used = frozenset().union(*(condition.free_symbols for condition in self.conditions))
        return frozenset(name for name, symbol in self.symbols.items() if symbol in used)

    def became_constants(self, names: Iterable[str]) -> bool:
        """Whether one of these floats was asked for its value. torch then computes with it, in ways of its own."""
        return any(self.symbols[name] in self.env.replacements for name in names if name in self.symbols)

    def still_hold(self, values: Mapping[str, float]) -> bool:
        """Whether every branch taken on the symbols would be taken again with these values."""
        asked = tuple((name, repr(values[name])) for name in sorted(self.asked))
        if self._answer is None or self._answer[0] != asked:
            known = not any(math.isnan(values[name]) for name in self.asked)
            at = {self.symbols[name]: _sympy().sympify(values[name]) for name in self.asked}
            self._answer = asked, known and all(bool(condition.xreplace(at)) for condition in self.conditions)
        return self._answer[1]


@contextlib.contextmanager
def symbolic_min_max() -> Iterator[None]:
    """Inside, Python's `min` and `max` of numbers that a trace keeps as symbols are symbols, too, and no branch.

    One thread at a time may be inside; the others find `min` and `max` as they are.
    """
    real, thread = (builtins.min, builtins.max), threading.get_ident()

    def of_symbols(plain: Callable, symbolic: Callable) -> Callable:
        def run(*args: Any, **options: Any) -> Any:
            if threading.get_ident() != thread or options:
                return plain(*args, **options)
            items = list(args[0]) if len(args) == 1 else args
            if any(isinstance(x, (torch.SymFloat, Integer)) or is_unbacked(x) for x in items):
                return functools.reduce(symbolic, items)
            return plain(items) if len(args) == 1 else plain(*args)

        return run

    builtins.min, builtins.max = of_symbols(real[0], torch.sym_min), of_symbols(real[1], torch.sym_max)
    try:
        yield
    finally:
        builtins.min, builtins.max = real


def symbolic_number(node: Any) -> Any:
    """The SymInt, SymFloat or SymBool of a node, by the type that the node has."""
    kind = torch.SymInt if node.is_int() else torch.SymFloat if node.is_float() else torch.SymBool
    return kind(node)


def size_key(n: Any) -> Any:
    """A size or stride as a key: itself, or the expression of a symbol."""
    return n.node.expr if isinstance(n, torch.SymInt) else n


SYMBOLS = torch.SymInt, torch.SymFloat, torch.SymBool


def is_symbol(value: Any) -> bool:
    """Whether a value in a trace is a symbolic number."""
    return isinstance(value, SYMBOLS)


def is_unbacked(value: Any) -> bool:
    """Whether a symbolic number is one that only the run knows."""
    return isinstance(value, (torch.SymInt, torch.SymFloat)) and not value.node.has_hint()


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

        asked = {name: symbol for name, symbol in symbols.symbols.items() if name in symbols.asked}
        short = {symbol: type(symbol)(f"n{i}") for i, symbol in enumerate(asked.values())}
        texts = [PythonPrinter().doprint(condition.xreplace(short)) for condition in symbols.conditions]
        return cls({f"n{i}": name for i, name in enumerate(asked)}, tuple(dict.fromkeys(texts)))

    @property
    def asked(self) -> frozenset[str]:
        """The names of the numbers that the conditions are about."""
        return frozenset(self.names.values())

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
_OF_TORCH = {"sym_float": float, "sym_int": int, "sym_not": operator.not_}
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
        case ast.IfExp(test, body, other):
            return _arithmetic(body if _arithmetic(test, names) else other, names)
        case ast.Compare(left, ops, rest):
            found = [_arithmetic(v, names) for v in (left, *rest)]
            pairs = zip(ops, found, found[1:], strict=False)
            return all(_OPERATORS[type(op)](a, b) for op, a, b in pairs)
        case ast.Call(ast.Name(name), args) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_arithmetic(a, names) for a in args))
        case ast.Call(ast.Attribute(ast.Name("math"), name), args):
            return getattr(math, name)(*(_arithmetic(a, names) for a in args))
        case ast.Call(ast.Attribute(ast.Name("torch"), name), args) if name in _OF_TORCH:
            return _OF_TORCH[name](*(_arithmetic(a, names) for a in args))
        case ast.Attribute(ast.Name("math"), name):
            return getattr(math, name)
    raise ValueError(f"{ast.unparse(e)!r} is no arithmetic of {', '.join(names)}")
