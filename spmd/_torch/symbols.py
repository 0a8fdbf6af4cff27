"""Numbers that stay symbols in a trace: a learning rate, a count of steps in a tensor, the norm of a gradient.

torch.fx.experimental.symbolic_shapes imports sympy, which takes as long as a third of torch: only a capture needs it,
so it is imported by the first one, and not with spmd.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._subclasses import fake_tensor
from torch.fx.experimental.sym_node import to_node
from torch.utils._pytree import tree_leaves

from spmd._torch.computed import Computed, checked, compiled, text_of, value_of
from spmd._torch.fake_results import FakeResults, is_kept
from spmd._torch.fakes import UNKNOWN_SHAPE, FakeTensorMode
from spmd._torch.known_values import note_value
from spmd._torch.number_methods import of_numbers
from spmd._torch.number_nodes import NumberNode, is_now, number
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
        if func is not torch.ops.aten._local_scalar_dense.default:
            note_value(out, func, args, kwargs or {}, leaves)
        elif hasattr(args[0], "symbol"):
            self.shape_env.define(out, args[0].symbol)
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


def known_value(x: torch.Tensor) -> Any:
    """What is known of the value of a fake tensor of one number, an expression; None for most."""
    return getattr(x, "symbol", None)


@functools.lru_cache(maxsize=1)
def _environment() -> type:
    """A ShapeEnv that decides branches by the values of tensors that are known. A class, made when it is needed."""

    class Environment(_symbolic_shapes().ShapeEnv):
        def __init__(self) -> None:
            super().__init__(duck_shape=False)  # sizes that happen to be equal are not one symbol
            self.hints: dict[Any, Any] = {}
            self.defined: dict[Any, Any] = {}
            self.decided: dict[tuple[Any, bool], None] = {}
            self.beside: set[Any] = set()
            self.refused: list[Exception] = []

        def create_symintnode(self, *args: Any, **kwargs: Any) -> Any:
            return _of_ours(super().create_symintnode(*args, **kwargs))

        def create_unbacked_symint(self, *args: Any, **kwargs: Any) -> Any:
            return _of_ours(super().create_unbacked_symint(*args, **kwargs))

        def create_unbacked_symfloat(self) -> Any:
            return _of_ours(super().create_unbacked_symfloat())

        def create_unbacked_symbool(self) -> Any:
            return _of_ours(super().create_unbacked_symbool())

        def define(self, number: Any, expression: Any) -> None:
            """Note what `item()` of a tensor is."""
            (symbol,) = number.node.expr.free_symbols
            self.defined[symbol] = expression

        def known(self, expression: Any) -> Any:
            """The present value of what follows from numbers that are known; None of others."""
            return value_of(expression, self._of_leaf) if self.numbers_in(expression) is not None else None

        def _of_leaf(self, x: Any) -> Any:
            if x in self.hints:
                return self.hints[x]
            if x in self.defined:
                return value_of(self.defined[x], self._of_leaf)
            values = {symbol: self._of_leaf(symbol) for symbol in x.free_symbols}
            values = {symbol: _sympy().sympify(n + 0) for symbol, n in values.items()}  # of a truth value: 0 or 1
            found = x.xreplace(values)
            return int(found) if found.is_number else bool(found)

        def numbers_in(self, expression: Any) -> frozenset[Any] | None:
            """The symbols of the numbers that something follows from; None where it follows from others, too."""
            found: set[Any] = set()
            left = list(getattr(expression, "free_symbols", ()))
            while left:
                symbol = left.pop()
                if symbol in self.defined:
                    left += getattr(self.defined[symbol], "free_symbols", ())
                elif symbol in self.hints:
                    found.add(symbol)
                else:
                    return None
            return frozenset(found)

        def evaluate_expr(self, orig_expr: Any, hint: Any = None, *args: Any, **kwargs: Any) -> Any:
            try:
                return self.evaluated(orig_expr, hint, *args, **kwargs)
            except _symbolic_shapes().GuardOnDataDependentSymNode as error:
                self.refused.append(error)
                raise

        def evaluated(self, orig_expr: Any, hint: Any, *args: Any, **kwargs: Any) -> Any:
            free = getattr(orig_expr, "free_symbols", frozenset())
            if type(orig_expr) is not Computed and not free & self.defined.keys():
                return super().evaluate_expr(orig_expr, hint, *args, **kwargs)
            value = self.known(orig_expr) if hint is None else hint
            if value is not None:
                self._decide(orig_expr, value)
                return _sympy().sympify(value)
            if type(orig_expr) is not Computed:
                return super().evaluate_expr(orig_expr, hint, *args, **kwargs)
            if (fallback := kwargs.get("fallback_value")) is not None:
                return _sympy().sympify(fallback)
            raise _symbolic_shapes().GuardOnDataDependentSymNode(orig_expr, f"the value of {orig_expr}")

        def _decide(self, expression: Any, value: Any) -> None:
            """Note the condition that something has this value, if it depends on numbers of calls that are not ints
            and sizes alone: what these decide is noted beside (`SizeSymbols`)."""
            if self.numbers_in(expression) <= self.beside and not expression.free_symbols & self.defined.keys():
                return
            is_truth = isinstance(value, bool)
            self.decided[(expression, value) if is_truth else (is_now(expression, value), True)] = None

        def text(self, expression: Any, names: Mapping[Any, str]) -> str:
            """A number as Python text. names: of symbols."""
            printer = _printer()

            def leaf(x: Any) -> str:
                printer._print_Symbol = symbol
                return printer.doprint(x)

            def symbol(x: Any) -> str:
                return names[x] if x in names else f"({text_of(self.defined[x], leaf)})"

            return text_of(expression, leaf)

    return Environment


def _printer() -> Any:
    from torch.utils._sympy.printers import PythonPrinter  # imports sympy: see above

    return PythonPrinter()


def _of_ours(x: Any) -> Any:
    return type(x)(NumberNode(x.node)) if isinstance(x, SYMBOLS) else x


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
        return torch.SymFloat(number(self.env, self._symbol(name, value), float, value))

    def beside(self, symbol: Any, name: str, value: int) -> None:
        """Take another symbol for that of the number of this name: conditions may be about both kinds."""
        self.symbols[name], self.env.hints[symbol] = symbol, value
        self.env.beside.add(symbol)

    def noting(self, name: str, value: float) -> Callable[[torch.Tensor], None]:
        """A function to be called with each fake tensor that holds the number of this name, which has this value now.
        """
        symbol = self.symbols[name] if name in self.symbols else self._symbol(name, value)
        return lambda x: setattr(x, "symbol", symbol)

    def _symbol(self, name: str, value: float) -> Any:
        symbol = _sympy().Symbol(f"zf{len(self.symbols)}", real=True)
        self.symbols[name], self.env.hints[symbol] = symbol, value
        return symbol

    @functools.cached_property
    def conditions(self) -> tuple[tuple[Any, bool], ...]:
        """What has to be true or false of the numbers. To be asked when the trace is complete."""
        return tuple(self.env.decided)

    @functools.cached_property
    def asked(self) -> frozenset[str]:
        """The names of the numbers that branches were decided by."""
        used = frozenset().union(*(self.env.numbers_in(condition) for condition, _ in self.conditions))
        return frozenset(name for name, symbol in self.symbols.items() if symbol in used)

    def still_hold(self, values: Mapping[str, float]) -> bool:
        """Whether every branch taken on the symbols would be taken again with these values."""
        return self._texts.still_hold(values)

    @functools.cached_property
    def _texts(self) -> Conditions:
        return Conditions.of(self)


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
                return functools.reduce(functools.partial(_first_of, plain, symbolic), items)
            return plain(items) if len(args) == 1 else plain(*args)

        return run

    builtins.min, builtins.max = of_symbols(real[0], torch.sym_min), of_symbols(real[1], torch.sym_max)
    try:
        yield
    finally:
        builtins.min, builtins.max = real


def _first_of(plain: Callable, symbolic: Callable, x: Any, y: Any) -> Any:
    """The smaller or greater one of two, as Python finds it: the first, where neither is."""
    if not is_symbol(x) and not is_symbol(y):
        return plain(x, y)
    kinds = {float if isinstance(n, (float, torch.SymFloat)) else int for n in (x, y)}
    if len(kinds) == 2:  # an int or a float: a branch, or for the run to say
        of_both = f"{plain.__name__} of both"
        return of_numbers(of_both, plain, x, y) if is_unbacked(x) or is_unbacked(y) else plain(x, y)
    if not is_symbol(x):  # torch would ask the other one first
        x = symbolic_number(to_node(y.node, float(x) if isinstance(y, torch.SymFloat) else x))
        return symbolic_number(getattr(x.node, symbolic.__name__)(y.node))
    return symbolic(x, y)


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


def settled(value: Any) -> Any:
    """A number for what is kept behind a trace: the present value of a symbol, which the trace takes for granted from
    now on. LookupError for one that only the run knows."""
    if not is_symbol(value):
        return value
    if not value.node.is_known:
        raise LookupError("the number is known only when the program runs")
    return value.node.settled()


def is_unbacked(value: Any) -> bool:
    """Whether a symbolic number is one that only the run knows."""
    return isinstance(value, (torch.SymInt, torch.SymFloat)) and not value.node.has_hint()


# ---- conditions as text -----------------------------------------------------------------------


def of_size(name: str) -> str:
    """The name of the number that is the size of this name: no other number has one of a space."""
    return f"size {name}"


class Conditions:
    """The conditions of a trace on its numbers, as text: what is left of `Symbols` in a saved program.

    names: the name of each number, by what it is called in the conditions. They are Python expressions of arithmetic
    and comparisons: "n0 > 0.5".

    >>> Conditions({"n0": "lr"}, ("n0 > 0.5",)).still_hold({"lr": 0.25})
    False
    """

    def __init__(self, names: dict[str, str], texts: tuple[str, ...]):
        self.names, self.texts = names, texts
        for text in texts:
            checked(text, names)

    @classmethod
    def of(cls, symbols: Symbols | Conditions) -> Conditions:
        """The conditions of a trace."""
        if isinstance(symbols, Conditions):
            return symbols
        asked = {name: symbol for name, symbol in symbols.symbols.items() if name in symbols.asked}
        short = {symbol: f"n{i}" for i, symbol in enumerate(asked.values())}
        texts = [(symbols.env.text(condition, short), holds) for condition, holds in symbols.conditions]
        texts = [text if holds else f"not {text}" for text, holds in texts]
        return cls({f"n{i}": name for i, name in enumerate(asked)}, tuple(dict.fromkeys(texts)))

    @property
    def asked(self) -> frozenset[str]:
        """The names of the numbers that the conditions are about."""
        return frozenset(self.names.values())

    def at(self, sizes: Mapping[str, float]) -> Conditions:
        """The same at these sizes, by name."""
        said = {short: repr(sizes[name]) for short, of in self.names.items() for name in sizes if of == of_size(name)}
        names = {short: of for short, of in self.names.items() if short not in said}
        return Conditions(names, tuple(_renamed(text, said) for text in self.texts)) if said else self

    @functools.cached_property
    def _hold(self) -> Callable[..., bool]:
        return compiled(self.texts, self.names)

    def still_hold(self, values: Mapping[str, float]) -> bool:
        """Whether all conditions hold for these numbers, by name."""
        return self.hold([values[name] for name in self.names.values()])

    def hold(self, values: Sequence[float]) -> bool:
        """The same of numbers in the order of `names`."""
        try:
            return bool(self._hold(*values))
        except (ArithmeticError, ValueError):  # of arithmetic that the trace did with other numbers
            return False


def _renamed(text: str, names: Mapping[str, str]) -> str:
    return re.sub(r"[A-Za-z_]\w*", lambda found: names.get(found[0], found[0]), text)
