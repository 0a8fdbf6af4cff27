"""Who takes part in a collective: any of six spellings, read into a name, a size and this rank's place.

    [0, 1, 2, 3]            ranks, in the order of their places
    [[0, 1], [2, 3]]        groups: each rank is in the one that lists it
    mesh                    a 1-D DeviceMesh
    (mesh, "tp")            the group along one axis of a mesh through this rank
    process_group           a torch.distributed ProcessGroup
    "ranks:0-3"             a group's name, spmd's or torch's

    >>> from spmd.mesh import as_rank
    >>> with as_rank(2):
    ...     members([[0, 1], [2, 3]])
    Members(name='ranks:2,3', size=2, place=0)

All but a ProcessGroup and torch's own names can be read before there is a process group. Dynamo reads the spelling as
it stands and takes what it means for constants.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import fx

from spmd import _torch
from spmd.mesh import DeviceMesh, current_rank, groups
from spmd.mesh.rank import players

Group = Sequence[int] | Sequence[Sequence[int]] | DeviceMesh | tuple[DeviceMesh, int | str] | dist.ProcessGroup | str
"""All spellings of a group."""


class Members(NamedTuple):
    """The group's name, how many ranks it has, and which of them this one is."""

    name: str
    size: int
    place: int


def members(group: Group) -> Members:
    """What the spelling of a group means on this rank. ValueError where the rank is in no such group."""
    who = players()
    return _members(group) if who is None else who.each(_members, (group,), {})


def _members(group: Group) -> Members:
    if isinstance(group, DeviceMesh):
        return Members(*_along_axis((group,), None))
    if isinstance(group, str):
        return Members(*_by_name(group))
    if isinstance(group, dist.ProcessGroup):
        return Members(group.group_name, group.size(), group.rank())
    if isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], DeviceMesh):
        axis = group[1]
        return Members(*_along_axis((group[0],), axis if isinstance(axis, str) else _constant(axis)))
    if not isinstance(group, (list, tuple)) or len(group) == 0:
        raise _no_group(group)
    lists = group if isinstance(group[0], (list, tuple)) else [group]
    if not all(isinstance(ranks, (list, tuple)) for ranks in lists):
        raise _no_group(group)
    # One flat row of plain ints, for Dynamo takes no nested lists for constants.
    lengths = [len(ranks) for ranks in lists]
    return Members(*_in_lists(len(lengths), *lengths, *[_constant(rank) for ranks in lists for rank in ranks]))


def _no_group(group: object) -> TypeError:
    return TypeError(
        f"group is {group!r}; give a list of ranks, a list of such lists, a 1-D DeviceMesh, (mesh, axis), "
        "a ProcessGroup or a group's name"
    )


def _constant(n: int) -> int:
    """n, a plain int. Dynamo makes symbols of numbers that change, but guards the ends of a range as constants."""
    try:
        return range(n, n + 1)[0]
    except TypeError:
        raise TypeError(f"group: {n!r} is no rank; ranks are whole numbers") from None


# Dynamo guards a mesh in a tuple by its value. By itself it would guard its address, which the next mesh may get.
_torch.pytree.register_constant(DeviceMesh)


@_torch.constant_in_dynamo
def _along_axis(mesh_alone: tuple[DeviceMesh], axis: int | str | None) -> tuple[str, int, int]:
    [mesh] = mesh_alone
    if axis is None and mesh.ndim != 1:
        raise ValueError(
            f"group: a mesh with axes {', '.join(mesh.axis_names)} is no group; say which axis, such as "
            f"(mesh, {mesh.axis_names[-1]!r})"
        )
    name, size, place = _of_mesh(mesh, 0 if axis is None else axis, _own_rank())
    return groups.known(name), size, place


@_torch.constant_in_dynamo
def _by_name(name: str) -> tuple[str, int, int]:
    ranks = groups.ranks_in(name)
    if ranks is None:
        group = groups.called(name)
        return name, group.size(), group.rank()
    return groups.known(name), len(ranks), _place(ranks)


@_torch.constant_in_dynamo
def _in_lists(count: int, *numbers: int) -> tuple[str, int, int]:
    name, size, place = _of_lists(_own_rank(), count, *numbers)
    return groups.known(name), size, place


@functools.lru_cache(maxsize=4096)
def _of_mesh(mesh: DeviceMesh, axis: int | str, rank: int) -> tuple[str, int, int]:
    i = mesh.axis(axis)
    ranks = mesh.ranks_along(i, mesh.coordinate_of(rank))
    return groups.name_of(ranks), len(ranks), mesh.coordinate_of(rank)[i]


@functools.lru_cache(maxsize=4096)
def _of_lists(rank: int, count: int, *numbers: int) -> tuple[str, int, int]:
    """Of `count` lists: their lengths, then their ranks one after the other."""
    lengths, ranks = numbers[:count], numbers[count:]
    _check_ranks(ranks)
    ends = [sum(lengths[: i + 1]) for i in range(count)]
    lists = [ranks[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    mine = next((found for found in lists if rank in found), None)
    if mine is None:
        shown = [list(found) for found in lists] if count > 1 else list(lists[0])
        raise ValueError(
            f"group: rank {rank} is not in {shown}. Call the collective on its ranks only, or give a list of lists "
            "in which each rank that calls is listed."
        )
    return groups.name_of(mine), len(mine), mine.index(rank)


def _check_ranks(ranks: Sequence[int]) -> None:
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1})
    if twice or min(ranks, default=0) < 0:
        wrong = f"ranks {twice} appear twice" if twice else f"rank {min(ranks)} is negative"
        raise ValueError(f"group: {wrong}; each rank may be in one group, once, counted from 0")


def _own_rank() -> int:
    """The current rank; what Dynamo compiles with it holds for this rank only."""
    _torch.guard_on(current_rank)
    return current_rank()


def _place(ranks: Sequence[int]) -> int:
    rank = _own_rank()
    if rank not in ranks:
        raise ValueError(f"group: rank {rank} is not in the group of ranks {list(ranks)}; call on its ranks only")
    return ranks.index(rank)


def use_groups(program: fx.GraphModule) -> fx.GraphModule:
    """Let torch know the groups that a program names, and give the program back.

    Needed once for a program that was traced in another process: a name is known where it was first spelled.

        program = use_groups(pickle.load(file))
    """
    for node in program.graph.nodes:
        for value in _torch.pytree.tree_leaves((node.args, node.kwargs)):
            if isinstance(value, str) and value.startswith(groups.PREFIX):
                groups.known(value)
    return program
