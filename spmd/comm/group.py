"""The group of a collective: six notations, each resolved to a name, a size and this rank's place in the group.

    [0, 1, 2, 3]            ranks, in the order of their places
    [[0, 1], [2, 3]]        groups: each rank belongs to the list that contains it
    mesh                    a 1-D DeviceMesh
    (mesh, "tp")            the group along one axis of a mesh through this rank
    process_group           a torch.distributed ProcessGroup
    "ranks:0-3"             a group's name, spmd's or torch's

    >>> from spmd.mesh import as_rank
    >>> with as_rank(2):
    ...     members([[0, 1], [2, 3]])
    Members(name='ranks:2,3', size=2, place=0)

All notations but a ProcessGroup and torch's own names can be resolved before there is a process group. Dynamo traces
the notation as it is and treats the resolved values as constants.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import fx

from spmd import _torch
from spmd.mesh import DeviceMesh, current_rank, groups
from spmd.mesh.rank import rank_simulator

Group = Sequence[int] | Sequence[Sequence[int]] | DeviceMesh | tuple[DeviceMesh, int | str] | dist.ProcessGroup | str
"""All notations of a group."""


class Members(NamedTuple):
    """A group's name, its number of ranks, and the place of this rank in it."""

    name: str
    size: int
    place: int


def members(group: Group) -> Members:
    """Resolve a group in any notation for this rank. ValueError if this rank is not in the group."""
    mode = rank_simulator()
    return _members(group) if mode is None else mode.each(_members, (group,), {})


def _members(group: Group) -> Members:
    if isinstance(group, DeviceMesh):
        return Members(*_members_along_axis((group,), None))
    if isinstance(group, str):
        return Members(*_members_by_name(group))
    if isinstance(group, dist.ProcessGroup):
        return Members(group.group_name, group.size(), group.rank())
    if isinstance(group, tuple) and len(group) == 2 and isinstance(group[0], DeviceMesh):
        axis = group[1]
        return Members(*_members_along_axis((group[0],), axis if isinstance(axis, str) else _constant(axis)))
    if not isinstance(group, (list, tuple)) or len(group) == 0:
        raise _not_a_group(group)
    lists = group if isinstance(group[0], (list, tuple)) else [group]
    if not all(isinstance(ranks, (list, tuple)) for ranks in lists):
        raise _not_a_group(group)
    # One flat row of plain ints, because Dynamo does not take nested lists as constants.
    lengths = [len(ranks) for ranks in lists]
    return Members(*_members_in_lists(len(lengths), *lengths, *[_constant(rank) for ranks in lists for rank in ranks]))


def _not_a_group(group: object) -> TypeError:
    return TypeError(
        f"group is {group!r}; give a list of ranks, a list of such lists, a 1-D DeviceMesh, (mesh, axis), "
        "a ProcessGroup or a group's name"
    )


def _constant(n: int) -> int:
    """n as a plain int. Dynamo makes numbers that change symbolic, but guards the ends of a range as constants."""
    try:
        return range(n, n + 1)[0]
    except TypeError:
        raise TypeError(f"group: {n!r} is no rank; ranks are whole numbers") from None


# Dynamo guards a mesh in a tuple by value. A bare mesh it would guard by address, which a later mesh may get again.
_torch.pytree.register_constant(DeviceMesh)


@_torch.constant_in_dynamo
def _members_along_axis(mesh_alone: tuple[DeviceMesh], axis: int | str | None) -> tuple[str, int, int]:
    [mesh] = mesh_alone
    if axis is None and mesh.ndim != 1:
        raise ValueError(
            f"group: a mesh with axes {', '.join(mesh.axis_names)} is no group; say which axis, such as "
            f"(mesh, {mesh.axis_names[-1]!r})"
        )
    name, size, place = _mesh_members(mesh, 0 if axis is None else axis, _guarded_rank())
    return groups.registered(name), size, place


@_torch.constant_in_dynamo
def _members_by_name(name: str) -> tuple[str, int, int]:
    ranks = groups.ranks_in(name)
    if ranks is None:
        group = groups.find_group(name)
        return name, group.size(), group.rank()
    return groups.registered(name), len(ranks), _place_of_rank(ranks)


@_torch.constant_in_dynamo
def _members_in_lists(count: int, *numbers: int) -> tuple[str, int, int]:
    name, size, place = _list_members(_guarded_rank(), count, *numbers)
    return groups.registered(name), size, place


@functools.lru_cache(maxsize=4096)
def _mesh_members(mesh: DeviceMesh, axis: int | str, rank: int) -> tuple[str, int, int]:
    i = mesh.axis(axis)
    ranks = mesh.ranks_along(i, mesh.coordinate_of(rank))
    return groups.name_of(ranks), len(ranks), mesh.coordinate_of(rank)[i]


@functools.lru_cache(maxsize=4096)
def _list_members(rank: int, count: int, *numbers: int) -> tuple[str, int, int]:
    """The members of this rank's list. numbers: the lengths of `count` lists, then the ranks of all lists in order."""
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


def _guarded_rank() -> int:
    """The current rank, with a Dynamo guard: the compiled code is valid for this rank only."""
    _torch.add_dynamo_guard(current_rank)
    return current_rank()


def _place_of_rank(ranks: Sequence[int]) -> int:
    rank = _guarded_rank()
    if rank not in ranks:
        raise ValueError(f"group: rank {rank} is not in the group of ranks {list(ranks)}; call on its ranks only")
    return ranks.index(rank)


def use_groups(program: fx.GraphModule) -> fx.GraphModule:
    """Register with torch the groups that a program names, and return the program.

    A program that was traced in another process needs this once: a name is registered where it is first used.

        program = use_groups(pickle.load(file))
    """
    for node in program.graph.nodes:
        for value in _torch.pytree.tree_leaves((node.args, node.kwargs)):
            if isinstance(value, str) and value.startswith(groups.PREFIX):
                groups.registered(value)
    return program
