"""Functional collectives: they return new tensors, are differentiable, and work alike in eager mode and in traces.

    y = all_reduce(x, "sum", mesh)                      # or [0, 1], [[0, 1], [2, 3]], (mesh, "tp"), ...
    y = all_gather_tensor(x, 1, (mesh, "tp"))           # [4, 8] on 2 ranks -> [4, 16]
    y = reduce_scatter_tensor(x, "avg", 0, "ranks:0-3")

Names and order of the arguments, but for the first, are those of torch.distributed._functional_collectives. In eager
mode the result is an AsyncTensor, which is launched and not yet waited for. In a trace (Dynamo, AOTAutograd, make_fx) a
call becomes the dispatcher ops `_c10d_functional.*` and `wait_tensor` with plain constants; tracing needs no process
group.

Places in a group (`src`, `src_dst`) count from 0 along the group; they are not global ranks. A mistake that one rank
can see by itself is an error before anything is sent. Inside `checked()` ranks also compare their calls.

Differences from torch's functions: every dtype can be sent and bools can be reduced, NaN survives a maximum, "avg"
works on gloo, a gather on any dim stays asynchronous, and every collective has a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from spmd.comm import adjoint, launch
from spmd.comm.adjoint import LINEAR, differentiates
from spmd.comm.group import Group, Members, members
from spmd.comm.packing import checked_dim, equal_part, equal_parts
from spmd.mesh import per_rank

# ---- the collectives --------------------------------------------------------------------------


def all_reduce(input: torch.Tensor, reduceOp: str, group: Group) -> torch.Tensor:
    """[...] -> [...]: `input` reduced over the group, the same on all its ranks.

    reduceOp: "sum", "avg", "product", "min" or "max"; "band", "bor" or "bxor" for integers. Bools stay bools.
    """
    to = members(group)
    if differentiates(input):
        return adjoint.AllReduce.apply(input, reduceOp, *to)
    return launch.all_reduce(input, reduceOp, to)


def all_gather_tensor(input: torch.Tensor, gather_dim: int, group: Group) -> torch.Tensor:
    """[..., r, ...] -> [..., n * r, ...]: the tensors of all n ranks, all of one shape, concatenated on `gather_dim`.

    A 0-dim tensor is taken as a 1-dim tensor of one element.
    """
    to = members(group)
    if differentiates(input):
        return adjoint.AllGather.apply(input, gather_dim, *to)
    return launch.all_gather(input, gather_dim, to)


def reduce_scatter_tensor(input: torch.Tensor, reduceOp: str, scatter_dim: int, group: Group) -> torch.Tensor:
    """[..., n * r, ...] -> [..., r, ...]: `input` reduced over the group; each rank keeps its n-th of `scatter_dim`."""
    to = members(group)
    if differentiates(input):
        return adjoint.ReduceScatter.apply(input, reduceOp, scatter_dim, *to)
    return launch.reduce_scatter(input, reduceOp, scatter_dim, to)


def all_to_all_single(
    input: torch.Tensor,
    output_split_sizes: Sequence[int] | None,
    input_split_sizes: Sequence[int] | None,
    group: Group,
) -> torch.Tensor:
    """[rows, ...] -> [other rows, ...]: send `input_split_sizes[j]` rows to the j-th rank of the group.

    That rank must expect as many rows from this rank in its `output_split_sizes`. None for both: equal parts.
    """
    to = members(group)
    return _all_to_all(input, *_checked_splits(input, output_split_sizes, input_split_sizes, to), None, to)


def broadcast(input: torch.Tensor, src: int, group: Group) -> torch.Tensor:
    """[...] -> [...]: the tensor of the group's src-th rank. On other ranks `input` gives only shape and dtype."""
    to = members(group)
    _check_place("broadcast", src, to)
    return adjoint.Broadcast.apply(input, src, *to) if differentiates(input) else launch.broadcast(input, src, to)


def scatter(input: torch.Tensor | Sequence[torch.Tensor], src: int, group: Group) -> torch.Tensor:
    """[n * r, ...] -> [r, ...]: each rank gets its n-th of the src-th rank's tensor.

    If `input` is a list of n tensors, each rank gets its own entry, and the entries may differ in shape. On ranks other
    than src the input gives only shapes and dtype. Only the source sends, and only what each rank gets.
    """
    to = members(group)
    _check_place("scatter", src, to)
    parts = input if isinstance(input, (list, tuple)) else equal_parts("scatter", input, _row_dim(input), to.size)
    if len(parts) != to.size:
        raise ValueError(f"scatter: a list of {len(parts)} tensors for a group of {to.size} ranks; give one a rank")
    flat = torch.cat([part.reshape(-1) for part in parts])
    out_splits, in_splits, shape = _scatter_splits([tuple(part.shape) for part in parts], src, to)
    # A rank that sends nothing gives an empty slice of its input, so that every rank takes part in the backward.
    return _all_to_all(_first(flat, sum(in_splits)), out_splits, in_splits, shape, to)


def permute_tensor(input: torch.Tensor, src_dst: Sequence[int], group: Group) -> torch.Tensor:
    """[...] -> [...]: rank m of the group sends its tensor to rank src_dst[m]; no rank may receive two tensors.

    A rank with -1 sends nothing. A rank that receives nothing gets zeros.
    """
    to = members(group)
    out_splits, in_splits = _permute_splits(src_dst, input.numel(), to)
    return _all_to_all(_first(input.reshape(-1), sum(in_splits)), out_splits, in_splits, tuple(input.shape), to)


