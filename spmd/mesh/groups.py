"""Process groups by their ranks: named at any time, made when first needed, by their members alone.

    >>> named((0, 1, 2, 3)), named((0, 2, 4, 6)), named((5, 1))
    ('ranks:0-3', 'ranks:0-6:2', 'ranks:5,1')
    >>> ranks_in("ranks:0-6:2")
    (0, 2, 4, 6)
    >>> ranks_in("ranks:0,1|2,3", 2)    # several groups: each rank is in the one that lists it
    (2, 3)

The name of a group spells its ranks, in the order of their places. It is equal on all ranks and in all runs and needs
no process group, so it can stand in a graph traced long before there is one. torch finds a group by its name when a
collective runs; until the group is made, a placeholder stands there that makes it at its first collective.

All members of a group come to its first collective, so they can make it there, in the order of their program; ranks
that are in none of the groups need not know of them. Members meet in the store first: where they part - one is making
one group, the other another, each waiting for the other - both learn so instead of hanging.
"""

from __future__ import annotations

import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch.distributed as dist

from spmd import _torch
from spmd.mesh.rank import current_rank, per_rank

if TYPE_CHECKING:
    from spmd.mesh.device_mesh import DeviceMesh

Ranks = tuple[int, ...]

PREFIX = "ranks:"


# ---- names ------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def name_of(ranks: Ranks) -> str:
    """The name that spells these ranks; runs of equal steps are written as first-last:step."""
    parts, i = [], 0
    while i < len(ranks):
        j = _end_of_run(ranks, i)
        step = ranks[i + 1] - ranks[i] if j - i > 1 else 1
        parts.append(f"{ranks[i]}-{ranks[j - 1]}" + (f":{step}" if step > 1 else "") if j - i > 1 else str(ranks[i]))
        i = j
    return PREFIX + ",".join(parts)


def name_of_lists(lists: Iterable[Ranks]) -> str:
    """The name that spells several groups, of which each rank uses the one that lists it."""
    return PREFIX + "|".join(dict.fromkeys(name_of(ranks).removeprefix(PREFIX) for ranks in lists))


def lists_in(name: str) -> tuple[Ranks, ...] | None:
    """The ranks of each group that the name spells; None for a name that torch gave."""
    return tuple(map(_spelled, name[len(PREFIX) :].split("|"))) if name.startswith(PREFIX) else None


def ranks_in(name: str, rank: int | None = None) -> Ranks | None:
    """The ranks that the name spells; None for a name that torch gave.

    Of several groups that of `rank`, by default the current one. ValueError where none lists it.
    """
    lists = lists_in(name)
    if lists is None or len(lists) == 1:
        return lists and lists[0]
    rank = current_rank() if rank is None else rank
    mine = next((ranks for ranks in lists if rank in ranks), None)
    if mine is None:
        raise ValueError(f"rank {rank} is in none of the groups of {name!r}; use it on its ranks only")
    return mine


def named(ranks: Ranks) -> str:
    """The name of the group of these ranks, known to torch from now on; nothing is sent."""
    return known(name_of(ranks))


def known(name: str) -> str:
    """The name that `name_of` gave, known to torch from now on."""
    if _maker.get() is None and not _torch.is_group(name):
        with _lock:  # simulated ranks are threads, and ask for one name at once
            if not _torch.is_group(name):
                _torch.register_group(name, _placeholder(name))
    return name


def called(name: str) -> dist.ProcessGroup:
    """The process group that torch knows by this name. ValueError when there is none."""
    make = _maker.get()
    if make is not None and name.startswith(PREFIX):
        return make(name)
    if not _torch.is_group(name):
        raise ValueError(
            f"there is no process group of name {name!r}. Give ProcessGroup.group_name of a group that exists, or its "
            f"ranks: '{PREFIX}0-3' names the group of ranks 0 to 3 also before there are process groups."
        )
    return _torch.group_called(name)


def _end_of_run(ranks: Ranks, i: int) -> int:
    """Where the run of at least three equal, rising steps that starts at i ends; i + 1 where there is none."""
    j = i + 1
    while j < len(ranks) and ranks[j] > ranks[j - 1] and ranks[j] - ranks[j - 1] == ranks[i + 1] - ranks[i]:
        j += 1
    return j if j - i > 2 else i + 1


