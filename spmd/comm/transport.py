"""Transports: who carries a collective.

The shape is that of torch's functional collectives: never in place, plain data but for the tensor, a group by its
name, and a result that must pass through `wait_tensor` before it is read.

    >>> from spmd.comm import transport
    >>> transport().all_reduce
    <OpOverload(op='_c10d_functional.all_reduce', overload='default')>

On torch.distributed each collective *is* the dispatcher op, so it can stand in an fx graph as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import fx

from spmd import _torch
from spmd.mesh import DeviceMesh, current_rank, groups


class Transport(Protocol):
    """The collectives of one rank. Inputs are contiguous; results are new tensors, to be waited for.

    `op`: "sum", "product", "min" or "max", which every backend has; a mean is a sum and a division. `group`: what
    `group(mesh, axis)` gave. `n`: ranks in the group.
    """

    def all_reduce(self, x: torch.Tensor, op: str, group: str) -> torch.Tensor:
        """Reduce x over the group; the same result on all its ranks."""

    def all_gather_into_tensor(self, x: torch.Tensor, n: int, group: str) -> torch.Tensor:
        """[r, ...] -> [n * r, ...]: the x of all ranks, of one shape, one after the other on dim 0."""

    def reduce_scatter_tensor(self, x: torch.Tensor, op: str, n: int, group: str) -> torch.Tensor:
        """[n * r, ...] -> [r, ...]: reduce x over the group and keep one's own n-th of dim 0."""

    def all_to_all_single(
        self, x: torch.Tensor, out_splits: list[int], in_splits: list[int], group: str
    ) -> torch.Tensor:
        """Send `in_splits[j]` rows of x to the group's j-th rank; put the `out_splits[j]` it sends in j-th place."""

    def broadcast(self, x: torch.Tensor, src: int, group: str) -> torch.Tensor:
        """The x of the group's src-th rank: a place in the group, no global rank."""

    def broadcast_(self, x: torch.Tensor, src: int, group: str) -> torch.Tensor:
        """The same, written into x, which is contiguous; gives x, to be waited for."""

    def all_reduce_coalesced(self, xs: list[torch.Tensor], op: str, group: str) -> list[torch.Tensor]:
        """`all_reduce` of tensors of one dtype, as one; the same for the next two."""

    def all_gather_into_tensor_coalesced(self, xs: list[torch.Tensor], n: int, group: str) -> list[torch.Tensor]: ...

    def reduce_scatter_tensor_coalesced(
        self, xs: list[torch.Tensor], op: str, n: int, group: str
    ) -> list[torch.Tensor]: ...

    def wait_tensor(self, x: torch.Tensor) -> torch.Tensor:
        """The same values, arrived."""

    def step(self, start: Callable[..., Any], finish: Callable[[Any], Any], *args: Any) -> Any:
        """`finish(start(*args))`, where `start` sends and `finish` waits: for one rank, or for all that are played."""

    def bound(self, make: Callable[[], fx.GraphModule]) -> Callable[..., Any]:
        """The program that `make` gives this rank, or those that it gives all that are played, as one function."""

    def group(self, mesh: DeviceMesh, axis: int | str | tuple[int, ...]) -> str:
        """The name of the group along one axis of the mesh, or several, through this rank."""

    def gather_objects(self, obj: object, mesh: DeviceMesh) -> list:
        """One object of every rank of the mesh, in row-major order, on all of them."""

    def gather_marks(self, mark: bytes, mesh: DeviceMesh) -> list[bytes]:
        """The same for a few bytes, equally many on all ranks: one small collective."""


class C10dTransport:
    """The collectives of torch.distributed: NCCL on CUDA, gloo on CPU."""

    all_reduce: Callable[..., torch.Tensor] = _torch.c10d_functional.all_reduce.default
    all_gather_into_tensor: Callable[..., torch.Tensor] = _torch.c10d_functional.all_gather_into_tensor.default
    reduce_scatter_tensor: Callable[..., torch.Tensor] = _torch.c10d_functional.reduce_scatter_tensor.default
    all_to_all_single: Callable[..., torch.Tensor] = _torch.c10d_functional.all_to_all_single.default
    broadcast: Callable[..., torch.Tensor] = _torch.c10d_functional.broadcast.default
    broadcast_: Callable[..., torch.Tensor] = _torch.c10d_functional.broadcast_.default
    all_reduce_coalesced: Callable[..., list] = _torch.c10d_functional.all_reduce_coalesced.default
    all_gather_into_tensor_coalesced: Callable[..., list] = (
        _torch.c10d_functional.all_gather_into_tensor_coalesced.default
    )
    reduce_scatter_tensor_coalesced: Callable[..., list] = (
        _torch.c10d_functional.reduce_scatter_tensor_coalesced.default
    )
    wait_tensor: Callable[..., torch.Tensor] = _torch.c10d_functional.wait_tensor.default

    def step(self, start: Callable[..., Any], finish: Callable[[Any], Any], *args: Any) -> Any:
        """One rank's start and finish."""
        return finish(start(*args))

    def bound(self, make: Callable[[], fx.GraphModule]) -> Callable[..., Any]:
        """One rank's program."""
        return make()

    def group(self, mesh: DeviceMesh, axis: int | str | tuple[int, ...]) -> str:
        """The name of the process group along one axis or several; the group is made by the first collective on it."""
        return groups.known(_name_along(mesh, axis, current_rank()))

    def gather_objects(self, obj: object, mesh: DeviceMesh) -> list:
        """One pickled object of every rank of the mesh, in row-major order."""
        found: list[Any] = [obj] * mesh.size()
        if mesh.size() > 1:
            dist.all_gather_object(found, obj, group=groups.whole_group(mesh))
        return found


    def gather_marks(self, mark: bytes, mesh: DeviceMesh) -> list[bytes]:
        """A few bytes of every rank of the mesh; through the CPU where the group can, so as not to wait for a GPU."""
        if mesh.size() == 1:
            return [mark]
        group = groups.whole_group(mesh)
        device = "cpu" if "cpu:" in dist.get_backend_config(group) else mesh.device_type
        mine = torch.frombuffer(bytearray(mark), dtype=torch.uint8).to(device)
        every = self.wait_tensor(self.all_gather_into_tensor(mine, mesh.size(), group.group_name))
        return [bytes(row) for row in every.reshape(mesh.size(), -1).tolist()]


@functools.lru_cache(maxsize=4096)
def _name_along(mesh: DeviceMesh, axis: int | str | tuple[int, ...], rank: int) -> str:
    return groups.name_of(mesh.ranks_along(axis, mesh.coordinate_of(rank)))


_c10d = C10dTransport()
_current: ContextVar[Transport] = ContextVar("spmd_transport", default=_c10d)


def transport() -> Transport:
    """The transport of the rank this code plays: torch.distributed's unless a `use_transport` is around it."""
    return _current.get()


@contextmanager
def use_transport(t: Transport) -> Iterator[Transport]:
    """Carry collectives by `t` inside the block, in this thread only."""
    token = _current.set(t)
    try:
        yield t
    finally:
        _current.reset(token)
