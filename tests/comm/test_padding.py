from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from spmd.comm import fill_empty_tensor_to_shards, pad_tensor, unpad_tensor
from spmd.comm.mesh_collectives import chunks


@pytest.mark.parametrize("shape, dim", [((2, 3), 0), ((2, 3), 1), ((2, 3), -1), ((0, 3), 0), ((2, 3, 4), 1), ((5,), 0)])
@pytest.mark.parametrize("size", [0, 1, 3])
def test_what_is_padded_is_zeros_and_comes_off_again(shape: tuple[int, ...], dim: int, size: int) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    padded = pad_tensor(x, dim, size)
    zeros = x.new_zeros(*shape[: dim % x.ndim], size, *shape[dim % x.ndim + 1 :])
    assert torch.equal(padded, torch.cat([x, zeros], dim))
    assert torch.equal(unpad_tensor(padded, dim, size), x)


@pytest.mark.parametrize("size, n", [(5, 4), (8, 4), (1, 3), (3, 3), (7, 2)])
def test_chunks_are_those_of_torch_and_empty_ones_behind(size: int, n: int) -> None:
    x = torch.randn(2, size, generator=torch.Generator().manual_seed(2))
    parts = list(torch.chunk(x, n, 1))
    filled = fill_empty_tensor_to_shards(parts, 1, n - len(parts))
    for a, b in zip(chunks(x, 1, n), filled, strict=True):
        assert a.shape == b.shape and torch.equal(a, b)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda: pad_tensor(torch.ones(2), 1, 1), "pad_dim 1 is not in"),
        (lambda: pad_tensor(torch.ones(2), 0, -1), "must be at least 0"),
        (lambda: unpad_tensor(torch.ones(2), 0, 3), "no 3 entries to take off"),
    ],
)
def test_a_mistake_says_what_was_given(wrong: Callable, message: str) -> None:
    with pytest.raises((ValueError, IndexError), match=message):
        wrong()
