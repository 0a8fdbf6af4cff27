"""Decompositions of ops with masks: the ranks exchange counts, or the elements that a mask selects, not whole tensors.

    masked_select(f32[n@dp], mask)          running counts over dp say where each selected element goes
    masked_scatter(f32[n@dp], mask, src)    and which element of src each place takes
    nonzero(f32[n@dp])                      the same for the places themselves

How many elements a mask selects is in its values. So `masked_select` and `nonzero` first count them: they read one
number, which a program that is captured cannot. A selected element is written where it belongs by the rank that has it,
and zeros elsewhere: the result is a sum over the ranks. (So -0.0 is selected as 0.0.)

The ops are kept if no operand is distributed.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from spmd import _torch
from spmd.tensor.rules.decomposition_table import Table, decomposition_registrar
from spmd.tensor.rules.norms import cast, is_distributed

aten = torch.ops.aten

mask_decompositions: Table = {}
"""From an op to a function of the same arguments. The function returns NotImplemented where the op is kept."""

register_decomposition = decomposition_registrar(mask_decompositions)


def reads_values(*tensors: torch.Tensor) -> bool:
    """Whether numbers can be read from these tensors now: not where one is fake, or stands for the value of a node."""
    blocks = [getattr(x, "_local_tensor", None) if hasattr(x, "_spec") else x for x in tensors]
    return not any(x is None for x in blocks) and not _torch.is_faking(*blocks)


def _count(mask: torch.Tensor) -> int:
    return aten._local_scalar_dense.default(aten.sum.default(mask))


def places(mask: torch.Tensor) -> torch.Tensor:
    """For each element of a flat mask, how many elements before it are selected."""
    return aten.sub.Tensor(aten.cumsum.default(mask, 0), cast(mask, torch.int64))


def _flat(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return aten.reshape.default(aten.expand.default(x, list(shape)), [prod(shape)])


def _collected(values: torch.Tensor, mask: torch.Tensor, n: int) -> torch.Tensor:
    """The first n of the flat values that a flat mask selects, in order, and zeros if there are fewer.

    What is not selected is added, as zero, to one place more, which is dropped.
    """
    at = places(mask)
    kept = aten.logical_and.default(mask, aten.lt.Scalar(at, n))
    dropped = aten.logical_not.default(kept)
    values = aten.masked_fill.Scalar(values, dropped, 0)
    work = cast(values, torch.uint8) if values.dtype == torch.bool else values
    at = aten.masked_fill.Scalar(at, dropped, n)
    out = aten.slice.Tensor(aten.scatter_add.default(aten.new_zeros.default(work, [n + 1]), 0, at, work), 0, 0, n)
    return aten.ne.Scalar(out, 0) if values.dtype == torch.bool else out


# ---- what a mask selects ----------------------------------------------------------------------


@register_decomposition(aten.masked_select.default)
def masked_select(self, mask):
    if mask.dtype != torch.bool or not is_distributed(self, mask) or not reads_values(self, mask):
        return NotImplemented
    shape = torch.broadcast_shapes(self.shape, mask.shape)
    flat = _flat(mask, shape)
    return _collected(_flat(self, shape), flat, _count(flat))


@register_decomposition(aten.masked_scatter_backward.default)
def masked_scatter_backward(grad_output, mask, sizes):
    if mask.dtype != torch.bool or not is_distributed(grad_output, mask):
        return NotImplemented
    shape = grad_output.shape
    return aten.view.default(_collected(_flat(grad_output, shape), _flat(mask, shape), prod(sizes)), sizes)


@register_decomposition(aten.nonzero.default)
def nonzero(self):
    if not self.ndim or not is_distributed(self) or not reads_values(self):
        return NotImplemented
    mask = _flat(aten.ne.Scalar(self, 0), self.shape)
    return aten.t.default(aten.stack.default(_coordinates(mask, self.shape, _count(mask)), 0))  # by columns, as torch's


@register_decomposition(aten.nonzero_static.default)
def nonzero_static(self, *, size, fill_value=-1):
    if not self.ndim or not is_distributed(self):
        return NotImplemented
    mask = _flat(aten.ne.Scalar(self, 0), self.shape)
    found = aten.stack.default(_coordinates(mask, self.shape, size), 1)
    number = aten.sub.Scalar(aten.cumsum.default(aten.new_ones.default(mask, [size, 1], dtype=torch.int64), 0), 1)
    return aten.masked_fill.Scalar(found, aten.ge.Tensor(number, aten.sum.default(mask)), fill_value)


def _coordinates(mask: torch.Tensor, shape: Sequence[int], n: int) -> list[torch.Tensor]:
    """The coordinates in a tensor of this shape, by dim, of the first n elements that a flat mask selects."""
    ones = aten.new_ones.default(mask, [prod(shape)], dtype=torch.int64)
    at = _collected(aten.sub.Scalar(aten.cumsum.default(ones, 0), 1), mask, n)
    at = aten.abs.default(at)  # reduced here, and not once for each dim
    steps = [prod(shape[d + 1 :]) for d in range(len(shape))]
    each = [(aten.floor_divide.Scalar(at, max(step, 1)), max(n, 1)) for step, n in zip(steps, shape, strict=True)]
    return [aten.remainder.Scalar(x, n) for x, n in each]


# ---- what goes where a mask says --------------------------------------------------------------


@register_decomposition(aten.masked_scatter.default)
def masked_scatter(self, mask, source):
    if mask.dtype != torch.bool or not source.numel() or not is_distributed(self, mask, source):
        return NotImplemented
    shape = torch.broadcast_shapes(self.shape, mask.shape)
    flat = _flat(mask, shape)
    at = aten.masked_fill.Scalar(places(flat), aten.logical_not.default(flat), 0)
    taken = aten.take.default(source, aten.view.default(at, list(shape)))
    return aten.where.self(aten.expand.default(mask, list(shape)), taken, self)


@register_decomposition(aten.put.default)
def put(self, index, source, accumulate=False):
    """`scatter` into the flat tensor. An index may count from the end."""
    if not self.numel() or self.dtype == torch.bool or not is_distributed(self, index, source):
        return NotImplemented
    n = self.numel()
    flat, index, source = (aten.reshape.default(x, [-1]) for x in (self, index, source))
    index = aten.where.self(aten.lt.Scalar(index, 0), aten.add.Scalar(index, n), index)
    out = (aten.scatter_add.default if accumulate else aten.scatter.src)(flat, 0, index, source)
    return aten.reshape.default(out, list(self.shape))


@register_decomposition(aten._unsafe_masked_index.default)
def unsafe_masked_index(self, mask, indices, fill):
    """`where(mask, self[indices], fill)`, where an index that is masked may point anywhere."""
    if not self.numel() or not is_distributed(self, mask, *_given(indices)):
        return NotImplemented
    found = aten._unsafe_index.Tensor(self, _clamped(self, indices))
    return aten.masked_fill.Scalar(found, aten.logical_not.default(mask), fill)


@register_decomposition(aten._unsafe_masked_index_put_accumulate.default)
def unsafe_masked_index_put_accumulate(self, mask, indices, values):
    if not self.numel() or not is_distributed(self, mask, values, *_given(indices)):
        return NotImplemented
    values = aten.masked_fill.Scalar(values, aten.logical_not.default(mask), 0)
    return aten.index_put.default(self, _clamped(self, indices), values, True)


def _given(indices: Sequence) -> list[torch.Tensor]:
    return [i for i in indices if i is not None]


def _clamped(x: torch.Tensor, indices: Sequence) -> list:
    return [i if i is None else aten.clamp.default(i, -n, n - 1) for i, n in zip(indices, x.shape, strict=False)]


@register_decomposition(aten.index_put.default)
def index_put(self, indices, values, accumulate=False):
    """`x[mask] = y`, for a mask of the shape of x: y is one number, or one for each place."""
    mask = indices[0] if len(indices) == 1 else None
    if mask is None or mask.dtype != torch.bool or mask.shape != self.shape or values.dtype != self.dtype:
        return NotImplemented
    if not is_distributed(self, mask, values):
        return NotImplemented
    zeros = aten.zeros_like.default(self)
    if values.numel() == 1:
        spread = aten.expand.default(aten.view.default(values, [1] * self.ndim), list(self.shape))
    else:
        spread = aten.masked_scatter.default(zeros, mask, values)
    if accumulate:
        return aten.add.Tensor(self, aten.where.self(mask, spread, zeros))
    return aten.where.self(mask, spread, self)


@register_decomposition(aten.index.Tensor)
def index(self, indices):
    """`x[mask]`: a mask is the places where it is true."""
    masks = [i for i in indices if i is not None and i.dtype == torch.bool]
    operands = (self, *_given(indices))
    if not masks or not is_distributed(*operands) or not reads_values(*operands):
        return NotImplemented
    if list(indices) == masks and masks[0].shape == self.shape:
        return masked_select(self, masks[0])
    places_of = [aten.unbind.int(aten.nonzero.default(i), 1) if i is not None and i.dtype == torch.bool else [i]
                 for i in indices]  # fmt: skip
    return aten.index.Tensor(self, [i for each in places_of for i in each])
