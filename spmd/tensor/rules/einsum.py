"""An einsum of two tensors, done as one `matmul` or `linear` that keeps the batch dims apart.

    bqhd,bkhd->bhqk     matmul(b h q d, b h k d)        b and h are dims of both operands, and stay two dims
    btd,dhk->bthk       linear(b t d, (h k) d)          dims that only one operand has, and summed dims, are flattened

torch's einsum flattens the dims of both operands into one batch dim. If two axes of a mesh shard these dims, the
flattened one needs a move.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod

import torch
import torch.nn.functional as F

PLAIN = re.compile(r"([a-zA-Z]+),([a-zA-Z]+)->([a-zA-Z]*)")
"""An equation of two operands and a result, without dots."""


def product(equation: str, operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """The result of torch.einsum. NotImplemented if the equation is no plain product of two operands.

    A plain product broadcasts no dim, takes no diagonal, and sums only dims that both operands have.

    >>> x, y = torch.randn(2, 3, 4), torch.randn(4, 5)
    >>> torch.allclose(product("btd,dn->nbt", [x, y]), torch.einsum("btd,dn->nbt", x, y))
    True
    """
    match = PLAIN.fullmatch(equation.replace(" ", ""))
    if match is None or len(operands) != 2:
        return NotImplemented
    left, right, out = match.groups()
    x, y = operands
    if not _is_plain_product(left, right, out) or len(left) != x.ndim or len(right) != y.ndim:
        return NotImplemented
    sizes = dict(zip(left, x.shape, strict=True))
    if any(sizes.setdefault(label, n) != n for label, n in zip(right, y.shape, strict=True)):
        return NotImplemented
    batch, summed = _batch_labels(left, right, out), [n for n in left if n in right and n not in out]
    rows, columns = [n for n in left if n not in right], [n for n in right if n not in left]
    b, m, n, k = ([sizes[label] for label in labels] for labels in (batch, rows, columns, summed))
    x, y = _permuted(x, left, [*batch, *rows, *summed]), _permuted(y, right, [*batch, *columns, *summed])
    y = _reshaped(y, [*b, prod(n), prod(k)])
    if batch:
        z = torch.matmul(_reshaped(x, [*b, prod(m), prod(k)]), y.mT)
    else:
        z = F.linear(_reshaped(x, [*m, prod(k)]), y)
    return _permuted(_reshaped(z, [*b, *m, *n]), [*batch, *rows, *columns], list(out))


def _batch_labels(left: str, right: str, out: str) -> list[str]:
    """The labels that both operands and the result have, in the order of the result."""
    return [label for label in out if label in left and label in right]


def _is_plain_product(left: str, right: str, out: str) -> bool:
    """Whether no tensor has a label twice, and every label of only one operand is in the result."""
    alone = set(left) ^ set(right)
    once = all(len(set(labels)) == len(labels) for labels in (left, right, out))
    return once and alone <= set(out) <= set(left) | set(right)


def _permuted(x: torch.Tensor, labels: Sequence[str], wanted: Sequence[str]) -> torch.Tensor:
    order = [labels.index(label) for label in wanted]
    return x if order == sorted(order) else x.permute(order)


def _reshaped(x: torch.Tensor, shape: list[int]) -> torch.Tensor:
    return x if list(x.shape) == shape else x.reshape(shape)
