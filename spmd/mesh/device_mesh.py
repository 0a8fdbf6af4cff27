"""DeviceMesh: an n-D array of ranks with named axes, as a value.

    >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    >>> mesh
    DeviceMesh('cpu', [[0, 1], [2, 3]], mesh_dim_names=('dp', 'tp'))
    >>> mesh.coordinate_of(2), mesh.ranks_along("dp", (0, 1))
    ((1, 0), (1, 3))

Names and meanings are those of torch.distributed.device_mesh. Where they differ: a mesh never needs nor creates a
process group until one is asked for, so it can be planned on, traced with and simulated in any process.

Left out: meshes made from existing process groups, and flattening several axes into one.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from itertools import product
from math import prod

import torch
from torch.distributed import ProcessGroup

from spmd.mesh import groups
from spmd.mesh.rank import current_rank
from spmd.mesh.topology import MeshTopoInfo

Axis = int | str
Coordinate = tuple[int, ...]


class DeviceMesh:
    """An n-D array of ranks. Immutable; equal and hashed by device type, ranks, names and topology.

        >>> mesh = DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]], mesh_dim_names=("dp", "tp"))
        >>> mesh.shape, mesh.size(), mesh.size("tp"), mesh.axis("tp"), mesh.axis_name(0)
        ((2, 3), 6, 3, 1, 'dp')

    `topology` says how fast its links are; None reads it off the ranks (`MeshTopoInfo.from_mesh`). It is part of
    what makes meshes equal because plans are priced by it, and a plan must not depend on which mesh came first.
    """

    __slots__ = (
        "_at", "_axes_of_root", "_hash", "_root", "_topology", "device_type", "mesh_dim_names", "ndim", "ranks", "shape"
    )  # fmt: skip

    def __init__(
        self,
        device_type: str,
        mesh: torch.Tensor | Sequence,
        *,
        mesh_dim_names: Sequence[str] | None = None,
        topology: MeshTopoInfo | None = None,
    ) -> None:
        shape, ranks = _flat(mesh)
        self._fill(str(device_type), shape, ranks, _checked_names(mesh_dim_names, shape), topology)

    def _fill(
        self,
        device_type: str,
        shape: tuple[int, ...],
        ranks: tuple[int, ...],
        names: tuple[str, ...] | None,
        topology: MeshTopoInfo | None,
        root: DeviceMesh | None = None,
        axes_of_root: tuple[int, ...] | None = None,
    ) -> None:
        """Set every slot once. `root`: the mesh this one was sliced from, by `axes_of_root`."""
        put = super().__setattr__
        put("device_type", device_type)
        put("shape", shape)
        put("ndim", len(shape))
        put("ranks", ranks)
        put("mesh_dim_names", names)
        put("_at", dict(zip(ranks, product(*map(range, shape)), strict=True)))
        put("_root", root)
        put("_axes_of_root", axes_of_root or tuple(range(len(shape))))
        put("_topology", _checked_topology(topology or MeshTopoInfo.from_mesh(self), shape))
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
        """How fast its links are; a slice has its parent's."""
        return self._topology

    @property
    def root(self) -> DeviceMesh:
        """The mesh this one was sliced from, or itself."""
        return self if self._root is None else self._root

    @property
    def axes_of_root(self) -> tuple[int, ...]:
        """For each axis, which axis of `root` it is."""
        return self._axes_of_root

    def with_topology(self, topology: MeshTopoInfo) -> DeviceMesh:
        """The same ranks with other links.

        >>> mesh = init_device_mesh("cpu", (2, 4))
        >>> mesh.with_topology(MeshTopoInfo.from_mesh(mesh, ranks_per_host=4)) == mesh
        False
        """
        return _rebuild(
            self.device_type, self.shape, self.ranks, self.mesh_dim_names, topology, self._root, self._axes_of_root
        )

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

    # Ranks and coordinates

    def get_rank(self) -> int:
        """The global rank this code plays, in the mesh or not."""
        return current_rank()

    def get_coordinate(self) -> Coordinate | None:
        """Where the current rank is; None when it is not in the mesh."""
        return self._at.get(current_rank())

    def get_local_rank(self, mesh_dim: Axis | None = None) -> int:
        """The current rank's place along one axis, which a 1-D mesh need not name."""
        if mesh_dim is None and self.ndim != 1:
            raise ValueError(f"get_local_rank: say which axis of {', '.join(self.axis_names)} is meant")
        return self._my_coordinate("get_local_rank")[self.axis(0 if mesh_dim is None else mesh_dim)]

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

    def ranks_along(self, axis: Axis, coordinate: Sequence[int]) -> tuple[int, ...]:
        """The ranks of the group on `axis` that goes through `coordinate`, in order of their place on the axis."""
        i = self.axis(axis)
        step = prod(self.shape[i + 1 :])
        first = self._flat_index(coordinate) - coordinate[i] * step
        return self.ranks[first : first + step * self.shape[i] : step]

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

    # Groups and slices

    def get_group(self, mesh_dim: Axis | None = None) -> ProcessGroup:
        """The process group along one axis, which a 1-D mesh need not name; made on first need (`mesh/groups.py`)."""
        if mesh_dim is None and self.ndim != 1:
            raise ValueError(f"get_group: say which axis of {', '.join(self.axis_names)} is meant")
        return groups.axis_group(self, self.axis(0 if mesh_dim is None else mesh_dim))

    def make_groups(self) -> None:
        """Make the process groups of all axes now. Needed on every rank of the job if the mesh lacks some of them."""
        groups.make_groups(self)

    def __getitem__(self, mesh_dim_names: str | tuple[str, ...]) -> DeviceMesh:
        """The part of the mesh along the named axes, through the current rank, with the same links.

        >>> from spmd.mesh import as_rank
        >>> mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        >>> with as_rank(3):
        ...     mesh["tp"]
        DeviceMesh('cpu', [2, 3], mesh_dim_names=('tp',))
        """
        wanted = (mesh_dim_names,) if isinstance(mesh_dim_names, str) else tuple(mesh_dim_names)
        if self.mesh_dim_names is None:
            raise ValueError(f"cannot slice {wanted} out of a mesh without names; give it mesh_dim_names=")
        names = _checked_names(wanted, wanted)
        axes = tuple(self.axis(name) for name in names)
        if axes == tuple(range(self.ndim)):
            return self
        here = self._my_coordinate(f"mesh[{mesh_dim_names!r}]")
        shape = tuple(self.shape[i] for i in axes)
        ranks = tuple(self.rank_at(_moved(here, axes, at)) for at in product(*map(range, shape)))
        of_root = tuple(self._axes_of_root[i] for i in axes)
        return _rebuild(self.device_type, shape, ranks, names, self._topology.take(axes), self.root, of_root)

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
        state = (self.device_type, self.shape, self.ranks, self.mesh_dim_names)
        return _rebuild, (*state, self._topology, self._root, self._axes_of_root)

    def __repr__(self) -> str:
        """What makes this mesh again; the topology shows where the ranks alone would not give it."""
        names = f", mesh_dim_names={self.mesh_dim_names!r}" if self.mesh_dim_names else ""
        known = self._topology == MeshTopoInfo.from_mesh(self)
        links = "" if known else f", topology={self._topology!r}"
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
    device_type: str, mesh_shape: Sequence[int], *, mesh_dim_names: Sequence[str] | None = None
) -> DeviceMesh:
    """The mesh of ranks 0, 1, 2, ... in row-major order.

    >>> init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    DeviceMesh('cpu', [0, 1, 2, 3], mesh_dim_names=('dp',))
    """
    shape = tuple(int(n) for n in mesh_shape)
    if not shape or min(shape) < 1:
        raise ValueError(f"mesh_shape is {shape}; give at least one axis, each of at least 1 rank")
    return DeviceMesh(device_type, _nested(tuple(range(prod(shape))), shape), mesh_dim_names=mesh_dim_names)


