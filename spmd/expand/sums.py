"""Sums of gradients that autograd's engine makes, written into a trace without being dispatched.

    w.grad += gradient(g, "w")     ->     add_3 = add(add_1, gradient_2)

Each further micro-batch of a step has one for each parameter. It is always the same op, on tensors that are alike: its
node, its result and what becomes of `w.grad` are known without the modes of the trace, which take five times as long.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from spmd import _torch
from spmd.expand.nodes import added
from spmd.expand.phases import Ahead, Phases, is_dense

SUM = torch.ops.aten.add_.Tensor


def summed(total: Any, term: Any, phases: Phases) -> bool:
    """Add a term to a gradient, as `SUM` of the two does in a trace. False where that may be more than a node: nothing
    was done then. To be called where the engine calls that op. phases: those of the trace."""
    mode = _torch.proxy_mode()
    if mode is None or not (type(total) is type(term) is _torch.FunctionalTensor) or total is term:
        return False
    values = _torch.from_functional(total), _torch.from_functional(term)
    nodes = [_torch.node_of(x, mode.tracer) for x in values]
    if (known := phases.sums.pop(id(values[1]), None)) is not None:
        _write_ahead(total, nodes[0], known, mode.tracer)
        return True
    with _torch.no_function_modes():  # they would hear of each size that is asked for
        if None in nodes or total._is_view() or not _are_alike(*values):
            return False
        if any(_torch.known_constant(x, mode.tracer) is not None for x in values):
            return False
        node = added(mode.tracer.graph, "call_function", torch.ops.aten.add.Tensor, tuple(nodes), {}, "add")
        (new,) = _torch.stand_ins([values[0]], [node], mode.tracer)
        node.meta["val"] = new
        _torch.write_functional(total, new)
    return True


def _write_ahead(total: torch.Tensor, old: fx.Node | None, known: Ahead, tracer: fx.Tracer) -> None:
    """The same where the node of the sum is there."""
    if old is not known.old:
        known.couple("a gradient changes while a backward pass that is written again adds to it")
    with _torch.no_function_modes():
        _torch.stand_for(known.value, known.total, tracer)
        _torch.write_functional(total, known.value)


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two values of a trace lie equally in memory that they fill, so that their sum lies so, too."""
    same = one.dtype == other.dtype and one.device == other.device and one.shape == other.shape
    return same and one.stride() == other.stride() and one.layout is torch.strided and is_dense(one)
