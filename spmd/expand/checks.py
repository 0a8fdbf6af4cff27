"""What torch checks of values in tensors, and reads them for, in a trace: asserts of the program, on all ranks.

    torch.linalg.inv(x)                   and an assert that no matrix was singular
    F.gaussian_nll_loss(x, target, var)   and an assert that no variance is negative
"""

from __future__ import annotations

import math
from typing import Any

import torch

from spmd.expand.user_code import current_frames, short_place

aten = torch.ops.aten


def check_errors(info: torch.Tensor, api_name: str, *, is_matrix: bool) -> None:
    """The check of what an op of linear algebra tells of each matrix: zero where all went well."""
    aten._assert_async.msg(
        aten.all.default(aten.eq.Scalar(info, 0)),
        f"{api_name}{short_place(current_frames())}: a matrix is singular or not positive-definite, or the algorithm "
        "did not converge; the variant with _ex tells which",
    )


_LOSSES = {"none": lambda x: x, "mean": torch.mean, "sum": torch.sum}


def gaussian_nll_loss(
    input: torch.Tensor, target: torch.Tensor, var: torch.Tensor | float, full: bool = False, eps: float = 1e-6,
    reduction: str = "mean",
) -> Any:  # fmt: skip
    """Half of log var + (input - target)^2 / var. NotImplemented where torch reads nothing, or raises an error."""
    if reduction not in _LOSSES or not isinstance(var, torch.Tensor):
        return NotImplemented
    if var.shape == input.shape[:-1]:
        var = var.unsqueeze(-1)  # one for each row
    if var.ndim != input.ndim or [n for m, n in zip(input.shape, var.shape, strict=True) if m != n] not in ([], [1]):
        return NotImplemented
    message = f"gaussian_nll_loss{short_place(current_frames())}: var has a negative entry"
    aten._assert_async.msg((var >= 0).all(), message)
    var = var.clone()
    with torch.no_grad():  # a variance below eps has a gradient, too
        var.clamp_(min=eps)
    loss = 0.5 * (var.log() + (input - target).square() / var)
    return _LOSSES[reduction](loss + 0.5 * math.log(2 * math.pi) if full else loss)