def _rebuild(*state: object) -> DeviceMesh:
    """A mesh from what another mesh has checked: slices, copies and pickles."""
    mesh = DeviceMesh.__new__(DeviceMesh)
    mesh._fill(*state)
    return mesh


def _flat(mesh: torch.Tensor | Sequence) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and row-major ranks of nested sequences or a tensor."""
    array = mesh if isinstance(mesh, torch.Tensor) else torch.tensor(mesh, dtype=torch.int64, device="cpu")
    ranks = tuple(int(rank) for rank in array.flatten().tolist())
    if not ranks or array.ndim == 0:
        raise ValueError(f"mesh is {mesh!r}; give a list (of lists) with at least one rank")
    twice = sorted({rank for rank in ranks if ranks.count(rank) > 1}) if len(set(ranks)) < len(ranks) else []
    if twice or min(ranks) < 0:
        wrong = f"ranks {twice} appear twice" if twice else f"rank {min(ranks)} is negative"
        raise ValueError(f"mesh: {wrong}; each rank may appear once, counted from 0")
    return tuple(array.shape), ranks


def _checked_names(names: Sequence[str] | None, shape: Sequence) -> tuple[str, ...] | None:
    if names is None:
        return None
    names = (names,) if isinstance(names, str) else tuple(names)
    if len(names) != len(shape):
        raise ValueError(f"mesh_dim_names {names} are {len(names)} for a mesh of {len(shape)} axes; give one an axis")
    if len(set(names)) != len(names):
        raise ValueError(f"axis names {names}: each may appear once")
    return names


def _checked_topology(topology: MeshTopoInfo, shape: tuple[int, ...]) -> MeshTopoInfo:
    if topology.sizes != shape:
        raise ValueError(f"topology is for a mesh of shape {topology.sizes}, and this mesh has shape {shape}")
    return topology


def _moved(here: Coordinate, axes: Sequence[int], at: Sequence[int]) -> Coordinate:
    """`here` with the coordinates on `axes` replaced by `at`."""
    to = dict(zip(axes, at, strict=True))
    return tuple(to.get(i, c) for i, c in enumerate(here))


def _nested(ranks: tuple[int, ...], shape: tuple[int, ...]) -> list:
    """Ranks as lists of lists: [0, 1, 2, 3] of shape (2, 2) is [[0, 1], [2, 3]]."""
    if len(shape) == 1:
        return list(ranks)
    step = len(ranks) // shape[0]
    return [_nested(ranks[i : i + step], shape[1:]) for i in range(0, len(ranks), step)]
