"""DeviceMesh: an n-D array of ranks with named axes, as a value.

    >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    >>> mesh
    DeviceMesh('cpu', [[0, 1], [2, 3]], mesh_dim_names=('dp', 'tp'))
    >>> mesh.coordinate_of(2), mesh.ranks_along("dp", (0, 1))
    ((1, 0), (1, 3))
    >>> mesh["tp", "dp"]                                       # transposed
    DeviceMesh('cpu', [[0, 2], [1, 3]], mesh_dim_names=('tp', 'dp'))
    >>> mesh.slices("tp")[1]                                   # mesh["tp"] on ranks 2 and 3
    DeviceMesh('cpu', [2, 3], mesh_dim_names=('tp',))
    >>> mesh.flatten()
    DeviceMesh('cpu', [0, 1, 2, 3], mesh_dim_names=('dp_tp',))
    >>> mesh["dp_tp"] == mesh.flatten()                        # axes joined by "_" are one axis
    True

Names and meanings are those of torch.distributed.device_mesh. Three things differ. A mesh neither needs nor creates a
process group until one is asked for, so it can be planned on, traced with and simulated in any process. Axes may be
sliced in any order. A mesh is a value: flattening gives another mesh, and leaves the first as it is.

Left out: splitting an axis into several, and joining meshes.
"""

from __future__ import annotations

import difflib
import threading
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

import torch
from torch.distributed import ProcessGroup

from spmd.mesh import backends, current, groups
from spmd.mesh.arguments import checked_device, checked_groups, checked_names, flat_ranks, joined_axes, nested
from spmd.mesh.foreign import check_caller
from spmd.mesh.layout import HostGrid
from spmd.mesh.machine import Machine
from spmd.mesh.rank import current_rank, per_rank
from spmd.mesh.topology import MeshTopoInfo

Axis = int | str
Coordinate = tuple[int, ...]


MOST_SHOWN = 64
"""The ranks of a mesh of at most so many are listed in its repr."""


class Content:
    """All that tells meshes apart. Equal meshes that are alive share one of these, so to compare two of them takes no
    look at their ranks."""

    __slots__ = ("__weakref__", "values")

    _known: weakref.WeakValueDictionary[tuple, Content] = weakref.WeakValueDictionary()
    _lock = threading.Lock()

    def __init__(self, values: tuple) -> None:
        self.values = values

    @classmethod
    def of(cls, *values: Hashable) -> Content:
        """The one with these values."""
        with cls._lock:
            return cls._known.setdefault(values, cls(values))


