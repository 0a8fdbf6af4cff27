"""Process groups, the collectives of the dispatcher, and the works they start."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn  # here, before any process group: its functions keep the default group of their import
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

# Functional collectives as dispatcher ops: plain data in, a new tensor out, legal as targets of an fx graph.
c10d_functional = torch.ops._c10d_functional

# The public collective of one tensor, which torch 2.11 has under its old name alone.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# The store through which the default process group met: where ranks can compare notes without a collective.
default_store = distributed_c10d._get_default_store


# ---- making groups ----------------------------------------------------------------------------


def new_group(
    ranks: Sequence[int], name: str, backend: str | None = None, options: Any = None
) -> dist.ProcessGroup:
    """The process group of these ranks, in this order and of this name, made by its members alone.

    backend, options: by default those of the job.

    The public new_group needs every rank of the job, or else names groups by how many a rank has made, which differs
    between ranks; and torch 2.11 sorts the ranks.
    """
    world = dist.group.WORLD
    of_world, store = distributed_c10d._world.pg_map[world]
    # A group of NCCL would be split off the communicator of its parent, which needs all ranks of the parent: this
    # one starts from a communicator of its own.
    device, world.bound_device_id = world.bound_device_id, None
    try:
        with _single_threaded_gloo():
            group, _ = distributed_c10d._new_process_group_helper(
                len(ranks), ranks.index(dist.get_rank()), list(ranks),
                distributed_c10d.Backend(backend or of_world), store, group_name=name, backend_options=options,
                timeout=group_timeout(), device_id=None,
            )  # fmt: skip
    finally:
        world.bound_device_id = device
    distributed_c10d._world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
    return group


@contextlib.contextmanager
def _single_threaded_gloo() -> Iterator[None]:
    """Inside, a new gloo group has one thread, so that its collectives run one after the other.

    By default torch gives it two threads, and two all-gathers that overlap in one group sometimes corrupt the heap
    (torch 2.13): the process dies in malloc, much later. Ranks that wait in one order lose little by it.
    """
    gloo = getattr(distributed_c10d, "ProcessGroupGloo", None)
    if gloo is None:
        yield
        return

    class OneThread(gloo):
        def __init__(self, store, rank, size, timeout):
            like = gloo(dist.HashStore(), 0, 1, timeout=timeout).options  # the network devices that torch would take
            like._threads = 1
            super().__init__(store, rank, size, like)

    distributed_c10d.ProcessGroupGloo = OneThread
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = gloo


def collectives_may_overlap(group: dist.ProcessGroup) -> bool:
    """Whether a collective may start before the last one ends: not in a gloo group with several threads."""
    for device in group._device_types:
        backend = group._get_backend(device)
        backend = getattr(backend, "wrapped_pg", backend)
        if getattr(getattr(backend, "options", None), "_threads", 1) > 1:
            return False
    return True


def default_rank() -> int | None:
    """The rank in the default process group, None before there is one: dist.get_rank without its checks."""
    group = distributed_c10d._world.default_pg
    return None if group is None else group.rank()


def group_timeout() -> datetime.timedelta:
    """How long a collective of the job may take: as init_process_group was told, where the backend says so."""
    world = dist.group.WORLD
    for device in world._device_types:
        options = getattr(world._get_backend(device), "options", None)
        if options is not None:
            return options._timeout
    return distributed_c10d.default_pg_timeout


# ---- groups by name ---------------------------------------------------------------------------


def is_group(name: str) -> bool:
    """Whether torch knows a group, or a placeholder of one, by this name."""
    try:
        return c10d._resolve_process_group(name) is not None
    except RuntimeError:
        return False


def group_named(name: str) -> dist.ProcessGroup:
    """The group, or the placeholder, of this name."""
    return c10d._resolve_process_group(name)


def register_group(name: str, group: dist.ProcessGroup) -> None:
    """Let dispatcher ops find the group by this name."""
    c10d._register_process_group(name, group)


def unregister_group(name: str) -> None:
    """Undo register_group; an unknown name is no error."""
    c10d._unregister_process_group(name)


def replace_group(name: str, group: dist.ProcessGroup) -> None:
    """Let the name mean this group from now on."""
    if is_group(name):
        if group_named(name) is group:
            return
        unregister_group(name)
    register_group(name, group)


class PlaceholderGroup(dist.ProcessGroup):
    """Stands for a process group of n ranks until the first collective on it, which makes the group.

    make: makes the group, and registers it in the place of this one.
    """

    def __init__(self, make: Callable[[], dist.ProcessGroup], n: int) -> None:
        super().__init__(0, n)
        self.make = make


def _forwarded(method: str) -> Callable:
    return lambda self, *args, **kwargs: getattr(self.make(), method)(*args, **kwargs)


for _method in ("allreduce allreduce_coalesced allgather allgather_coalesced allgather_into_tensor_coalesced "
                "_allgather_base all_gather_single all_gather_single_coalesced reduce_scatter _reduce_scatter_base "
                "reduce_scatter_tensor_coalesced reduce_scatter_single reduce_scatter_single_coalesced alltoall "
                "alltoall_base all_to_all_single broadcast reduce gather scatter send recv recv_anysource barrier "
                ).split():  # fmt: skip
    if hasattr(dist.ProcessGroup, _method):
        setattr(PlaceholderGroup, _method, _forwarded(_method))


# ---- what a dispatcher op is given, and works -------------------------------------------------


def unboxed_group(boxed: torch.ScriptObject) -> dist.ProcessGroup:
    """The process group that a dispatcher op was given."""
    return c10d.ProcessGroup.unbox(boxed)


def unboxed_reduce_op(boxed: torch.ScriptObject) -> str:
    """The reduction that a dispatcher op was given: "sum", "premul_sum"."""
    return c10d.ReduceOp.RedOpType(boxed.op()).name.lower()


FakeWork = c10d.FakeWork


def register_work(x: torch.Tensor, work: dist.Work) -> None:
    """Let wait_tensor of x, or of any tensor of its memory, wait for this work; of several works, for all."""
    c10d._register_work(x, work)


def works_in_flight() -> int:
    """How many tensors have a work that nobody has waited for."""
    return c10d._get_work_registry_size()
