"""Process groups of a mesh, made when first needed, in an order that all ranks share.

torch names a group by counting the calls of `new_group`, so every rank of the job must make every group, its own
or not, in one order: a rank that skips one waits forever later on. So the first question for any group of a mesh
makes the groups of all its axes, axis by axis, row-major over the other axes. A slice asks the mesh it was cut from,
since each rank holds another slice. Groups with the same ranks are made once.

That the ranks of a mesh come here with the same mesh at the same step is compared through the store first; where they
part, all of them learn at once instead of hanging.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch.distributed as dist

from spmd import _torch

if TYPE_CHECKING:
    from spmd.mesh.device_mesh import DeviceMesh

Axes = tuple[int, ...]
Ranks = tuple[int, ...]


@dataclass
class _Registry:
    """The groups made under one default process group, which is not among them: it would keep itself alive."""

    epoch: int
    steps: int = 0
    group_of: dict[Ranks, dist.ProcessGroup] = field(default_factory=dict)
    asked: dict[tuple[DeviceMesh, Axes], dist.ProcessGroup | None] = field(default_factory=dict)  # None: the default


# One registry a default process group: destroying it and initialising again starts afresh.
_registries: WeakKeyDictionary[dist.ProcessGroup, _Registry] = WeakKeyDictionary()
_lock = threading.RLock()
_epochs = 0


def axis_group(mesh: DeviceMesh, axis: int) -> dist.ProcessGroup:
    """The group along one axis through the current rank."""
    return _group(mesh, (axis,))


def whole_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group of all ranks of the mesh, in row-major order."""
    return _group(mesh, tuple(range(mesh.ndim)))


def make_groups(mesh: DeviceMesh) -> None:
    """Make the groups of all axes of the mesh, also on a rank that is not in it."""
    registry = _registry()
    _check_size(mesh)
    with _lock:
        for axes in _long_axes(mesh.root):
            _make(registry, mesh.root, axes)


def _group(mesh: DeviceMesh, axes: Axes) -> dist.ProcessGroup:
    registry = _registry()
    if (mesh, axes) not in registry.asked:
        _check_size(mesh)
        with _lock:
            registry.asked[mesh, axes] = _found_or_made(registry, mesh, axes)
    group = registry.asked[mesh, axes]
    return dist.group.WORLD if group is None else group


def _found_or_made(registry: _Registry, mesh: DeviceMesh, axes: Axes) -> dist.ProcessGroup | None:
    ranks = _ranks_through(mesh, axes, dist.get_rank())
    if ranks == _all_ranks():
        return None
    make_groups(mesh)
    _make(registry, mesh.root, tuple(mesh.axes_of_root[i] for i in axes))
    return registry.group_of[ranks]


def _ranks_through(mesh: DeviceMesh, axes: Axes, rank: int) -> Ranks:
    if rank not in mesh.ranks:
        raise RuntimeError(f"rank {rank} is not in {mesh!r} and has none of its groups; ask on its ranks only")
    return mesh.ranks_along(axes[0], mesh.coordinate_of(rank)) if len(axes) == 1 else mesh.ranks


def _long_axes(mesh: DeviceMesh) -> list[Axes]:
    """The axes that need groups: with one rank there is nobody to talk to."""
    return [(i,) for i in range(mesh.ndim) if mesh.shape[i] > 1]


def _make(registry: _Registry, root: DeviceMesh, axes: Axes) -> None:
    """Make every group that spans `axes` of a root mesh, on all ranks alike.

    Whether there is anything to make depends on all of them: were it on this rank's own group, ranks would part.
    """
    known = {_all_ranks(), *registry.group_of}
    missing = [ranks for ranks in root.groups_along(*axes) if ranks not in known]
    if missing:
        step = f"spmd/groups/{registry.epoch}/{registry.steps}"
        registry.steps += 1
        _compare_notes(step, f"axes {[root.axis_name(i) for i in axes]} of {root!r}", root.ranks)
    for ranks in missing:
        # Unsorted: the place in the group must be the place on the axis, also in a mesh such as [[1, 0], [3, 2]].
        registry.group_of[ranks] = _torch.new_group(ranks)


def _all_ranks() -> Ranks:
    return tuple(range(dist.get_world_size()))


def _compare_notes(step: str, making: str, ranks: Ranks) -> None:
    """Raise on all `ranks` unless each of them makes the same thing as this step of the job."""
    store = _torch.default_store()
    store.set(f"{step}/{dist.get_rank()}", making)
    for rank in ranks:
        said = _note(store, f"{step}/{rank}", rank, making)
        if said != making:
            raise RuntimeError(
                f"rank {dist.get_rank()} makes the process groups of {making},\n"
                f"but rank {rank} at the same step those of {said}.\n"
                "Every rank must use the same meshes in the same order, also a rank that is not in one of them: "
                "call mesh.make_groups() for every mesh on all ranks, at the start."
            )


def _note(store: dist.Store, key: str, rank: int, making: str) -> str:
    try:
        return store.get(key).decode()  # waits for the rank to come
    except dist.DistStoreError as error:
        raise RuntimeError(f"rank {rank} did not come to make the process groups of {making}") from error


def _registry() -> _Registry:
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "a mesh has no process groups before torch.distributed is initialised. Call "
            "torch.distributed.init_process_group() under torchrun, or play the ranks with spmd.sim.run_ranks."
        )
    with _lock:
        if dist.group.WORLD not in _registries:
            global _epochs
            _epochs += 1
            _registries[dist.group.WORLD] = _Registry(_epochs)
        return _registries[dist.group.WORLD]


def _check_size(mesh: DeviceMesh) -> None:
    if max(mesh.ranks) >= dist.get_world_size():
        raise RuntimeError(
            f"{mesh!r} mentions rank {max(mesh.ranks)}, but the job has {dist.get_world_size()} ranks, "
            f"0..{dist.get_world_size() - 1}. Start more processes or build a smaller mesh."
        )
