"""What the cost model knows about a mesh: for each axis, how long a hop takes and how wide the link is.

The textbook preset has two kinds of link, inside a host and between hosts. Which kind an axis crosses is read off
the ranks, never guessed from sizes: an axis is intra-host only if *every* group along it lies on one host.

    >>> from spmd.mesh import init_device_mesh
    >>> mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    >>> topo = MeshTopoInfo.from_mesh(mesh, ranks_per_host=4)
    >>> [link.gb_per_s for link in topo.links]
    [19.294, 87.7]

Left out: calibration, NICs shared by the ranks of a host, and any algorithm but the ring.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spmd.mesh.device_mesh import DeviceMesh

BASE_LATENCY_US = 6.6
INTRA_GB_PER_S, INTRA_HOP_US = 87.7, 0.6
INTER_SHARE, INTER_HOP_US = 0.22, 2.7


@dataclass(frozen=True)
class AxisLink:
    """The links that one mesh axis crosses.

    `size`: devices along the axis. `hop_us`: latency alpha of one hop, in microseconds. `gb_per_s`: bandwidth of one
    device's link, in 1e9 bytes a second.

        >>> AxisLink(size=4, hop_us=0.6, gb_per_s=50.0).us_per_byte
        2e-05
    """

    size: int
    hop_us: float
    gb_per_s: float

    def __post_init__(self) -> None:
        if self.size < 1 or self.hop_us < 0 or self.gb_per_s <= 0:
            raise ValueError(f"{self}: size must be at least 1, hop_us at least 0 and gb_per_s more than 0")

    @property
    def us_per_byte(self) -> float:
        """beta: microseconds that one byte takes."""
        return 1e-3 / self.gb_per_s


@dataclass(frozen=True)
class MeshTopoInfo:
    """The links of a mesh, one entry an axis, and the latency that every collective pays once.

    Build it from a mesh, from sizes, or by hand:

        >>> MeshTopoInfo.textbook((8,), intra_host=(True,)).links[0].hop_us
        0.6
        >>> MeshTopoInfo((AxisLink(8, hop_us=1.0, gb_per_s=400.0),)).base_latency_us
        6.6
    """

    links: tuple[AxisLink, ...]
    base_latency_us: float = BASE_LATENCY_US

    def __post_init__(self) -> None:
        object.__setattr__(self, "links", tuple(self.links))  # a list from the user must not break the hash
        if self.base_latency_us < 0:
            raise ValueError(f"base_latency_us is {self.base_latency_us}; it must be at least 0")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Devices along each axis: the shape of the mesh."""
        return tuple(link.size for link in self.links)

    def link(self, axis: int) -> AxisLink:
        """The links of one axis; negative axes count from the end."""
        if not -len(self.links) <= axis < len(self.links):
            raise IndexError(f"axis {axis} is not in a topology of {len(self.links)} axes; use mesh.axis(name)")
        return self.links[axis]

    def take(self, axes: Sequence[int]) -> MeshTopoInfo:
        """The topology of a mesh sliced to `axes`, in that order: the links stay what they were."""
        return MeshTopoInfo(tuple(self.link(axis) for axis in axes), self.base_latency_us)

    @classmethod
    def textbook(cls, sizes: Sequence[int], intra_host: Sequence[bool]) -> MeshTopoInfo:
        """The textbook preset for axes of these sizes, each inside a host or not."""
        if len(sizes) != len(intra_host):
            raise ValueError(f"{len(sizes)} sizes but {len(intra_host)} entries of intra_host; give one an axis")
        return cls(tuple(_textbook_link(n, inside) for n, inside in zip(sizes, intra_host, strict=True)))

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh, ranks_per_host: int | None = None) -> MeshTopoInfo:
        """The textbook preset for a mesh, with rank r on host r // ranks_per_host.

        `ranks_per_host` None means $LOCAL_WORLD_SIZE, which torchrun sets; where that is unset all ranks share a
        host. A slice keeps what its parent knows: use `mesh.topology` for it.
        """
        per_host = _ranks_per_host(ranks_per_host)
        inside = [all(_on_one_host(ranks, per_host) for ranks in mesh.groups_along(axis)) for axis in range(mesh.ndim)]
        return cls.textbook(mesh.shape, inside)


def _textbook_link(size: int, intra_host: bool) -> AxisLink:
    if intra_host:
        return AxisLink(size, INTRA_HOP_US, INTRA_GB_PER_S)
    return AxisLink(size, INTER_HOP_US, round(INTRA_GB_PER_S * INTER_SHARE, 6))


def _on_one_host(ranks: Sequence[int], per_host: int | None) -> bool:
    return per_host is None or len({rank // per_host for rank in ranks}) == 1


def _ranks_per_host(given: int | None) -> int | None:
    """The explicit number, else the launcher's, else None: one host."""
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
    return count
