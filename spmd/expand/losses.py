"""Losses in a trace, where torch would read lengths or sizes, or make a tensor of them, in C++.

    F.ctc_loss(x, targets, (7, 6), (3, 2))    the loss of each sequence, divided by the length of its target; their mean
    F.ctc_loss(x, targets, lengths, wanted)   the same by ops that read the lengths where they run (`ctc_lengths`)
    vmap(F.cross_entropy)(x, targets)         a masked sum; torch's rules for vmap make numbers of sizes, that of a
                                              gather, too
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from spmd import _torch
from spmd.tensor.recipes import ctc_lengths

NONE, MEAN, SUM = range(3)
REDUCTIONS = {"none": NONE, "mean": MEAN, "sum": SUM}


def ctc_loss(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: int | str = MEAN, zero_infinity: bool = False,
) -> Any:  # fmt: skip
    """The loss, its mean or sum. NotImplemented where torch's own way works: lengths that are numbers, and no mean."""
    how = REDUCTIONS.get(reduction, reduction)
    if isinstance(input_lengths, torch.Tensor) and isinstance(target_lengths, torch.Tensor):
        lengths = [n.detach().reshape(-1) for n in (input_lengths, target_lengths)]
        each = _each(log_probs, targets, *lengths, blank, zero_infinity)
        divisors = lengths[1].clamp_min(1)
    elif how == MEAN and _are_numbers(input_lengths) and _are_numbers(target_lengths):
        each = torch.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, NONE, zero_infinity)
        divisors = torch.tensor([max(n, 1) for n in target_lengths], dtype=each.dtype, device=each.device)
    else:
        return NotImplemented
    if how == MEAN:
        return (each / (divisors if each.ndim else divisors[0])).mean()
    return each.sum() if how == SUM else each


def cross_entropy(
    input: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None = None, size_average: bool | None = None,
    ignore_index: int = -100, reduce: bool | None = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Any:  # fmt: skip
    """The loss of classes under vmap. NotImplemented elsewhere, and for what is more than an index of classes."""
    more = weight is not None or size_average is not None or reduce is not None or label_smoothing != 0.0
    both = isinstance(input, torch.Tensor) and isinstance(target, torch.Tensor)
    mapped = both and any(_torch.is_functorch_wrapper(x) for x in (input, target))
    if more or not mapped or reduction not in REDUCTIONS or target.is_floating_point() or input.ndim < 1:
        return NotImplemented
    dim = min(1, input.ndim - 1)
    counts = target != ignore_index
    classes = torch.arange(input.shape[dim], device=input.device).view(-1, *[1] * (input.ndim - 1 - dim))
    each = -torch.where(counts.unsqueeze(dim) & (target.unsqueeze(dim) == classes), input.log_softmax(dim), 0).sum(dim)
    if reduction == "none":
        return each
    return each.sum() / counts.sum() if reduction == "mean" else each.sum()


def _each(
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: torch.Tensor, target_lengths: torch.Tensor,
    blank: int, zero_infinity: bool,
) -> torch.Tensor:  # fmt: skip
    """The loss of each sequence; of one that is no batch, a number."""
    x = log_probs if log_probs.ndim == 3 else log_probs.unsqueeze(1)
    found = ctc_lengths.ctc_loss(x, targets, input_lengths, target_lengths, blank, zero_infinity)
    if zero_infinity:
        found = torch.where(found == torch.inf, 0, found)
    return found if log_probs.ndim == 3 else found.squeeze(0)


def _are_numbers(lengths: Any) -> bool:
    return isinstance(lengths, Sequence) and all(type(n) is int for n in lengths)


FUNCTIONS = {torch.nn.functional.cross_entropy: cross_entropy}
"""From a function to one of the same arguments, which returns NotImplemented where torch is to do it."""
