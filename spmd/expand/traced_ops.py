"""Ops of a trace before functionalisation sees them: decomposed, numbered, noted, or refused."""

from __future__ import annotations

import sys
from typing import Any

import torch

from spmd import _torch
from spmd._torch import pytree
from spmd.expand.checks import check_errors
from spmd.expand.constrained_writes import ConstrainedWrites
from spmd.expand.dense_views import DENSE_VIEWS
from spmd.expand.draws import Numbering, is_taken_apart
from spmd.expand.keep_products import TRACED_AS
from spmd.expand.origins import Origins
from spmd.expand.outs import write_out
from spmd.expand.phases import Phases
from spmd.expand.stamp.watch import unwatched
from spmd.expand.sums import SUM, summed
from spmd.expand.user_code import at_user_line, current_frames
from spmd.expand.value_places import check_numbers
from spmd.expand.value_sizes import SIZED, advice, of_unknown_size
from spmd.tensor.rules.lists import list_decompositions

aten = torch.ops.aten


def _conjugate(x: torch.Tensor | complex) -> torch.Tensor:
    """The conjugate of a number. Autograd takes it as that of a tensor, and dispatch gives modes the number: a view of
    one has no memory that functionalisation could follow."""
    if isinstance(x, torch.Tensor):
        return NotImplemented
    return torch.full((), complex(x).conjugate(), dtype=torch.complex128)


def _copied(op: _torch.OpOverload) -> Any:
    """In the place of an op in place, of which torch's kernel makes numbers of sizes that are symbols."""
    return lambda x, *args, **kwargs: x.copy_(op(x, *args, **kwargs))


COLLECTIVES = "c10d", "_c10d_functional", "_c10d_functional_autograd"
"""The namespaces of torch's collectives: on global tensors they would add up what is the same on all ranks."""


OF_TORCH = "aten", "prim", "prims", "profiler", "spmd", "inductor", "higher_order"
"""Namespaces whose ops without results are known: asserts are kept, and the others have no effect on numbers."""


class Normalise(_torch.TorchDispatchMode):
    """Decomposes list ops and fused optimiser steps into ops on single tensors, before functionalisation sees them.

    Numbers what is drawn. Refuses ops whose result sizes depend on values, unless an argument tells the size.
    """

    table = (
        list_decompositions()
        | DENSE_VIEWS
        | SIZED
        | {aten._linalg_check_errors.default: check_errors, aten._conj.default: _conjugate}
        | {aten.tril_.default: _copied(aten.tril.default), aten.triu_.default: _copied(aten.triu.default)}
    )

    def __init__(self, phases: Phases, origins: Origins):
        super().__init__()
        self.phases, self.origins, self.numbering = phases, origins, Numbering()
        self.constrained = ConstrainedWrites()
        self.default_dtype = torch.get_default_dtype()
        self.reads_values = False

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        with unwatched(op):
            return self._normalised(op, args, kwargs or {})

    def _normalised(self, op: _torch.OpOverload, args: tuple, kwargs: dict[str, Any]) -> Any:
        self.phases.note()
        if torch.get_default_dtype() is not self.default_dtype:
            raise NotImplementedError(
                f"{op}: the step changes torch's default dtype, which its program would not; give dtype= to what is "
                f"made, or change it before the step{at_user_line(current_frames())}"
            )
        if op is aten.detach.default and _is_kept_by_engine(args[0]):
            return _torch.same_value(args[0])
        _check_written(op, args)
        if op is SUM and not kwargs and _is_kept_by_engine(args[0]) and summed(*args, self.phases):
            self.origins.note()
            self.constrained.note(op, args, kwargs, args[0])
            return args[0]
        if op.namespace in COLLECTIVES:
            raise NotImplementedError(
                f"{op}: a step computes with global tensors, of which every rank has the whole value, and the compiler "
                "adds the collectives; leave this one out, or call it in a spmd.local_map"
                f"{at_user_line(current_frames())}"
            )
        if op is aten._print.default:
            raise NotImplementedError(
                f"{op}: prints once, while the step is captured, and not when its program runs; print after the step"
                f"{at_user_line(current_frames())}"
            )
        if self.reads_values:
            check_numbers(op, args, kwargs)
        self.reads_values |= op is aten._local_scalar_dense.default
        if op.namespace not in OF_TORCH and not _torch.returns(op) and not _torch.written_positions(op):
            raise NotImplementedError(
                f"{op}: gives nothing, so its program would leave it out; let the op return a tensor that is used, or "
                f"call it after the step{at_user_line(current_frames())}"
            )
        if is_taken_apart(op):
            with self:
                return op.decompose(*args, **kwargs)
        with self.numbering.drawing(op, args, kwargs):
            out = write_out(op, args, kwargs)
            if out is NotImplemented:
                out = self.table.get(op, TRACED_AS.get(op, op))(*args, **kwargs)
            if out is NotImplemented:
                out = op(*args, **kwargs)
        self.origins.note()
        self.constrained.note(op, args, kwargs, out)
        if (self.reads_values or torch.Tag.dynamic_output_shape in op.tags) and _has_unknown_size(out):
            raise of_unknown_size(op, advice(op))
        if isinstance(out, torch.Tensor) and out.layout is not torch.strided:
            raise NotImplementedError(
                f"{op}: gives a tensor of layout {out.layout}, and a program holds strided ones; leave out "
                f"sparse=True, or compute with a dense tensor{at_user_line(current_frames())}"
            )
        return out


def _is_kept_by_engine(x: torch.Tensor) -> bool:
    """Whether autograd's engine itself, and no code that it runs, keeps a gradient that it has made."""
    if type(x) is not _torch.FunctionalTensor or torch.is_grad_enabled() or not _torch.in_backward():
        return False
    return _torch.is_called_by_engine(sys._getframe(3))  # by whom the op came to `Normalise`


def _check_written(op, args: tuple) -> None:
    """Refuse a write into an expanded tensor, whose elements share memory: functionalisation gets it wrong."""
    for i in _torch.written_positions(op):
        x = args[i] if i < len(args) else None
        if isinstance(x, torch.Tensor) and any(
            type(step) is int and not step and _torch.number_now(n) > 1
            for n, step in zip(x.shape, x.stride(), strict=True)
        ):
            raise NotImplementedError(
                f"{op}: writes into an expanded tensor of shape {list(x.shape)}, whose elements share memory; write "
                "into the tensor that was expanded, or clone() it first"
                f"{at_user_line(current_frames())}"
            )


def _has_unknown_size(out: Any) -> bool:
    tensors = [t for t in pytree.tree_leaves(out) if isinstance(t, torch.Tensor)]
    return any(_torch.is_unbacked(n) for t in tensors for n in t.shape)
