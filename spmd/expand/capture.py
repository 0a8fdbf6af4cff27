"""Capture: the single-device function as one functional graph on global shapes.

The function runs once under make_fx, on fake tensors of the *global* sizes: forward, backward and optimiser step as
the user wrote them. Parameters, buffers, gradients and optimiser state are inputs and outputs of the graph;
in-place writes are made functional; floats - the learning rate - are symbols; the step count is read from its
tensor. Nothing of this knows of a mesh, but for functions of blocks (`mapped`).

    graph(model.w, optimizer.step[model.w], ..., tokens, lr) -> loss, new model.w, ...
"""

from __future__ import annotations

import operator
import os
import traceback
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from spmd import _torch
from spmd._torch import pytree
from spmd.expand.mapped import captured_calls, one_at_a_time
from spmd.expand.state import PLAIN, Slot, State, Tensors, named_leaves
from spmd.expand.whole import IN_A_TRACE, Whole, renamed
from spmd.mesh import DeviceMesh
from spmd.tensor.call import Call
from spmd.tensor.dtensor import DTensor
from spmd.tensor.random import Draw
from spmd.tensor.rules.decompositions import decompositions
from spmd.tensor.rules.draws import FILLS
from spmd.tensor.rules.lists import list_decompositions
from spmd.tensor.spec import contiguous

aten = torch.ops.aten


@dataclass(frozen=True)
class Argument:
    """An input of the graph that the caller passes: a tensor, or a number that may change between calls."""

    path: str

    def __str__(self):
        return self.path


@dataclass(frozen=True)
class Draws:
    """An input of the graph: the seed of the random numbers, and the number of the first of so many draws."""

    count: int

    def __str__(self):
        return f"random numbers, {self.count} draws"


@dataclass(frozen=True)
class Captured:
    """A single-device function as a graph.

    inputs: one `Slot` or `Argument` per placeholder, and `Draws` last where the function draws. results: where each
    output goes: a `Slot`, or the index of a leaf of what the function returns. leaves and tree: that return value, None
    where a tensor goes. fixed: float arguments that could not stay symbols, with the values that the graph is for.
    """

    graph: fx.Graph
    constants: dict[str, torch.Tensor]
    inputs: tuple[Slot | Argument | Draws, ...]
    outputs: tuple[Slot | int, ...]
    leaves: tuple[Any, ...]
    tree: Any
    symbols: _torch.Symbols
    fixed: dict[str, float]

    def holds(self, numbers: dict[str, float]) -> bool:
        """Whether the graph is right for these numbers too: the trace would have taken the same branches."""
        fixed = all(repr(numbers[path]) == repr(value) for path, value in self.fixed.items())
        return fixed and self.symbols.still_hold(numbers)


def capture(
    fn: Callable,
    args: dict[str, Any],
    call: Callable[[dict[str, Any]], Any],
    state: State,
    mesh: DeviceMesh | None = None,
) -> Captured:
    """Trace `call(args)`, which calls fn with the named arguments. mesh: on which functions of blocks run in it.

    Raises RuntimeError where fn touches a tensor that is neither an argument nor inside one, where it decides on a
    value that only the run knows, or where it changes what would be frozen; NotImplementedError where it draws random
    numbers that cannot be numbered, or makes tensors of sizes that only the run knows. The arguments and what is in
    them are left as they are.
    """
    _check_hooks(state)
    floats = {path: x for path, x in named_leaves(args) if isinstance(x, float)}
    try:
        captured = _captured(fn, args, call, state, {}, mesh)
    except Exception:
        if not floats:
            raise
    else:
        if not floats or _only_arithmetic(captured.graph):
            return captured
    return _captured(fn, args, call, state, floats, mesh)