def all_reduce_coalesced(inputs: Sequence[torch.Tensor], reduceOp: str, group: Group) -> list[torch.Tensor]:
    """`all_reduce` of several tensors, launched as one."""
    if reduceOp not in LINEAR and differentiates(*inputs):
        return [all_reduce(x, reduceOp, group) for x in inputs]
    return adjoint.all_reduce_coalesced(inputs, reduceOp, members(group))


def all_gather_into_tensor_coalesced(inputs: Sequence[torch.Tensor], group: Group) -> list[torch.Tensor]:
    """`all_gather_tensor` on dim 0 of several tensors, launched as one."""
    return adjoint.all_gather_coalesced(inputs, (0,) * len(inputs), members(group))


def reduce_scatter_tensor_coalesced(
    inputs: Sequence[torch.Tensor], reduceOp: str, scatter_dim: Sequence[int], group: Group
) -> list[torch.Tensor]:
    """`reduce_scatter_tensor` of several tensors, each on its own dim, launched as one."""
    dims = tuple(scatter_dim)
    if len(dims) != len(inputs):
        raise ValueError(f"reduce_scatter_tensor_coalesced: {len(dims)} dims for {len(inputs)} tensors; give one each")
    if reduceOp not in LINEAR and differentiates(*inputs):
        return [reduce_scatter_tensor(x, reduceOp, dim, group) for x, dim in zip(inputs, dims, strict=True)]
    return adjoint.reduce_scatter_coalesced(inputs, reduceOp, dims, members(group))


# ---- arguments --------------------------------------------------------------------------------


def _all_to_all(
    x: torch.Tensor, out_splits: Sequence[int], in_splits: Sequence[int], shape: Sequence[int] | None, to: Members
) -> torch.Tensor:
    if differentiates(x):
        return adjoint.AllToAll.apply(x, tuple(out_splits), tuple(in_splits), shape, *to)
    return launch.all_to_all(x, out_splits, in_splits, to, shape)


def _first(x: torch.Tensor, n: int) -> torch.Tensor:
    """The first n entries of x; x itself if n is a plain number and equal to its size."""
    return x if isinstance(n, int) and n == x.numel() else x[:n]


@per_rank
def _checked_splits(
    x: torch.Tensor, out_splits: Sequence[int] | None, in_splits: Sequence[int] | None, to: Members
) -> tuple[Sequence[int], Sequence[int]]:
    rows = x.shape[_row_dim(x, "all_to_all_single")]
    if (out_splits is None) != (in_splits is None):
        raise ValueError("all_to_all_single: give both output_split_sizes and input_split_sizes, or None for both")
    if out_splits is None or in_splits is None:
        each = equal_part("all_to_all_single", x, 0, to.size)
        return [each] * to.size, [each] * to.size
    _check_splits(rows, out_splits, in_splits, to)
    return out_splits, in_splits


@per_rank
def _check_splits(rows: int, out_splits: Sequence[int], in_splits: Sequence[int], to: Members) -> None:
    if len(out_splits) != to.size or len(in_splits) != to.size or min(*out_splits, *in_splits) < 0:
        raise ValueError(
            f"all_to_all_single: output_split_sizes {list(out_splits)} and input_split_sizes {list(in_splits)} must "
            f"have one number of rows for each of the {to.size} ranks"
        )
    if sum(in_splits) != rows:
        raise ValueError(
            f"all_to_all_single: input_split_sizes {list(in_splits)} add up to {sum(in_splits)}, but the input has "
            f"{rows} rows"
        )


def _row_dim(x: torch.Tensor, kind: str = "scatter") -> int:
    """Dim 0; IndexError for a 0-dim tensor."""
    return checked_dim(kind, 0, x)


def _check_place(kind: str, src: int, to: Members) -> None:
    if not 0 <= src < to.size:
        raise ValueError(f"{kind}: src {src} is not in 0..{to.size - 1}: it is a place in the group, no global rank")


@per_rank
def _scatter_splits(shapes: Sequence[tuple[int, ...]], src: int, to: Members) -> tuple[list[int], list[int], tuple]:
    """What this rank receives from each rank and sends to each rank, in elements, and the shape it receives."""
    sizes = [prod(shape) for shape in shapes]
    out_splits = [sizes[to.place] if i == src else 0 for i in range(to.size)]
    return out_splits, sizes if to.place == src else [0] * to.size, shapes[to.place]


@per_rank
def _permute_splits(src_dst: Sequence[int], numel: int, to: Members) -> tuple[list[int], list[int]]:
    """What this rank receives from each rank and sends to each rank, in elements."""
    targets = [dst for dst in src_dst if dst != -1]
    if len(src_dst) != to.size or len(set(targets)) < len(targets) or not all(0 <= dst < to.size for dst in targets):
        raise ValueError(
            f"permute_tensor: src_dst is {list(src_dst)}; for a group of {to.size} ranks it must have {to.size} "
            f"entries: for each rank the one it sends to, 0..{to.size - 1} and each at most once, or -1 to send nothing"
        )
    out_splits = [numel if dst == to.place else 0 for dst in src_dst]
    in_splits = [numel if i == src_dst[to.place] else 0 for i in range(to.size)]
    return out_splits, in_splits
