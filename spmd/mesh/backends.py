"""Which backend makes the groups of an axis, where the user says so: `backend_override` of a mesh, as torch has it.

    init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "tp"), backend_override={"dp": "gloo", "tp": nccl_options})

A mesh is a value, and a group is named by its ranks alone. So what is said counts for the groups of these ranks, in
whatever mesh they are an axis, and it has to be said before the group is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Said = tuple[str | None, Any]
"""The name of a backend and its options; None where torch's default is meant."""

DEFAULT: Said = None, None

_said: dict[tuple[int, ...], Said] = {}


def backend_of(ranks: tuple[int, ...]) -> Said:
    """What was said about the group of these ranks."""
    return _said.get(ranks, DEFAULT)


def say(groups: Sequence[Iterable[tuple[int, ...]]], said: Sequence[Said]) -> None:
    """Make groups so, given those of each axis, and a backend with options for each axis.

    ValueError where another mesh says something else about one of them.
    """
    if len(said) != len(groups) or not all(type(each) is tuple and len(each) == 2 for each in said):
        raise ValueError(
            f"backend_override is {said!r}; give (backend, options) for each of the {len(groups)} axes, or a dict to "
            "init_device_mesh"
        )
    for axis, each in zip(groups, said, strict=True):
        for ranks in axis if each != DEFAULT else ():
            if _said.setdefault(ranks, each) != each:
                raise ValueError(
                    f"backend_override: the group of ranks {list(ranks)} is to be {each[0] or 'the default'} here, and "
                    f"{_said[ranks][0] or 'the default'} in another mesh, or both have options of their own. A group "
                    "is one for all meshes: say the same, with the same options object"
                )


def by_axis(given: Mapping[int | str, Any], names: Sequence[str]) -> list[Said]:
    """What a dict says about each axis. Its keys are axes by number or name, its values a backend, options, or both.

    >>> by_axis({"tp": "gloo", 0: ("nccl", None)}, ["dp", "tp", "pp"])
    [('nccl', None), ('gloo', None), (None, None)]
    """
    found: list[Said] = [DEFAULT] * len(names)
    seen: set[int] = set()
    for key, value in given.items():
        axis = names.index(key) if key in names else key
        if not isinstance(axis, int) or not 0 <= axis < len(names) or axis in seen:
            raise ValueError(
                f"backend_override: {key!r} is no axis, or one that was named twice; give numbers below {len(names)}, "
                f"or names among {', '.join(names)}"
            )
        seen.add(axis)
        found[axis] = _said_by(value)
    return found


def _said_by(value: Any) -> Said:
    if isinstance(value, str):
        return value, None
    if isinstance(value, tuple):
        if len(value) != 2 or not (value[0] is None or isinstance(value[0], str)):
            raise ValueError(f"backend_override: {value!r}; give a backend's name, its options, or (name, options)")
        return value
    return None, value
