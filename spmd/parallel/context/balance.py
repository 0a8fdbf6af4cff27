"""Balanced rings of sequences that lie in order: their parts are exchanged before the attention, and back behind it.

    q, k, v [.., 0 1 2 3 | 4 5 6 7]  ->  [.., 0 1 6 7 | 2 3 4 5]  ->  ring  ->  out  ->  [.., 0 1 2 3 | 4 5 6 7]

That is one all-to-all of a rank's queries, keys and values, and one of its results, forward and again backward. What it
buys is the time that the last ranks of a causal ring work longer than the average, (n - 1)/n of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod

import torch

from spmd.comm import all_to_all_single, wait
from spmd.expand.choose.work import Roofline, flops
from spmd.mesh import DeviceMesh, MeshTopoInfo, per_rank
from spmd.mesh.cost import all_to_all_cost
from spmd.parallel.context.layout import Chunk, Layout, balanced, tiles
from spmd.parallel.context.ring import Ring, RingAttention

KERNEL = "_scaled_dot_product_flash_attention"
Tensors = tuple[torch.Tensor, ...]
Shape = tuple[int, ...]


def balanced_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ring: Ring) -> torch.Tensor:
    """Causal attention of this rank's rows, which lie in order as those of `ring` do, by the balanced ring."""
    there = balanced(sum(ring.rows.lengths), ring.n)
    q, k, v = laid_out((q, k, v), ring.mesh, ring.axis, ring.rows, there)
    out = RingAttention.apply(q, k, v, None, replace(ring, rows=there, keys=there))
    return laid_out((out,), ring.mesh, ring.axis, there, ring.rows)[0]


def wants_balance(
    mesh: DeviceMesh, axis: str, layout: Layout, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, said: bool | None
) -> bool:
    """Whether causal attention of sequences that lie so is to be balanced: as the user says, or where it pays.

    q, k, v: of all ranks of the axis.
    """
    if len(layout.chunks) == 1 or said is not None:
        return bool(said) and len(layout.chunks) > 1
    is_trained = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    shapes = [tuple(map(int, x.shape)) for x in (q, k, v)]
    return pays(mesh.topology, mesh.axis(axis), layout, *shapes, q.dtype, is_trained)


@functools.lru_cache(maxsize=1024)
def pays(
    topology: MeshTopoInfo, axis: int, layout: Layout, q: Shape, k: Shape, v: Shape, dtype: torch.dtype, trains: bool
) -> bool:
    """Whether the two exchanges take less time than the rank with the most work saves, by the machine's figures.

    What a rank computes is priced as products are. q, k, v: shapes of the sequences of all ranks.
    """
    n = len(layout.chunks)
    saved = most_work(layout) - most_work(balanced(sum(layout.lengths), n))
    one = (*q[:2], 1, q[3]), (*k[:2], 1, k[3])  # of a row and a key
    operations = saved * (flops(KERNEL, one, ((),)) + trains * flops(f"{KERNEL}_backward", ((), *one), ((),)))
    sizes = prod(q) + prod(k) + prod(v), prod(q[:3]) * v[3]
    sent = sum(all_to_all_cost(size * dtype.itemsize / n, axis, topology) for size in sizes)
    return bool(Roofline(topology).us(operations, 0, dtype) > sent * (1 + trains))


@functools.lru_cache(maxsize=1024)
def most_work(layout: Layout) -> float:
    """How many pairs of a row and a key the rank with the most has in causal attention.

    >>> from spmd.parallel.context.layout import in_order
    >>> most_work(in_order((4, 4))), most_work(balanced(8, 2))
    (24.0, 16.0)
    """
    places = range(len(layout.chunks))
    return max(sum(_area(layout, place, owner) for owner in places) for place in places)


def _area(layout: Layout, place: int, owner: int) -> float:
    found = tiles(layout, layout, place, owner, True)
    return sum((t.rows[1] - t.rows[0]) * (t.keys[1] - t.keys[0]) / (2 if t.causal else 1) for t in found)