@functools.lru_cache(maxsize=4096)
def _spelled(text: str) -> Ranks:
    ranks: list[int] = []
    for part in text.split(","):
        run = _RUN.fullmatch(part)
        if run is None:
            raise ValueError(
                f"'{PREFIX}{text}' names no group: {part!r} is neither a rank nor a run first-last:step. "
                f"'{PREFIX}0,2-5,8-14:2' would be one."
            )
        first, last, step = run.groups()
        ranks += range(int(first), int(last or first) + 1, int(step or 1))
    return tuple(ranks)


_RUN = re.compile(r"(\d+)(?:-(\d+)(?::([1-9]\d*))?)?")


@functools.cache
def _placeholder(name: str) -> dist.ProcessGroup:
    return _torch.GroupToBe(lambda: group_of(ranks_in(name)), len(lists_in(name)[0]))


# ---- groups -----------------------------------------------------------------------------------

_maker: ContextVar[Callable[[str], dist.ProcessGroup] | None] = ContextVar("spmd_group_maker", default=None)


@contextmanager
def made_by(make: Callable[[str], dist.ProcessGroup]) -> Iterator[None]:
    """Inside the block, in this thread only, `make` gives the group of a name that spells ranks: nobody meets."""
    token = _maker.set(make)
    try:
        yield
    finally:
        _maker.reset(token)


@dataclass
class _Registry:
    """The groups made under one default process group, which is not among them: it would keep itself alive.

    uses_world: whether it serves as the group of all ranks.
    """

    group_of: dict[Ranks, dist.ProcessGroup] = field(default_factory=dict)
    uses_world: bool = False


# One registry a default process group: destroying it and initialising again starts afresh.
_registries: WeakKeyDictionary[dist.ProcessGroup, _Registry] = WeakKeyDictionary()
_lock = threading.RLock()


def group_of(ranks: Ranks) -> dist.ProcessGroup:
    """The process group of these ranks in this order, among them the current one; made if there is none yet."""
    make = _maker.get()
    if make is not None:
        return make(name_of(ranks))
    registry = _registry()
    with _lock:
        if ranks in registry.group_of:
            return registry.group_of[ranks]
        if ranks == _all_ranks() and (registry.uses_world or _torch.is_careful(dist.group.WORLD)):
            _torch.replace_group(name_of(ranks), dist.group.WORLD)
            return dist.group.WORLD
        registry.group_of[ranks] = _made(ranks, registry)
        return registry.group_of[ranks]


@per_rank
def axis_group(mesh: DeviceMesh, axis: int) -> dist.ProcessGroup:
    """The group along one axis through the current rank."""
    return group_of(mesh.ranks_along(axis, mesh.coordinate_of(_own_rank(mesh))))


