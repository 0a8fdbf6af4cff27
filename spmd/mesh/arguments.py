"""The arguments that a mesh is made of: checked, and brought into one form."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed import ProcessGroup


def flat_ranks(mesh: torch.Tensor | Sequence) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and row-major ranks of nested sequences or a tensor."""
    array = mesh if isinstance(mesh, torch.Tensor) else _array(mesh)
    if array.dtype.is_floating_point or array.dtype.is_complex or array.dtype == torch.bool:
        raise ValueError(f"mesh is of {array.dtype}: {mesh!r:.200}; ranks are integers")
    ranks = tuple(int(rank) for rank in array.flatten().tolist())
    if not ranks or array.ndim == 0:
        raise ValueError(f"mesh is {mesh!r}; give a list (of lists) with at least one rank")
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1}) if len(set(ranks)) < len(ranks) else []
    if twice or min(ranks) < 0:
        wrong = f"ranks {twice} appear twice" if twice else f"rank {min(ranks)} is negative"
        raise ValueError(f"mesh: {wrong}; each rank may appear once, counted from 0")
    return tuple(array.shape), ranks


def _array(mesh: Sequence) -> torch.Tensor:
    try:
        array = torch.tensor(mesh, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"mesh is {mesh!r:.200}; give ranks as lists of lists, equally long: {error}") from None
    return array if array.numel() else array.to(torch.int64)


def checked_device(device_type: str) -> str:
    if isinstance(device_type, torch.device):
        device_type = device_type.type if device_type.index is None else str(device_type)
    if not isinstance(device_type, str) or not device_type.isidentifier():
        raise ValueError(f"device_type is {device_type!r}; give a type without a number, such as 'cpu' or 'cuda'")
    return device_type


def checked_groups(given: object) -> list[ProcessGroup]:
    found = list(given) if isinstance(given, (list, tuple)) else [given]
    strange = [each for each in found if not isinstance(each, ProcessGroup)]
    if strange or not found:
        what = f"{strange[0]!r} is no process group" if strange else "no group given"
        raise ValueError(
            f"from_group: {what}; give one ProcessGroup, or a list with one for each axis. Ranks that are not in a "
            "group have none: call from_group on its ranks only."
        )
    return found


def checked_names(names: Sequence[str] | None, shape: Sequence) -> tuple[str, ...] | None:
    if names is None:
        return None
    names = (names,) if isinstance(names, str) else tuple(names)
    if len(names) != len(shape):
        raise ValueError(f"mesh_dim_names {names} are {len(names)} for a mesh of {len(shape)} axes; give one an axis")
    if len(set(names)) != len(names):
        raise ValueError(f"axis names {names}: each may appear once")
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"axis names {names}: each must be a text that is not empty")
    return names


def nested(ranks: tuple[int, ...], shape: tuple[int, ...]) -> list:
    """Ranks as lists of lists: [0, 1, 2, 3] of shape (2, 2) is [[0, 1], [2, 3]]."""
    if len(shape) == 1:
        return list(ranks)
    step = len(ranks) // shape[0]
    return [nested(ranks[i : i + step], shape[1:]) for i in range(0, len(ranks), step)]


def joined_axes(name: object, axes: Sequence[str]) -> tuple[str, ...]:
    """The axes of which the name is made by joining them with "_"; empty if it is not.

    >>> joined_axes("dp_tp_r", ("tp_r", "dp")), joined_axes("dp_x", ("dp", "tp"))
    (('dp', 'tp_r'), ())
    """
    for axis in axes if isinstance(name, str) else ():
        if name == axis:
            return (axis,)
        if name.startswith(axis + "_"):
            rest = joined_axes(name[len(axis) + 1 :], [other for other in axes if other != axis])
            if rest:
                return (axis, *rest)
    return ()
