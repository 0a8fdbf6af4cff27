"""Which functions of numbers do the same with symbols as with numbers: those that a trace computes with as written."""

from __future__ import annotations

import operator

import torch
from torch import fx

from spmd import _torch

FUNCTIONS = {*_torch.TARGETS, operator.floordiv, operator.mod, torch.sym_sum}


def only_arithmetic(graph: fx.Graph) -> bool:
    """Whether all that computes with numbers does the same when the graph runs as in the trace."""
    numbers = (n for n in graph.nodes if n.op == "call_function" and _torch.is_symbol(n.meta.get("val")))
    return all(n.target in FUNCTIONS or isinstance(n.target, _torch.OpOverload) for n in numbers)
