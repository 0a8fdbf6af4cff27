"""torch.distributed in a simulation: tables of process groups, and functions, of one thread.

torch keeps its process groups in tables of the process. Inside `simulated_distributed(state)` the code of this thread,
and of no other, finds the tables and functions of `state` in their place.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from spmd._torch.carried import Carried


@dataclasses.dataclass
class DistributedState:
    """The tables of torch.distributed about process groups, and the functions that a simulation replaces."""

    default_pg: dist.ProcessGroup | None = None
    pg_map: dict = dataclasses.field(default_factory=dict)
    pg_names: dict = dataclasses.field(default_factory=dict)
    pg_group_ranks: dict = dataclasses.field(default_factory=dict)
    pg_backend_config: dict = dataclasses.field(default_factory=dict)
    group_count: int = 0
    tags_to_pg: dict = dataclasses.field(default_factory=dict)
    pg_to_tag: dict = dataclasses.field(default_factory=dict)
    pg_coalesce_state: dict = dataclasses.field(default_factory=dict)
    comms: list = dataclasses.field(default_factory=list)
    functions: dict[str, Callable] = dataclasses.field(default_factory=dict)

    def clear(self) -> None:
        """Forget all groups."""
        self.default_pg = None
        for table in (self.pg_map, self.pg_names, self.pg_group_ranks, self.pg_backend_config):
            table.clear()

    def add_outside(self) -> None:
        """Add the groups of the process, which have no simulated rank, so that torch can say so when one is used."""
        outside = distributed_c10d._world
        self.pg_map.update(outside.pg_map)
        self.pg_names.update(outside.pg_names)
        self.pg_group_ranks.update({group: _Elsewhere(ranks) for group, ranks in outside.pg_group_ranks.items()})
        self.pg_backend_config.update(outside.pg_backend_config)

    def add(self, group: dist.ProcessGroup, ranks: Mapping, backend: str) -> None:
        """Let torch.distributed know the group."""
        self.pg_map[group] = (backend, self.store)
        self.pg_names[group], self.pg_group_ranks[group] = group.group_name, ranks
        self.pg_backend_config[group] = f"cpu:{backend}"

    @functools.cached_property
    def store(self) -> dist.Store:
        """The store of all groups."""
        return dist.HashStore()


class _Elsewhere(dict):
    """The places of ranks in a group of the process: -1, torch's word for a rank outside, for every simulated rank."""

    def __contains__(self, rank: object) -> bool:
        return True

    def __getitem__(self, rank: object) -> int:
        return -1


class _World(distributed_c10d._World):
    """The tables of the simulation that this code runs in; outside any, those of the process."""

    def __init__(self, outside: Any) -> None:
        super().__init__()
        self.outside = outside


def _here_or_outside(name: str) -> property:
    def read(self: _World) -> Any:
        return getattr(_simulated.get() or self.outside, name)

    def write(self: _World, value: Any) -> None:
        setattr(_simulated.get() or self.outside, name, value)

    return property(read, write)


for _field in dataclasses.fields(DistributedState):
    if hasattr(distributed_c10d._World, _field.name):
        setattr(_World, _field.name, _here_or_outside(_field.name))

_simulated: Carried[DistributedState | None] = Carried("spmd_simulated_distributed", None)
_hooks_lock, _hooks_in_use, _unhook = threading.Lock(), 0, contextlib.ExitStack()


@contextlib.contextmanager
def simulated_distributed(state: DistributedState) -> Iterator[None]:
    """Inside the block, in this thread only, torch.distributed has these tables and functions.

    While any such block is open, two things are replaced for the whole process: torch's table of tables, which torch
    allows, and the functions of these names. Both look where they are called from, and elsewhere do what they did.
    """
    _hook(state.functions)
    state.add_outside()
    token = _simulated.set(state)
    try:
        yield
    finally:
        _simulated.reset(token)
        state.clear()  # which must not keep a group of the process alive
        _unhook_if_last()


def _hook(names: Iterable[str]) -> None:
    global _hooks_in_use
    with _hooks_lock:
        _hooks_in_use += 1
        if _hooks_in_use == 1:
            _replace(distributed_c10d, "_world", _World(distributed_c10d._world))
            for name in names:
                target = _REPLACED_INSTEAD.get(name, name)
                function = _function_here_or_outside(name, getattr(distributed_c10d, target))
                for module in (distributed_c10d, dist):
                    if hasattr(module, target):
                        _replace(module, target, function)


_REPLACED_INSTEAD = {"new_group": "_new_group_with_tag", "group_size_by_name": "_get_group_size_by_name"}
"""By public function, the function that it calls, which is replaced instead, also for code that imported the former;
and a function that has no public name."""


def _unhook_if_last() -> None:
    global _hooks_in_use
    with _hooks_lock:
        _hooks_in_use -= 1
        if not _hooks_in_use:
            _unhook.close()


def _replace(module: Any, name: str, value: Any) -> None:
    _unhook.callback(setattr, module, name, getattr(module, name))
    setattr(module, name, value)


def _function_here_or_outside(name: str, outside: Callable) -> Callable:
    @functools.wraps(outside)
    def call(*args: Any, **kwargs: Any) -> Any:
        state = _simulated.get()
        return outside(*args, **kwargs) if state is None else state.functions[name](*args, **kwargs)

    return call
