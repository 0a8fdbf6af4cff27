"""Process groups by their ranks: named at any time, made at first use, by their members alone.

    >>> registered_name((0, 1, 2, 3)), registered_name((0, 2, 4, 6)), registered_name((5, 1))
    ('ranks:0-3', 'ranks:0-6:2', 'ranks:5,1')
    >>> ranks_in("ranks:0-6:2")
    (0, 2, 4, 6)
    >>> ranks_in("ranks:0,1|2,3", 2)    # several groups: each rank is in the one that lists it
    (2, 3)

The name of a group lists its ranks, in the order of their places. It is equal on all ranks and in all runs and needs
no process group, so a graph may contain it long before there is one. torch finds a group by its name when a collective
runs. Until the group is made, torch has a placeholder under the name, which makes the group at its first collective.

All members of a group come to its first collective, so they can make it there, in the order of their program; other
ranks need not know of it. Members meet in the store first. Two members may make different groups, each waiting for the
other: then both raise an error instead of hanging.
"""

from __future__ import annotations

import functools
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import get_ident
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch.distributed as dist

from spmd import _torch
from spmd.mesh import backends, threads
from spmd.mesh.rank import current_rank, is_rank_overridden, per_rank

if TYPE_CHECKING:
    from spmd.mesh.device_mesh import DeviceMesh

Ranks = tuple[int, ...]

PREFIX, OWN = "ranks:", "@"


# ---- names ------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def name_of(ranks: Ranks) -> str:
    """The name that lists these ranks; runs of equal steps are written as first-last:step."""
    parts, i = [], 0
    while i < len(ranks):
        j = _end_of_run(ranks, i)
        step = ranks[i + 1] - ranks[i] if j - i > 1 else 1
        parts.append(f"{ranks[i]}-{ranks[j - 1]}" + (f":{step}" if step > 1 else "") if j - i > 1 else str(ranks[i]))
        i = j
    return PREFIX + ",".join(parts)


def name_of_lists(lists: Iterable[Ranks]) -> str:
    """The name of several groups, of which each rank uses the one that lists it."""
    return PREFIX + "|".join(dict.fromkeys(name_of(ranks).removeprefix(PREFIX) for ranks in lists))


def lists_in(name: str) -> tuple[Ranks, ...] | None:
    """The ranks of each group that the name lists; None for a name that torch made."""
    text = name[len(PREFIX) :].partition(OWN)[0]
    return tuple(map(_parse_ranks, text.split("|"))) if name.startswith(PREFIX) else None


def ranks_in(name: str, rank: int | None = None) -> Ranks | None:
    """The ranks that the name lists; None for a name that torch made.

    A name of several groups gives that of `rank`, by default the current rank. ValueError where none lists it.
    """
    lists = lists_in(name)
    if lists is None or len(lists) == 1:
        return lists and lists[0]
    rank = current_rank() if rank is None else rank
    mine = next((ranks for ranks in lists if rank in ranks), None)
    if mine is None:
        raise ValueError(f"rank {rank} is in none of the groups of {name!r}; use it on its ranks only")
    return mine


def registered_name(ranks: Ranks) -> str:
    """The name of the group of these ranks, registered with torch; nothing is sent."""
    return registered(name_of(ranks))


def registered(name: str) -> str:
    """The name, of `name_of`, under which torch finds a group, or a placeholder, from now on.

    It is the same name, except in a thread with groups of its own (`OwnGroups`).
    """
    make = _maker.get()
    if make is not None:
        return make.registered(name) if type(make) is OwnGroups else name
    if get_ident() != threads.last:
        threads.changed()
    if not _torch.is_group(name):
        with _lock:  # simulated ranks are threads, and may register one name at the same time
            if not _torch.is_group(name):
                _torch.register_group(name, _placeholder(name))
    return name


def find_group(name: str) -> dist.ProcessGroup:
    """The process group that torch has under this name. ValueError where there is none."""
    make = _maker.get()
    if make is not None and name.startswith(PREFIX):
        return make(name)
    if not _torch.is_group(name):
        raise ValueError(
            f"there is no process group of name {name!r}. Give ProcessGroup.group_name of a group that exists, or its "
            f"ranks: '{PREFIX}0-3' names the group of ranks 0 to 3 also before there are process groups."
        )
    return _torch.group_named(name)


def _end_of_run(ranks: Ranks, i: int) -> int:
    """The end of the run of ranks with equal, rising steps that starts at i; i + 1 where it has fewer than three."""
    j = i + 1
    while j < len(ranks) and ranks[j] > ranks[j - 1] and ranks[j] - ranks[j - 1] == ranks[i + 1] - ranks[i]:
        j += 1
    return j if j - i > 2 else i + 1


@functools.lru_cache(maxsize=4096)
def _parse_ranks(text: str) -> Ranks:
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
    return _torch.PlaceholderGroup(lambda: group_of(ranks_in(name)), len(lists_in(name)[0]))


