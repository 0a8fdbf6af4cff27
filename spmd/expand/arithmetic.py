"""Which functions of numbers do the same with symbols as with floats: arithmetic, and nothing that rounds."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from spmd import _torch
from spmd.expand.sizes.size import Size

ARITHMETIC = {
    operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pow, operator.pos,
    torch.sym_min, torch.sym_max, torch.sym_float, *_torch.OF_SYMBOLS.values(),
}  # fmt: skip
OF_INTS = {operator.floordiv, operator.mod}


def only_arithmetic(graph: fx.Graph) -> bool:
    """Whether numbers are only used in arithmetic. Other functions, such as rounding, treat symbols and floats
    differently."""
    numbers = (n for n in graph.nodes if n.op == "call_function" and _torch.is_symbol(n.meta.get("val")))
    return all(
        n.target in ARITHMETIC
        or isinstance(n.target, _torch.OpOverload)
        or (n.target in OF_INTS and all(map(_is_int, n.args)))
        for n in numbers
    )


def _is_int(x: Any) -> bool:
    return isinstance(x.meta["val"] if isinstance(x, fx.Node) else x, (int, torch.SymInt, Size))
