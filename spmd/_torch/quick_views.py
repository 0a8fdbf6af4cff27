"""The shapes of views whose sizes are symbols, where no size has to be asked for them.

    view(f32[x0*x1, 64], [x0, x1, 64])    as many elements, whatever x0 and x1 are: strides x1*64, 64, 1

torch takes a view apart into splits and merges of dims, and asks at each step whether sizes are equal, divide one
another, or are 0 or 1: milliseconds, and a condition for each answer. NotImplemented where a question has to be asked.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from spmd._torch.size_nodes import SizeNode

aten = torch.ops.aten

Layout = tuple[Sequence[Any], Sequence[Any], Any]
"""The shape, the strides and the offset of a tensor."""


def are_sizes(values: Iterable[Any]) -> bool:
    """Whether all are numbers, or expressions of sizes, of which there is one node each."""
    return all(type(n) is int or (type(n) is torch.SymInt and type(n.node) is SizeNode) for n in values)


def _is_same(x: Any, y: Any) -> bool:
    """Whether two sizes are equal by what they are: one number, or one expression."""
    if type(x) is int or type(y) is int:
        return type(x) is type(y) and x == y
    return x.node is y.node


def contiguous(shape: Sequence[Any]) -> list[Any]:
    """The strides of a contiguous tensor that is not empty."""
    steps, step = [], 1
    for n in reversed(shape):
        steps.append(step)
        step = step * n
    return steps[::-1]


def _is_contiguous(x: torch.Tensor) -> bool:
    """Whether x is contiguous whatever its sizes are. torch writes `Max(1, n)` for a size n in some strides."""
    plain, largest = 1, 1
    for n, step in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if not _is_same(n, 1) and not _is_same(step, plain) and not _is_same(step, largest):
            return False
        plain, largest = plain * n, largest * torch.sym_max(n, 1)
    return True


def _view(x: torch.Tensor, size: Sequence[Any]) -> Layout:
    if not size or not x.ndim or any(type(n) is int and n < 1 for n in x.shape):
        return NotImplemented
    if not are_sizes((*size, *x.shape, *x.stride())) or not _is_contiguous(x):
        return NotImplemented
    elements = _product(x.shape)
    size = _inferred(size, elements)
    if any(type(n) is int and n < 1 for n in size) or not _is_same(_product(size), elements):
        return NotImplemented
    return size, contiguous(size), x.storage_offset()


def _product(sizes: Sequence[Any]) -> Any:
    return functools.reduce(operator.mul, sizes, 1)


def _inferred(size: Sequence[Any], elements: Any) -> list[Any]:
    """A shape with a length in the place of -1. It is right if the shape has as many elements then."""
    known = [n for n in size if type(n) is not int or n != -1]
    others = _product(known)
    if len(known) != len(size) - 1 or (type(others) is int and others < 1):
        return [*size]
    return [elements // others if type(n) is int and n == -1 else n for n in size]


def _transpose(x: torch.Tensor, one: int, other: int) -> Layout:
    if not -x.ndim <= min(one, other) <= max(one, other) < x.ndim:
        return NotImplemented  # an error, in torch's words, as below
    order = [*range(x.ndim)]
    order[one], order[other] = order[other], order[one]
    return _permute(x, order)


def _t(x: torch.Tensor) -> Layout:
    return _permute(x, [*reversed(range(x.ndim))]) if x.ndim <= 2 else NotImplemented


def _permute(x: torch.Tensor, dims: Sequence[int]) -> Layout:
    shape, stride = x.shape, x.stride()
    if sorted(d + len(shape) if d < 0 else d for d in dims) != [*range(len(shape))]:
        return NotImplemented
    return [shape[d] for d in dims], [stride[d] for d in dims], x.storage_offset()


def _unsqueeze(x: torch.Tensor, dim: int) -> Layout:
    if not -x.ndim - 1 <= dim <= x.ndim:
        return NotImplemented
    at, shape, stride = dim % (x.ndim + 1), [*x.shape], [*x.stride()]
    step = shape[at] * stride[at] if at < x.ndim else 1
    return [*shape[:at], 1, *shape[at:]], [*stride[:at], step, *stride[at:]], x.storage_offset()


def _same(x: torch.Tensor) -> Layout:
    return x.shape, x.stride(), x.storage_offset()


def _as_strided(x: torch.Tensor, size: Sequence[Any], stride: Sequence[Any], offset: Any = None) -> Layout:
    return size, stride, x.storage_offset() if offset is None else offset


QUICK_VIEWS: dict[Any, Callable[..., Layout]] = {
    aten.view.default: _view, aten.transpose.int: _transpose, aten.t.default: _t, aten.permute.default: _permute,
    aten.unsqueeze.default: _unsqueeze, aten.detach.default: _same, aten.alias.default: _same,
    aten.as_strided.default: _as_strided,
}  # fmt: skip
"""Views, with the layout of what they give."""