class DeviceMesh:
    """An n-D array of ranks. Immutable; equal and hashed by device type, ranks, names and topology.

        >>> mesh = DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]], mesh_dim_names=("dp", "tp"))
        >>> mesh.shape, mesh.size(), mesh.size("tp"), mesh.axis("tp"), mesh.axis_name(0)
        ((2, 3), 6, 3, 1, 'dp')

    `topology` says how fast its links are: a MeshTopoInfo, or a machine, a preset's name or a file for
    `MeshTopoInfo.from_mesh`; None looks in the environment (`topology.py`). Equal meshes have equal topologies, because
    plans are priced by them, and a plan must not depend on which mesh came first. `backend_override` has a backend and
    its options for the groups of each axis, None for the default ones (`backends.py`).
    """

    __slots__ = ("_at", "_content", "_hash", "_topology", "device_type", "mesh_dim_names", "ndim", "ranks", "shape")

    def __init__(
        self,
        device_type: str,
        mesh: torch.Tensor | Sequence,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        backend_override: Sequence[backends.Said] | None = None,
        topology: MeshTopoInfo | Machine | str | None = None,
    ) -> None:
        shape, ranks = flat_ranks(mesh)
        self._set_slots(checked_device(device_type), shape, ranks, checked_names(mesh_dim_names, shape), topology)
        if backend_override is not None:
            groups.override(self, backend_override)

    def _set_slots(
        self,
        device_type: str,
        shape: tuple[int, ...],
        ranks: tuple[int, ...],
        names: tuple[str, ...] | None,
        topology: MeshTopoInfo | Machine | str | None,
    ) -> None:
        """Set every slot once."""
        put = super().__setattr__
        put("device_type", device_type)
        put("shape", shape)
        put("ndim", len(shape))
        put("ranks", ranks)
        put("mesh_dim_names", names)
        put("_at", dict(zip(ranks, product(*map(range, shape)), strict=True)))
        put("_topology", _topology_of(self, topology))
        put("_content", Content.of(ranks, shape, names, device_type, self._topology))
        put("_hash", hash(self._content.values))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"cannot set {name}: a DeviceMesh is a value. Make another one.")

    # Ranks and links

    @property
    def mesh(self) -> torch.Tensor:
        """The ranks as an int64 CPU tensor, a new one each time: fake-tensor modes and writes leave the mesh alone."""
        return torch.tensor(self.ranks, dtype=torch.int64, device="cpu").reshape(self.shape)

    @property
    def ranks_key(self) -> Hashable:
        """What meshes of the same ranks in the same order have in common, as a key for tables."""
        return self.ranks

    @property
    def topology(self) -> MeshTopoInfo:
        """How fast its links are; a slice, a transposed and a flattened mesh have the topology of their parent."""
        return self._topology

    def with_topology(self, topology: MeshTopoInfo | Machine | str) -> DeviceMesh:
        """The same ranks with other links.

        >>> mesh = init_device_mesh("cpu", (2, 4))
        >>> mesh.with_topology(MeshTopoInfo.from_mesh(mesh, ranks_per_host=4)) == mesh
        False
        >>> mesh.with_topology("hopper").topology
        MeshTopoInfo(HostGrid((2, 4)), 'hopper')
        """
        return _rebuild(self.device_type, self.shape, self.ranks, self.mesh_dim_names, topology)

    def size(self, mesh_dim: Axis | None = None) -> int:
        """The number of ranks along one axis, or of all ranks."""
        return len(self.ranks) if mesh_dim is None else self.shape[self.axis(mesh_dim)]

    # Axes

    def axis(self, mesh_dim: Axis) -> int:
        """The number of an axis that is given by name or number; negative numbers count from the end."""
        if isinstance(mesh_dim, int) and -self.ndim <= mesh_dim < self.ndim:
            return mesh_dim % self.ndim
        names = self.axis_names
        # A ValueError, for a KeyError would print its message in quotes.
        if mesh_dim in names:
            return names.index(mesh_dim)
        near = difflib.get_close_matches(str(mesh_dim), names, cutoff=0.5)
        hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ValueError(f"no axis {mesh_dim!r} in a mesh with axes {', '.join(names)}.{hint}")

    def axis_name(self, i: int) -> str:
        """The name of axis i, "dim{i}" where the mesh has no names."""
        return self.axis_names[self.axis(i)]

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The names of all axes, "dim{i}" where the mesh has no names."""
        return self.mesh_dim_names or tuple(f"dim{i}" for i in range(self.ndim))

    def __iter__(self) -> Iterator[str]:
        """The names of its axes, for a mesh is indexed by them."""
        return iter(self.axis_names)

    @per_rank
    def __contains__(self, item: object) -> bool:
        """Whether it has an axis of this name, or a rank of this number.

        >>> mesh = DeviceMesh("cpu", [4, 5], mesh_dim_names=("tp",))
        >>> "tp" in mesh, "dp" in mesh, 5 in mesh, 0 in mesh
        (True, False, True, False)
        """
        return item in (self.axis_names if isinstance(item, str) else self._at)

    # Ranks and coordinates

    def get_rank(self) -> int:
        """The global rank that this code runs as, in the mesh or not."""
        return current_rank()

    @per_rank
    def get_coordinate(self) -> Coordinate | None:
        """The coordinate of the current rank; None when it is not in the mesh."""
        return self._at.get(current_rank())

    @per_rank
    def get_local_rank(self, mesh_dim: Axis | None = None) -> int:
        """The current rank's place along one axis; a 1-D mesh needs no `mesh_dim`."""
        if mesh_dim is None and self.ndim != 1:
            raise ValueError(f"get_local_rank: say which axis of {', '.join(self.axis_names)} is meant")
        return self._own_coordinate("get_local_rank")[self.axis(0 if mesh_dim is None else mesh_dim)]

    @per_rank
    def coordinate_of(self, rank: int) -> Coordinate:
        """The coordinate of a rank. ValueError when it is not in the mesh."""
        if rank not in self._at:
            raise ValueError(f"rank {rank} is not in {self!r}")
        return self._at[rank]

    def coordinates(self) -> list[Coordinate]:
        """All coordinates in row-major order: the order of `ranks`."""
        return list(product(*map(range, self.shape)))

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """The rank at a coordinate."""
        return self.ranks[self._flat_index(coordinate)]

    @per_rank
    def ranks_along(self, axis: Axis | tuple[Axis, ...], coordinate: Sequence[int]) -> tuple[int, ...]:
        """The ranks of the group along `axis` through `coordinate`, in the order of the axis.

        With several axes: the group that spans them, the first axis outermost.

        >>> init_device_mesh("cpu", (2, 2, 2)).ranks_along((0, 2), (1, 1, 0))
        (2, 3, 6, 7)
        """
        spanned = [self.axis(each) for each in (axis if isinstance(axis, tuple) else (axis,))]
        steps = {i: prod(self.shape[i + 1 :]) for i in spanned}
        places = [self._flat_index(coordinate) - sum(coordinate[i] * step for i, step in steps.items())]
        for i, step in steps.items():
            places = [place + c * step for place in places for c in range(self.shape[i])]
        return tuple(self.ranks[place] for place in places)

    def groups_along(self, *axes: Axis) -> list[tuple[int, ...]]:
        """The ranks of all groups that span `axes`, row-major over the other axes, and row-major inside.

        >>> init_device_mesh("cpu", (2, 2)).groups_along(0)
        [(0, 2), (1, 3)]
        """
        spanned = [self.axis(axis) for axis in axes]
        found: dict[Coordinate, list[tuple[Coordinate, int]]] = {}
        for at, rank in zip(self._at.values(), self.ranks, strict=True):
            others = tuple(c for i, c in enumerate(at) if i not in spanned)
            found.setdefault(others, []).append((tuple(at[i] for i in spanned), rank))
        return [tuple(rank for _, rank in sorted(group)) for group in found.values()]

    # Parts and views

    @per_rank
    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        """The part of the mesh along the named axes, in that order, through the current rank, with the same links.

        All axes in another order give the transposed mesh. A name such as "dp_tp", of axes joined by "_", gives these
        as one axis, as `flatten` names it. RuntimeError on a rank outside the mesh, which has no part, unless all ranks
        have the same part; `slices` gives all parts, on any rank.

            >>> from spmd.mesh import as_rank
            >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            >>> with as_rank(3):
            ...     mesh["tp"]
            DeviceMesh('cpu', [2, 3], mesh_dim_names=('tp',))
        """
        joined = self._joined_axes(mesh_dim_names)
        if joined is not None:
            part = self[tuple(name for names in joined for name in names)]
            for names in joined:
                part = part.flatten(axes=names) if len(names) > 1 else part
            return part
        axes = self._named_axes((mesh_dim_names,) if isinstance(mesh_dim_names, str) else mesh_dim_names)
        parts = self.groups_along(*axes)
        if len(parts) > 1:
            self._own_coordinate(f"mesh[{mesh_dim_names!r}]")
            parts = [ranks for ranks in parts if current_rank() in ranks]
        return self._part(axes, parts[0], self._topology.take(axes))

    def slices(self, *mesh_dim_names: str) -> list[DeviceMesh]:
        """All parts of the mesh along the named axes, row-major over the other axes; the same list on any rank.

        >>> [part.ranks for part in init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp")).slices("dp")]
        [(0, 3), (1, 4), (2, 5)]
        """
        axes = self._named_axes(mesh_dim_names)
        topology = self._topology.take(axes)
        return [self._part(axes, ranks, topology) for ranks in self.groups_along(*axes)]

    def _joined_axes(self, wanted: object) -> list[tuple[str, ...]] | None:
        """The axes that each name joins: [("dp", "tp"), ("pp",)] for ("dp_tp", "pp"). None if no name joins several."""
        own = self.mesh_dim_names or ()
        names = (wanted,) if isinstance(wanted, str) else wanted
        if not isinstance(names, (tuple, list)) or all(name in own for name in names):
            return None
        split = [(name,) if name in own else joined_axes(name, own) for name in names]
        return split if all(split) else None

    def _named_axes(self, wanted: object) -> tuple[int, ...]:
        if not isinstance(wanted, (tuple, list)) or not wanted or not all(isinstance(name, str) for name in wanted):
            raise ValueError(f"cannot slice by {wanted!r}; give the names of one axis or more, as in mesh['tp', 'dp']")
        if self.mesh_dim_names is None:
            raise ValueError(f"cannot slice {tuple(wanted)} out of a mesh without names; give it mesh_dim_names=")
        return tuple(self.axis(name) for name in checked_names(wanted, wanted))

    def _part(self, axes: tuple[int, ...], ranks: tuple[int, ...], topology: MeshTopoInfo) -> DeviceMesh:
        if axes == tuple(range(self.ndim)):
            return self
        shape = tuple(self.shape[axis] for axis in axes)
        return _rebuild(self.device_type, shape, ranks, tuple(map(self.axis_name, axes)), topology)

    def flatten(self, name: str | None = None, *, axes: Sequence[Axis] | None = None) -> DeviceMesh:
        """The mesh with several axes merged into one, the first of them outermost. Works on any rank.

        `axes`: None means all; the new axis takes the place of the first of them. `name`: None means their names joined
        by "_"; a mesh without names stays without. Unlike torch's `_flatten` it leaves the mesh itself as it is: keep
        the result.

            >>> mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
            >>> mesh.flatten("fsdp", axes=("dp", "cp"))
            DeviceMesh('cpu', [[0, 1], [2, 3], [4, 5], [6, 7]], mesh_dim_names=('fsdp', 'tp'))
            >>> mesh.flatten().mesh_dim_names
            ('dp_cp_tp',)
        """
        merged = tuple(range(self.ndim)) if axes is None else tuple(self.axis(axis) for axis in axes)
        if not merged or len(set(merged)) < len(merged):
            raise ValueError(f"flatten: axes {tuple(axes or ())}; give one or more, each once")
        parts = [merged if i == merged[0] else (i,) for i in range(self.ndim) if i == merged[0] or i not in merged]
        order = [axis for part in parts for axis in part]
        [ranks] = self.groups_along(*order)
        shape = tuple(prod(self.shape[axis] for axis in part) for part in parts)
        names = checked_names(self._flat_names(name, parts, merged), shape)
        return _rebuild(self.device_type, shape, ranks, names, self._topology.view(parts))

    def _flat_names(
        self, name: str | None, parts: Sequence[tuple[int, ...]], merged: tuple[int, ...]
    ) -> tuple[str, ...] | None:
        if self.mesh_dim_names is None and name is not None and len(parts) > 1:
            raise ValueError(f"flatten: {name!r} would be the one name in a mesh without; give it mesh_dim_names=")
        if self.mesh_dim_names is None:
            return None if name is None else (name,)
        joined = "_".join(self.mesh_dim_names[axis] for axis in merged) if name is None else name
        return tuple(joined if part is merged else self.mesh_dim_names[part[0]] for part in parts)

    # Blocks

    def __enter__(self) -> DeviceMesh:
        """Inside, functions that are given no mesh take this one."""
        current.enter(self)
        return self

    def __exit__(self, *_: object) -> None:
        current.leave()

    def __bool__(self) -> bool:
        """True. TypeError where a function of torch asks, which would take it for a mesh of torch's."""
        check_caller()
        return True

    # Process groups

    @classmethod
    @per_rank
    def from_group(
        cls,
        group: ProcessGroup | Sequence[ProcessGroup],
        device_type: str,
        mesh: torch.Tensor | Sequence | None = None,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        topology: MeshTopoInfo | Machine | str | None = None,
    ) -> DeviceMesh:
        """A mesh over process groups that exist: `get_group` and all collectives use them.

        One group makes a 1-D mesh of its ranks. A list makes an n-D mesh. It has a group of this rank for each axis,
        with the ranks that `mesh` has along the axis through this rank; ValueError where it has others.
        """
        given = [group] if isinstance(group, ProcessGroup) else checked_groups(group)
        if mesh is None and len(given) != 1:
            raise ValueError(f"from_group: {len(given)} groups do not say how their ranks form a mesh; give mesh=")
        ranks = groups.ranks_of(given[0]) if mesh is None else mesh
        made = cls(device_type, ranks, mesh_dim_names=mesh_dim_names, topology=topology)
        made._check_groups([groups.ranks_of(each) for each in given])
        for each in given:
            groups.adopt(each)
        return made

    def _check_groups(self, given: Sequence[tuple[int, ...]]) -> None:
        if len(given) != self.ndim:
            raise ValueError(f"from_group: {len(given)} groups for a mesh of {self.ndim} axes; give one for each axis")
        here = self.get_coordinate()
        if here is None:
            raise ValueError(f"from_group: rank {current_rank()} is not in {self!r}; call it on its ranks only")
        for axis, ranks in enumerate(given):
            wanted = self.ranks_along(axis, here)
            if ranks != wanted:
                raise ValueError(
                    f"from_group: axis {self.axis_name(axis)} of {self!r} has ranks {wanted} through rank "
                    f"{current_rank()}, and its group has {ranks}. Give the group of these ranks in this order, or "
                    "another mesh; DeviceMesh(...) makes its groups by itself."
                )

    def get_group(self, mesh_dim: Axis | None = None) -> ProcessGroup:
        """The process group along one axis, made at first use (`mesh/groups.py`); a 1-D mesh needs no `mesh_dim`."""
        if mesh_dim is None and self.ndim != 1:
            raise ValueError(f"get_group: say which axis of {', '.join(self.axis_names)} is meant")
        return groups.axis_group(self, self.axis(0 if mesh_dim is None else mesh_dim))

    def get_all_groups(self) -> list[ProcessGroup]:
        """The process groups of all axes through the current rank, in the order of the axes."""
        return [self.get_group(axis) for axis in range(self.ndim)]

    def make_groups(self) -> None:
        """Make the process groups of all axes now."""
        groups.make_groups(self)

    # Equality, pickles and repr

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, DeviceMesh) and self._content is other._content)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple:
        # The hash is made again: strings hash differently in another process.
        return _rebuild, (self.device_type, self.shape, self.ranks, self.mesh_dim_names, self._topology)

    def __repr__(self) -> str:
        """An expression that makes this mesh; its topology is left out where it is the textbook on one host.

        Of a large mesh whose ranks are not 0, 1, 2, ... it shows the first and the last ranks, and makes none.
        """
        names = f", mesh_dim_names={self.mesh_dim_names!r}" if self.mesh_dim_names else ""
        plain = self._topology == MeshTopoInfo(HostGrid(self.shape))
        links = "" if plain else f", topology={self._topology!r}"
        if len(self.ranks) <= MOST_SHOWN:
            return f"DeviceMesh({self.device_type!r}, {nested(self.ranks, self.shape)!r}{names}{links})"
        if self.ranks == tuple(range(len(self.ranks))):
            return f"init_device_mesh({self.device_type!r}, {self.shape!r}{names}{links})"
        first, last = ", ".join(map(str, self.ranks[:3])), self.ranks[-1]
        return f"<DeviceMesh {self.device_type!r} of shape {self.shape!r}, ranks {first}, ..., {last}{names}{links}>"

    def _own_coordinate(self, asked: str) -> Coordinate:
        here = self.get_coordinate()
        if here is None:
            raise RuntimeError(
                f"{asked}: rank {current_rank()} is not in {self!r}. Ask on its ranks only; "
                "get_coordinate() is None on the others."
            )
        return here

    def _flat_index(self, coordinate: Sequence[int]) -> int:
        if len(coordinate) != self.ndim or not all(0 <= c < n for c, n in zip(coordinate, self.shape, strict=True)):
            raise IndexError(f"no coordinate {tuple(coordinate)} in a mesh of shape {self.shape}")
        index = 0
        for c, n in zip(coordinate, self.shape, strict=True):
            index = index * n + c
        return index


