"""Collectives with gradients.

A collective is one function of the tensors of all ranks of a group. The gradient on a rank is the gradient of the sum
of all ranks' losses. For a linear collective this is its transpose:

    all-reduce        all-reduce
    all-gather        reduce-scatter of a sum, and vice versa
    all-to-all        all-to-all with the splits exchanged
    broadcast         a sum that only the source keeps

A maximum or minimum passes the gradient to the elements that attain it, in equal parts where several do. A product
multiplies the gradient by the other ranks' factors. Every rank of the group must run the backward, because the backward
communicates too. Adjoints use these same functions, so gradients of gradients work.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd import Function

from spmd.comm import launch
from spmd.comm.group import Members
from spmd.mesh import per_rank

LINEAR = ("sum", "avg")


class AllReduce(Function):
    @staticmethod
    def forward(x, reduce_op, name, size, place):
        return launch.all_reduce(x, reduce_op, Members(name, size, place))

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.reduce_op, *ctx.to = inputs
        ctx.save_for_backward(*(() if ctx.reduce_op in LINEAR else (x, output)))

    @staticmethod
    def backward(ctx, g):
        if ctx.reduce_op in LINEAR:
            return AllReduce.apply(g, ctx.reduce_op, *ctx.to), None, None, None, None
        total = AllReduce.apply(g, "sum", *ctx.to)
        return _nonlinear_gradient(ctx, total, *ctx.saved_tensors), None, None, None, None


class AllGather(Function):
    @staticmethod
    def forward(x, dim, name, size, place):
        return launch.all_gather(x, dim, Members(name, size, place))

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.dim, *ctx.to = inputs
        ctx.shape = x.shape

    @staticmethod
    def backward(ctx, g):
        own = ReduceScatter.apply(g, "sum", ctx.dim, *ctx.to)
        return own if len(ctx.shape) else own.reshape(()), None, None, None, None


class ReduceScatter(Function):
    @staticmethod
    def forward(x, reduce_op, dim, name, size, place):
        return launch.reduce_scatter(x, reduce_op, dim, Members(name, size, place))

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, ctx.reduce_op, ctx.dim, *ctx.to = inputs
        ctx.save_for_backward(*(() if ctx.reduce_op in LINEAR else (x, output)))

    @staticmethod
    def backward(ctx, g):
        whole = AllGather.apply(g, ctx.dim, *ctx.to)
        if ctx.reduce_op == "avg":
            whole = whole / ctx.to[1]
        elif ctx.reduce_op != "sum":
            x, y = ctx.saved_tensors
            whole = _nonlinear_gradient(ctx, whole, x, AllGather.apply(y, ctx.dim, *ctx.to))
        return whole, None, None, None, None, None


class AllToAll(Function):
    @staticmethod
    def forward(x, out_splits, in_splits, shape, name, size, place):
        return launch.all_to_all(x, out_splits, in_splits, Members(name, size, place), shape)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.out_splits, ctx.in_splits, ctx.shape, *ctx.to = inputs

    @staticmethod
    def backward(ctx, g):
        g = g if ctx.shape is None else g.reshape(-1)[: sum(ctx.out_splits)]
        back = AllToAll.apply(g, ctx.in_splits, ctx.out_splits, None, *ctx.to)
        return back, None, None, None, None, None, None


class Broadcast(Function):
    @staticmethod
    def forward(x, src, name, size, place):
        return launch.broadcast(x, src, Members(name, size, place))

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.src, *ctx.to = inputs

    @staticmethod
    def backward(ctx, g):
        total = AllReduce.apply(g, "sum", *ctx.to)
        # masked_fill and not new zeros: the gradient of this gradient must communicate with the other ranks again.
        elsewhere = torch.full((), _is_not_source(ctx.to[2], ctx.src), dtype=torch.bool, device=total.device)
        return total.masked_fill(elsewhere, 0), None, None, None, None


class AllReduceCoalesced(Function):
    """Sums and averages only."""

    @staticmethod
    def forward(reduce_op, name, size, place, *xs):
        return tuple(launch.all_reduce_coalesced(xs, reduce_op, Members(name, size, place)))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.reduce_op, *ctx.to = inputs[:4]

    @staticmethod
    def backward(ctx, *gs):
        return None, None, None, None, *all_reduce_coalesced(gs, ctx.reduce_op, Members(*ctx.to))


class AllGatherCoalesced(Function):
    @staticmethod
    def forward(dims, name, size, place, *xs):
        return tuple(launch.all_gather_coalesced(xs, dims, Members(name, size, place)))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.dims, *ctx.to = inputs[:4]
        ctx.shapes = [x.shape for x in inputs[4:]]

    @staticmethod
    def backward(ctx, *gs):
        own = reduce_scatter_coalesced(gs, "sum", ctx.dims, Members(*ctx.to))
        return None, None, None, None, *(g.reshape(s) for g, s in zip(own, ctx.shapes, strict=True))


class ReduceScatterCoalesced(Function):
    """Sums and averages only."""

    @staticmethod
    def forward(reduce_op, dims, name, size, place, *xs):
        return tuple(launch.reduce_scatter_coalesced(xs, reduce_op, dims, Members(name, size, place)))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.reduce_op, ctx.dims, *ctx.to = inputs[:5]

    @staticmethod
    def backward(ctx, *gs):
        whole = all_gather_coalesced(gs, ctx.dims, Members(*ctx.to))
        if ctx.reduce_op == "avg":
            whole = [g / ctx.to[1] for g in whole]
        return None, None, None, None, None, *whole


# Without gradients no Function is used: Dynamo confuses Functions that take any number of tensors.


def all_reduce_coalesced(xs: Sequence[torch.Tensor], reduce_op: str, to: Members) -> list[torch.Tensor]:
    """A coalesced all-reduce (sum or average), with gradients where they are needed.

    The next two functions are the same for all-gather and reduce-scatter.
    """
    if not differentiates(*xs):
        return launch.all_reduce_coalesced(xs, reduce_op, to)
    return list(AllReduceCoalesced.apply(reduce_op, *to, *xs))


def all_gather_coalesced(xs: Sequence[torch.Tensor], dims: Sequence[int], to: Members) -> list[torch.Tensor]:
    if not differentiates(*xs):
        return launch.all_gather_coalesced(xs, dims, to)
    return list(AllGatherCoalesced.apply(dims, *to, *xs))


def reduce_scatter_coalesced(
    xs: Sequence[torch.Tensor], reduce_op: str, dims: Sequence[int], to: Members
) -> list[torch.Tensor]:
    if not differentiates(*xs):
        return launch.reduce_scatter_coalesced(xs, reduce_op, dims, to)
    return list(ReduceScatterCoalesced.apply(reduce_op, dims, *to, *xs))


def differentiates(*xs: torch.Tensor) -> bool:
    """Whether any of these tensors may need a gradient."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in xs)


@per_rank
def _is_not_source(place: int, src: int) -> int:
    return int(place != src)


def _nonlinear_gradient(ctx, g: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """This rank's part of the gradient: g is the gradient of y, the maximum, minimum or product of all ranks' x."""
    if ctx.reduce_op == "product":
        place = ctx.to[2]
        every = AllGather.apply(x.unsqueeze(0), 0, *ctx.to)
        return g * torch.cat([every[:place], every[place + 1 :]]).prod(0)  # y / x would be wrong where x is 0
    attained = ((x == y) | (x.isnan() & y.isnan())).to(g.dtype)
    return g * attained / AllReduce.apply(attained, "sum", *ctx.to)