def _captured(
    fn: Callable, args: dict[str, Any], call: Callable, state: State, fixed: dict[str, float], mesh: DeviceMesh | None
) -> Captured:
    name = getattr(fn, "__name__", str(fn))
    symbols = _torch.Symbols()
    mode = symbols.fake_mode()
    slots = state.tensors()
    leaves = dict(named_leaves(args))
    inputs: dict[Slot | Argument, Any] = {slot: _fake(mode, t) for slot, t in slots.items()}
    inputs |= {Argument(path): _fake(mode, x) for path, x in leaves.items() if isinstance(x, torch.Tensor)}
    numbers = state.numbers() | {path: x for path, x in leaves.items() if isinstance(x, float) and path not in fixed}
    inputs |= {Argument(path): symbols.number(path, x) for path, x in numbers.items()}
    trace = _Trace(call, args, state, slots, tuple(inputs))
    try:
        with one_at_a_time, captured_calls(mesh) as settle:
            gm = make_fx(trace, decomposition_table=decompositions, tracing_mode="fake")(list(inputs.values()))
            settle(gm.graph)
    except AssertionError as error:
        if "token for effect" in str(error):
            raise NotImplementedError(
                f"{name} calls an op that only checks or prints, which has no place in a program; use a variant "
                f"without, such as torch.linalg.inv_ex{_in_user_code(error)}"
            ) from error
        if "FakeTensor" not in str(error):
            raise
        raise RuntimeError(
            f"{name} uses a tensor that is not among its arguments, nor in a module or optimiser among them; "
            f"pass it as an argument{_in_user_code(error)}"
        ) from error
    except _torch.UNKNOWN_VALUE as error:
        raise RuntimeError(
            f"{name} decides by a value in a tensor, which only the run knows; write it with ops on tensors, such as "
            f"torch.where, or move it out of the step{_in_user_code(error)}"
        ) from error
    constants = _attributes(gm)
    renamed(gm.graph)
    _clean(gm.graph)
    inputs = (*inputs, *_number_draws(gm.graph))
    return Captured(gm.graph, constants, inputs, trace.outputs, trace.leaves, trace.tree, symbols, fixed)


ARITHMETIC = {operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pow, operator.pos}


def _only_arithmetic(graph: fx.Graph) -> bool:
    """Whether nothing is done to numbers that a symbol does otherwise than a float, such as rounding."""
    numbers = (n for n in graph.nodes if n.op == "call_function" and _torch.is_symbol(n.meta.get("val")))
    return all(n.target in ARITHMETIC or isinstance(n.target, _torch.OpOverload) for n in numbers)


