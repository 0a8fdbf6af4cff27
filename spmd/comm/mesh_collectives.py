"""Collectives along one axis of a mesh: every group of the axis runs its own.

    mesh_broadcast(weight, mesh, "tp")                  # in place: each group gets the tensor of its first rank
    mesh_scatter(shard, chunks(weight, 0, 2), mesh, 1)  # in place: each rank gets its entry of the first rank's list
    y = shard_dim_alltoall(x, 0, 1, mesh, "tp")         # [r, 8] on 2 ranks -> [2 * r, 4]: one all-to-all

A rank is given by its place on the axis. Broadcast and scatter do nothing for tensors without data (meta tensors).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

import torch

from spmd import _torch
from spmd.comm import launch, wire
from spmd.comm.async_tensor import wait
from spmd.comm.check import compare_call, comparing
from spmd.comm.chunk import blocks
from spmd.comm.functional import all_gather_tensor, all_to_all_single
from spmd.comm.group import Members, members
from spmd.comm.packing import checked_dim
from spmd.comm.transport import Transport, transport
from spmd.mesh import DeviceMesh, per_rank


class PendingWrite:
    """A write into a tensor that has not finished; used like a torch.distributed Work."""

    def __init__(self, finish: Callable[[], object]) -> None:
        self._finish: Callable[[], object] | None = finish

    def wait(self) -> bool:
        """Return when the tensor has its new contents."""
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        return True

    def is_completed(self) -> bool:
        """Whether it has been waited for."""
        return self._finish is None


def mesh_broadcast(
    tensor: torch.Tensor, mesh: DeviceMesh, mesh_dim: int | str = 0, async_op: bool = False, *, group_src: int = 0
) -> PendingWrite | None:
    """Copy the tensor of the `group_src`-th rank of the mesh axis into `tensor` on every rank of the axis.

    Shape and dtype must be equal on all of them. With `async_op` returns an object to wait for.
    """
    if tensor.is_meta:
        return None
    to = members((mesh, mesh_dim))
    _check_place("mesh_broadcast", group_src, to)
    carrier = transport()
    if comparing(carrier):
        carrier = compare_call(carrier, "mesh_broadcast", [tensor], (group_src,), to)
    return _pending_write(_broadcast_into(carrier, tensor.detach(), group_src, to), async_op)


def mesh_scatter(
    output: torch.Tensor,
    scatter_list: Sequence[torch.Tensor] | None,
    mesh: DeviceMesh,
    mesh_dim: int | str = 0,
    async_op: bool = False,
    *,
    group_src: int = 0,
) -> PendingWrite | None:
    """Copy this rank's entry of the list of the `group_src`-th rank of the mesh axis into `output`.

    scatter_list: on that rank a tensor for each rank of the axis, of the dtype of `output`; the tensors may differ in
    size. On other ranks it is not read. With `async_op` returns an object to wait for.
    """
    if output.is_meta:
        return None
    to = members((mesh, mesh_dim))
    _check_place("mesh_scatter", group_src, to)
    flat, sizes = _scatter_input(output, scatter_list, group_src, to)
    expected = [output.numel() if i == group_src else 0 for i in range(to.size)]
    came = launch.all_to_all(flat, expected, sizes, to, tuple(output.shape))
    return _pending_write(lambda: output.detach().copy_(wait(came)), async_op)


def shard_dim_alltoall(
    input: torch.Tensor,
    gather_dim: int,
    shard_dim: int,
    mesh: DeviceMesh,
    mesh_dim: int | str,
    *,
    gather_sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """[r on gather_dim, k on shard_dim] -> [sum of all r, this rank's chunk of k]: one all-to-all, also on gloo.

    The input is sharded on `gather_dim` over the axis; the shards may differ in size or be empty. The result has all of
    `gather_dim` and this rank's `torch.chunk` of `shard_dim`. Each rank sends (n-1)/n of its bytes. Differentiable.

    gather_sizes: the size of `gather_dim` on each rank of the axis. None: the ranks exchange these sizes first, in a
    collective of 8 bytes a rank; in a trace, and for tensors without data, the sizes are assumed to be equal.
    """
    to = members((mesh, mesh_dim))
    gather, shard = (checked_dim("shard_dim_alltoall", dim, input) for dim in (gather_dim, shard_dim))
    if gather == shard:
        raise ValueError(f"shard_dim_alltoall: gather_dim and shard_dim are both dim {gather}; give two dims")
    given = gather_sizes is not None
    rows = _checked_sizes(gather_sizes, input, gather, to) if given else _gathered_sizes(input, gather, to)
    parts = chunks(input, shard, to.size)
    flat = torch.cat([part.reshape(-1) for part in parts])
    shapes = _piece_shapes([tuple(part.shape) for part in parts], gather, rows, to)
    expected = [prod(shape) for shape in shapes]
    pieces = all_to_all_single(flat, expected, [part.numel() for part in parts], to.name).split(expected)
    return torch.cat([piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)], gather)


def chunks(tensor: torch.Tensor, dim: int, n: int) -> list[torch.Tensor]:
    """n parts with the sizes of torch.chunk; the trailing empty parts, which torch.chunk omits, are included.

    >>> [len(part) for part in chunks(torch.arange(5), 0, 4)]
    [2, 2, 1, 0]
    """
    return list(tensor.split([length for _, length in blocks(tensor.shape[dim], 1, (n,))], dim))


def _broadcast_into(carrier: Transport, x: torch.Tensor, src: int, to: Members) -> Callable[[], object]:
    """Launch the broadcast; return the function that waits for it."""
    if x.is_contiguous() and x.dtype not in wire.BYTES_ONLY:
        sent = carrier.broadcast_(x, src, to.name)
        return lambda: carrier.wait_tensor(sent)
    came = launch.broadcast(x, src, to)
    return lambda: x.copy_(wait(came))


def _pending_write(finish: Callable[[], object], async_op: bool) -> PendingWrite | None:
    pending = PendingWrite(finish)
    if async_op:
        return pending
    pending.wait()
    return None


@per_rank
def _scatter_input(
    output: torch.Tensor, parts: Sequence[torch.Tensor] | None, src: int, to: Members
) -> tuple[torch.Tensor, list[int]]:
    """What this rank sends, as one flat tensor, and how many elements of it go to each rank."""
    if to.place != src:
        return output.new_empty(0), [0] * to.size
    if parts is None or len(parts) != to.size:
        given = "no list" if parts is None else f"a list of {len(parts)} tensors"
        raise ValueError(f"mesh_scatter: {given} on the source; give one tensor for each of the {to.size} ranks")
    unlike = next((part for part in parts if part.dtype != output.dtype), None)
    if unlike is not None or parts[src].shape != output.shape:
        wrong = parts[src] if unlike is None else unlike
        raise ValueError(
            f"mesh_scatter: {wrong.dtype} {list(wrong.shape)} in scatter_list does not fit the output, "
            f"{output.dtype} {list(output.shape)}"
        )
    return torch.cat([part.detach().reshape(-1) for part in parts]), [part.numel() for part in parts]


def _gathered_sizes(x: torch.Tensor, dim: int, to: Members) -> list[int]:
    """The size of dim on each rank: all ranks exchange it; in a trace the sizes are assumed to be equal."""
    if _torch.is_tracing(x):
        return [x.shape[dim]] * to.size
    mine = torch.full((1,), x.shape[dim], device=x.device)
    return all_gather_tensor(mine, 0, to.name).tolist()


@per_rank
def _checked_sizes(sizes: Sequence[int], x: torch.Tensor, dim: int, to: Members) -> Sequence[int]:
    if len(sizes) != to.size or sizes[to.place] != x.shape[dim]:
        raise ValueError(
            f"shard_dim_alltoall: gather_sizes {list(sizes)} do not fit dim {dim} of {list(x.shape)} on the "
            f"{to.place}-th of {to.size} ranks; give for each rank how much of the dim it has"
        )
    return sizes


@per_rank
def _piece_shapes(
    parts: Sequence[tuple[int, ...]], dim: int, rows: Sequence[int], to: Members
) -> list[tuple[int, ...]]:
    """The shapes of the pieces that this rank receives: rank r's piece has size `rows[r]` on dim."""
    mine = parts[to.place]
    return [(*mine[:dim], r, *mine[dim + 1 :]) for r in rows]


def _check_place(kind: str, src: int, to: Members) -> None:
    if not 0 <= src < to.size:
        raise ValueError(
            f"{kind}: group_src {src} is not in 0..{to.size - 1}; it is a place on the axis, no global rank"
        )
