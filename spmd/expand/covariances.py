"""`cov` and `corrcoef` in a trace: torch's own look at values in C++, only to warn of a divisor that is not positive.

    torch.cov(x)  ->  x - mean(x, 1); its product with itself, divided by the number of columns less one
"""

from __future__ import annotations

import torch


def cov(
    x: torch.Tensor, *, correction: int = 1, fweights: torch.Tensor | None = None, aweights: torch.Tensor | None = None
) -> torch.Tensor:
    """The covariances of the rows, as torch has them; a vector is one row."""
    rows = x if x.ndim == 2 else x.reshape(1, -1)
    rows = rows if rows.is_floating_point() or rows.is_complex() else rows.to(torch.get_default_dtype())
    counts = _product(fweights, aweights)
    if counts is None:
        apart = rows - rows.mean(1, keepdim=True)
        return (apart @ apart.mH / torch.sym_max(rows.shape[1] - correction, 0)).squeeze()
    total = counts.sum()
    apart = rows - (rows * counts).sum(1, keepdim=True) / total
    by = total - correction * (1 if aweights is None else (counts * aweights).sum() / total)
    return (apart * counts @ apart.mH / by.clamp(min=0)).squeeze()


def corrcoef(x: torch.Tensor) -> torch.Tensor:
    """The correlations of the rows, as torch has them."""
    c = cov(x)
    if not c.ndim:
        return c / c
    deviations = c.diagonal().real.sqrt() if c.is_complex() else c.diagonal().sqrt()
    c = c / deviations[:, None] / deviations[None, :]
    if c.is_complex():
        return torch.complex(c.real.clip(-1, 1), c.imag.clip(-1, 1))
    return c.clip(-1, 1)


def _product(*weights: torch.Tensor | None) -> torch.Tensor | None:
    """How often each column counts; None where each counts once."""
    given = [w for w in weights if w is not None]
    return given[0] if len(given) == 1 else given[0] * given[1] if given else None
