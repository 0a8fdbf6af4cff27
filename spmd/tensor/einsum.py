"""A product of two tensors that einsum spells, as one `matmul` or `linear` that keeps its dims.

    bqhd,bkhd->bhqk     matmul(b h q d, b h d k)        batch and head are dims of both, and stay two
    btd,dhk->bthk       linear(b t d, (h k) d)          what only one side has, and what is summed, is flattened

torch flattens the dims of both into one batch, which two axes of a mesh cannot share out without a move.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F

PLAIN = re.compile(r"([a-zA-Z]+),([a-zA-Z]+)->([a-zA-Z]*)")
"""Two operands and a result, without dots."""


def product(equation: str, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """What torch.einsum gives; NotImplemented for what is no product of two, or stretches, traces or sums a dim alone.

    >>> x, y = torch.randn(2, 3, 4), torch.randn(4, 5)
    >>> torch.allclose(product("btd,dn->nbt", [x, y]), torch.einsum("btd,dn->nbt", x, y))
    True
    """
    found = PLAIN.fullmatch(equation.replace(" ", ""))
    if found is None or len(operands) != 2:
        return NotImplemented
    left, right, out = found.groups()
    x, y = operands
    if not _is_meant(left, right, out) or len(left) != x.ndim or len(right) != y.ndim:
        return NotImplemented
    sizes = dict(zip(left, x.shape, strict=True))
    if any(sizes.setdefault(label, n) != n for label, n in zip(right, y.shape, strict=True)):
        return NotImplemented
    both, summed = _both(left, right, out), [n for n in left if n in right and n not in out]
    rows, columns = [n for n in left if n not in right], [n for n in right if n not in left]
    b, m, n, k = ([sizes[label] for label in labels] for labels in (both, rows, columns, summed))
    x, y = _in_order(x, left, [*both, *rows, *summed]), _in_order(y, right, [*both, *columns, *summed])
    y = _shaped(y, [*b, prod(n), prod(k)])
    if both:
        z = torch.matmul(_shaped(x, [*b, prod(m), prod(k)]), y.mT)
    else:
        z = F.linear(_shaped(x, [*m, prod(k)]), y)
    return _in_order(_shaped(z, [*b, *m, *n]), [*both, *rows, *columns], list(out))


def _both(left: str, right: str, out: str) -> list[str]:
    """The dims of both operands that the result has, in its order."""
    return [label for label in out if label in left and label in right]


def _is_meant(left: str, right: str, out: str) -> bool:
    """Whether no operand has a dim twice, and what one of them has alone is in the result."""
    alone = set(left) ^ set(right)
    once = all(len(set(labels)) == len(labels) for labels in (left, right, out))
    return once and alone <= set(out) <= set(left) | set(right)


def _in_order(x: torch.Tensor, labels: Sequence[str], wanted: Sequence[str]) -> torch.Tensor:
    order = [labels.index(label) for label in wanted]
    return x if order == sorted(order) else x.permute(order)


def _shaped(x: torch.Tensor, shape: list[int]) -> torch.Tensor:
    return x if list(x.shape) == shape else x.reshape(shape)
