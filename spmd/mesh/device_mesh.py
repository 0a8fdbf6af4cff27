"""DeviceMesh: an n-D array of ranks with named axes, as a value.

    >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    >>> mesh
    DeviceMesh('cpu', [[0, 1], [2, 3]], mesh_dim_names=('dp', 'tp'))
    >>> mesh.coordinate_of(2), mesh.ranks_along("dp", (0, 1))
    ((1, 0), (1, 3))
    >>> mesh["tp", "dp"]                                       # transposed
    DeviceMesh('cpu', [[0, 2], [1, 3]], mesh_dim_names=('tp', 'dp'))
    >>> mesh.slices("tp")[1]                                   # what mesh["tp"] is on ranks 2 and 3
    DeviceMesh('cpu', [2, 3], mesh_dim_names=('tp',))
    >>> mesh.flatten()
    DeviceMesh('cpu', [0, 1, 2, 3], mesh_dim_names=('dp_tp',))

Names and meanings are those of torch.distributed.device_mesh. Where they differ: a mesh never needs nor creates a
process group until one is asked for, so it can be planned on, traced with and simulated in any process. Axes may be
sliced in any order. A mesh is a value: flattening gives another mesh, and the first does not learn of it.

Left out: splitting an axis into several, joining meshes, and process group options for each axis.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod

import torch
from torch.distributed import ProcessGroup

from spmd.mesh import groups
from spmd.mesh.layout import HostGrid
from spmd.mesh.machine import Machine
from spmd.mesh.rank import current_rank, per_rank
from spmd.mesh.topology import MeshTopoInfo

Axis = int | str
Coordinate = tuple[int, ...]


class DeviceMesh:
    """An n-D array of ranks. Immutable; equal and hashed by device type, ranks, names and topology.

        >>> mesh = DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]], mesh_dim_names=("dp", "tp"))
        >>> mesh.shape, mesh.size(), mesh.size("tp"), mesh.axis("tp"), mesh.axis_name(0)
        ((2, 3), 6, 3, 1, 'dp')

    `topology` says how fast its links are: a MeshTopoInfo, or a machine, a preset's name or a file for
    `MeshTopoInfo.from_mesh`; None looks in the environment (`topology.py`). It is part of what makes meshes equal
    because plans are priced by it, and a plan must not depend on which mesh came first.
    """

    __slots__ = ("_at", "_hash", "_topology", "device_type", "mesh_dim_names", "ndim", "ranks", "shape")

    def __init__(
        self,
        device_type: str,
        mesh: torch.Tensor | Sequence,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        topology: MeshTopoInfo | Machine | str | None = None,
    ) -> None:
        shape, ranks = _flat(mesh)
        self._fill(_checked_device(device_type), shape, ranks, _checked_names(mesh_dim_names, shape), topology)

    def _fill(
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
        put("_hash", hash(self._content))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"cannot set {name}: a DeviceMesh is a value. Make another one.")

    # What it is

    @property
    def mesh(self) -> torch.Tensor:
        """The ranks as an int64 CPU tensor, made afresh: a fake-tensor mode or a writer leaves no trace in the mesh."""
        return torch.tensor(self.ranks, dtype=torch.int64, device="cpu").reshape(self.shape)

    @property
    def topology(self) -> MeshTopoInfo:
        """How fast its links are; a slice, a transposed and a flattened mesh have their parent's."""
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
        """How many ranks along one axis, or in all."""
        return len(self.ranks) if mesh_dim is None else self.shape[self.axis(mesh_dim)]

    # Axes

    def axis(self, mesh_dim: Axis) -> int:
        """The number of an axis given by its name or number; negative numbers count from the end."""
        if isinstance(mesh_dim, int) and -self.ndim <= mesh_dim < self.ndim:
            return mesh_dim % self.ndim
        names = self.axis_names
        # A ValueError and no KeyError, which would print its message in quotes.
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
        """The names of its axes, which are what it is indexed by."""
        return iter(self.axis_names)

    def __contains__(self, item: object) -> bool:
        """Whether it has an axis of this name, or a rank of this number.

        >>> mesh = DeviceMesh("cpu", [4, 5], mesh_dim_names=("tp",))
        >>> "tp" in mesh, "dp" in mesh, 5 in mesh, 0 in mesh
        (True, False, True, False)
        """
        return item in (self.axis_names if isinstance(item, str) else self._at)

    # Ranks and coordinates

    def get_rank(self) -> int:
        """The global rank this code plays, in the mesh or not."""
        return current_rank()

    @per_rank
    def get_coordinate(self) -> Coordinate | None:
        """Where the current rank is; None when it is not in the mesh."""
        return self._at.get(current_rank())

    @per_rank
    def get_local_rank(self, mesh_dim: Axis | None = None) -> int:
        """The current rank's place along one axis, which a 1-D mesh need not name."""
        if mesh_dim is None and self.ndim != 1:
            raise ValueError(f"get_local_rank: say which axis of {', '.join(self.axis_names)} is meant")
        return self._my_coordinate("get_local_rank")[self.axis(0 if mesh_dim is None else mesh_dim)]

    @per_rank
    def coordinate_of(self, rank: int) -> Coordinate:
        """Where a rank is. ValueError when it is not in the mesh."""
        if rank not in self._at:
            raise ValueError(f"rank {rank} is not in {self!r}")
        return self._at[rank]

    def coordinates(self) -> list[Coordinate]:
        """All coordinates in row-major order: the order of `ranks`."""
        return list(self._at.values())

    def rank_at(self, coordinate: Sequence[int]) -> int:
        """The rank at a coordinate."""
        return self.ranks[self._flat_index(coordinate)]

    @per_rank
    def ranks_along(self, axis: Axis | tuple[Axis, ...], coordinate: Sequence[int]) -> tuple[int, ...]:
        """The ranks of the group on `axis` that goes through `coordinate`, in order of their place on the axis.

        Of several axes the group that spans them, the first outermost.

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

        All axes in another order are the transposed mesh. On a rank outside the mesh there is no part to give
        (RuntimeError), unless all ranks have the same; `slices` has all parts, on any rank.

            >>> from spmd.mesh import as_rank
            >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            >>> with as_rank(3):
            ...     mesh["tp"]
            DeviceMesh('cpu', [2, 3], mesh_dim_names=('tp',))
        """
        axes = self._named_axes((mesh_dim_names,) if isinstance(mesh_dim_names, str) else mesh_dim_names)
        parts = self.groups_along(*axes)
        if len(parts) > 1:
            self._my_coordinate(f"mesh[{mesh_dim_names!r}]")
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

    def _named_axes(self, wanted: object) -> tuple[int, ...]:
        if not isinstance(wanted, (tuple, list)) or not wanted or not all(isinstance(name, str) for name in wanted):
            raise ValueError(f"cannot slice by {wanted!r}; give the names of one axis or more, as in mesh['tp', 'dp']")
        if self.mesh_dim_names is None:
            raise ValueError(f"cannot slice {tuple(wanted)} out of a mesh without names; give it mesh_dim_names=")
        return tuple(self.axis(name) for name in _checked_names(wanted, wanted))

    def _part(self, axes: tuple[int, ...], ranks: tuple[int, ...], topology: MeshTopoInfo) -> DeviceMesh:
        if axes == tuple(range(self.ndim)):
            return self
        shape = tuple(self.shape[axis] for axis in axes)
        return _rebuild(self.device_type, shape, ranks, tuple(map(self.axis_name, axes)), topology)

    def flatten(self, name: str | None = None, *, axes: Sequence[Axis] | None = None) -> DeviceMesh:
        """The mesh with several axes made into one, the first of them outermost. Works on any rank.

        `axes`: all of them where None; the new axis stands where the first of them stood. `name`: the names joined
        by "_" where None; a mesh without names stays without. Other than torch's `_flatten` it leaves no mark on the
        mesh it was cut from: keep the result.

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
        names = _checked_names(self._flat_names(name, parts, merged), shape)
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

        One group makes a 1-D mesh of its ranks. A list makes an n-D mesh, a group for each axis: those of this rank,
        whose ranks must be what `mesh` has along the axis through it. ValueError where they are not.
        """
        given = [group] if isinstance(group, ProcessGroup) else _checked_groups(group)
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
        """The process group along one axis, which a 1-D mesh need not name; made on first need (`mesh/groups.py`)."""
        if mesh_dim is None and self.ndim != 1:
            raise ValueError(f"get_group: say which axis of {', '.join(self.axis_names)} is meant")
        return groups.axis_group(self, self.axis(0 if mesh_dim is None else mesh_dim))

    def get_all_groups(self) -> list[ProcessGroup]:
        """The process groups of all axes through the current rank, in order of the axes."""
        return [self.get_group(axis) for axis in range(self.ndim)]

    def make_groups(self) -> None:
        """Make the process groups of all axes now."""
        groups.make_groups(self)

    # A value

    @property
    def _content(self) -> tuple:
        return (self.ranks, self.shape, self.mesh_dim_names, self.device_type, self._topology)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, DeviceMesh) and self._hash == other._hash and self._content == other._content

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple:
        # The hash is made again: strings hash differently in another process.
        return _rebuild, (self.device_type, self.shape, self.ranks, self.mesh_dim_names, self._topology)

    def __repr__(self) -> str:
        """What makes this mesh again, with its topology unless that is the textbook on one host."""
        names = f", mesh_dim_names={self.mesh_dim_names!r}" if self.mesh_dim_names else ""
        plain = self._topology == MeshTopoInfo(HostGrid(self.shape))
        links = "" if plain else f", topology={self._topology!r}"
        return f"DeviceMesh({self.device_type!r}, {_nested(self.ranks, self.shape)!r}{names}{links})"

    def _my_coordinate(self, asked: str) -> Coordinate:
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
    topology: MeshTopoInfo | Machine | str | None = None,
) -> DeviceMesh:
    """The mesh of ranks 0, 1, 2, ... in row-major order.

    >>> init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    DeviceMesh('cpu', [0, 1, 2, 3], mesh_dim_names=('dp',))
    """
    sizes = (mesh_shape,) if isinstance(mesh_shape, int) else tuple(mesh_shape)
    shape = tuple(int(n) if isinstance(n, int) else 0 for n in sizes)
    if not shape or min(shape) < 1:
        raise ValueError(f"mesh_shape is {mesh_shape!r}; give at least one axis, each of at least 1 rank")
    ranks = _nested(tuple(range(prod(shape))), shape)
    return DeviceMesh(device_type, ranks, mesh_dim_names=mesh_dim_names, topology=topology)


