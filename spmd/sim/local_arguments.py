"""The arguments and results of torch.distributed's calls, as each simulated rank has them.

    own = OwnValues(1)
    own(x)                                    # the tensor of rank 1, if x is a LocalTensor
    write_results("all_reduce", x, received)  # copies each rank's result into that rank's tensor

A collective is called once for all ranks. The functions here read what each rank gives to it, and write what each rank
gets from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from spmd import _torch
from spmd.sim.exchange import Ranks
from spmd.sim.local_int import PerRank, pick
from spmd.sim.local_tensor import LocalTensor, plain_tensor_error, same

pytree = _torch.pytree
Tensors = Sequence[torch.Tensor]


class OwnValues:
    """The values of one rank: `own(x)` replaces each LocalTensor and number in x by that rank's."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __call__(self, value: Any) -> Any:
        return pytree.tree_map(self._leaf, pick(value, self.rank))

    def _leaf(self, value: Any) -> Any:
        return value.local[self.rank] if isinstance(value, LocalTensor) else pick(value, self.rank)


def calling_ranks(played: Ranks, tensors: Tensors, kind: str, where: str) -> Ranks:
    """The ranks that call: those of the played ranks that all LocalTensors have."""
    ranks = [rank for rank in played if all(rank in x.ranks for x in tensors if isinstance(x, LocalTensor))]
    if not ranks:
        raise RuntimeError(f"{kind} at {where}: none of the ranks played here, {list(played)}, has these tensors")
    return tuple(ranks)


def reduction_name(opts: Any) -> str:
    """The reduction in a collective's options, as a word."""
    word = "sum" if opts is None else opts.reduceOp.op.name.lower()
    if word == "premul_sum":
        raise NotImplementedError("ReduceOp.PREMUL_SUM is not simulated. Multiply first, x.mul_(factor), and use SUM.")
    return word


def as_list(tensors: Any) -> Tensors:
    """The tensors as a list, also if a single one is given."""
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def list_of_rank(lists: Any, rank: int) -> Any:
    """The list of one rank. A list that is not a PerRank is the same list, of LocalTensors, for all ranks."""
    return pick(lists, rank) if isinstance(lists, PerRank) else lists


def flattened(parts: Tensors) -> torch.Tensor:
    """The elements of all tensors in one flat tensor."""
    return torch.cat([part.reshape(-1) for part in parts])


def element_counts(parts: Tensors) -> tuple[int, ...]:
    """The number of elements of each tensor."""
    return tuple(part.numel() for part in parts)


def copy_into(kind: str, into: torch.Tensor, y: torch.Tensor, who: str) -> None:
    """Copy a received tensor into the tensor that a rank gave. `kind` and `who` are for the error message."""
    if into.numel() != y.numel() or into.dtype != y.dtype:
        raise ValueError(f"{kind}: a tensor that is {describe(into)}{who} cannot hold what arrives, {describe(y)}")
    with _torch.no_modes(), torch.no_grad():
        into.copy_(y.view(into.shape))


def describe(x: torch.Tensor) -> str:
    """Dtype and shape as text: `torch.float32 [2]`."""
    return f"{x.dtype} {list(x.shape)}"


def write_results(kind: str, into: torch.Tensor, received: Mapping[int, Any], callers: Any = None) -> None:
    """Copy what each rank received into its own tensor. callers: all ranks that took part, if not all received."""
    with _torch.no_modes(), torch.no_grad():
        if isinstance(into, LocalTensor):
            local = into.local
            for rank, y in received.items():
                copy_into(kind, local[rank], y, f" on rank {rank}")
            return
        first, *others = received.values()
        if len(received) != len(callers or received) or not all(same(first, y) for y in others):
            raise plain_tensor_error(kind)
        copy_into(kind, into, first, "")
