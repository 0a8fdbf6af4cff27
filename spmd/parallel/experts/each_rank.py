"""A function of a rank's tensors that autograd differentiates, where one thread plays several ranks, too.

`per_rank` calls a function once for each rank, on tensors without a history. Here each call is differentiated by
itself, and what it was given gets its gradient. On a real rank the function is simply called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from spmd.mesh import per_rank
from spmd.mesh.rank import rank_simulator


def on_each_rank(fn: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    """`fn(*tensors)` on this rank; of simulated ranks for each with its own tensors. It may branch, and not send."""
    return fn(*tensors) if rank_simulator() is None else _OnEachRank.apply(fn, *tensors)


@dataclass(eq=False)
class _Call:
    """What one rank has computed, with its history, of these leaves."""

    out: torch.Tensor
    leaves: list[torch.Tensor]


class _OnEachRank(torch.autograd.Function):
    @staticmethod
    def forward(ctx, fn, *tensors):
        ctx.wants = [x.requires_grad for x in tensors]
        out, ctx.call = _called(fn, ctx.wants, tensors)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        found = iter(_gradients(ctx.call, g))
        return None, *(next(found) if want else None for want in ctx.wants)


@contextlib.contextmanager
def _saved_as_they_are() -> Iterator[None]:
    """Inside, autograd keeps tensors as they are, though a checkpoint around it makes others again: that would run what
    is around this function, with its collectives, once for each rank."""
    with torch.autograd.graph.saved_tensors_hooks(_itself, _itself):
        yield


def _itself(x: torch.Tensor) -> torch.Tensor:
    return x


@per_rank
def _called(fn: Callable[..., torch.Tensor], wants: list[bool], tensors: tuple) -> tuple[torch.Tensor, _Call]:
    with torch.enable_grad(), _saved_as_they_are():
        given = [x.detach().requires_grad_(want) for x, want in zip(tensors, wants, strict=True)]
        out = fn(*given)
    return out.detach(), _Call(out, [x for x, want in zip(given, wants, strict=True) if want])


@per_rank
def _gradients(call: _Call, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    out, leaves = call.out, call.leaves
    if not out.requires_grad:
        return tuple(torch.zeros_like(x) for x in leaves)
    found = torch.autograd.grad(out, leaves, g, allow_unused=True)
    return tuple(torch.zeros_like(x) if y is None else y for x, y in zip(leaves, found, strict=True))
