"""Decompose an op of a graph: run its decomposition, the same function as in eager mode, on tensors that have specs.

    softmax(f32[t, V@tp], 1)    ->  amax, sub, exp, sum, div, each of which is lowered in turn

A decomposition decides from the specs of its operands whether the op is decomposed at all (`spmd.tensor.rules.norms`).
Eagerly the operands are DTensors. In a program they are `SpecTensor`s: a `SpecTensor` has no data, but a spec and the
graph node of its value. Each op on SpecTensors is handed to `emit`, which writes the op into the program and returns
SpecTensors for the results.
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

Emit = Callable[[_torch.OpOverload, tuple, dict[str, Any]], Any]
"""Writes an op whose operands are nodes into the program. Returns a SpecTensor for its result, or a list of them."""


class SpecTensor(torch.Tensor):
    """The value of a node, without data, as an operand of a decomposition."""

    __torch_function__ = _torch.disabled_torch_function

    @staticmethod
    def __new__(cls, node: fx.Node, spec: Spec, emit: Emit) -> SpecTensor:
        out = _torch.wrapper_tensor(cls, torch.empty(0), spec.shape, spec.stride, False, dtype=spec.dtype)
        out.node, out._spec, out._emit = node, spec, emit
        return out

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        leaves = pytree.tree_leaves((args, kwargs or {}))
        foreign = [x for x in leaves if isinstance(x, torch.Tensor) and not isinstance(x, SpecTensor)]
        assert not foreign, f"a decomposition may not mix in other tensors: {op}"
        assert not _torch.written(op), f"a decomposition may not write in place: {op}"
        args, kwargs = pytree.tree_map_only(SpecTensor, lambda x: x.node, (args, kwargs or {}))
        return next(x for x in leaves if isinstance(x, SpecTensor))._emit(op, args, kwargs)


def decomposed(op: _torch.OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
    """The result of the op's decomposition on SpecTensors.

    NotImplemented where the op has no decomposition, or where the op itself does as well for these specs.
    """
    with torch.no_grad():
        return decompose(op, args, kwargs)