def init_device_mesh(
    device_type: str,
    mesh_shape: Sequence[int],
    *,
    mesh_dim_names: Sequence[str] | None = None,
    backend_override: Mapping[Axis, Any] | None = None,
    topology: MeshTopoInfo | Machine | str | None = None,
) -> DeviceMesh:
    """The mesh of ranks 0, 1, 2, ... in row-major order.

    backend_override: by number or name of axes, the backend that makes their groups, its options, or both.

    >>> init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    DeviceMesh('cpu', [0, 1, 2, 3], mesh_dim_names=('dp',))
    """
    sizes = (mesh_shape,) if isinstance(mesh_shape, int) else tuple(mesh_shape)
    shape = tuple(int(n) if isinstance(n, int) else 0 for n in sizes)
    if not shape or min(shape) < 1:
        raise ValueError(f"mesh_shape is {mesh_shape!r}; give at least one axis, each of at least 1 rank")
    ranks = nested(tuple(range(prod(shape))), shape)
    names = checked_names(mesh_dim_names, shape) or [f"dim{i}" for i in range(len(shape))]
    said = backends.by_axis(backend_override, names) if backend_override else None
    return DeviceMesh(device_type, ranks, mesh_dim_names=mesh_dim_names, backend_override=said, topology=topology)


def _rebuild(*state: object) -> DeviceMesh:
    """A mesh from values that another mesh has checked: slices, copies and pickles."""
    mesh = DeviceMesh.__new__(DeviceMesh)
    mesh._set_slots(*state)
    return mesh


def _topology_of(mesh: DeviceMesh, said: MeshTopoInfo | Machine | str | None) -> MeshTopoInfo:
    if said is not None and not isinstance(said, (MeshTopoInfo, Machine, str)):
        raise ValueError(
            f"topology is {said!r}; give a MeshTopoInfo (MeshTopoInfo.by_hand takes links), a Machine, "
            "or the name of a preset or a file"
        )
    topology = said if isinstance(said, MeshTopoInfo) else MeshTopoInfo.from_mesh(mesh, machine=said)
    if topology.sizes != mesh.shape:
        raise ValueError(f"topology is for a mesh of shape {topology.sizes}, and this mesh has shape {mesh.shape}")
    return topology