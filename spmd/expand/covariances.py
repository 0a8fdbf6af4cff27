"""`cov` and `corrcoef` in a trace: torch reads the divisor, to warn where it is not positive.

    torch.cov(f32[4, n])    ->  f32[4, 4]: products of the rows, less their means, divided by n - 1
"""

from __future__ import annotations

from typing import Any

import torch


def cov(
    input: torch.Tensor, *, correction: int = 1, fweights: torch.Tensor | None = None,
    aweights: torch.Tensor | None = None,
) -> Any:  # fmt: skip
    """Of each row with each. A divisor that is not positive is taken as zero, as torch does. NotImplemented where torch
    raises an error."""
    if input.ndim > 2 or input.dtype is torch.bool:
        return NotImplemented
    x = input if input.ndim == 2 else input.reshape(1, -1)
    x = x if x.is_floating_point() or x.is_complex() else x.to(torch.get_default_dtype())
    weights = [w for w in (fweights, aweights) if w is not None]
    if any(w.shape != x.shape[1:] for w in weights):
        return NotImplemented
    if not weights:
        x = x - x.mean(1, keepdim=True)
        return (x @ x.mH / torch.sym_max(x.shape[1] - correction, 0)).squeeze()
    w = weights[0] * weights[-1] if len(weights) == 2 else weights[0]
    total, spread = w.sum(), (w if aweights is None else w * aweights).sum()
    own = correction if aweights is None else correction * spread / total
    x = x - (x * w).sum(1, keepdim=True) / total
    return (x * w @ x.mH / (total - own).clamp_min(0)).squeeze()


def corrcoef(input: torch.Tensor) -> Any:
    """The covariances divided by the deviations of both rows, cut to [-1, 1]."""
    found = cov(input)
    if found is NotImplemented:
        return NotImplemented
    if not found.ndim:
        return found / found
    deviation = found.diagonal().real.sqrt() if found.is_complex() else found.diagonal().sqrt()
    found = found / deviation.unsqueeze(1) / deviation
    if found.is_complex():
        return torch.complex(found.real.clamp(-1, 1), found.imag.clamp(-1, 1))
    return found.clamp(-1, 1)
