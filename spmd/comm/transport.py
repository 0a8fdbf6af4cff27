"""Transports carry collectives: torch.distributed's over the network, the simulators' in memory.

The interface is that of torch's functional collectives: never in place, all arguments but the tensor are plain data, a
group is given by its name, and a result must pass through `wait_tensor` before it is read.

    >>> from spmd.comm import transport
    >>> transport().all_reduce
    <OpOverload(op='_c10d_functional.all_reduce', overload='default')>

On torch.distributed each collective *is* the dispatcher op, so an fx graph can contain it as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import fx

from spmd import _torch
from spmd.comm.stuck import Place, wait_or_name
from spmd.mesh import DeviceMesh, current_rank, groups


class Transport(Protocol):
    """The collectives of one rank. Inputs are contiguous; results are new tensors that must be waited for.

    `op`: "sum", "product", "min" or "max", which every backend has; a mean is a sum and a division. `group`: the name
    that `group(mesh, axis)` returned. `n`: the number of ranks in the group.

    compares: whether the ranks compare what they exchange before it is sent (`spmd.comm.check`).
    """

    compares: bool

    def all_reduce(self, x: torch.Tensor, op: str, group: str) -> torch.Tensor:
        """Reduce x over the group; the same result on all its ranks."""

    def all_gather_into_tensor(self, x: torch.Tensor, n: int, group: str) -> torch.Tensor:
        """[r, ...] -> [n * r, ...]: the x of all ranks, all of one shape, concatenated on dim 0."""

    def reduce_scatter_tensor(self, x: torch.Tensor, op: str, n: int, group: str) -> torch.Tensor:
        """[n * r, ...] -> [r, ...]: reduce x over the group and keep this rank's n-th of dim 0."""

    def all_to_all_single(
        self, x: torch.Tensor, out_splits: list[int], in_splits: list[int], group: str
    ) -> torch.Tensor:
        """Send `in_splits[j]` rows of x to the group's j-th rank, and receive `out_splits[j]` rows from it.

        The result has the received rows in the order of the ranks.
        """

    def broadcast(self, x: torch.Tensor, src: int, group: str) -> torch.Tensor:
        """The x of the group's src-th rank. `src` is a place in the group, not a global rank."""

    def broadcast_(self, x: torch.Tensor, src: int, group: str) -> torch.Tensor:
        """`broadcast` written into x, which is contiguous; returns x, which must be waited for."""

    def all_reduce_(self, x: torch.Tensor, op: str, group: str) -> torch.Tensor:
        """`all_reduce` written into x, which is contiguous; returns x, which must be waited for."""

    def all_reduce_coalesced(self, xs: list[torch.Tensor], op: str, group: str) -> list[torch.Tensor]:
        """`all_reduce` of several tensors of one dtype in one launch; the next two methods are coalesced as well."""

    def all_gather_into_tensor_coalesced(self, xs: list[torch.Tensor], n: int, group: str) -> list[torch.Tensor]: ...

    def reduce_scatter_tensor_coalesced(
        self, xs: list[torch.Tensor], op: str, n: int, group: str
    ) -> list[torch.Tensor]: ...

    def wait_tensor(self, x: torch.Tensor) -> torch.Tensor:
        """Wait for the result of a collective, and return it."""

    def step(self, start: Callable[..., Any], finish: Callable[[Any], Any], *args: Any) -> Any:
        """`finish(start(*args))`, where `start` sends and `finish` waits: for one rank, or for all simulated ranks."""

    def bound(self, make: Callable[[], fx.GraphModule]) -> Callable[..., Any]:
        """This rank's bound program, which `make` builds; or the programs of all simulated ranks as one function."""

    def group(self, mesh: DeviceMesh, axis: int | str | tuple[int, ...]) -> str:
        """The name of this rank's group along one axis of the mesh, or along several axes."""

    def gather_objects(self, obj: object, mesh: DeviceMesh) -> list:
        """The objects of all ranks of the mesh, in row-major order; every rank gets all of them."""

    def gather_bytes(self, data: bytes, mesh: DeviceMesh, here: Place | None = None) -> list[bytes]:
        """A few bytes of all ranks, equally many on each: one small collective. here: as in `wait_or_name`."""

    def stop_comparing(self, mesh: DeviceMesh) -> None:
        """A rank of the mesh compares nothing more: no rank may wait for it."""

    def exchanges_terms(self, device_type: str) -> bool:
        """Whether to reduce and scatter tensors of such a device is faster by an exchange of terms: `comm/added.py`."""


