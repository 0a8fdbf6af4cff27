"""The cost model's view of a mesh: which hosts its ranks run on, and how fast the links between them are.

The hosts that a group crosses follow from its ranks, and are never guessed from sizes. A group of several ranks on each
of several hosts is priced for both kinds of link.

    >>> from spmd.mesh import init_device_mesh
    >>> mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    >>> topo = MeshTopoInfo.from_mesh(mesh, ranks_per_host=4)
    >>> topo
    MeshTopoInfo(HostGrid((2, 4), '0*4 1*4'), 'textbook')
    >>> [rung.level for rung in topo.crossings(1)[0]], [rung.level for rung in topo.crossings((0, 1))[0]]
    ([0], [0, 1])

A mesh without a given topology looks for one in this order: the file that $SPMD_TOPOLOGY names (`calibration.py`); the
environment ($SPMD_TOPOLOGY as the name of a preset; $LOCAL_WORLD_SIZE, which torchrun sets, for the hosts); the
textbook preset on one host.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spmd.mesh.calibration import machine_from_environment, machine_named
from spmd.mesh.layout import OWN, AxisLevels, HostGrid, Ladder, Place, card
from spmd.mesh.machine import Compute, Link, Machine, Measured, Way
from spmd.mesh.presets import BASE_LATENCY_US, INTER, INTRA, PRESETS, TEXTBOOK

if TYPE_CHECKING:
    from spmd.mesh.device_mesh import DeviceMesh

Axes = int | tuple[int, ...]  # one axis, or several as one group
BY_HAND = "by hand"


@dataclass(frozen=True)
class AxisLink:
    """The links that one mesh axis crosses, given by hand.

    `size`: devices along the axis. `hop_us`: latency alpha of one hop, in microseconds. `gb_per_s`: bandwidth of one
    device's link, in 1e9 bytes a second.

        >>> AxisLink(size=4, hop_us=0.6, gb_per_s=50.0).link.us_per_byte
        2e-05
    """

    size: int
    hop_us: float
    gb_per_s: float

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"{self}: size must be at least 1")
        _ = self.link  # it checks its numbers

    @property
    def link(self) -> Link:
        """The link without the size of the axis."""
        return Link(self.hop_us, self.gb_per_s)


@dataclass(frozen=True, eq=False, repr=False)
class MeshTopoInfo:
    """The places of the ranks of a mesh, and the machine they run on. A value, cheap to hash.

    Build it from a mesh, by hand for each axis, or from the places of the ranks:

        >>> MeshTopoInfo.by_hand([AxisLink(8, hop_us=1.0, gb_per_s=400.0)]).sizes
        (8,)
        >>> MeshTopoInfo(HostGrid((2, 2), "0 0 1 1"), "hopper").machine.name
        'hopper'
    """

    layout: HostGrid | AxisLevels
    machine: Machine | str = TEXTBOOK
    _hash: int = field(init=False)
    # Prices by collective and axes, filled by cost.py: at most one for each way to write some of the axes.
    _prices: dict[tuple[str, Axes], Any] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "machine", machine_named(self.machine) if isinstance(self.machine, str) else self.machine)
        if self.machine.levels < self.layout.levels:
            raise ValueError(
                f"the ranks are on several hosts, and machine {self.machine.name!r} knows links inside a host only; "
                "give each of its ways a second link, for hops between hosts"
            )
        put(self, "_hash", hash((self.layout, self.machine)))

    # Constructors

    @classmethod
    def by_hand(
        cls, links: Sequence[AxisLink | Sequence[AxisLink]], base_latency_us: float = BASE_LATENCY_US
    ) -> MeshTopoInfo:
        """Links given for each axis, and rings over them. An axis that was flattened has several links.

        >>> topo = MeshTopoInfo.by_hand([AxisLink(4, 2.7, 20.0), AxisLink(8, 0.6, 90.0)])
        >>> topo.take((1,))
        MeshTopoInfo.by_hand((AxisLink(size=8, hop_us=0.6, gb_per_s=90.0),), base_latency_us=6.6)
        """
        axes = [(axis,) if isinstance(axis, AxisLink) else tuple(axis) for axis in links]
        if not any(axes):
            raise ValueError("by_hand: give one AxisLink or more, for each axis of the mesh")
        fastest_first = sorted({part.link for axis in axes for part in axis}, key=lambda x: (x.us_per_byte, x.hop_us))
        levels = tuple(tuple((fastest_first.index(part.link), part.size) for part in axis) for axis in axes)
        return cls(AxisLevels(levels), Machine(BY_HAND, (Way("ring", base_latency_us, tuple(fastest_first)),)))

    @classmethod
    def textbook(cls, sizes: Sequence[int], intra_host: Sequence[bool]) -> MeshTopoInfo:
        """The textbook preset for axes of these sizes, each either inside a host or between hosts."""
        if len(sizes) != len(intra_host):
            raise ValueError(f"{len(sizes)} sizes but {len(intra_host)} entries of intra_host; give one an axis")
        kinds = [INTRA if inside else INTER for inside in intra_host]
        return cls.by_hand([AxisLink(n, kind.hop_us, kind.gb_per_s) for n, kind in zip(sizes, kinds, strict=True)])

    @classmethod
    def from_mesh(
        cls,
        mesh: DeviceMesh,
        ranks_per_host: int | None = None,
        machine: Machine | str | None = None,
        hosts: Sequence[int] | None = None,
    ) -> MeshTopoInfo:
        """The topology of a mesh that is no slice. A slice has the topology of its parent: `mesh.topology`.

        `machine`: a Machine, the name of a preset, or a file; None means the one that $SPMD_TOPOLOGY names, else the
        textbook. `hosts`: the host of rank r is hosts[r]; None means r // ranks_per_host. `ranks_per_host`: None means
        the number in the machine's file, else $LOCAL_WORLD_SIZE; without either, all ranks share a host.

            >>> from spmd.mesh import init_device_mesh
            >>> mesh = init_device_mesh("cpu", (3,))
            >>> MeshTopoInfo.from_mesh(mesh, hosts=[0, 0, 1], machine="ampere")
            MeshTopoInfo(HostGrid((3,), '0*2 1'), 'ampere')
        """
        machine = machine_from_environment() if machine is None else machine
        machine = machine_named(machine) if isinstance(machine, str) else machine
        if hosts is None:
            places = _places_in_turn(mesh.ranks, _ranks_per_host(ranks_per_host, machine), machine.nics_per_host)
        else:
            places = _places_on(hosts, mesh.ranks, machine.nics_per_host)
        return cls(HostGrid(mesh.shape, (places,)), machine)

    # Sizes and links

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of devices along each axis: the shape of the mesh."""
        return self.layout.sizes

    def axes(self, axes: Axes) -> tuple[int, ...]:
        """One axis or several as a sorted tuple; negative ones count from the end."""
        given = (axes,) if isinstance(axes, int) else axes
        return tuple(sorted(self._numbered(given)))

    def crossings(self, axes: Axes) -> tuple[Ladder, ...]:
        """The levels of links that the groups along some axes cross: the ladders that occur (`layout.py`)."""
        return self.layout.crossings(self.axes(axes))

    # Views: the topology of a mesh sliced, transposed or flattened

    def take(self, axes: Sequence[int]) -> MeshTopoInfo:
        """The topology of a mesh sliced or transposed to `axes`, in that order."""
        return self.view([(axis,) for axis in axes])

    def view(self, parts: Sequence[Sequence[int]]) -> MeshTopoInfo:
        """The topology of a mesh whose axes are each made of some axes of this one, the first of them outermost."""
        flat = self._numbered([axis for part in parts for axis in part])
        at = iter(flat)
        layout = self.layout.view([[next(at) for _ in part] for part in parts])
        if isinstance(layout, AxisLevels):
            return MeshTopoInfo.by_hand(self._links(layout), self.machine.ways[0].base_us)
        return MeshTopoInfo(layout, self.machine)

    def _numbered(self, axes: Sequence[int]) -> list[int]:
        n = len(self.sizes)
        for axis in axes:
            if not isinstance(axis, int) or not -n <= axis < n:
                raise IndexError(f"axis {axis!r} is not in a topology of {n} axes; use mesh.axis(name)")
        numbered = [axis % n for axis in axes]
        if len(set(numbered)) < len(numbered):
            raise ValueError(f"axes {tuple(axes)}: each may appear once")
        return numbered

    def _links(self, layout: AxisLevels) -> tuple[tuple[AxisLink, ...], ...]:
        known = self.machine.ways[0].links
        return tuple(
            tuple(AxisLink(size, known[level].hop_us, known[level].gb_per_s) for level, size in axis)
            for axis in layout.axes
        )

    # Equality, pickles and repr

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        same = isinstance(other, MeshTopoInfo) and self._hash == other._hash
        return same and self.layout == other.layout and self.machine == other.machine

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple:
        # The hash is made again: strings hash differently in another process.
        return MeshTopoInfo, (self.layout, self.machine)

    def __repr__(self) -> str:
        """An expression that makes this topology; a preset is shown by its name."""
        if isinstance(self.layout, AxisLevels):
            links = tuple(axis[0] if len(axis) == 1 else axis for axis in self._links(self.layout))
            return f"MeshTopoInfo.by_hand({links!r}, base_latency_us={self.machine.ways[0].base_us!r})"
        known = PRESETS.get(self.machine.name) == self.machine
        return f"MeshTopoInfo({self.layout!r}, {(self.machine.name if known else self.machine)!r})"