@dataclass
class _Trace:
    """The function that make_fx runs: flat tensors in, flat tensors out; what it returns otherwise is kept here."""

    call: Callable
    args: dict[str, Any]
    state: State
    slots: Tensors
    inputs: tuple[Slot | Argument, ...]
    outputs: tuple = ()
    leaves: tuple = ()
    tree: Any = None

    def __call__(self, flat: list) -> list:
        with _torch.FunctionalTensorMode():
            given = dict(zip(self.inputs, flat, strict=True))
            wrapped = {k: _torch.functional(v) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
            new = {slot: self._as_before(slot, wrapped[slot]) for slot in self.slots}
            numbers = {a.path: v for a, v in wrapped.items() if isinstance(a, Argument)}
            with self.state.swap(new, numbers):
                constants = self.state.constants()
                with _Normal(), Whole(), _torch.data_is_written():
                    result = self.call(_with_leaves(self.args, numbers))
                after = self.state.tensors()
                self._check_unchanged(constants, numbers)
                self._check_places(after)
        self._check_arguments_unwritten(given, wrapped)
        return self._flat_outputs(result, after)

    def _as_before(self, slot: Slot, x: torch.Tensor) -> torch.Tensor:
        if slot.kind == "parameter":
            return nn.Parameter(x, requires_grad=self.slots[slot].requires_grad)
        return x

    def _check_unchanged(self, constants: dict[str, Hashable], numbers: dict[str, Any]) -> None:
        """A Python value that the step changes would be frozen at what it is now: say so instead."""
        present = dict(self.state._hyper())
        for path, symbol in numbers.items():
            if path in present and present[path] is not symbol:
                raise RuntimeError(f"the step changes {path} itself; change it between steps, outside the step")
        now = self.state.constants()
        changed = [path for path in {**constants, **now} if constants.get(path) != now.get(path)]
        if changed:
            raise RuntimeError(
                f"the step changes a Python value in {changed[0]} (a flag, a count kept as a number, a tensor kept as "
                "an attribute); it would be frozen in the program. Keep tensors with register_buffer, counts in "
                "tensors, and set flags outside the step."
            )

    def _check_places(self, after: Tensors) -> None:
        """Tensors of modules do not come and go, and what lasts keeps its shape and dtype."""
        before = {slot for slot in self.slots if slot.kind in ("parameter", "buffer")}
        parted = before ^ {slot for slot in after if slot.kind in ("parameter", "buffer")}
        if parted:
            raise RuntimeError(f"the step adds or removes {min(parted)}; register what a module holds before the step")
        for slot in self.slots.keys() & after.keys():
            old, new = self.slots[slot], after[slot]
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                raise RuntimeError(
                    f"the step makes {slot}, {list(old.shape)} of {old.dtype}, a tensor of {list(new.shape)} of "
                    f"{new.dtype}; state keeps its shape and dtype. Let the step return what grows."
                )

    def _check_arguments_unwritten(self, given: dict, wrapped: dict) -> None:
        for i, x in wrapped.items():
            if isinstance(i, Argument) and isinstance(x, torch.Tensor) and _torch.settled(x) is not given[i]:
                raise RuntimeError(f"the step writes into its argument {i}; let it return the new value instead")

    def _flat_outputs(self, result: Any, after: Tensors) -> list:
        leaves, self.tree = pytree.tree_flatten(result)
        traced = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) or _torch.is_symbol(x)]
        strange = next((x for x in leaves if not isinstance(x, PLAIN) and not _torch.is_symbol(x)), None)
        if strange is not None:
            raise TypeError(
                f"the step returns a {type(strange).__name__}; it may return tensors, numbers, strings, None, and "
                "lists, tuples or dicts of them"
            )
        self.leaves = tuple(None if i in traced else x for i, x in enumerate(leaves))
        self.outputs = (*traced, *after)
        values = [leaves[i] for i in traced] + list(after.values())
        return [_torch.settled(v) if isinstance(v, torch.Tensor) else v for v in values]


def _fake(mode, t: torch.Tensor) -> torch.Tensor:
    """A fake of the global tensor, with the strides it has when it is placed."""
    stride = t.stride() if isinstance(t, DTensor) else contiguous(t.shape)
    with mode:
        return torch.empty_strided(t.shape, stride, dtype=t.dtype, device=t.device)


def _check_hooks(state: State) -> None:
    """A trace runs on tensors of its own, so hooks on the parameters would not run."""
    for path, p in state.parameters().items():
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            raise NotImplementedError(f"{path} has a gradient hook, which a compiled step would not run; remove it")