class C10dTransport:
    """The collectives of torch.distributed: NCCL on CUDA, gloo on CPU."""

    compares: bool = dist.is_available() and dist.get_debug_level() == dist.DebugLevel.DETAIL

    all_reduce: Callable[..., torch.Tensor] = _torch.c10d_functional.all_reduce.default
    all_gather_into_tensor: Callable[..., torch.Tensor] = _torch.c10d_functional.all_gather_into_tensor.default
    reduce_scatter_tensor: Callable[..., torch.Tensor] = _torch.c10d_functional.reduce_scatter_tensor.default
    all_to_all_single: Callable[..., torch.Tensor] = _torch.c10d_functional.all_to_all_single.default
    broadcast: Callable[..., torch.Tensor] = _torch.c10d_functional.broadcast.default
    broadcast_: Callable[..., torch.Tensor] = _torch.c10d_functional.broadcast_.default
    all_reduce_: Callable[..., torch.Tensor] = _torch.c10d_functional.all_reduce_.default
    all_reduce_coalesced: Callable[..., list] = _torch.c10d_functional.all_reduce_coalesced.default
    all_gather_into_tensor_coalesced: Callable[..., list] = (
        _torch.c10d_functional.all_gather_into_tensor_coalesced.default
    )
    reduce_scatter_tensor_coalesced: Callable[..., list] = (
        _torch.c10d_functional.reduce_scatter_tensor_coalesced.default
    )
    wait_tensor: Callable[..., torch.Tensor] = _torch.c10d_functional.wait_tensor.default

    def step(self, start: Callable[..., Any], finish: Callable[[Any], Any], *args: Any) -> Any:
        """Start and finish of this rank."""
        return finish(start(*args))

    def bound(self, make: Callable[[], fx.GraphModule]) -> Callable[..., Any]:
        """The bound program of this rank."""
        return make()

    def group(self, mesh: DeviceMesh, axis: int | str | tuple[int, ...]) -> str:
        """The name of the process group along one or several axes; the first collective on it makes the group."""
        return groups.registered(_group_name_along(mesh, axis, current_rank()))

    def gather_objects(self, obj: object, mesh: DeviceMesh) -> list:
        """The objects of all ranks of the mesh, in row-major order; they are sent pickled."""
        found: list[Any] = [obj] * mesh.size()
        if mesh.size() > 1:
            dist.all_gather_object(found, obj, group=groups.mesh_group(mesh))
        return found

    def gather_bytes(self, data: bytes, mesh: DeviceMesh, here: Place | None = None) -> list[bytes]:
        """A few bytes of all ranks of the mesh. They go through the CPU if possible, to avoid waiting for a GPU."""
        if mesh.size() == 1:
            return [data]
        group = groups.mesh_group(mesh)
        device = "cpu" if "cpu:" in dist.get_backend_config(group) else mesh.device_type
        mine = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        if here is not None and device == "cpu":
            every = mine.new_empty(mesh.size() * len(mine))
            wait_or_name(_torch.all_gather_single(every, mine, group, async_op=True), here)
        else:
            every = self.wait_tensor(self.all_gather_into_tensor(mine, mesh.size(), group.group_name))
        return [bytes(row) for row in every.reshape(mesh.size(), -1).tolist()]

    def stop_comparing(self, mesh: DeviceMesh) -> None:
        """Nothing to do here."""

    def exchanges_terms(self, device_type: str) -> bool:
        """On the CPU, where gloo carries: its reduce-scatter is an all-reduce whose result is cut."""
        return device_type == "cpu"


@functools.lru_cache(maxsize=4096)
def _group_name_along(mesh: DeviceMesh, axis: int | str | tuple[int, ...], rank: int) -> str:
    return groups.name_of(mesh.ranks_along(axis, mesh.coordinate_of(rank)))


_c10d = C10dTransport()
_current: _torch.Carried[Transport] = _torch.Carried("spmd_transport", _c10d)


def transport() -> Transport:
    """The current transport: torch.distributed's, unless the code runs inside a `use_transport` block."""
    return _current.get()


def uncompared() -> Transport:
    """The current transport, or the one below it if it compares what it carries."""
    by = _current.get()
    return getattr(by, "inner", by)


@contextmanager
def use_transport(t: Transport) -> Iterator[Transport]:
    """Use the transport `t` inside the block, in this thread only."""
    token = _current.set(t)
    try:
        yield t
    finally:
        _current.reset(token)