# ---- groups -----------------------------------------------------------------------------------

_maker: _torch.Carried[Callable[[str], dist.ProcessGroup] | None] = _torch.Carried("spmd_group_maker", None)


@contextmanager
def made_by(make: Callable[[str], dist.ProcessGroup]) -> Iterator[None]:
    """Inside the block, in this thread only, `make` gives the group for a name that lists ranks, and no rank waits."""
    token = _maker.set(make)
    try:
        yield
    finally:
        _maker.reset(token)


@dataclass
class _Registry:
    """The groups made under one default process group. That one is not among them: it would keep itself alive.

    uses_world: whether the default process group serves as the group of all ranks. own: by name, those of `OwnGroups`.
    """

    group_of: dict[Ranks, dist.ProcessGroup] = field(default_factory=dict)
    uses_world: bool = False
    own: dict[str, dist.ProcessGroup] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Whether the group of this name was made."""
        return name in self.own or (OWN not in name and ranks_in(name) in self.group_of)


# One registry for each default process group: destroying it and initialising again starts afresh.
_registries: WeakKeyDictionary[dist.ProcessGroup, _Registry] = WeakKeyDictionary()
_lock = threading.RLock()


def group_of(ranks: Ranks) -> dist.ProcessGroup:
    """The process group of these ranks, in this order and with the current one; made if there is none yet."""
    make = _maker.get()
    if make is not None:
        return make(name_of(ranks))
    if get_ident() != threads.last:
        threads.changed()
    registry = _registry()
    with _lock:
        if ranks in registry.group_of:
            return registry.group_of[ranks]
        may_be_world = ranks == _all_ranks() and backends.backend_of(ranks) == backends.DEFAULT
        if may_be_world and (registry.uses_world or _torch.collectives_may_overlap(dist.group.WORLD)):
            _torch.replace_group(name_of(ranks), dist.group.WORLD)
            return dist.group.WORLD
        registry.group_of[ranks] = _make_group(ranks, registry)
        return registry.group_of[ranks]


def override(mesh: DeviceMesh, said: Sequence[backends.Said]) -> None:
    """Make the groups of each axis with this backend and these options (`backends.py`).

    ValueError where a group was made already, or another mesh says something else.
    """
    axes = list(map(mesh.groups_along, range(mesh.ndim)))
    made = _registry().group_of if dist.is_available() and dist.is_initialized() else {}
    new = [ranks for axis, each in zip(axes, said, strict=False) if each != backends.DEFAULT for ranks in axis]
    late = [ranks for ranks in new if ranks in made and backends.backend_of(ranks) == backends.DEFAULT]
    if late:
        raise ValueError(
            f"backend_override: there is a process group of ranks {list(late[0])} already, made as by default. Make "
            "the mesh with backend_override before the first collective of these ranks"
        )
    backends.say(axes, said)


@per_rank
def axis_group(mesh: DeviceMesh, axis: int) -> dist.ProcessGroup:
    """The group along one axis through the current rank."""
    return group_of(mesh.ranks_along(axis, mesh.coordinate_of(_own_rank(mesh))))


@per_rank
def mesh_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group of all ranks of the mesh, in row-major order."""
    _own_rank(mesh)
    return group_of(mesh.ranks)


@per_rank
def make_groups(mesh: DeviceMesh) -> None:
    """Make the groups of all axes through the current rank now; a rank outside the mesh makes none."""
    _registry()
    if dist.get_rank() in mesh.ranks:
        for axis in range(mesh.ndim):
            axis_group(mesh, axis)


def ranks_of(group: dist.ProcessGroup) -> Ranks:
    """The global ranks of a process group, in the order of their places."""
    return tuple(dist.get_process_group_ranks(group))


def adopt(group: dist.ProcessGroup) -> Ranks:
    """Use this group from now on as the group of its ranks; returns these. All its members must call this."""
    ranks = ranks_of(group)
    if _maker.get() is not None:  # it always gives the same group for the same ranks
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


def _make_group(ranks: Ranks, registry: _Registry, name: str = "") -> dist.ProcessGroup:
    _check_ranks(ranks)
    name = name or name_of(ranks)
    if len(ranks) > 1:
        _Meeting(ranks, registry, name).wait()
    _torch.unregister_group(name)
    try:
        return _torch.new_group(ranks, name, *backends.backend_of(ranks))
    finally:
        _announce("")


