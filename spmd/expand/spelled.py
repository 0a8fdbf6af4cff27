"""Spell an op of a graph out: its decomposition is asked as it is eagerly, of tensors that say how they lie.

    softmax(f32[t, V@tp], 1)    ->  amax, sub, exp, sum, div, each lowered as it comes

Whether an op is spelled in terms of others is decided by its decomposition, which looks at how its operands lie
(`spmd.tensor.rules.norms`). In a program a `Stand` tells it: a tensor without data, with a spec and the node that gives
it. Each op on stands is handed to `write`, which writes it into the program and gives stands of the results.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from spmd import _torch
from spmd._torch import pytree
from spmd.tensor.rules.decompositions import decompose
from spmd.tensor.spec import Spec

Write = Callable[[_torch.OpOverload, tuple, dict[str, Any]], Any]
"""Given an op with nodes for its tensors, the node of its result or a list of those of its results."""


class Stand(torch.Tensor):
    """Stands for the value of a node in the decomposition of an op."""

    __torch_function__ = _torch.disabled_torch_function

    @staticmethod
    def __new__(cls, node: fx.Node, spec: Spec, write: Write) -> Stand:
        out = _torch.wrapper_tensor(cls, torch.empty(0), spec.shape, spec.stride, False, dtype=spec.dtype)
        out.node, out._spec, out._write = node, spec, write
        return out

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        leaves = pytree.tree_leaves((args, kwargs or {}))
        strange = [x for x in leaves if isinstance(x, torch.Tensor) and not isinstance(x, Stand)]
        assert not strange and not _torch.written(op), f"a decomposition may not mix tensors nor write: {op}"
        args, kwargs = pytree.tree_map_only(Stand, lambda x: x.node, (args, kwargs or {}))
        return next(x for x in leaves if isinstance(x, Stand))._write(op, args, kwargs)


def spelled_out(op: _torch.OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What the decomposition of the op makes of stands; NotImplemented where there is none or the op is as good."""
    with torch.no_grad():
        return decompose(op, args, kwargs)
