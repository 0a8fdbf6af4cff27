"""Decompositions of histograms and counts, and of questions about whole tensors: each rank counts its own elements.

    histogramdd(f32[n@dp, 2], [4, 4])     the limits of the bins are extremes over dp; the counts are sums over dp
    bincount(i64[n@dp])                   the length is a maximum over dp; the counts are sums over dp
    allclose(f32[n@dp], f32[n@dp])        one bool over dp

The ops read one number or a few, so a captured program keeps them. They are kept if no operand is distributed.
"""

from __future__ import annotations

import torch

from spmd.tensor.rules.decomposition_table import Table, decomposition_registrar
from spmd.tensor.rules.masked import reads_values
from spmd.tensor.rules.norms import is_distributed

aten = torch.ops.aten

count_decompositions: Table = {}
"""From an op to a function of the same arguments. The function returns NotImplemented where the op is kept."""

register_decomposition = decomposition_registrar(count_decompositions)


def numbers(x: torch.Tensor) -> list:
    """The numbers in a small 1-D tensor."""
    return [aten._local_scalar_dense.default(each) for each in aten.unbind.int(aten.mul.Scalar(x, 1))]


def lengths(x: torch.Tensor) -> list[int]:
    """The numbers in a tensor of one dim, or none, that may be sharded."""
    return [aten._local_scalar_dense.default(each) for each in aten.unbind.int(aten.reshape.default(x, [-1, 1]))]


# ---- losses -----------------------------------------------------------------------------------


@register_decomposition(aten._ctc_loss.Tensor)
def ctc_loss(log_probs, targets, input_lengths, target_lengths, blank=0, zero_infinity=False):
    """With lengths that are numbers, a rank can take those of its part of the batch."""
    if not is_distributed(log_probs, targets) or not reads_values(input_lengths, target_lengths):
        return NotImplemented
    given = lengths(input_lengths), lengths(target_lengths)
    return aten._ctc_loss.default(log_probs, targets, *given, blank, zero_infinity)


@register_decomposition(aten._ctc_loss_backward.Tensor)
def ctc_loss_backward(
    grad, log_probs, targets, input_lengths, target_lengths, neg_log_likelihood, log_alpha, blank, zero_infinity=False
):
    if not is_distributed(log_probs, targets) or not reads_values(input_lengths, target_lengths):
        return NotImplemented
    given = lengths(input_lengths), lengths(target_lengths)
    return aten._ctc_loss_backward.default(
        grad, log_probs, targets, *given, neg_log_likelihood, log_alpha, blank, zero_infinity
    )


# ---- histograms -------------------------------------------------------------------------------


def _outer_edges(x: torch.Tensor) -> list[float]:
    """For each coordinate the least and the greatest value."""
    rows = aten.reshape.default(x, [-1, x.shape[-1]])
    ends = [numbers(best(rows, [0])) for best in (aten.amin.default, aten.amax.default)]
    return [end for pair in zip(*ends, strict=True) for end in pair]


def _needs_edges(x: torch.Tensor, range, *others) -> bool:
    return range is None and x.ndim > 1 and x.numel() and is_distributed(x) and reads_values(x)


@register_decomposition(aten._histogramdd_bin_edges.default)
def histogramdd_bin_edges(self, bins, *, range=None, weight=None, density=False):
    """With a given range, the edges depend on no value."""
    if self.ndim < 2 or not is_distributed(self) or (range is None and not _needs_edges(self, range)):
        return NotImplemented
    range = _outer_edges(self) if range is None else range
    return aten._histogramdd_bin_edges.default(aten.new_zeros.default(self, [0, self.shape[-1]]), bins, range=range)


@register_decomposition(aten._histogramdd_from_bin_cts.default)
def histogramdd_from_bin_cts(self, bins, *, range=None, weight=None, density=False):
    """With a given range, the counts are sums (see the book). A density is of all counts."""
    if density or not _needs_edges(self, range):
        return NotImplemented
    return aten._histogramdd_from_bin_cts.default(self, bins, range=_outer_edges(self), weight=weight)


@register_decomposition(aten.bincount.default)
def bincount(self, weights=None, minlength=0):
    if not is_counted(self, weights) or not self.numel() or not is_distributed(self) or not reads_values(self):
        return NotImplemented
    least, most = (numbers(best(self, [0], True))[0] for best in (aten.amin.default, aten.amax.default))
    if least < 0:
        return NotImplemented  # the op raises the error
    return counted(self, weights, max(most + 1, minlength))


def is_counted(x: torch.Tensor, weights: torch.Tensor | None) -> bool:
    """Whether `bincount` takes these; the op raises the error where it does not."""
    whole = not x.dtype.is_floating_point and not x.dtype.is_complex and x.dtype != torch.bool
    return x.ndim == 1 and whole and (weights is None or weights.shape == x.shape)


def counted(x: torch.Tensor, weights: torch.Tensor | None, n: int) -> torch.Tensor:
    """What `bincount` gives where all values of x are in 0..n-1 and the result has n elements."""
    floats = weights is not None and weights.dtype == torch.float32
    dtype = torch.int64 if weights is None else torch.float32 if floats else torch.float64
    each = aten.ones_like.default(x, dtype=dtype) if weights is None else aten._to_copy.default(weights, dtype=dtype)
    zeros = aten.new_zeros.default(each, [n])
    return aten.scatter_add.default(zeros, 0, aten._to_copy.default(x, dtype=torch.int64), each)


# ---- questions about whole tensors ------------------------------------------------------------


@register_decomposition(aten.allclose.default)
def allclose(self, other, rtol=1e-05, atol=1e-08, equal_nan=False):
    if not is_distributed(self, other) or not reads_values(self, other):
        return NotImplemented
    close = aten.isclose.default(self, other, rtol, atol, equal_nan)
    return bool(aten._local_scalar_dense.default(aten.all.default(close)))


@register_decomposition(aten.equal.default)
def equal(self, other):
    if self.dtype != other.dtype or not is_distributed(self, other) or not reads_values(self, other):
        return NotImplemented
    if self.shape != other.shape:
        return False
    return bool(aten._local_scalar_dense.default(aten.all.default(aten.eq.Tensor(self, other))))


@register_decomposition(aten._linalg_check_errors.default)
def linalg_check_errors(info, api_name, *, is_matrix):
    """One flag says whether any matrix of the batch failed. Only then the op has to say which."""
    if not is_distributed(info) or not reads_values(info):
        return NotImplemented
    return NotImplemented if aten._local_scalar_dense.default(aten.any.default(info)) else None
