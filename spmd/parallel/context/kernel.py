"""Attention of some rows to some keys, with what is needed to add other keys later.

    out, sums = attend(q, k, v, None, True, scale)         sums: the logarithm of each row's sum of exponentials
    dq, dk, dv = gradients(g, q, k, v, out, sums, ...)     out and sums may be those of all keys

The gradients of a part of the keys need only the result and the sums of all. On the CPU torch's kernel computes both.
Elsewhere, and where values have another size than keys, attention is written out; its scores are held at once.
"""

from __future__ import annotations

import torch

from spmd.tensor.recipes.attention import GRADIENTS, KERNEL

Mask = torch.Tensor | None
"""What is added to the scores, [b, h, rows, keys] or broadcast over any of these."""


def attend(q, k, v, mask: Mask, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Of [b, h, t, d], [b, h or fewer, s, d] and [b, h or fewer, s, e]: [b, h, t, e], and sums [b, h, t].

    A row that sees nothing has a result of zero, and sums of minus infinity.
    """
    if not _has_kernel(q, v):
        return _written_out(q, k, v, mask, causal, scale)
    out, sums = KERNEL(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    if mask is not None:  # the kernel says zero where a row sees nothing
        sums = sums.masked_fill(mask.isneginf().all(-1), -torch.inf)
    return out, sums


def gradients(g, q, k, v, out, sums, mask: Mask, causal: bool, scale: float) -> tuple[torch.Tensor, ...]:
    """The gradients of q, k and v from that of the result."""
    sums = sums.masked_fill(sums.isneginf(), 0.0)
    if _has_kernel(q, v):
        return GRADIENTS(g, q, k, v, out, sums, 0.0, causal, attn_mask=mask, scale=scale)
    p, wide = (_scores(q, k, mask, causal, scale) - sums.unsqueeze(-1)).exp(), sums.dtype
    g, keys, values = g.to(wide), _for_heads(k, q).to(wide), _for_heads(v, q).to(wide)
    ds = p * (g @ values.mT - (g * out).sum(-1, keepdim=True)) * scale
    back = ds @ keys, _of_heads(ds.mT @ q.to(wide), k), _of_heads(p.mT @ g, v)
    return tuple(x.to(like.dtype) for x, like in zip(back, (q, k, v), strict=True))


def _has_kernel(q: torch.Tensor, v: torch.Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def _written_out(q, k, v, mask: Mask, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    scores = _scores(q, k, mask, causal, scale)
    sums = scores.logsumexp(-1)
    weights = (scores - sums.masked_fill(sums.isneginf(), 0.0).unsqueeze(-1)).exp()
    return (weights @ _for_heads(v, q).to(sums.dtype)).to(q.dtype), sums


def _scores(q, k, mask: Mask, causal: bool, scale: float) -> torch.Tensor:
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    scores = q.to(wide) @ _for_heads(k, q).to(wide).mT * scale
    if causal:
        rows, keys = scores.shape[-2:]
        scores = scores.masked_fill(scores.new_ones(rows, keys, dtype=torch.bool).triu(1), -torch.inf)
    return scores if mask is None else scores + mask


def _for_heads(x: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Each head of keys or values for all heads of queries that belong to it."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _of_heads(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The sum over the heads of queries that belong to a head of keys or values."""
    return x.unflatten(1, (like.shape[1], -1)).sum(2)
