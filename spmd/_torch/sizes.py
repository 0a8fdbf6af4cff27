"""Sizes that stay symbols in a trace, with every decision that the trace makes about them.

    x0 == 1, x0 * x1 < 2, x0 != y0      questions that are asked of a batch of x0 rows: by the step, or by ops

All of torch's questions about symbols go through `ShapeEnv.evaluate_expr`. There each is noted, also one that torch
answers by itself from what was asked before.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from spmd._torch.computed import text_of
from spmd._torch.quick_traces import record_quickly
from spmd._torch.size_nodes import SizeNode, SizeNodes, SizeTracker, unrecorded
from spmd._torch.symbols import Symbols, of_size
from spmd._torch.traces import proxy_mode


class Decision(NamedTuple):
    """What a trace took for granted about its sizes.

    condition: as Python text over the names of the sizes. of_op: whether only shapes of ops depend on it. asked_at:
    what `where` said when it was asked.
    """

    condition: str
    of_op: bool
    asked_at: str


class SizeSymbols:
    """Makes symbols for sizes, and notes what is asked about them. where: says where the question comes from."""

    def __init__(self, symbols: Symbols, where: Callable[[], str] = str):
        self.env, self._mode, self._where, self._all = symbols.env, symbols.fake_mode(), where, symbols
        self.arguments: frozenset[str] = frozenset()
        """The names of those that stay inputs of the program: no shape depends on them."""
        self._nodes = SizeNodes()
        self._names: dict[Any, str] = {}
        self._printed: dict[Any, str] = {}
        self._found: dict[tuple, tuple[str, str]] = {}
        self._evaluate, self.env.evaluate_expr = self.env.evaluate_expr, self._evaluated
        self._evaluate_node, self.env.evaluate_sym_node = self.env.evaluate_sym_node, self._evaluated_node

    def size(self, name: str, of: str, value: int) -> torch.SymInt:
        """A symbol for a size. name: an identifier of its own. of: what it is the size of."""
        found = self._symbol(name, of, value)
        self._nodes.symbols.add(found.node.expr)
        self._all.beside(found.node.expr, of_size(name), value)
        return torch.SymInt(self._nodes.of(found.node))

    def integer(self, name: str, of: str, value: int) -> torch.SymInt:
        """A symbol for an int, whose arithmetic is recorded. The arguments are those of `size`."""
        found = self._symbol(name, of, value)
        self._all.beside(found.node.expr, of, value)
        return found

    def _symbol(self, name: str, of: str, value: int) -> torch.SymInt:
        from torch._dynamo.source import ConstantSource  # a second to import, and only captures need it
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        source = ConstantSource(of)
        # By default 0 and 1 would be no symbols but constants, without a condition that says so.
        symbol = self.env.create_symbol(
            value, source=source, dynamic_dim=DimDynamic.DYNAMIC, positive=None, do_not_specialize_zero_one=True
        )
        self._names[symbol] = name
        return self.env.create_symintnode(symbol, hint=value, source=source)

    def track(self) -> None:
        """To be called as a trace begins: it records no arithmetic of sizes, and what is as usual quickly."""
        mode = proxy_mode()
        record_quickly(mode)
        mode.tracer.symnode_tracker = SizeTracker(mode.tracer, self._nodes)
        mode.__sym_dispatch__ = unrecorded(mode.__sym_dispatch__, self._nodes)

    # ---- decisions ------------------------------------------------------------------------------
    def _evaluated(self, expr: Any, *args: Any, **kwargs: Any) -> Any:
        """In the place of the `evaluate_expr` of torch, which answers all questions."""
        answer = self._evaluate(expr, *args, **kwargs)
        free = getattr(expr, "free_symbols", frozenset())
        if free & self._names.keys():
            self._note(expr, answer, free <= self._names.keys(), sys._getframe(1))
        return answer

    def _evaluated_node(self, node: Any, size_oblivious: bool = False, fallback_value: bool | None = None) -> Any:
        """In the place of torch's method. What an op asks again for its shapes has been noted.

        The step may ask what torch knows since an op asked it: another answer would have been right for the op.
        """
        if type(node) is not SizeNode:
            return self._evaluate_node(node, size_oblivious, fallback_value)
        if not self._mode.running:
            answer = self._evaluate_node(node, size_oblivious, fallback_value)
            if node.asked != node.expr:
                self._note(node.asked, answer, True, sys._getframe(1))
            return answer
        key = size_oblivious, fallback_value
        if key not in node.answers:
            node.answers[key] = self._evaluate_node(node, size_oblivious, fallback_value)
        return node.answers[key]

    def _note(self, expr: Any, answer: Any, of_sizes: bool, frame: Any) -> None:
        about_shapes = self._mode.running > 0 or _is_about_shapes(frame, expr, answer)
        key = expr, answer, about_shapes and _is_truth(answer)  # a symbol that became a number is none any more
        if of_sizes and key not in self._found:  # what is decided by other numbers, too, is among the conditions of all
            self._found[key] = self._condition(expr, answer), self._where()

    def _condition(self, expr: Any, answer: Any) -> str:
        text = self._text(expr)
        if not _is_truth(answer):
            return f"{text} == {answer}"
        return text if answer else f"not ({text})"

    def take_for_granted(self, condition: str) -> None:
        """Note a condition, as text over the names of sizes, that the graph is right for alone."""
        asked = next((at for text, at in self._found.values() if text == condition), "")
        self._found.setdefault((condition, True, False), (condition, asked))

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """All decisions, each once, those of the step first."""
        for symbol, name in self._names.items():
            equal = self.env.replacements.get(symbol)
            if equal is not None and symbol not in self._nodes.symbols:  # no shape says any more that it is this int
                self.take_for_granted(f"{name} == {self._text(equal)}")
        by_step = {text: Decision(text, False, at) for (*_, of_op), (text, at) in self._found.items() if not of_op}
        by_op = {text: Decision(text, True, at) for (*_, of_op), (text, at) in self._found.items() if of_op}
        return (*by_step.values(), *(d for text, d in by_op.items() if text not in by_step))

    # ---- expressions ----------------------------------------------------------------------------
    def text(self, value: Any) -> str | None:
        """A symbolic number as Python text over the names of sizes; None where it depends on more than sizes.

        The text may use `math` and `torch`.
        """
        free = value.node.expr.free_symbols
        known = free <= self._names.keys() and not self.arguments & {self._names[symbol] for symbol in free}
        return self._text(value.node.expr) if known else None

    def names_in(self, value: Any) -> set[str]:
        """The names of the sizes that a symbolic number depends on."""
        return {self._names[symbol] for symbol in value.node.expr.free_symbols if symbol in self._names}

    def _text(self, expr: Any) -> str:
        if expr not in self._printed:
            self._printed[expr] = text_of(expr, self._printer.doprint)
        return self._printed[expr]

    @functools.cached_property
    def _printer(self) -> Any:
        from torch.utils._sympy.printers import PythonPrinter  # imports sympy: only captures need it

        printer = PythonPrinter()
        printer._print_Symbol = self._names.__getitem__
        return printer


def _is_truth(answer: Any) -> bool:
    """Whether an answer is yes or no, and no number. Those of sympy are no bools."""
    return type(answer).__name__ in ("bool", "BooleanTrue", "BooleanFalse")


def _in_torch(*paths: str) -> tuple[str, ...]:
    return tuple(os.path.join(os.path.dirname(torch.__file__), *path.split("/")) for path in paths)


_ASKING = (__file__, *_in_torch("fx/experimental", "_logging", "utils/_stats.py", "__init__.py"))
_ASKING = (*_ASKING, os.path.join(os.path.dirname(__file__), "symbols.py"))
"""The code through which a question about a symbol goes."""

_LAYOUT = _in_torch("_prims_common/__init__.py", "_subclasses", "fx/passes/shape_prop.py")
"""torch's code that asks how tensors lie in memory."""

_EITHER_IS_RIGHT = {"guard_or_false", "guard_or_true", "guard_size_oblivious"}
"""How torch asks where it is right to go on with either answer, as it has to for sizes that only the run knows."""


def _is_about_shapes(frame: Any, expr: Any, answer: Any) -> bool:
    """Whether shapes and strides of ops, and nothing else, depend on the answer to a question asked in this frame.

    Where code in C++ asks whether a size is 0 or 1, it is not, and it goes the general way: so it is, too. Shapes tell
    where the general way is not that of 0 or 1, as in a broadcast.
    """
    while frame is not None and frame.f_code.co_filename.startswith(_ASKING):
        if frame.f_code.co_name in _EITHER_IS_RIGHT:
            return True
        if frame.f_code.co_name == "guard_bool" and frame.f_locals["file"] and _says_not_0_or_1(expr, answer):
            return True
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(_LAYOUT)


def _says_not_0_or_1(expr: Any, answer: Any) -> bool:
    """Whether it was asked whether a number is 0 or 1, and it is not."""
    asked = type(expr).__name__ in ("Equality", "Unequality") and any(side in (0, 1) for side in expr.args)
    return asked and bool(answer) == (type(expr).__name__ == "Unequality")
