"""Padding makes uneven shards even, for collectives that need one size on all ranks.

    >>> pad_tensor(torch.ones(2, 3), 0, 1).shape, unpad_tensor(torch.ones(3, 3), 0, 1).shape
    (torch.Size([3, 3]), torch.Size([2, 3]))
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def pad_tensor(tensor: torch.Tensor, pad_dim: int, pad_size: int) -> torch.Tensor:
    """The tensor with `pad_size` zeros appended on `pad_dim`; the tensor itself if `pad_size` is 0."""
    _check(tensor, pad_dim, pad_size)
    if pad_size == 0:
        return tensor
    behind = tensor.ndim - pad_dim % tensor.ndim - 1
    return torch.nn.functional.pad(tensor, [0, 0] * behind + [0, pad_size])


def unpad_tensor(tensor: torch.Tensor, pad_dim: int, pad_size: int) -> torch.Tensor:
    """The tensor without the last `pad_size` entries of `pad_dim`: a view; the tensor itself if `pad_size` is 0."""
    _check(tensor, pad_dim, pad_size)
    if pad_size > tensor.shape[pad_dim]:
        raise ValueError(f"unpad_tensor: dim {pad_dim} of {list(tensor.shape)} has no {pad_size} entries to take off")
    return tensor if pad_size == 0 else tensor.narrow(pad_dim, 0, tensor.shape[pad_dim] - pad_size)


def fill_empty_tensor_to_shards(
    shards: Sequence[torch.Tensor], shard_dim: int, num_empty_tensors: int
) -> list[torch.Tensor]:
    """The shards of `torch.chunk`, followed by empty shards for the ranks that it left out."""
    empty = shards[0].narrow(shard_dim, 0, 0)
    return [*shards, *(empty.clone() for _ in range(num_empty_tensors))]


def _check(tensor: torch.Tensor, dim: int, size: int) -> None:
    if not -tensor.ndim <= dim < tensor.ndim:
        raise IndexError(f"pad_dim {dim} is not in a tensor of shape {list(tensor.shape)}")
    if size < 0:
        raise ValueError(f"pad_size is {size}; it must be at least 0")