# ---- the exchange -------------------------------------------------------------------------------


def laid_out(tensors: Tensors, mesh: DeviceMesh, axis: str, src: Layout, dst: Layout) -> Tensors:
    """Tensors [b, h, t, d] of one dtype whose positions ranks have by `src`, as they have them by `dst`.

    All go in one collective, and so do their gradients.
    """
    return _LaidOut.apply(mesh, axis, src, dst, *tensors)


class _LaidOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, mesh, axis, src, dst, *tensors):
        ctx.way = mesh, axis, src, dst
        return _exchanged(tensors, *ctx.way)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *gradients):
        mesh, axis, src, dst = ctx.way
        return None, None, None, None, *_exchanged(gradients, mesh, axis, dst, src)


def _exchanged(tensors: Tensors, mesh: DeviceMesh, axis: str, src: Layout, dst: Layout) -> Tensors:
    flat, to_each, from_each = _packed(tensors, mesh, axis, src, dst)
    came = wait(all_to_all_single(flat, from_each, to_each, (mesh, axis)))
    return _unpacked(came, tensors, mesh, axis, src, dst)


@per_rank
def _packed(
    tensors: Tensors, mesh: DeviceMesh, axis: str, src: Layout, dst: Layout
) -> tuple[torch.Tensor, list[int], list[int]]:
    """What each rank gets, one rank's behind the other's, and how many elements go to each and come from each."""
    starts, parts = _starts(src.chunks[mesh.get_local_rank(axis)]), _shared(mesh, axis, src, dst)
    pieces = [x.narrow(2, starts(a), b - a).reshape(-1) for part in parts for a, b in part for x in tensors]
    width = sum(x.shape[0] * x.shape[1] * x.shape[3] for x in tensors)
    to_each, from_each = ([width * sum(b - a for a, b in part) for part in each]
                          for each in (parts, _shared(mesh, axis, dst, src)))  # fmt: skip
    return torch.cat([tensors[0].new_empty(0), *pieces]), to_each, from_each


@per_rank
def _unpacked(
    came: torch.Tensor, like: Tensors, mesh: DeviceMesh, axis: str, src: Layout, dst: Layout
) -> Tensors:
    """What came, which is in the order of the ranks that sent it, as this rank has its positions."""
    chunks = [chunk for part in _shared(mesh, axis, dst, src) for chunk in part]
    shapes = [[(*x.shape[:2], b - a, x.shape[3]) for x in like] for a, b in chunks]
    flats = iter(came.split([prod(shape) for of_chunk in shapes for shape in of_chunk]))
    pieces = [[next(flats).view(shape) for shape in of_chunk] for of_chunk in shapes]
    starts = _starts(dst.chunks[mesh.get_local_rank(axis)])
    ordered = sorted(range(len(chunks)), key=lambda i: starts(chunks[i][0]))
    return tuple(
        torch.cat([x.new_empty((*x.shape[:2], 0, x.shape[3])), *(pieces[i][j] for i in ordered)], 2)
        for j, x in enumerate(like)
    )


def _shared(mesh: DeviceMesh, axis: str, here: Layout, there: Layout) -> list[list[Chunk]]:
    """For each rank the chunks that it has by `there` and this rank by `here`, in order of their positions."""
    own = here.chunks[mesh.get_local_rank(axis)]
    return [
        sorted((max(a, c), min(b, d)) for a, b in own for c, d in chunks if max(a, c) < min(b, d))
        for chunks in there.chunks
    ]


def _starts(chunks: Sequence[Chunk]) -> Callable[[int], int]:
    """Where a position is among those of these chunks."""
    before = list(accumulate((b - a for a, b in chunks), initial=0))

    def start(position: int) -> int:
        return next(n + position - a for n, (a, b) in zip(before, chunks, strict=False) if a <= position < b)

    return start
