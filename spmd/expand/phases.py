"""Which pass of a step made each node of its capture, where gradients were made, and where parameters got new values.

    phase 0, 2, ...   forward passes, and at the end the update
    phase 1, 3, ...   backward passes: autograd's engine ran
    gradient(g, "model.up.weight")    the engine hands over the gradient of a parameter
    meta[NEW_VALUE]                   an optimiser's step has ended, and this is the parameter of that path now

All are noted while the step runs, so no name of an op plays a role. `gradient` is an op of our own: it gives its
operand as a new tensor, so that a write into the gradient, such as clipping, is no write into a view of something else.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from spmd import _torch
from spmd.expand.nodes import added

NEW_VALUE = "new value of"

_library = torch.library.Library("spmd", "FRAGMENT")
_library.define("gradient(Tensor gradient, str parameter) -> Tensor")
_library.impl("gradient", lambda gradient, parameter: gradient.clone(), "CompositeExplicitAutograd")


class _Marked(torch.autograd.Function):
    """`gradient` with its derivative, for gradients of gradients."""

    @staticmethod
    def forward(ctx, gradient, parameter):
        return torch.ops.spmd.gradient(gradient, parameter)

    @staticmethod
    def backward(ctx, of_gradient):
        return of_gradient, None


def mark(gradient: torch.Tensor, path: str) -> torch.Tensor:
    """The gradient of a parameter, marked. Without a path it stays as it is."""
    return _Marked.apply(gradient, path) if path else gradient


def mark_gradient(parameter: torch.Tensor, path: str, phases: Phases, after: Callable[[], None]) -> None:
    """Mark each gradient that a backward pass makes of this parameter. It may be a traced tensor alone.

    phases: those of the trace. after: what is called after each of its ops.
    """

    def marked(gradient: torch.Tensor) -> torch.Tensor:
        new = _marked_in_trace(gradient, path, phases) if path and not torch.is_grad_enabled() else None
        if new is None:
            return mark(gradient, path)
        after()
        return new

    if parameter.requires_grad:
        parameter.register_hook(marked)


def _marked_in_trace(gradient: torch.Tensor, path: str, phases: Phases) -> torch.Tensor | None:
    """The marked gradient in a trace: its op, written without being dispatched. None where that may differ.

    A value that nobody else has is the marked one from now on; of others, another tensor is made.
    """
    mode = _torch.proxy_mode() if isinstance(gradient, _torch.FunctionalTensor) else None
    value = None if mode is None else _torch.from_functional(gradient)
    if path in phases.ahead:
        return phases.marked_ahead(path, gradient, value)
    given = None if value is None else _torch.node_of(value, mode.tracer)
    with _torch.no_function_modes():  # they would hear of each size that is asked for
        if given is None or not is_dense(value):
            return None
        phases.note()
        op = torch.ops.spmd.gradient.default
        node = added(mode.tracer.graph, "call_function", op, (given, path), {}, "gradient")
        if phases.unshared.pop(id(value), None) is not None:
            _torch.stand_for(value, node, mode.tracer)
            node.meta["val"] = value
            return gradient
        (node.meta["val"],) = _torch.stand_ins([value], [node], mode.tracer)
        return _torch.to_functional(node.meta["val"])


def is_dense(x: torch.Tensor) -> bool:
    """Whether a tensor fills its memory, so that a clone of it lies as it does."""
    shape, stride = x.shape, x.stride()
    return all([type(n) is int for n in (*shape, *stride)]) and _fills(tuple(shape), stride)


@functools.lru_cache(maxsize=4096)
def _fills(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    expected = 1
    for step, n in sorted(zip(stride, shape, strict=True)):
        if n == 0 or (n > 1 and step != expected):
            return False
        expected *= n
    return True


@contextlib.contextmanager
def new_values_noted(parameters: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Inside, where an optimiser's step ends, the nodes of its parameters' new values get the paths of these."""
    paths, thread = {id(p): path for path, p in parameters.items()}, threading.get_ident()

    def note(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        mode = _torch.proxy_mode() if threading.get_ident() == thread else None
        for p in (p for group in optimizer.param_groups for p in group["params"] if mode is not None):
            node = _torch.node_of(_torch.from_functional(p), mode.tracer) if id(p) in paths else None
            if node is not None:
                node.meta[NEW_VALUE] = paths[id(p)]

    handle = register_optimizer_step_post_hook(note)
    try:
        yield
    finally:
        handle.remove()


@dataclass(frozen=True, eq=False)
class Ahead:
    """A gradient of a parameter whose mark is in the graph before the engine hands it over: what was written again.

    value: for which the mark stands, and which nobody else has. old, total: the node of the gradient that is there and
    that of the sum of the two, written as well; None where none is there. couple: raises where it is not so.
    """

    value: torch.Tensor
    old: fx.Node | None
    total: fx.Node | None
    couple: Callable[[str], None]


@dataclass
class Phases:
    """When autograd's engine ran during a capture.

    ends: the last node that was made before each start and each end of the engine; None where there was none. unshared:
    values that were given to the engine as gradients, by identity, each in memory of its own that nobody else has.
    ahead: gradients that are marked already, by the path of the parameter. sums: those to be added up, by the identity
    of the value.
    """

    running: bool = False
    ends: list[fx.Node | None] = field(default_factory=list)
    is_paused: bool = False
    unshared: dict[int, torch.Tensor] = field(default_factory=dict)
    ahead: dict[str, Ahead] = field(default_factory=dict)
    sums: dict[int, Ahead] = field(default_factory=dict)

    def marked_ahead(self, path: str, gradient: torch.Tensor, value: torch.Tensor | None) -> torch.Tensor:
        """The gradient of a parameter that was marked ahead."""
        known = self.ahead.pop(path)
        if value is not known.value:
            known.couple("a parameter gets other gradients than those of a call that is written again")
        if known.total is not None:
            self.sums[id(value)] = known
        return gradient

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, nothing is noted."""
        self.is_paused = True
        try:
            yield
        finally:
            self.is_paused = False

    def note(self) -> None:
        """Call before each op."""
        if not self.is_paused and _torch.in_backward() != self.running and (mode := _torch.proxy_mode()) is not None:
            self.running = not self.running
            self.ends.append(next(iter(reversed(mode.tracer.graph.nodes)), None))

    def mark(self, graph: fx.Graph) -> None:
        """Give each node the number of its phase."""
        ends = Counter(self.ends)
        phase = ends[None]
        for node in graph.nodes:
            node.meta["phase"] = phase
            phase += ends[node]


def fill_phases(graph: fx.Graph) -> None:
    """Give nodes that were inserted later the phase of the node before them."""
    phase = 0
    for node in graph.nodes:
        phase = node.meta.setdefault("phase", phase)
