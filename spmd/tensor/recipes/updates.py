"""Updates of optimisers that are one op of a program: what stands in the place of a chain of small ones.

    p, m, v = adamw(p, g, m, v, step, lr, beta1, beta2, eps, decay)

The chain reads and writes the memory of a parameter and its state many times, the fused kernel once. It rounds in other
places, so the last bit may differ. `passes/fused_updates.py` finds the chains.
"""

from __future__ import annotations

from math import sqrt

import torch

from spmd import _torch


def adamw(p, g, m, v, step, lr, beta1, beta2, eps, decay):
    """The parameter and its two averages after a step of AdamW (Loshchilov and Hutter 2019, algorithm 2).

    p, g, m, v: the parameter, its gradient and the averages of the gradient and of its square, of one shape and dtype.
    step: how many steps there were, this one included.
    """
    return adamw_(p.clone(), g, m.clone(), v.clone(), step, lr, beta1, beta2, eps, decay)


def adamw_(p, g, m, v, step, lr, beta1, beta2, eps, decay):
    """`adamw` in the memory of the parameter and the averages."""
    if p.numel() and p.device.type == "cpu" and all(x.is_contiguous() for x in (p, m, v)):
        _torch.fused_adamw_(p, g.contiguous(), m, v, step, lr, beta1, beta2, eps, decay)
        return p, m, v
    n = step.item()
    p.mul_(1 - lr * decay)
    m.lerp_(g, 1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    spread = (v.sqrt() / sqrt(1 - beta2**n)).add_(eps)
    return p.addcdiv_(m, spread, value=-lr / (1 - beta1**n)), m, v


TENSORS = 5
"""How many of the arguments are tensors: the first ones."""
WRITTEN = (0, 2, 3)
"""The arguments that the update makes anew."""
DTYPES = (torch.float32, torch.float64)
"""The dtypes of which the kernel computes as the chain does, but for rounding."""
