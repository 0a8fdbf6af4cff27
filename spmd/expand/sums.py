"""Sums of gradients that autograd's engine makes, written into a trace without being dispatched.

    w.grad += gradient(g, "w")     ->     add_3 = add(add_1, gradient_2)

Each further micro-batch of a step has one for each parameter. It is always the same op, on tensors that are alike: its
node, its result and what becomes of `w.grad` are known without the modes of the trace, which take five times as long.
"""

from __future__ import annotations

from typing import Any

import torch

from spmd import _torch
from spmd.expand.nodes import added
from spmd.expand.phases import is_dense

SUM = torch.ops.aten.add_.Tensor


def summed(total: Any, term: Any) -> bool:
    """Add a term to a gradient, as `SUM` of the two does in a trace. False where that may be more than a node: nothing
    was done then. To be called where the engine calls that op."""
    mode = _torch.proxy_mode()
    if mode is None or not (type(total) is type(term) is _torch.FunctionalTensor) or total is term:
        return False
    values = _torch.from_functional(total), _torch.from_functional(term)
    nodes = [_torch.node_of(x, mode.tracer) for x in values]
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


def _are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two values of a trace lie equally in memory that they fill, so that their sum lies so, too."""
    same = one.dtype == other.dtype and one.device == other.device and one.shape == other.shape
    return same and one.stride() == other.stride() and one.layout is torch.strided and is_dense(one)
