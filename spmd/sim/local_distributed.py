"""torch.distributed inside a LocalTensorMode: initialised, with a group of all ranks, and the functions that need care.

    >>> import torch.distributed as dist
    >>> from spmd.sim import LocalTensorMode
    >>> with LocalTensorMode(2):
    ...     x = torch.ones(1) + dist.get_rank()
    ...     dist.all_reduce(x)
    ...     dist.get_world_size(), x.reconcile()
    (2, tensor([3.]))
    >>> dist.is_initialized()
    False

Most of torch's functions run unchanged, on a `LocalGroup`. Functions that branch on the rank (a gather has a list on
one rank only) are replaced while a simulation runs. The table in which torch looks up groups is replaced as well. Both
replacements are process-wide, but check the calling thread: other threads use torch's own. Afterwards torch is as it
was before. A function that was imported by name before the mode (`from torch.distributed import gather`) is not
replaced.

A list that only one rank has is given either as one list of LocalTensors for all ranks, or as a PerRank. Objects are
the same on all ranks or PerRank; they are sent pickled, as in a real job.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from spmd import _torch
from spmd.mesh import current_rank, groups
from spmd.sim.exchange import Post
from spmd.sim.local_groups import LocalGroup, PlaceByRank, each_rank, join_groups
from spmd.sim.local_int import pick, values_of
from spmd.sim.local_mail import Mailbox
from spmd.sim.local_tensor import join_values

BACKEND = "gloo"
"""The backend that the simulation reports: code takes the same path as on CPUs."""

FUNCTIONS = (
    "init_process_group", "destroy_process_group", "new_group", "new_subgroups_by_enumeration",
    "get_global_rank", "group_size_by_name", "gather", "scatter", "all_gather_object", "gather_object",
    "broadcast_object_list", "scatter_object_list", "send_object_list", "recv_object_list",
)  # fmt: skip


class LocalDistributed:
    """torch.distributed for the ranks of a simulation. Methods named like torch's functions take their arguments."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.mail = Mailbox()
        self.state = _torch.DistributedState(functions={name: getattr(self, name) for name in FUNCTIONS})
        self.groups: dict[str, LocalGroup] = {}
        self.init_process_group()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside the block, in this thread, this object replaces torch.distributed."""
        with _torch.simulated_distributed(self.state), groups.made_by(self.group):
            yield
        self.mail.check_empty()

    def group(self, name: str) -> LocalGroup:
        """The group of a name that lists ranks; the same object for the same name."""
        if name not in self.groups:
            beyond = [rank for ranks in groups.lists_in(name) for rank in ranks if rank >= self.world_size]
            if beyond:
                raise RuntimeError(f"group {name!r} has rank {beyond[0]}, but {self.world_size} ranks are simulated")
            self.groups[name] = LocalGroup(name, self.mail, self.group)
            self.state.add(self.groups[name], PlaceByRank(self.groups[name]), BACKEND)
        return self.groups[name]

    # Groups

    def init_process_group(self, backend: Any = None, *args: Any, world_size: int = -1, **kwargs: Any) -> None:
        """Make the default group again after the groups were destroyed; otherwise nothing is left to do."""
        if world_size not in (-1, self.world_size):
            raise ValueError(f"init_process_group: world_size is {world_size}, but {self.world_size} ranks are played")
        self.state.default_pg = self.group(groups.name_of(tuple(range(self.world_size))))

    def destroy_process_group(self, group: Any = None) -> None:
        if group is None or group is self.state.default_pg:
            self.groups.clear()
            self.state.clear()

    def new_group(
        self, ranks: Sequence[int] | None = None, *args: Any, sort_ranks: bool = True, **kwargs: Any
    ) -> Any:
        """One group of these ranks for every caller; no group where none of its ranks is played."""

        def group_on(rank: int) -> Any:
            listed = range(self.world_size) if ranks is None else [pick(r, rank) for r in ranks]
            members = tuple(sorted(listed) if sort_ranks else listed)
            if len(set(members)) != len(members) or not all(0 <= r < self.world_size for r in members):
                raise ValueError(f"new_group: {list(members)} are not ranks in 0..{self.world_size - 1}, each once")
            return self.group(groups.name_of(members)) if rank in members else dist.GroupMember.NON_GROUP_MEMBER

        return _group_of_each_rank(group_on)

    def group_size_by_name(self, name: Any) -> int:
        """torch's functional collectives name groups, or (torch 2.13) give the group itself."""
        return (self.group(name) if isinstance(name, str) else name).size()

    def new_subgroups_by_enumeration(self, ranks_per_subgroup_list: Sequence, *args: Any, **kwargs: Any) -> tuple:
        """Each rank's own group, joined into one, and the list of all groups."""
        every = [dist.new_group(ranks) for ranks in ranks_per_subgroup_list]

        def own_group(rank: int) -> Any:
            lists = [[pick(r, rank) for r in ranks] for ranks in ranks_per_subgroup_list]
            own = next((ranks for ranks in lists if rank in ranks), None)
            return dist.GroupMember.NON_GROUP_MEMBER if own is None else self.group(groups.name_of(tuple(sorted(own))))

        own = _group_of_each_rank(own_group)
        return (None if own == dist.GroupMember.NON_GROUP_MEMBER else own), every

    def get_global_rank(self, group: LocalGroup, group_rank: int) -> int:
        """The global rank at a place of each rank's own group."""

        def rank_at(on: int) -> int:
            ranks, place = group.ranks_on(on) or group.lists[0], pick(group_rank, on)
            if not 0 <= place < len(ranks):
                raise ValueError(f"Group rank {place} is not part of group {list(ranks)}")
            return ranks[place]

        return each_rank(rank_at)

    # Collectives with a list that only one rank has

    def gather(self, tensor, gather_list=None, dst=None, group=None, async_op=False, group_dst=None):
        group = self._group(group)
        opts = dist.GatherOptions()
        opts.rootRank = self._place(group, dst, group_dst)
        return self._finished(group.gather([] if gather_list is None else [gather_list], [tensor], opts), async_op)

    def scatter(self, tensor, scatter_list=None, src=None, group=None, async_op=False, group_src=None):
        group = self._group(group)
        opts = dist.ScatterOptions()
        opts.rootRank = self._place(group, src, group_src)
        return self._finished(group.scatter([tensor], [] if scatter_list is None else [scatter_list], opts), async_op)

    # Objects

    def all_gather_object(self, object_list, obj, group=None):
        group = self._group(group)
        received = group.exchange_all("all_gather_object", [], lambda own: (_pickled(own(obj)), ()))
        for i in range(group.size()):
            object_list[i] = _joined_object({rank: every[i] for rank, every in received.items()})

    def gather_object(self, obj, object_gather_list=None, dst=None, group=None, group_dst=None):
        group = self._group(group)
        place = self._place(group, dst, group_dst)
        received = group.exchange_all("gather_object", [], lambda own: (_pickled(own(obj)), (place,)))
        to = {rank: every for rank, every in received.items() if group.place_of(rank, rank) == place}
        lists = values_of(object_gather_list)
        if object_gather_list is None or (lists is not None and any(lists[rank] is None for rank in to)):
            raise ValueError(f"gather_object: rank {next(iter(to))} is the destination and has no object_gather_list")
        for rank, every in to.items():
            for i in range(len(every)):
                if lists is not None:
                    lists[rank][i] = _joined_object({rank: every[i]})
                else:
                    object_gather_list[i] = _joined_object({on: found[i] for on, found in to.items()})

    def broadcast_object_list(self, object_list, src=None, group=None, device=None, group_src=None):
        group = self._group(group)
        place = self._place(group, src, group_src)
        for i in range(len(object_list)):
            received = self._exchange_from_one(
                "broadcast_object_list", group, place, lambda own, i=i: own(object_list[i])
            )
            object_list[i] = _joined_object({rank: every[place] for rank, every in received.items()})

    def scatter_object_list(
        self, scatter_object_output_list, scatter_object_input_list=None, src=None, group=None, group_src=None
    ):
        group = self._group(group)
        place = self._place(group, src, group_src)

        def parts(own: Callable) -> list:
            objects = own(scatter_object_input_list)
            if objects is None or len(objects) != group.size_on(own.rank):
                raise ValueError(f"scatter_object_list: rank {own.rank} is the source and must give one object a rank")
            return objects

        received = self._exchange_from_one("scatter_object_list", group, place, parts)
        ranks = tuple(received)
        objects = [_unpickled(every[place])[group.place_of(rank, rank)] for rank, every in received.items()]
        scatter_object_output_list[0] = objects[0] if len(objects) == 1 else join_values(ranks, objects)

    def send_object_list(self, object_list, dst=None, group=None, device=None, group_dst=None, use_batch=False):
        group = self._group(group)
        place = self._place(group, dst, group_dst)
        group.send_message("send_object_list", place, 0, lambda own: _pickled(own(object_list)))

    def recv_object_list(self, object_list, src=None, group=None, device=None, group_src=None, use_batch=False):
        group = self._group(group)
        anyone = src is None and group_src is None
        received: dict[int, list] = {}

        def take(rank: int) -> Callable[[Post], None]:
            return lambda post: received.update({rank: _unpickled(post.tensor)})

        place = None if anyone else self._place(group, src, group_src)
        work = group.receive_message("recv_object_list", place, 0, take)
        work.wait()
        ranks = tuple(received)
        for i in range(len(object_list)):
            objects = [received[rank][i] for rank in ranks]
            object_list[i] = objects[0] if len(objects) == 1 else join_values(ranks, objects)
        return self.get_global_rank(group, work._source_rank())

    def _exchange_from_one(self, kind: str, group: LocalGroup, place: int, obj_of: Callable) -> dict[int, list]:
        """Send the object `obj_of(own)` of the rank at this place to all ranks of its group."""

        def sent(own: Callable) -> tuple:
            is_source = group.place_of(own.rank, own.rank) == place
            return _pickled(obj_of(own)) if is_source else torch.empty(0, dtype=torch.uint8), (place,)

        return group.exchange_all(kind, [], sent)

    def _group(self, group: LocalGroup | None) -> LocalGroup:
        if group is None and self.state.default_pg is None:
            raise ValueError("the default process group was destroyed; call init_process_group again")
        return self.state.default_pg if group is None else group

    def _place(self, group: LocalGroup, rank: Any, place: Any) -> Any:
        """The place in the group that is given by a global rank or by a place; that of rank 0 by default."""
        if rank is not None and place is not None:
            raise ValueError("Can't specify both group_rank and global_rank")
        return place if place is not None else dist.get_group_rank(group, 0 if rank is None else rank)

    def _finished(self, work: dist.Work, async_op: bool) -> dist.Work | None:
        return work if async_op else work.wait() and None


def _group_of_each_rank(group_on: Callable[[int], Any]) -> Any:
    """group_on(rank) of the current rank; where the thread plays several ranks, their groups as one."""
    ranks = values_of(current_rank())
    if ranks is None:
        return group_on(current_rank())
    return join_groups(tuple(ranks), [group_on(rank) for rank in ranks]) or dist.GroupMember.NON_GROUP_MEMBER


def _pickled(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _unpickled(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())


def _joined_object(pickles: dict[int, torch.Tensor]) -> Any:
    """The objects of the ranks as one value: one object if all ranks have the same bytes."""
    first, *others = pickles.values()
    if all(torch.equal(first, data) for data in others):
        return _unpickled(first)
    return join_values(tuple(pickles), [_unpickled(data) for data in pickles.values()])
