"""Conversions that autograd has to be told about: blocks to DTensors and back, one layout to another, mesh to mesh.

    to_dtensor(block, spec)       the DTensor with this rank's block
    to_block(x, spec)             this rank's block; `spec` is the layout of the gradient that comes back
    redistributed(x, target)      the same global tensor in another layout
    sent(x, target)               the same global tensor on another mesh

The docstring of `spmd.tensor.eager.dtensor` has the gradient of each. The backward of each calls the same conversions;
so it can be differentiated again.

The DTensor class comes as an argument, or is the type of a tensor, so that imports go one way: `dtensor` imports this.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from spmd import _torch
from spmd.tensor.eager.view_copies import block, handed_out
from spmd.tensor.modes import explicit
from spmd.tensor.placement import Placement, Shard
from spmd.tensor.redistribute.cross_mesh import move_between_meshes
from spmd.tensor.redistribute.plan import plan
from spmd.tensor.spec import Order, Spec, spec_of


def is_differentiated(x: torch.Tensor) -> bool:
    """Whether autograd has to know what is computed from x: it wants a gradient, or may have a tangent."""
    return (x.requires_grad and torch.is_grad_enabled()) or _torch.in_forward_ad()


# ---- specs ------------------------------------------------------------------------------------


def with_placements(spec: Spec, placements: Sequence[Placement], order: Order | None = None) -> Spec:
    """The spec of the same tensor with these placements: `spec` if it has that layout, else a contiguous one."""
    if order:
        target = spec_of(spec.mesh, placements, spec.shape, spec.dtype, order=order)
        return spec if spec.same_layout(target) else target
    return _with_placements_in_mesh_order(spec, tuple(placements))


@functools.lru_cache(maxsize=4096)
def _with_placements_in_mesh_order(spec: Spec, placements: tuple[Placement, ...]) -> Spec:
    target = spec_of(spec.mesh, placements, spec.shape, spec.dtype)
    return spec if spec.same_layout(target) else target


def checked_dtype(spec: Spec, dtype: torch.dtype) -> torch.dtype:
    """The dtype to send a tensor in. TypeError for a Partial in a dtype that is not floating point."""
    if spec.partial and not (spec.dtype.is_floating_point and dtype.is_floating_point):
        raise TypeError(
            f"redistribute: forward_dtype is {dtype}, and {spec} is still to be reduced, which would give other "
            "numbers in it; redistribute first and convert the result"
        )
    return dtype


def gradient_spec(spec: Spec, placements: Sequence[Placement] | None) -> Spec:
    """The spec of a cotangent that comes back to this tensor. The cotangent of a Partial is replicated."""
    return spec.with_layout(spec.dims, spec.units) if placements is None else with_placements(spec, placements)


def block_gradient_spec(spec: Spec, placements: Sequence[Placement] | None) -> Spec | None:
    """The spec of which the gradient of a block of `spec` is to be a block. ValueError where its shape would differ."""
    if placements is None:
        return None
    wanted = gradient_spec(spec, placements)
    if any(kind not in ("sum", "avg") for _, kind in spec.partial):
        raise ValueError(f"from_local: grad_placements of {spec}, whose terms have each their own; leave it out")
    if wanted.dims != spec.dims or wanted.units != spec.units:
        raise ValueError(
            f"from_local: a gradient in the layout {wanted} has other blocks than {spec}; an axis that shards has to "
            "shard alike, and others may be Replicate() or Partial()"
        )
    return wanted


# ---- from blocks ------------------------------------------------------------------------------


def to_dtensor(local: torch.Tensor, spec: Spec, dtensor: type, gradient: Spec | None = None):
    """The DTensor of a block, differentiable. Sums and averages are linear; other reductions need more.

    gradient: the spec of which the gradient of the block is to be a block, where the user gives it.
    """
    linear = all(kind in ("sum", "avg") for _, kind in spec.partial)
    return FromLocal.apply(local, spec, dtensor, gradient) if linear else _reduced_over_terms(local, spec, dtensor)


_REDUCTIONS = {"max": torch.amax, "min": torch.amin, "product": torch.prod}


def _reduced_over_terms(local: torch.Tensor, spec: Spec, dtensor: type):
    """The maximum (minimum, product) of the ranks' terms: a reduction over a new dim, where every rank has one index.

    The result stays Partial. Each term gets the part of the cotangent that this op gives on one device: of a maximum
    the cotangent where the term equals it, divided by the number of ties.
    """
    kind = spec.partial[0][1]  # one for all axes, because different kinds do not commute
    n = math.prod(spec.mesh.shape[axis] for axis, _ in spec.partial)
    placements = [
        Shard(0) if p.is_partial() else p.at(p.dim + 1) if p.is_shard() else p for p in spec.placements
    ]
    stacked = spec_of(spec.mesh, placements, (n, *spec.shape), spec.dtype)
    terms = FromLocal.apply(local.unsqueeze(0), stacked, dtensor)
    out = _REDUCTIONS[kind](terms, 0)  # [n@axes, ...] -> [...] +max@axes
    return out if out._spec.same_layout(spec) else out.redistribute(placements=spec.placements)


class FromLocal(torch.autograd.Function):
    """The gradient is the block of the cotangent. For a Partial each term gets all of the cotangent, or, of an
    average, a share of it."""

    @staticmethod
    def forward(ctx, local, spec, dtensor, gradient=None):
        ctx.spec, ctx.dtensor, ctx.gradient = spec, dtensor, gradient
        return dtensor(local.view_as(local), spec)

    @staticmethod
    def backward(ctx, grad):
        spec, share = ctx.spec, 1.0
        for axis, kind in spec.partial:
            share /= spec.mesh.shape[axis] if kind == "avg" else 1
        if ctx.gradient is not None:
            target = grad._spec.moved_to(spec.dims, spec.units, ctx.gradient.partial)
            terms = target.with_layout(target.dims, target.units)
        else:
            target = grad._spec.moved_to(spec.dims, spec.units)
            explicit.check("the gradient of from_local", [("grad", plan(grad._spec, target))])
            # Each term has its own gradient, though these are equal; so gradients that come back to them are summed.
            terms = target.with_layout(target.dims, target.units, [(axis, "sum") for axis, _ in spec.partial])
        local = ToLocal.apply(Redistribute.apply(grad, target, False, None), terms)
        return (local if share == 1.0 else local * share), None, None, None

    @staticmethod
    def jvp(ctx, tangent, *_):
        return FromLocal.apply(tangent, ctx.spec, ctx.dtensor)


# ---- to blocks --------------------------------------------------------------------------------


class ToLocal(torch.autograd.Function):
    """The gradients that come back are blocks of the cotangent, which has the spec `spec`."""

    @staticmethod
    def forward(ctx, x, spec):
        ctx.gradient_spec, ctx.spec, ctx.dtensor = spec, x._spec, type(x)
        local = handed_out(x)
        return local.view_as(local)

    @staticmethod
    def backward(ctx, grad):
        return to_dtensor(grad, ctx.gradient_spec, ctx.dtensor), None

    @staticmethod
    def jvp(ctx, tangent, _):
        spec = ctx.spec
        if any(kind not in ("sum", "avg") for _, kind in spec.partial):
            raise NotImplementedError(
                f"to_local of {spec}: the tangent of one rank's part is not known; redistribute it first"
            )
        target = tangent._spec.moved_to(spec.dims, spec.units, spec.partial)
        return Redistribute.apply(tangent, target, False, None).to_local()


# ---- layouts ----------------------------------------------------------------------------------


def redistributed(x, target: Spec, async_op: bool = False, in_rank_order: bool = False):
    """x with the layout and the dtype of the target, and with memory of its own for autograd."""
    local, spec, shown_by = block(x), x._spec, [x]
    if spec.dtype is not target.dtype:
        local, spec, shown_by = local.to(target.dtype), spec.with_tensor(spec.shape, target.dtype), []
    moves = plan(spec, target, math.inf, in_rank_order)
    moved = moves.launch(local, *shown_by) if async_op else moves.run(local)
    return type(x)(moved.view_as(moved) if moved is x._local_tensor else moved, target)


class Redistribute(torch.autograd.Function):
    """The identity of the global tensor. The cotangent gets the layout of the input, but never becomes Partial."""

    @staticmethod
    def forward(ctx, x, target, async_op, backward_dtype, in_rank_order=False):
        ctx.spec, ctx.target, ctx.backward_dtype = x._spec, target, backward_dtype
        return redistributed(x, target, async_op, in_rank_order)

    @staticmethod
    def backward(ctx, grad):
        spec, dtype = ctx.spec, ctx.backward_dtype or grad.dtype
        target = grad._spec.moved_to(spec.dims, spec.units)
        if dtype != grad.dtype:
            target = target.with_tensor(target.shape, dtype)
        back = grad if target is grad._spec else Redistribute.apply(grad, target, False, None)
        return (back if dtype == spec.dtype else back.to(spec.dtype)), None, None, None, None

    @staticmethod
    def jvp(ctx, tangent, *_):
        target, dtype = tangent._spec.moved_to(ctx.target.dims, ctx.target.units), ctx.target.dtype
        if dtype != target.dtype:
            target = target.with_tensor(target.shape, dtype)
        return Redistribute.apply(tangent, target, False, None)


# ---- meshes -----------------------------------------------------------------------------------


def sent(x, target: Spec, in_rank_order: bool = False):
    """x on another mesh, in the dtype of the target."""
    local, spec = block(x), x._spec
    if spec.dtype is not target.dtype:
        local, spec = local.to(target.dtype), spec.with_tensor(spec.shape, target.dtype)
    return type(x)(move_between_meshes(local, spec, target, in_rank_order), target)


class Send(torch.autograd.Function):
    """The identity of the global tensor, from one mesh to another. The cotangent goes back to the input's layout."""

    @staticmethod
    def forward(ctx, x, target, backward_dtype, in_rank_order):
        ctx.spec, ctx.target, ctx.backward_dtype = x._spec, target, backward_dtype
        return sent(x, target, in_rank_order)

    @staticmethod
    def backward(ctx, grad):
        spec, dtype = ctx.spec, ctx.backward_dtype or grad.dtype
        home = spec.with_layout(spec.dims, spec.units).with_tensor(spec.shape, dtype)
        back = Send.apply(grad, home, None, False)
        return (back if dtype == spec.dtype else back.to(spec.dtype)), None, None, None

    @staticmethod
    def jvp(ctx, tangent, *_):
        return Send.apply(tangent, ctx.target.with_layout(ctx.target.dims, ctx.target.units), None, False)
