"""An all-to-all whose sizes are known only when the program runs, between buffers whose sizes are known before.

    x [rows, ...]           the first sizes[0].sum() rows go out, sizes[0][j] of them to the j-th rank
    y [as many as said]     the first sizes[1].sum() rows came, sizes[1][j] of them from the j-th rank; the rest is zero

A traced function has one op for it, whose shapes are known. In the code of a rank it is four calls, of which the first
is the one place where sizes are read on the host: `read_sizes`, `first_rows`, the all-to-all of the transport, and
`in_buffer`. The gradient is the same exchange the other way, with the same sizes. Without data, as where memory is
counted, sizes are those of the buffers.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from spmd import _torch
from spmd.comm.group import Group, members

_library = torch.library.Library("spmd", "FRAGMENT")
_library.define("exchange_rows(Tensor x, Tensor sizes, int rows, str group) -> Tensor")

EXCHANGE_ROWS = torch.ops.spmd.exchange_rows.default


@torch.library.impl(_library, "exchange_rows", "Meta")
def _exchanged_without_data(x: torch.Tensor, sizes: torch.Tensor, rows: int, group: str) -> torch.Tensor:
    return x.new_empty((rows, *x.shape[1:]))


def exchange_rows(x: torch.Tensor, sizes: torch.Tensor, rows: int, group: Group) -> torch.Tensor:
    """[n, ...] -> [rows, ...]: the rows that come from the ranks of a group, one rank's behind the other's, and zeros.

    For functions of blocks in a compiled step. sizes: [2, ranks] integers, in host memory: how many rows go to each
    rank and how many come from each. x has at least as many rows as go; behind them may be anything. Its gradient is
    zero there.
    """
    return _ExchangeRows.apply(x, sizes, rows, members(group).name)


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sizes, rows, group):
        ctx.rows, ctx.group = len(x), group
        ctx.save_for_backward(sizes)
        return EXCHANGE_ROWS(x, sizes, rows, group)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, g):
        (sizes,) = ctx.saved_tensors
        return EXCHANGE_ROWS(g.contiguous(), sizes.flip(0), ctx.rows, ctx.group), None, None, None


# ---- in the code of a rank --------------------------------------------------------------------


def read_sizes(sizes: torch.Tensor, sent: int, received: int) -> tuple[list[int], list[int]]:
    """How many rows go to each rank, and how many come. sent, received: the rows of the buffers.

    >>> read_sizes(torch.tensor([[1, 0], [2, 3]]), 4, 8)
    ([1, 0], [2, 3])
    """
    if _torch.is_fake(sizes):
        others = [0] * (sizes.shape[1] - 1)
        return [sent, *others], [received, *others]
    to_each, from_each = sizes.tolist()
    return to_each, from_each


def first_rows(x: torch.Tensor, sizes: tuple[list[int], list[int]]) -> torch.Tensor:
    """The rows that are sent, in the memory of x."""
    return x[: sum(sizes[0])]


def in_buffer(y: torch.Tensor, rows: int) -> torch.Tensor:
    """These rows, and zeros behind them; y itself where it has as many.

    >>> in_buffer(torch.ones(1), 3)
    tensor([1., 0., 0.])
    """
    return y if len(y) == rows else torch.cat([y, y.new_zeros((rows - len(y), *y.shape[1:]))])


def written_rows(write: Any, launch: Any, wait: Any, x: Any, sizes: Any, rows: tuple[int, int], group: str) -> Any:
    """The exchange as calls that `write(function, *arguments)` writes. launch, wait: of a transport."""
    read = write(read_sizes, sizes, *rows)
    to_each, from_each = (write(operator.getitem, read, i) for i in range(2))
    came = write(launch, write(first_rows, x, read), from_each, to_each, group)
    return write(in_buffer, write(wait, came), rows[1])
