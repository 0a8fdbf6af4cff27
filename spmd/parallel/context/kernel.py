"""Attention of some rows to some keys, with what is needed to add other keys later.

    out, sums = attend(q, k, v, None, True, scale)         sums: the logarithm of each row's sum of exponentials
    dq, dk, dv = gradients(g, q, k, v, out, sums, ...)     out and sums may be those of all keys

The gradients of a part of the keys need only the result and the sums of all. On the CPU torch's kernel computes both,
and on GPUs flash attention, which takes half precision and no mask. Elsewhere, and where values have another size than
keys, attention is written out; its scores are held at once.
"""

from __future__ import annotations

import functools

import torch

from spmd.tensor.recipes.attention import GRADIENTS, KERNEL

aten = torch.ops.aten
FLASH = aten._scaled_dot_product_flash_attention.default
FLASH_GRADIENTS = aten._scaled_dot_product_flash_attention_backward.default

Mask = torch.Tensor | None
"""What is added to the scores, [b, h, rows, keys] or broadcast over any of these."""


def attend(q, k, v, mask: Mask, causal: bool, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Of [b, h, t, d], [b, h or fewer, s, d] and [b, h or fewer, s, e]: [b, h, t, e], and sums [b, h, t].

    A row that sees nothing has a result of zero, and sums of minus infinity.
    """
    if is_for_flash(q, k, v, mask):
        return FLASH(q, k, v, 0.0, causal, scale=scale)[:2]
    if not _has_kernel(q, v):
        return _written_out(q, k, v, mask, causal, scale)
    out, sums = KERNEL(q, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    if mask is not None:  # the kernel says zero where a row sees nothing
        sums = sums.masked_fill(mask.isneginf().all(-1), -torch.inf)
    return out, sums


def gradients(g, q, k, v, out, sums, mask: Mask, causal: bool, scale: float) -> tuple[torch.Tensor, ...]:
    """The gradients of q, k and v from that of the result."""
    if is_for_flash(q, k, v, mask):
        return flash_gradients(g, q, k, v, out, sums, causal, scale)
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


def is_for_flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Mask) -> bool:
    """Whether flash attention takes these tensors. Heads of keys may belong to several of queries."""
    if q.device.type != "cuda" or mask is not None or q.shape[-1] != v.shape[-1] or not q.numel() or not k.numel():
        return False
    fits = q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and q.dtype in (torch.float16, torch.bfloat16)
    return fits and torch.backends.cuda.flash_sdp_enabled() and _has_flash(q.device)


@functools.lru_cache(maxsize=64)
def _has_flash(device: torch.device) -> bool:
    is_there = torch.backends.cuda.is_flash_attention_available() and torch.version.hip is None
    return is_there and torch.cuda.get_device_capability(device) >= (8, 0)


def flash_gradients(g, q, k, v, out, sums, causal: bool, scale: float) -> tuple[torch.Tensor, ...]:
    """Of flash attention, whose sums have no strides. No random numbers were drawn, and all sequences are as long."""
    drawn = q.new_zeros(2, dtype=torch.uint64)
    lengths = None, None, q.shape[2], k.shape[2]
    return FLASH_GRADIENTS(g, q, k, v, out, sums.contiguous(), *lengths, 0.0, causal, drawn, drawn, scale=scale)


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
