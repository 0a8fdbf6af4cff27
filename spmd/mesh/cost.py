"""What a collective along one mesh axis costs, in microseconds: the ring model.

    cost = base latency + hops * alpha + bytes on the wire * beta

With n ranks an all-gather, a reduce-scatter or an all-to-all takes n-1 hops and moves bytes * (n-1)/n; an
all-reduce is a reduce-scatter and an all-gather, twice both. An axis of one rank costs nothing. Costs grow with the
bytes and never jump, so a plan that moves less is never priced higher.

    >>> from spmd.mesh import MeshTopoInfo
    >>> topo = MeshTopoInfo.textbook((4,), intra_host=(True,))
    >>> round(all_gather_cost(1_000_000, 0, topo), 2)   # 6.6 + 3 * 0.6 + 750 kB / 87.7 GB/s
    16.95
"""

from __future__ import annotations

from spmd.mesh.topology import MeshTopoInfo


def all_gather_cost(nbytes: float, axis: int, topo: MeshTopoInfo) -> float:
    """`nbytes`: bytes of the *gathered* result on one rank."""
    n = topo.link(axis).size
    return _ring(axis, topo, n - 1, nbytes * (n - 1) / n)


def reduce_scatter_cost(nbytes: float, axis: int, topo: MeshTopoInfo) -> float:
    """`nbytes`: bytes of the input on one rank."""
    n = topo.link(axis).size
    return _ring(axis, topo, n - 1, nbytes * (n - 1) / n)


def all_reduce_cost(nbytes: float, axis: int, topo: MeshTopoInfo) -> float:
    """`nbytes`: bytes of the tensor on one rank."""
    n = topo.link(axis).size
    return _ring(axis, topo, 2 * (n - 1), 2 * nbytes * (n - 1) / n)


def all_to_all_cost(nbytes: float, axis: int, topo: MeshTopoInfo) -> float:
    """`nbytes`: bytes of the local input: a rank keeps one n-th of it, which is why it is cheaper than a gather."""
    n = topo.link(axis).size
    return _ring(axis, topo, n - 1, nbytes * (n - 1) / n)


def broadcast_cost(nbytes: float, axis: int, topo: MeshTopoInfo) -> float:
    """`nbytes`: bytes of the tensor, passed on along the ring in small pieces, so each link carries all of it."""
    return _ring(axis, topo, topo.link(axis).size - 1, nbytes)


def _ring(axis: int, topo: MeshTopoInfo, hops: int, wire_bytes: float) -> float:
    if wire_bytes < 0:
        raise ValueError(f"a collective cannot move {wire_bytes} bytes; nbytes must be at least 0")
    link = topo.link(axis)
    return 0.0 if link.size == 1 else topo.base_latency_us + hops * link.hop_us + wire_bytes * link.us_per_byte
