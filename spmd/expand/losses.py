"""`ctc_loss` in a trace: its mean divides by lengths, of which torch makes a tensor in C++, with memory of its own.

    F.ctc_loss(x, targets, (7, 6), (3, 2))  ->  the loss of each sequence, divided by its length; their mean
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

NONE, MEAN = 0, 1


def ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: int | str = MEAN, zero_infinity: bool = False,
) -> Any:  # fmt: skip
    """The loss, its mean or sum. NotImplemented where torch's own way works: lengths in tensors, or no mean."""
    if reduction not in (MEAN, "mean") or not _are_numbers(input_lengths) or not _are_numbers(target_lengths):
        return NotImplemented
    each = torch.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, NONE, zero_infinity)
    lengths = torch.tensor([max(n, 1) for n in target_lengths], dtype=each.dtype, device=each.device)
    return (each / (lengths if each.ndim else lengths[0])).mean()


def _are_numbers(lengths: Any) -> bool:
    return isinstance(lengths, Sequence) and all(type(n) is int for n in lengths)