def _rebuild(*state: object) -> DeviceMesh:
    """A mesh from what another mesh has checked: slices, copies and pickles."""
    mesh = DeviceMesh.__new__(DeviceMesh)
    mesh._fill(*state)
    return mesh


def _flat(mesh: torch.Tensor | Sequence) -> tuple[tuple[int, ...], tuple[int, ...]]:
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


def _checked_device(device_type: str) -> str:
    if isinstance(device_type, torch.device):
        device_type = device_type.type if device_type.index is None else str(device_type)
    if not isinstance(device_type, str) or not device_type.isidentifier():
        raise ValueError(f"device_type is {device_type!r}; give a type without a number, such as 'cpu' or 'cuda'")
    return device_type


def _checked_groups(given: object) -> list[ProcessGroup]:
    found = list(given) if isinstance(given, (list, tuple)) else [given]
    strange = [each for each in found if not isinstance(each, ProcessGroup)]
    if strange or not found:
        what = f"{strange[0]!r} is no process group" if strange else "no group given"
        raise ValueError(
            f"from_group: {what}; give one ProcessGroup, or a list with one for each axis. Ranks that are not in a "
            "group have none: call from_group on its ranks only."
        )
    return found


def _checked_names(names: Sequence[str] | None, shape: Sequence) -> tuple[str, ...] | None:
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


def _nested(ranks: tuple[int, ...], shape: tuple[int, ...]) -> list:
    """Ranks as lists of lists: [0, 1, 2, 3] of shape (2, 2) is [[0, 1], [2, 3]]."""
    if len(shape) == 1:
        return list(ranks)
    step = len(ranks) // shape[0]
    return [_nested(ranks[i : i + step], shape[1:]) for i in range(0, len(ranks), step)]