# The classes that a topology is made of: torch.load may read them from a file with a saved mesh.
PARTS = (AxisLevels, Compute, HostGrid, Link, Machine, Measured, MeshTopoInfo, Way)


def _places_in_turn(ranks: Sequence[int], per_host: int | None, nics_per_host: int | None) -> tuple[Place, ...]:
    """Rank r on host r // per_host, as launchers number them; None means all on one host."""
    if per_host is None:
        return tuple((0, OWN) for _ in ranks)
    return tuple((rank // per_host, card(rank % per_host, per_host, nics_per_host)) for rank in ranks)


def _places_on(hosts: Sequence[int], ranks: Sequence[int], nics_per_host: int | None) -> tuple[Place, ...]:
    if max(ranks) >= len(hosts):
        raise ValueError(
            f"hosts has {len(hosts)} entries and the mesh has rank {max(ranks)}; give the host of every rank of the job"
        )
    on_host: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        on_host.setdefault(host, []).append(rank)
    return tuple(
        (host, card(on_host[host].index(rank), len(on_host[host]), nics_per_host))
        for rank, host in ((rank, hosts[rank]) for rank in ranks)
    )


def _ranks_per_host(given: int | None, machine: Machine) -> int | None:
    """The given number, else that of the machine's file, else the launcher's, else None: one host."""
    if given is None and machine.ranks_per_host is not None:
        return machine.ranks_per_host
    said = given if given is not None else os.environ.get("LOCAL_WORLD_SIZE") or None
    if said is None:
        return None
    try:
        count = int(said)
    except ValueError:
        count = 0
    if count < 1:
        source = "ranks_per_host" if given is not None else "$LOCAL_WORLD_SIZE"
        raise ValueError(f"{source} is {said!r}; it must be an integer of at least 1")
    if given is None:
        _check_hosts_are_alike(count)
    return count


def _check_hosts_are_alike(per_host: int) -> None:
    """Raise where hosts have unequal numbers of ranks: each host would plan as if all were like itself."""
    world, hosts = os.environ.get("WORLD_SIZE", ""), os.environ.get("GROUP_WORLD_SIZE", "")
    if world.isdecimal() and hosts.isdecimal() and int(world) != int(hosts) * per_host:
        raise ValueError(
            f"the launcher started {world} ranks on {hosts} hosts, {per_host} of them here: from that no rank can tell "
            "where the others are. Say it, as in topology=MeshTopoInfo(HostGrid((6,), '0*4 1*2')) for 4 ranks and 2."
        )