class OwnGroups:
    """Process groups of a mesh that one thread uses alone; a `with` block uses them in this thread.

        mine = spmd.comm.OwnGroups(mesh, "evaluation")      # on all ranks, before the threads start
        def evaluate():
            with mine:
                loss = step(model, batch)

    Collectives of one group run in the order in which a rank launches them. Where two threads launch them, the order
    differs between ranks, and their numbers would be mixed. So only one thread at a time may use the groups of a mesh;
    each other thread takes groups of its own. They are made at once: all ranks of the mesh must come here in the same
    order. Each rank gives them the same name, which no other groups of the mesh have. What was compiled outside of the
    block keeps its groups; compile inside. With simulated ranks there is nothing to separate.
    """

    def __init__(self, mesh: DeviceMesh, name: str) -> None:
        if not name or not name.isidentifier():
            raise ValueError(f"OwnGroups: the name is {name!r}; give an identifier, such as 'evaluation'")
        self.name, self._tokens = name, []
        if _maker.get() is None and not is_rank_overridden():
            at = mesh.coordinate_of(_own_rank(mesh))
            axes = [axes for n in range(1, mesh.ndim + 1) for axes in itertools.combinations(range(mesh.ndim), n)]
            for ranks in dict.fromkeys([*(mesh.ranks_along(each, at) for each in axes), mesh.ranks]):
                self(name_of(ranks))

    def registered(self, name: str) -> str:
        """The name of this thread's own group of the ranks that the name lists, which is made if it is missing."""
        own = f"{name_of(ranks_in(name))}{OWN}{self.name}"
        if own not in _registry().own:
            self(name)
        return own

    def __call__(self, name: str) -> dist.ProcessGroup:
        """This thread's own group of the ranks that the name lists."""
        ranks, registry = ranks_in(name), _registry()
        own = f"{name_of(ranks)}{OWN}{self.name}"
        with _lock:
            if own not in registry.own:
                registry.own[own] = _make_group(ranks, registry, own)
            return registry.own[own]

    def __enter__(self) -> OwnGroups:
        simulated = _maker.get() is not None or is_rank_overridden()
        threads.leave()
        self._tokens.append(None if simulated else _maker.set(self))
        return self

    def __exit__(self, *_: object) -> None:
        token = self._tokens.pop()
        if token is not None:
            _maker.reset(token)


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

    Each announces the group that it makes. A waiting member reads the announcements of the others now and then. If
    another member makes another group that includes this rank, and this rank has not made it, the two wait for each
    other.
    """

    ranks: Ranks
    registry: _Registry
    name: str

    def wait(self) -> None:
        """Return when all have come. RuntimeError where two wait for each other, TimeoutError where one never comes."""
        store, name, n = _torch.default_store(), self.name, len(self.ranks)
        _announce(name)
        come = store.add(f"spmd/groups/{name}", 1)
        # The same group may be made again after destroy_process_group: the n next members are another meeting.
        key = f"spmd/groups/{name}/{(come - 1) // n}"
        if come % n == 0:
            self._conclude(key, MET)
        end, pause = time.monotonic() + _torch.group_timeout().total_seconds(), FIRST_PAUSE_S
        while not store.check([key]):
            error = self._conflict() or (self._timed_out() if time.monotonic() > end else None)
            if error is not None:
                self._conclude(key, str(error), type(error))
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
        self._conclude(key, MET)

    def _conclude(self, key: str, outcome: str, error: type[Exception] = RuntimeError) -> None:
        """The first member to conclude decides the outcome for all: either every member goes on or none does."""
        store = _torch.default_store()
        decided = store.compare_set(key, "", outcome).decode()
        if decided != MET:
            store.set(FAILED, decided)  # so that the members of other meetings stop waiting
            raise error(decided)

    def _conflict(self) -> RuntimeError | None:
        """The error where a member waits for this rank in another group, or where another meeting has failed."""
        store = _torch.default_store()
        if store.check([FAILED]):
            return RuntimeError(store.get(FAILED).decode())
        for rank in self.ranks:
            announced = _announced_by(rank)
            other = ranks_in(announced) or ()
            if announced != self.name and dist.get_rank() in other and not self.registry.has(announced):
                both = f"rank {rank} that of ranks {list(other)}, and each waits for the other"
                return RuntimeError(self._message(both))
        return None

    def _timed_out(self) -> TimeoutError:
        return TimeoutError(self._message(f"the others did not come: {self._missing()}"))

    def _message(self, problem: str) -> str:
        return (
            f"rank {dist.get_rank()} makes the process group of ranks {list(self.ranks)}, but {problem}.\n"
            "Every rank must use the same meshes and groups in the same order; look for rank-dependent branches."
        )

    def _missing(self) -> str:
        """The members that have not come, each with the group that it makes."""
        announced = {rank: ranks_in(_announced_by(rank)) for rank in self.ranks if rank != dist.get_rank()}
        missing = {rank: ranks for rank, ranks in announced.items() if ranks != self.ranks}
        return ", ".join(
            f"rank {rank} makes that of ranks {list(ranks)}" if ranks else f"rank {rank} makes none"
            for rank, ranks in missing.items()
        )


def _announce(name: str) -> None:
    _torch.default_store().set(f"{NOW}/{dist.get_rank()}", json.dumps(name))


def _announced_by(rank: int) -> str:
    store, key = _torch.default_store(), f"{NOW}/{rank}"
    return json.loads(store.get(key)) if store.check([key]) else ""