def _with_leaves(args: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    found, tree = pytree.tree_flatten(args)
    paths = [path for path, _ in named_leaves(args)]
    return pytree.tree_unflatten([new.get(path, x) for path, x in zip(paths, found, strict=True)], tree)


def _attributes(gm: fx.GraphModule) -> dict[str, torch.Tensor]:
    return {n.target: getattr(gm, n.target) for n in gm.graph.nodes if n.op == "get_attr"}


# ---- ops as the expander wants them -----------------------------------------------------------


class _Normal(_torch.TorchDispatchMode):
    """List ops and fused optimiser steps go tensor by tensor, before functionalisation meets them.

    Draws that cannot be numbered are refused, and sizes that only the run knows.
    """

    table = list_decompositions()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if Call(op, args, kwargs, ()).draws:
            _check_draw(op, kwargs)
        _check_written(op, args)
        out = self.table.get(op, IN_A_TRACE.get(op, op))(*args, **kwargs)
        if torch.Tag.dynamic_output_shape in op.tags and _has_symbolic_size(out):
            raise NotImplementedError(
                f"{op}: the size of its result is in the values, which only the run knows; write it with ops that keep "
                f"sizes, such as torch.where{_at_user_line(frame for frame, _ in traceback.walk_stack(None))}"
            )
        return out


def _check_draw(op, kwargs: dict[str, Any]) -> None:
    """Random numbers in a program are those of `spmd.manual_seed`, in the order in which the function draws."""
    why = None
    if _torch.in_backward():
        why = "draws in a backward pass, as activation checkpointing does that computes again what drew; leave it out"
    elif kwargs.get("generator") is not None:
        why = "draws from a generator of its own, which would be frozen; use spmd.manual_seed, or draw outside the step"
    elif op not in FILLS and op not in decompositions:
        why = "draws in its kernel, which is not supported in a compiled step; use uniform_, normal_ or dropout"
    if why is not None:
        raise NotImplementedError(f"{op}: {why}{_at_user_line(frame for frame, _ in traceback.walk_stack(None))}")


def _check_written(op, args: tuple) -> None:
    """Refuse what functionalisation gets wrong: a write into memory that stands for several elements."""
    for i in _torch.written_places(op):
        x = args[i] if i < len(args) else None
        if isinstance(x, torch.Tensor) and 0 in x.stride() and any(
            n > 1 and not step for n, step in zip(x.shape, x.stride(), strict=True)
        ):
            raise NotImplementedError(
                f"{op}: writes into an expanded tensor of shape {list(x.shape)}, whose elements share memory; write "
                "into the tensor that was expanded, or clone() it first"
                f"{_at_user_line(frame for frame, _ in traceback.walk_stack(None))}"
            )


def _has_symbolic_size(out: Any) -> bool:
    tensors = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
    return any(_torch.is_symbol(n) for t in tensors for n in t.shape)


# ---- where in the user's code -----------------------------------------------------------------

NOT_USERS = tuple(str(Path(f).parent) + os.sep for f in (torch.__file__, Path(__file__).parent, os.__file__))
"""Folders of torch, spmd and Python's own library."""


def _in_user_code(error: BaseException) -> str:
    return _at_user_line(reversed([frame for frame, _ in traceback.walk_tb(error.__traceback__)]))


def _at_user_line(frames: Iterable[FrameType]) -> str:
    """The innermost of these frames that is neither torch's nor ours, for an error message."""
    for frame in frames:
        where = frame.f_code.co_filename
        if os.path.isfile(where) and not where.startswith(NOT_USERS):
            return f"\n  at {where}:{frame.f_lineno}, in {frame.f_code.co_name}"
    return ""


# ---- random numbers ---------------------------------------------------------------------------


def _number_draws(graph: fx.Graph) -> tuple[Draws, ...]:
    """Number the draws of a graph in their order; the numbers count from an input, which moves on between calls."""
    drawing = [n for n in graph.nodes if n.target in FILLS]
    if not drawing:
        return ()
    last = [n for n in graph.nodes if n.op == "placeholder"][-1:]
    with graph.inserting_after(last[0]) if last else graph.inserting_before(next(iter(graph.nodes))):
        rng = graph.placeholder("rng")
    for number, node in enumerate(drawing):
        node.args = (node.args[0], rng, *node.args[1:])
        node.kwargs = {name: x for name, x in node.kwargs.items() if name != "generator"}
        node.target = Draw(node.target, number)
    return (Draws(len(drawing)),)


# ---- cleaning ---------------------------------------------------------------------------------

SAME_VALUE = {aten.detach.default, aten.alias.default, aten.lift_fresh.default, aten.lift.default}
"""In a functional graph these only rename."""


def _clean(graph: fx.Graph) -> None:
    """Drop profiler marks, renamings and dead code."""
    for node in reversed(graph.nodes):
        if node.target in _torch.PROFILER_OPS:
            graph.erase_node(node)
        elif node.target in SAME_VALUE:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()
