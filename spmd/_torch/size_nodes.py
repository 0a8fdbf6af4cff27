"""Symbols for sizes that know what was asked of them before.

    x.shape[0] * 8      the first time by sympy, from then on one look-up

Each op of a trace asks for the same products, strides and comparisons of the same few sizes. So all nodes of one
expression are one object (`SizeNodes`), which keeps the results of its operations and the answers to questions about
shapes. Arithmetic of sizes is not recorded: a size that is an argument of a recorded op is a node in front of the graph
(`SizeTracker`), one for each expression. Where a size meets another symbol, torch's ways are taken.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.sym_node import SymNode
from torch.utils._thunk import Thunk

from spmd._torch.number_nodes import NumberNode, check_step

# How often more became known of the symbols of a shape environment: torch 2.13 has a number for this alone.
_OF_SYMBOLS = "_replacements_version_counter"
_version = operator.attrgetter(
    _OF_SYMBOLS if _OF_SYMBOLS in SymNode.expr.fget.__code__.co_names else "_version_counter"
)


class SizeNode(NumberNode):
    """The symbol of one expression of sizes. all: the others. asked: the expression, as it was before more was known.
    answers: to questions that ops asked for their shapes."""

    def __init__(self, all: SizeNodes, like: SymNode):
        self.__dict__.update(vars(like))
        self.all, self.asked = all, like._expr
        self.answers: dict[tuple, Any] = {}
        self._results: dict[Any, SizeNode] = {}
        self._present: tuple[int, Any, int | None] = -1, None, None

    @property
    def expr(self) -> Any:
        return self._expr if self.all.is_computing else self._now()[1]

    def maybe_as_int(self) -> int | None:
        return self._now()[2]

    def _now(self) -> tuple[int, Any, int | None]:
        """The version of what is known of symbols, the expression, and its value, if it is none of a symbol."""
        version = _version(self.shape_env)
        if self._present[0] != version:
            expr = super().expr
            self._present = version, expr, int(expr) if self.pytype is int and expr.is_number else None
        return self._present

    def wrap_int(self, num: int) -> SymNode:
        return self.all.constant(super().wrap_int, num)

    def wrap_float(self, num: float) -> SymNode:
        return self.all.constant(super().wrap_float, num)

    def wrap_bool(self, num: bool) -> SymNode:
        return self.all.constant(super().wrap_bool, num)

    def kept(self, key: Any, operation: Callable, *args: Any) -> SizeNode:
        """The result of an operation, which is not recorded."""
        found = self._results.get(key)
        if found is None:
            found = self._results[key] = self.all.computed(functools.partial(operation, self, *args))
        return found


class SizeNodes:
    """All nodes of the sizes of one trace. symbols: those of sizes. is_computing: whether an operation runs. strides:
    the texts of strides that were asked for. elements: how many elements the memory of a tensor has, by its layout.

    An operation computes with what a size is, and not with what it was found to be equal to: whoever asks then is known
    to have asked.
    """

    def __init__(self):
        self.symbols: set[Any] = set()
        self.is_computing = False
        self.strides: dict[tuple, tuple[str, ...]] = {}
        self.elements: dict[tuple, Any] = {}
        self._nodes: dict[tuple, SizeNode] = {}
        self._constants: dict[tuple, SizeNode] = {}
        self._are_sizes: dict[Any, bool] = {}

    def of(self, node: SymNode) -> SizeNode:
        """The one node of the expression that a node has."""
        key = node._expr, node.pytype, node.constant
        found = self._nodes.get(key)
        if found is None:
            found = self._nodes[key] = SizeNode(self, node)
        return found

    def computed(self, operation: Callable[[], SymNode]) -> SizeNode:
        """The result of an operation."""
        was, self.is_computing = self.is_computing, True
        try:
            with proxy_tensor.disable_proxy_modes_tracing():
                return self.of(operation())
        finally:
            self.is_computing = was

    def constant(self, wrap: Callable, num: Any) -> SizeNode:
        """The node of a number."""
        key = type(num), repr(num)
        found = self._constants.get(key)
        if found is None:
            found = self._constants[key] = SizeNode(self, wrap(num))
        return found

    def has(self, expr: Any) -> bool:
        """Whether an expression is one of sizes alone."""
        found = self._are_sizes.get(expr)
        if found is None:
            found = self._are_sizes[expr] = bool(expr.free_symbols) and expr.free_symbols <= self.symbols
        return found

    def own(self, x: Any) -> SizeNode | None:
        """A node as one of these; None for other symbols."""
        if type(x) is SizeNode or not isinstance(x, SymNode):
            return x
        return self.of(x) if self.has(x.expr) else None


def _unary(name: str) -> Callable:
    plain = getattr(NumberNode, name)
    return functools.wraps(plain)(lambda self: self.kept(name, plain))


def _binary(name: str) -> Callable:
    plain = getattr(NumberNode, name)

    @functools.wraps(plain)
    def run(self: SizeNode, other: Any) -> Any:
        own = self.all.own(other)
        if own is None:
            return plain(self, other)
        if name in _DIVISIONS:
            check_step(_DIVISIONS[name], self, own)
        return self.kept((name, own), plain, own)

    return run


_DIVISIONS = {"int_floordiv": "floordiv", "mod": "mod"}


def _of_many(name: str) -> Callable:
    plain = getattr(NumberNode, name)

    @functools.wraps(plain)
    def run(self: SizeNode, *several: Any) -> Any:
        own = [[self.all.own(x) for x in nodes] for nodes in several]
        if any(x is None for nodes in own for x in nodes):
            return plain(self, *several)
        return self.kept((name, *map(tuple, own)), plain, *own)

    return run


_BINARY = (
    "add", "sub", "mul", "mod", "float_pow", "pow_by_natural", "and_", "or_", "float_truediv", "int_truediv",
    "int_floordiv", "lshift", "rshift", "eq", "ne", "gt", "lt", "le", "ge", "sym_min", "sym_max", "bitwise_and",
    "bitwise_or", "bitwise_xor",
)  # fmt: skip
_UNARY = ("abs", "pos", "neg", "trunc", "ceil", "floor", "sym_not", "sym_float", "sym_int", "is_integer")
_OF_MANY = (
    "is_contiguous", "is_channels_last_contiguous_2d", "is_channels_last_contiguous_3d", "is_channels_last_strides_2d",
    "is_channels_last_strides_3d", "is_non_overlapping_and_dense_indicator", "sym_sum",
)  # fmt: skip

for _kind, _names in ((_unary, _UNARY), (_binary, _BINARY), (_of_many, _OF_MANY)):
    for _name in _names:
        setattr(SizeNode, _name, _kind(_name))


def elements_of(shape: Sequence[Any], stride: Sequence[Any], offset: Any) -> Any:
    """How many elements memory has that holds a tensor of this layout, if no size that is a symbol is 0: torch takes
    that for granted, too."""
    sizes = (*shape, *stride, offset)
    of = next((n.node.all for n in sizes if type(n) is torch.SymInt), None)
    key = tuple([n if type(n) is int else n.node for n in sizes])
    if of is None or key not in of.elements:
        is_empty = 0 in [n for n in shape if type(n) is int]
        found = 0 if is_empty else offset + 1 + sum(step * (n - 1) for n, step in zip(shape, stride, strict=True))
        if of is None:
            return found
        of.elements[key] = found
    return of.elements[key]


def strides_text(x: torch.Tensor) -> tuple[str, ...]:
    """The strides of a tensor as text. Torch writes `Max(1, n)` for a size n in some; an empty tensor has no memory, so
    that is n here."""
    shape, stride = x.shape, x.stride()
    of = next((n.node for n in stride if isinstance(n, torch.SymInt)), None)
    if of is None:
        return tuple(map(str, stride))
    if type(of) is not SizeNode:
        return _text_of_strides(shape, stride)
    key = _version(of.shape_env), *(n if type(n) is int else n.node for n in (*shape, *stride))
    if key not in of.all.strides:
        of.all.strides[key] = _text_of_strides(shape, stride)
    return of.all.strides[key]


def _text_of_strides(shape: Sequence[Any], stride: Sequence[Any]) -> tuple[str, ...]:
    from torch.utils._sympy.functions import Max  # with sympy, which only symbols need

    plain = {Max(1, n.node.expr): n.node.expr for n in shape if isinstance(n, torch.SymInt)}
    return tuple(str(n.node.expr.xreplace(plain) if isinstance(n, torch.SymInt) else n) for n in stride)


# ---- in a graph -------------------------------------------------------------------------------


def size(of: Any) -> Any:
    """In the graph of a trace: a size. Whoever reads the graph takes the value of the node."""
    raise NotImplementedError(f"the size {of} stands for a number in the graph of a trace")


class SizeTracker:
    """The symbols that a trace knows, with their proxies. A size has a node as soon as something is recorded that has
    it as an argument, behind the inputs. others: of all other symbols.
    """

    def __init__(self, tracer: torch.fx.Tracer, sizes: SizeNodes):
        self.tracer, self.others, self._sizes = tracer, tracer.symnode_tracker, sizes
        self._last = next(iter(reversed(tracer.graph.nodes)), None)
        self._found: dict[Any, Thunk] = {}

    def get(self, symbol: Any, default: Any = None) -> Any:
        expr = symbol.node.expr
        found = self._found.get(expr)
        if found is None and self._sizes.has(expr):
            found = self._found[expr] = Thunk(functools.partial(self._made, symbol))
        return self.others.get(symbol, default) if found is None else found

    def _made(self, symbol: Any) -> torch.fx.Proxy:
        graph = self.tracer.graph
        with graph.inserting_after(self._last):
            node = self._last = graph.create_node("call_function", size, (str(symbol.node.expr),))
        node.meta["val"] = symbol
        return torch.fx.Proxy(node, self.tracer)

    def __getitem__(self, symbol: Any) -> Any:
        return self.get(symbol)

    def __setitem__(self, symbol: Any, proxy: Any) -> None:
        self.others[symbol] = proxy

    def __contains__(self, symbol: Any) -> bool:
        return type(symbol.node) is SizeNode or self.get(symbol) is not None


def unrecorded(record: Callable, sizes: SizeNodes) -> Callable:
    """What a trace does with arithmetic of symbols, but for sizes. torch makes nodes of them that are not ours."""

    def run(function: Callable, types: Any, args: tuple, kwargs: dict) -> Any:
        if not all(_is_size(x, sizes) for x in args):
            return record(function, types, args, kwargs)
        found = function(*args, **kwargs)
        own = sizes.own(found.node) if isinstance(found, proxy_tensor.py_sym_types) else None
        return found if own is None else type(found)(own)

    return run


def _is_size(x: Any, sizes: SizeNodes) -> bool:
    if isinstance(x, (list, tuple)):
        return all(_is_size(each, sizes) for each in x)
    if not isinstance(x, proxy_tensor.py_sym_types) or sizes.own(x.node) is not None:
        return True
    return isinstance(x, torch.SymBool) and not x.node.expr.free_symbols  # a comparison that is true of all sizes
