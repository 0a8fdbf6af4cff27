"""Fused kernels of optimisers."""

from __future__ import annotations

import torch


def fused_adamw_(
    p: torch.Tensor, g: torch.Tensor, m: torch.Tensor, v: torch.Tensor, step: torch.Tensor,
    lr: float, beta1: float, beta2: float, eps: float, decay: float,
) -> None:  # fmt: skip
    """One step of AdamW, in place, in one pass over the memory. The tensors lie alike, on the CPU."""
    torch._fused_adamw_(
        [p], [g], [m], [v], [], [step], lr=lr, beta1=beta1, beta2=beta2, weight_decay=decay, eps=eps, amsgrad=False,
        maximize=False,
    )  # fmt: skip


FUSED_STEPS = {
    getattr(torch, name): getattr(torch.ops.aten, name).default
    for name in ("_fused_adam_", "_fused_adamw_", "_fused_sgd_", "_fused_adagrad_")
}
"""The functions that optimisers with `fused=True` call for all parameters, with their ops for numbers as floats."""