@per_rank
def whole_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group of all ranks of the mesh, in row-major order."""
    _own_rank(mesh)
    return group_of(mesh.ranks)


@per_rank
def make_groups(mesh: DeviceMesh) -> None:
    """Make the groups of all axes through the current rank now; nothing to do for a rank outside the mesh."""
    _registry()
    if dist.get_rank() in mesh.ranks:
        for axis in range(mesh.ndim):
            axis_group(mesh, axis)


def ranks_of(group: dist.ProcessGroup) -> Ranks:
    """The global ranks of a process group, in the order of their places."""
    return tuple(dist.get_process_group_ranks(group))


def adopt(group: dist.ProcessGroup) -> Ranks:
    """Use this group wherever a group of its ranks is asked for; gives its ranks. All its members must do so."""
    ranks = ranks_of(group)
    if _maker.get() is not None:  # who gives the same group for the same ranks
        return ranks
    registry = _registry()
    with _lock:
        if group is dist.group.WORLD:
            registry.uses_world = True
            registry.group_of.pop(ranks, None)
        else:
            registry.group_of[ranks] = group
        _torch.replace_group(name_of(ranks), group)
    return ranks


def _made(ranks: Ranks, registry: _Registry) -> dist.ProcessGroup:
    _check_ranks(ranks)
    if len(ranks) > 1:
        _Meeting(ranks, registry).wait()
    _torch.forget_group(name_of(ranks))
    try:
        return _torch.new_group(ranks, name_of(ranks))
    finally:
        _say_now("")


def _own_rank(mesh: DeviceMesh) -> int:
    _registry()
    rank = dist.get_rank()
    if rank not in mesh.ranks:
        raise RuntimeError(f"rank {rank} is not in {mesh!r} and has none of its groups; ask on its ranks only")
    return rank


def _all_ranks() -> Ranks:
    return tuple(range(dist.get_world_size()))


def _registry() -> _Registry:
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "there are no process groups before torch.distributed is initialised. Call "
            "torch.distributed.init_process_group() under torchrun, or play the ranks with spmd.sim.run_ranks."
        )
    with _lock:
        return _registries.setdefault(dist.group.WORLD, _Registry())


def _check_ranks(ranks: Ranks) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    if max(ranks) >= size:
        raise RuntimeError(
            f"the group of ranks {list(ranks)} mentions rank {max(ranks)}, but the job has {size} ranks, "
            f"0..{size - 1}. Start more processes or build a smaller mesh."
        )
    if rank not in ranks:
        raise RuntimeError(f"rank {rank} is not in the group of ranks {list(ranks)}; use it on its ranks only")


# ---- meeting in the store ---------------------------------------------------------------------

NOW, FAILED = "spmd/groups/now", "spmd/groups/failed"
MET = "met"
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.0005, 0.05


@dataclass
class _Meeting:
    """All members of a group come here before they make it.

    Each says what it is making. A member that waits looks now and then at the others: one that is making another
    group that needs this rank too, which this rank has not made, waits for this rank as this rank waits for it.
    """

    ranks: Ranks
    registry: _Registry

    def wait(self) -> None:
        """Return when all have come. RuntimeError where two have parted, TimeoutError where one never comes."""
        store, name, n = _torch.default_store(), name_of(self.ranks), len(self.ranks)
        _say_now(name)
        come = store.add(f"spmd/groups/{name}", 1)
        # The same group may be made again after destroy_process_group: the n next ones are another meeting.
        key = f"spmd/groups/{name}/{(come - 1) // n}"
        if come % n == 0:
            self._end(key, MET)
        end, pause = time.monotonic() + _torch.group_timeout().total_seconds(), FIRST_PAUSE_S
        while not store.check([key]):
            error = self._parted() or (self._late() if time.monotonic() > end else None)
            if error is not None:
                self._end(key, str(error), type(error))
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        self._end(key, MET)

    def _end(self, key: str, how: str, error: type[Exception] = RuntimeError) -> None:
        """Who comes first says how the meeting ends, for all: either every member goes on or none does."""
        store = _torch.default_store()
        told = store.compare_set(key, "", how).decode()
        if told != MET:
            store.set(FAILED, told)  # so that all who wait elsewhere learn of it
            raise error(told)

    def _parted(self) -> RuntimeError | None:
        """The error where a member waits for this rank in another group, or where one has been found elsewhere."""
        store = _torch.default_store()
        if store.check([FAILED]):
            return RuntimeError(store.get(FAILED).decode())
        for rank in self.ranks:
            other = ranks_in(_said_now(rank)) or ()
            if other != self.ranks and dist.get_rank() in other and other not in self.registry.group_of:
                both = f"rank {rank} that of ranks {list(other)}, and each waits for the other"
                return RuntimeError(self._told(both))
        return None

    def _late(self) -> TimeoutError:
        return TimeoutError(self._told(f"the others did not come: {self._doing()}"))

    def _told(self, how: str) -> str:
        return (
            f"rank {dist.get_rank()} makes the process group of ranks {list(self.ranks)}, but {how}.\n"
            "Every rank must use the same meshes and groups in the same order; look for rank-dependent branches."
        )

    def _doing(self) -> str:
        said = {rank: ranks_in(_said_now(rank)) for rank in self.ranks if rank != dist.get_rank()}
        missing = {rank: ranks for rank, ranks in said.items() if ranks != self.ranks}
        return ", ".join(
            f"rank {rank} makes that of ranks {list(ranks)}" if ranks else f"rank {rank} makes none"
            for rank, ranks in missing.items()
        )


def _say_now(name: str) -> None:
    _torch.default_store().set(f"{NOW}/{dist.get_rank()}", json.dumps(name))


def _said_now(rank: int) -> str:
    store, key = _torch.default_store(), f"{NOW}/{rank}"
    return json.loads(store.get(key)) if store.check([key]) else ""
