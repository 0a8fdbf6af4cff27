"""Errors of ops that the step catches: they are decided by sizes, which a program for many sizes would not ask again.

    try:
        y = x.view(4, -1, 2)            raises for some sizes of x alone
    except RuntimeError:
        y = x.view(-1, 2)

A trace in which the step has caught the error of an op is made again with sizes that are numbers, for these alone. So
is one in which an op within a `try` gives what nobody reads: it would be left out of the program, with its error for
other sizes. With numbers it is asked whether the error is one of the op, and not one of the trace: the op is run on
zeros of these sizes.
"""

from __future__ import annotations

import dis
import functools
import sys
from collections.abc import Callable, Iterable, Iterator
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch import fx

from spmd import _torch
from spmd._torch import pytree
from spmd.comm.user_line import is_library
from spmd.expand.user_code import at_user_line, ended_in_user_code


class DecidedByErrors(Exception):
    """The step catches errors of ops, or may catch them at other sizes."""


class Caught:
    """The errors that ops have raised in a trace, and what ops within a `try` have made.

    functions: the user's, of which it is asked whether they catch errors. outermost: the code around the step.
    is_exact: whether sizes are numbers.
    """

    def __init__(self, functions: Iterable[FunctionType], outermost: CodeType, is_exact: bool) -> None:
        self._outermost, self._is_exact = outermost, is_exact
        self.watches = any(catching(fn.__code__) for fn in functions)
        self._errors: list[Exception] = []
        self._lines: dict[fx.Node, str] = {}

    def noted(self, error: Exception, function: Callable, args: tuple, kwargs: dict[str, Any]) -> Exception:
        """The error that an op raises on a device, where it raises this one in the trace, and the step may catch it.
        Raises NotTheOps if it raises none there."""
        self._errors.append(error)
        if not (self._is_exact and _is_caught(self._outermost)):
            return error
        real = _on_a_device(function, args, kwargs)
        if real is None:
            raise NotTheOps(
                f"the step catches an error that {_name(function)} raises in the trace alone, and its program would go "
                f"another way than one device: {type(error).__name__}: {error}"
            ) from error
        return real

    def pass_on(self, call: Callable, *given: Any) -> Any:
        """Call this, and note what it adds to the graph of the trace where the step would catch its error."""
        if not _is_caught(self._outermost):
            return call(*given)
        graph = _torch.proxy_mode().tracer.graph
        last = next(iter(reversed(graph.nodes)))
        out = call(*given)
        if last is not next(iter(reversed(graph.nodes))):
            self._lines |= dict.fromkeys(_behind(last), at_user_line(_frames(sys._getframe(1))))
        return out

    def check(self, graph: fx.Graph) -> None:
        """Raise DecidedByErrors if a trace with symbols for sizes may go another way at other sizes; RuntimeError if an
        op that nobody reads would raise on a device, and did not in the trace."""
        errors, self._errors = self._errors, []
        if not self._is_exact and any(map(ended_in_user_code, errors)):
            raise DecidedByErrors("the step catches an error of an op")
        live = _live(graph) if self._lines else set()
        for node, line in self._lines.items():
            if node not in live and node.op == "call_function" and _may_raise(node):
                if not self._is_exact:
                    raise DecidedByErrors(f"the step may catch an error of {node.target}, which nothing reads")
                _check_runs(node, line)


# ---- what code catches ------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def catching(code: CodeType) -> bool:
    """Whether a function, or one inside of it, catches errors.

    >>> def f(x):
    ...     try:
    ...         return x.view(4)
    ...     except RuntimeError:
    ...         return x
    >>> catching(f.__code__), catching((lambda x: x.view(4)).__code__)
    (True, False)
    """
    return bool(_tried(code)) or any(catching(x) for x in code.co_consts if isinstance(x, CodeType))


@functools.lru_cache(maxsize=4096)
def _tried(code: CodeType) -> tuple[range, ...]:
    """The instructions of a function whose errors are caught: within `try` with `except`, or `with suppress(...)`."""
    found = {i.offset: i for i in dis.get_instructions(code)}
    offsets = sorted(found)
    suppresses = "suppress" in (*code.co_names, *code.co_freevars)

    def catches(target: int) -> bool:
        after = [found[at] for at in offsets if at > target][:1]
        is_with = bool(after) and after[0].opname == "WITH_EXCEPT_START"
        if is_with:
            return suppresses
        return bool(after) and _ends_by_catching(found, offsets, target)

    entries = dis.Bytecode(code).exception_entries
    tops = [e for e in entries if found.get(e.target) and found[e.target].opname == "PUSH_EXC_INFO"]
    return tuple(range(e.start, e.end) for e in tops if catches(e.target))


