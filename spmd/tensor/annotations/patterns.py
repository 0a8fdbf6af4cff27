"""Placements by name: patterns over the names of tensors, each with placements by axis name or in mesh order.

    {"*.attn.[qkv].weight": {"tp": Shard(0)},          # by axis name; other axes replicate
     "*.attn.out.weight": [Replicate(), Shard(1)]}     # in mesh order

The first pattern that matches a name decides. A pattern that matches no name at all is an error: it is a mistake.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Iterable, Mapping, Sequence

import torch

from spmd.mesh import DeviceMesh
from spmd.tensor.placement import REPLICATE, Placement
from spmd.tensor.spec import Spec, spec_of

PlacementsByAxis = Mapping[str, Placement] | Sequence[Placement]
Patterns = Mapping[str, PlacementsByAxis]
Placed = Mapping[str, tuple[Placement, ...]]
"""Patterns that were checked, with placements in mesh order."""


def in_mesh_order(mesh: DeviceMesh, placements: PlacementsByAxis, name: str) -> tuple[Placement, ...]:
    """One placement for each axis of the mesh. ValueError for an unknown axis or a list of another length."""
    if isinstance(placements, Mapping):
        by_axis = {_axis(mesh, axis, name): p for axis, p in placements.items()}
        return tuple(by_axis.get(axis, REPLICATE) for axis in range(mesh.ndim))
    if isinstance(placements, (list, tuple)) and len(placements) == mesh.ndim:
        return tuple(placements)
    raise ValueError(
        f"{name!r}: {placements!r} gives no placements on a mesh with axes {', '.join(mesh.axis_names)}; give a dict "
        f"by axis name, such as {{{mesh.axis_names[-1]!r}: Shard(0)}}, or a list of {mesh.ndim} placements"
    )


def _axis(mesh: DeviceMesh, axis: str | int, name: str) -> int:
    try:
        return mesh.axis(axis)
    except ValueError as error:
        raise ValueError(f"{name!r}: {error}") from None


def check_patterns(
    mesh: DeviceMesh, patterns: Patterns, what: str, *, may_be_partial: bool = False
) -> dict[str, tuple[Placement, ...]]:
    """The patterns, with their placements in mesh order. Everything that can be checked without tensors is checked."""
    if not isinstance(patterns, Mapping):
        raise TypeError(f"{what} is a {type(patterns).__name__}; give a dict from name pattern to placements")
    placed = {name: in_mesh_order(mesh, placements, name) for name, placements in patterns.items()}
    for name, placements in placed.items():
        wrong = [p for p in placements if not isinstance(p, Placement) or (p.is_partial() and not may_be_partial)]
        if wrong:
            kind = "a result; use Shard(dim), Replicate() or Partial()" if may_be_partial else (
                "an input; use Shard(dim) or Replicate()"
            )
            raise ValueError(f"{what} {name!r}: {wrong[0]!r} is no placement for {kind}")
    return placed


def require_matches(patterns: Iterable[str], names: Sequence[str], what: str) -> None:
    """ValueError for a pattern that matches none of the names; the error lists the names that are nearest."""
    for pattern in patterns:
        if not any(matches(pattern, name) for name in names):
            raise ValueError(f"{what} {pattern!r} matches nothing. {what_there_is(pattern, names)}")


def what_there_is(pattern: str, names: Iterable[str]) -> str:
    """For an error about a pattern that matches none of the names: those that are nearest to it, or the first."""
    there = [name for name in dict.fromkeys(names) if name]
    near = difflib.get_close_matches(pattern, [*there, *map(without_root, there)], n=3, cutoff=0.4)
    return f"Near: {', '.join(dict.fromkeys(near))}." if near else f"There are: {', '.join(there[:8]) or 'none'}."


def matches(pattern: str, name: str) -> bool:
    """Whether a pattern matches a name, with or without the argument in front of it (`model.`)."""
    if fnmatch.fnmatchcase(name, pattern):
        return True
    # A star at the beginning has matched whatever is in front.
    return not pattern.startswith("*") and fnmatch.fnmatchcase(without_root(name), pattern)


def without_root(name: str) -> str:
    return name.partition(".")[2]


def placements_for(
    patterns: Mapping[str, tuple[Placement, ...]], names: Iterable[str]
) -> tuple[Placement, ...] | None:
    """The placements of the first pattern that matches one of the names; None where none does."""
    names = list(names)
    return next((p for pattern, p in patterns.items() if any(matches(pattern, n) for n in names)), None)


def placed_spec(mesh: DeviceMesh, placements: Sequence[Placement] | None, t: torch.Tensor, name: str) -> Spec:
    """The spec of a global tensor with these placements, replicated for None. Errors name the tensor."""
    try:
        return spec_of(mesh, placements or [REPLICATE] * mesh.ndim, t.shape, t.dtype)
    except (ValueError, TypeError) as error:
        raise type(error)(f"{name}: {error}") from None


def matches_module(pattern: str, name: str) -> bool:
    """Whether a pattern names a module: a star stands for one part of the name, as in torch, or within one."""
    wanted, found = pattern.split("."), name.split(".")
    return len(wanted) == len(found) and all(map(fnmatch.fnmatchcase, found, wanted))
