"""Attention by heads: one all-to-all makes of a part of the sequence for all heads the whole sequence for some heads.

    q [b, h, t@cp, d]  ->  [b, h@cp, t, d]  ->  attention as on one device  ->  [b, h@cp, t, d]  ->  [b, h, t@cp, d]

A rank sends (n - 1)/n of its queries, keys, values and results, forward and again backward. Keys and values with fewer
heads than there are ranks are repeated first.

S. Jacobs et al., DeepSpeed Ulysses, arXiv:2309.14509.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from spmd.comm import all_gather_tensor, shard_dim_alltoall, wait
from spmd.mesh import per_rank
from spmd.parallel.context.layout import Layout
from spmd.parallel.context.ring import Ring


def attention_by_heads(q, k, v, mask, ring: Ring) -> torch.Tensor:
    """Attention of this rank's rows to the keys of all ranks. The ranks divide the heads of the queries."""
    check_heads(q.shape[1], ring.n)
    if k.shape[1] % ring.n:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    q, k, v = (
        _reordered(_exchanged(x, 2, 1, ring, layout), layout, back=False)
        for x, layout in ((q, ring.rows), (k, ring.keys), (v, ring.keys))
    )
    out = F.scaled_dot_product_attention(
        q, k, v, _whole_mask(mask, ring), is_causal=ring.causal, scale=ring.scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return _exchanged(_reordered(out, ring.rows, back=True), 1, 2, ring, ring.rows)


def check_heads(heads: int, ranks: int) -> None:
    """ValueError unless each rank gets as many heads of queries."""
    if heads % ranks:
        raise ValueError(
            f"context_parallel: method 'heads' gives each of {ranks} ranks some heads, and there are {heads}; "
            "use a mesh whose size divides them, or method='ring'"
        )


def _exchanged(x: torch.Tensor, gather: int, shard: int, ring: Ring, layout: Layout) -> torch.Tensor:
    """As many heads for each rank, or positions as they are laid out."""
    sizes = list(layout.lengths) if gather == 2 else [x.shape[1]] * ring.n
    return shard_dim_alltoall(x, gather, shard, ring.mesh, ring.axis, gather_sizes=sizes)


def _reordered(x: torch.Tensor, layout: Layout, back: bool) -> torch.Tensor:
    """All positions, in order; or back as the ranks have them."""
    if layout.is_in_order:
        return x
    order = torch.tensor(layout.order, device=x.device)
    return x.index_select(2, order if back else order.argsort())


def _whole_mask(mask: torch.Tensor | None, ring: Ring) -> torch.Tensor | None:
    """The mask of all positions, for this rank's heads."""
    if mask is None:
        return None
    layout, dim = (ring.keys, 3) if ring.mask_is == "keys" else (ring.rows, 2)
    most = max(layout.lengths)
    every = wait(all_gather_tensor(_padded(mask, dim, most), dim, (ring.mesh, ring.axis)))
    places = [
        owner * most + i for owner, n in enumerate(layout.lengths) for i in range(n)
    ]  # of the positions in what was gathered, rank by rank
    inverse = torch.tensor(layout.order).argsort()
    whole = every.index_select(dim, torch.tensor(places, device=mask.device)[inverse])
    return _own_heads(whole, ring)


@per_rank
def _padded(x: torch.Tensor, dim: int, n: int) -> torch.Tensor:
    return F.pad(x, [0, 0] * (x.ndim - 1 - dim) + [0, n - x.shape[dim]])


@per_rank
def _own_heads(mask: torch.Tensor, ring: Ring) -> torch.Tensor:
    return mask if mask.shape[1] == 1 else mask.chunk(ring.n, 1)[ring.place()]