def _ends_by_catching(found: dict[int, Any], offsets: list[int], target: int) -> bool:
    """Whether a handler asks for the kind of an error, or goes on after it, and does not only raise it again."""
    for at in (at for at in offsets if at > target):
        if found[at].opname in ("CHECK_EXC_MATCH", "CHECK_EG_MATCH", "POP_EXCEPT"):
            return True
        if found[at].opname in ("RERAISE", "PUSH_EXC_INFO"):
            return False
    return False


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_caught(outermost: CodeType) -> bool:
    """Whether code around the call is within a `try`, up to the code around the step."""
    for frame in _frames(sys._getframe(2)):
        if frame.f_code is outermost:
            return False
        tried = () if is_library(frame.f_code.co_filename) else _tried(frame.f_code)
        if tried and any(frame.f_lasti in each for each in tried):
            return True
    return False


# ---- what ops do ------------------------------------------------------------------------------


def _behind(last: fx.Node) -> Iterator[fx.Node]:
    """The nodes of a graph behind this one."""
    node = last.next
    while node.op != "root":
        yield node
        node = node.next


def _live(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that the outputs are made of, and those that have effects."""
    left = [n for n in graph.nodes if n.op == "output" or (n.op == "call_function" and n.is_impure())]
    found: set[fx.Node] = set()
    while left:
        if (node := left.pop()) not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


def _may_raise(node: fx.Node) -> bool:
    """Whether an op may raise for some sizes: not one of a single tensor and nothing else, as `relu`."""
    if not isinstance(node.target, _torch.OpOverload):
        return False
    leaves = pytree.tree_leaves((node.args, node.kwargs))
    return len([x for x in leaves if x is not None]) > 1


def _zeros(x: Any) -> Any:
    """A value of a trace as one of a device, with zeros in tensors."""
    if isinstance(x, torch.Tensor):
        shape, stride = ([_torch.number_now(n) for n in of] for of in (x.shape, x.stride()))
        memory = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if 0 not in shape else 0
        return torch.zeros(memory, dtype=x.dtype).as_strided(shape, stride)
    return _torch.number_now(x)


def _on_a_device(function: Callable, args: Any, kwargs: Any) -> Exception | None:
    """The error of a function on zeros."""
    with _torch.no_modes():
        given, named = pytree.tree_map(_zeros, (args, kwargs))
        try:
            function(*given, **named)
        except Exception as error:
            return error
    return None


class NotTheOps(BaseException):
    """An error that is one of the trace: the step may not catch it. It becomes a RuntimeError behind the step."""


def _check_runs(node: fx.Node, line: str) -> None:
    args, kwargs = pytree.tree_map_only(fx.Node, lambda n: n.meta.get("val"), (node.args, node.kwargs))
    real = _on_a_device(node.target, args, kwargs)
    if real is not None or _takes_places(node, (args, kwargs)):
        why = "an index may be out of range" if real is None else f"{type(real).__name__}: {real}"
        raise RuntimeError(
            f"the step would catch an error of {node.target}, whose result nothing reads, so that its program would "
            f"leave it out ({why}): use the result, or decide by sizes{line}"
        )


def _takes_places(node: fx.Node, given: Any) -> bool:
    """Whether an op takes places in a tensor from another one, which alone says whether they are in range."""
    tensors = [x for x in pytree.tree_leaves(given) if isinstance(x, torch.Tensor)]
    are_places = any(not x.dtype.is_floating_point and x.dtype is not torch.bool for x in tensors)
    return are_places and str(node.target).removeprefix("aten.").startswith(BY_VALUES)


BY_VALUES = ("index", "gather", "embedding", "take", "scatter", "put", "_unsafe_index")
"""The names of ops begin so that take places in tensors, which may be out of range."""


def _name(function: Callable) -> str:
    return getattr(function, "__name__", str(function))
