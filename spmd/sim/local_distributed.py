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

Most of torch's functions run as they are, on a `LocalGroup`. Those whose way depends on the rank - a gather has a list
on one rank only - are replaced while a simulation is on. So is the table in which torch looks up groups. Both are
process-wide, and ask where they are called from: other threads find what they always did. Afterwards torch is as it
was. Functions that were imported by name before the mode, `from torch.distributed import gather`, are torch's own.

A list that only one rank has is given either as one of LocalTensors, on all ranks alike, or as a PerRank. Objects are
the same on all ranks or PerRank, and travel pickled, as they do on a real job.
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
from spmd.sim.local_groups import LocalGroup, Places, each_rank, joined_groups
from spmd.sim.local_mail import Mail
from spmd.sim.local_tensor import joined_values
from spmd.sim.varying import pick, values_of

BACKEND = "gloo"
"""What the simulation says it is: what code does on CPUs."""

FUNCTIONS = (
    "init_process_group", "destroy_process_group", "new_group", "new_subgroups_by_enumeration",
    "get_global_rank", "gather", "scatter", "all_gather_object", "gather_object", "broadcast_object_list",
    "scatter_object_list", "send_object_list", "recv_object_list",
)  # fmt: skip


class LocalDistributed:
    """What torch.distributed is for the ranks of a simulation; methods of torch's names take torch's arguments."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.mail = Mail()
        self.known = _torch.Distributed(functions={name: getattr(self, name) for name in FUNCTIONS})
        self.groups: dict[str, LocalGroup] = {}
        self.init_process_group()

    @contextmanager
    def around(self) -> Iterator[None]:
        """Inside the block, in this thread, torch.distributed is this."""
        with _torch.simulated_distributed(self.known), groups.made_by(self.group):
            yield
        self.mail.check_empty()

    def group(self, name: str) -> LocalGroup:
        """The group of a name that spells ranks: always the same."""
        if name not in self.groups:
            beyond = [rank for ranks in groups.lists_in(name) for rank in ranks if rank >= self.world_size]
            if beyond:
                raise RuntimeError(f"group {name!r} has rank {beyond[0]}, but {self.world_size} ranks are simulated")
            self.groups[name] = LocalGroup(name, self.mail, self.group)
            self.known.add(self.groups[name], Places(self.groups[name]), BACKEND)
        return self.groups[name]

    # Groups

    def init_process_group(self, backend: Any = None, *args: Any, world_size: int = -1, **kwargs: Any) -> None:
        """Nothing is left to do, unless the groups were destroyed."""
        if world_size not in (-1, self.world_size):
            raise ValueError(f"init_process_group: world_size is {world_size}, but {self.world_size} ranks are played")
        self.known.default_pg = self.group(groups.name_of(tuple(range(self.world_size))))

    def destroy_process_group(self, group: Any = None) -> None:
        if group is None or group is self.known.default_pg:
            self.groups.clear()
            self.known.clear()

    def new_group(
        self, ranks: Sequence[int] | None = None, *args: Any, sort_ranks: bool = True, **kwargs: Any
    ) -> Any:
        """One group of these ranks, whoever asks; no group where none of its ranks is played."""

        def made(rank: int) -> Any:
            mine = range(self.world_size) if ranks is None else [pick(r, rank) for r in ranks]
            members = tuple(sorted(mine) if sort_ranks else mine)
            if len(set(members)) != len(members) or not all(0 <= r < self.world_size for r in members):
                raise ValueError(f"new_group: {list(members)} are not ranks in 0..{self.world_size - 1}, each once")
            return self.group(groups.name_of(members)) if rank in members else dist.GroupMember.NON_GROUP_MEMBER

        return _each_group(made)

    def new_subgroups_by_enumeration(self, ranks_per_subgroup_list: Sequence, *args: Any, **kwargs: Any) -> tuple:
        """The group of each rank's own, as one, and the groups in a list."""
        every = [dist.new_group(ranks) for ranks in ranks_per_subgroup_list]

        def mine(rank: int) -> Any:
            lists = [[pick(r, rank) for r in ranks] for ranks in ranks_per_subgroup_list]
            own = next((ranks for ranks in lists if rank in ranks), None)
            return dist.GroupMember.NON_GROUP_MEMBER if own is None else self.group(groups.name_of(tuple(sorted(own))))

        own = _each_group(mine)
        return (None if own == dist.GroupMember.NON_GROUP_MEMBER else own), every

    def get_global_rank(self, group: LocalGroup, group_rank: int) -> int:
        """The rank at a place of each rank's own group."""

        def rank_at(on: int) -> int:
            ranks, place = group.ranks_on(on) or group.lists[0], pick(group_rank, on)
            if not 0 <= place < len(ranks):
                raise ValueError(f"Group rank {place} is not part of group {list(ranks)}")
            return ranks[place]

        return each_rank(rank_at)

    # Lists that one rank has

    def gather(self, tensor, gather_list=None, dst=None, group=None, async_op=False, group_dst=None):
        group = self._group(group)
        opts = dist.GatherOptions()
        opts.rootRank = self._place(group, dst, group_dst)
        return self._waited(group.gather([] if gather_list is None else [gather_list], [tensor], opts), async_op)

    def scatter(self, tensor, scatter_list=None, src=None, group=None, async_op=False, group_src=None):
        group = self._group(group)
        opts = dist.ScatterOptions()
        opts.rootRank = self._place(group, src, group_src)
        return self._waited(group.scatter([tensor], [] if scatter_list is None else [scatter_list], opts), async_op)

    # Objects

    def all_gather_object(self, object_list, obj, group=None):
        group = self._group(group)
        came = group.meet("all_gather_object", [], lambda mine: (_pickled(mine(obj)), ()))
        for i in range(group.size()):
            object_list[i] = _unpickled({rank: every[i] for rank, every in came.items()})

    def gather_object(self, obj, object_gather_list=None, dst=None, group=None, group_dst=None):
        group = self._group(group)
        place = self._place(group, dst, group_dst)
        came = group.meet("gather_object", [], lambda mine: (_pickled(mine(obj)), (place,)))
        to = {rank: every for rank, every in came.items() if group.place_of(rank, rank) == place}
        lists = values_of(object_gather_list)
        if object_gather_list is None or (lists is not None and any(lists[rank] is None for rank in to)):
            raise ValueError(f"gather_object: rank {next(iter(to))} is the destination and has no object_gather_list")
        for rank, every in to.items():
            for i in range(len(every)):
                if lists is not None:
                    lists[rank][i] = _unpickled({rank: every[i]})
                else:
                    object_gather_list[i] = _unpickled({on: found[i] for on, found in to.items()})

    def broadcast_object_list(self, object_list, src=None, group=None, device=None, group_src=None):
        group = self._group(group)
        place = self._place(group, src, group_src)
        for i in range(len(object_list)):
            came = self._from_one("broadcast_object_list", group, place, lambda mine, i=i: mine(object_list[i]))
            object_list[i] = _unpickled({rank: every[place] for rank, every in came.items()})

    def scatter_object_list(
        self, scatter_object_output_list, scatter_object_input_list=None, src=None, group=None, group_src=None
    ):
        group = self._group(group)
        place = self._place(group, src, group_src)

        def parts(mine: Callable) -> list:
            given = mine(scatter_object_input_list)
            if given is None or len(given) != group.size_on(mine.rank):
                raise ValueError(f"scatter_object_list: rank {mine.rank} is the source and must give one object a rank")
            return given

        came = self._from_one("scatter_object_list", group, place, parts)
        ranks = tuple(came)
        own = [_loaded(every[place])[group.place_of(rank, rank)] for rank, every in came.items()]
        scatter_object_output_list[0] = own[0] if len(own) == 1 else joined_values(ranks, own)

    def send_object_list(self, object_list, dst=None, group=None, device=None, group_dst=None, use_batch=False):
        group = self._group(group)
        place = self._place(group, dst, group_dst)
        group.post("send_object_list", place, 0, lambda mine: _pickled(mine(object_list)))

    def recv_object_list(self, object_list, src=None, group=None, device=None, group_src=None, use_batch=False):
        group = self._group(group)
        anyone = src is None and group_src is None
        came: dict[int, list] = {}

        def take(rank: int) -> Callable[[Post], None]:
            return lambda post: came.update({rank: _loaded(post.tensor)})

        work = group.expect("recv_object_list", None if anyone else self._place(group, src, group_src), 0, take)
        work.wait()
        ranks = tuple(came)
        for i in range(len(object_list)):
            of = [came[rank][i] for rank in ranks]
            object_list[i] = of[0] if len(of) == 1 else joined_values(ranks, of)
        return self.get_global_rank(group, work._source_rank())

    def _from_one(self, kind: str, group: LocalGroup, place: int, given: Callable) -> dict[int, list]:
        """What the rank at the place gives, to all of its group."""

        def sent(mine: Callable) -> tuple:
            gives = group.place_of(mine.rank, mine.rank) == place
            return _pickled(given(mine)) if gives else torch.empty(0, dtype=torch.uint8), (place,)

        return group.meet(kind, [], sent)

    def _group(self, group: LocalGroup | None) -> LocalGroup:
        if group is None and self.known.default_pg is None:
            raise ValueError("the default process group was destroyed; call init_process_group again")
        return self.known.default_pg if group is None else group

    def _place(self, group: LocalGroup, rank: Any, place: Any) -> Any:
        """The place in the group that is meant by a rank, or by a place; the first rank by default."""
        if rank is not None and place is not None:
            raise ValueError("Can't specify both group_rank and global_rank")
        return place if place is not None else dist.get_group_rank(group, 0 if rank is None else rank)

    def _waited(self, work: dist.Work, async_op: bool) -> dist.Work | None:
        return work if async_op else work.wait() and None


def _each_group(made: Callable[[int], Any]) -> Any:
    of = values_of(current_rank())
    if of is None:
        return made(current_rank())
    found = [made(rank) for rank in of]
    return joined_groups(tuple(of), found) or dist.GroupMember.NON_GROUP_MEMBER


def _pickled(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def _loaded(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())


def _unpickled(of: dict[int, torch.Tensor]) -> Any:
    """The object of each rank as one."""
    first, *others = of.values()
    if all(torch.equal(first, data) for data in others):
        return _loaded(first)
    return joined_values(tuple(of), [_loaded(data) for data in of.values()])
