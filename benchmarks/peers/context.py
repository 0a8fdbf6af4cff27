"""torch's context parallel attention on the CPU: its ring, over the CPU's kernel, for which it has no entry of its own.

    out = RingAttention.apply(q, k, v, group, "alltoall")     # causal, parts balanced as torch balances them
"""

from __future__ import annotations

import torch
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

aten = torch.ops.aten


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, group, rotate: str):
        ring.set_rotate_method(rotate)
        ctx.group = group
        kernel = aten._scaled_dot_product_flash_attention_for_cpu.default
        out, sums = ring._templated_ring_attention(group, 2, kernel, q, k, v, is_causal=True)[:2]
        ctx.save_for_backward(q, k, v, out, sums)
        return out

    @staticmethod
    def backward(ctx, g):
        q, k, v, out, sums = ctx.saved_tensors
        kernel = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        found = ring._templated_ring_attention_backward(
            ctx.group, 2, kernel, g, "grad_out", q, k, v, out, sums, is_causal=True, dropout_p=0.0
        )
        return *found[:3], None, None
