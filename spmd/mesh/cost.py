"""The cost of a collective along some mesh axes, in microseconds.

A way (`machine.py`) over a group's ladder (`layout.py`) takes

    base latency + sum over levels of (hops * alpha + share of the bytes * beta)

and the fastest way runs. Where groups differ, the slowest group counts. Measured times replace all this. The hops and
shares are in `algorithms.py`. Over several levels a collective works level by level: an all-gather over g ranks on each
of h hosts first gathers a g-th of the bytes between hosts and then all of them inside, so the slow links carry (h-1)/h
of a g-th. Ranks that share a network card wait for each other: bytes between hosts count once for each rank that sends
through the busiest card, in all groups that send at once.

An axis of one rank costs nothing. Costs grow with the bytes and never jump, so a plan that moves less never costs more.
Views of a mesh that have the same groups (a slice, a transposed mesh, axes of one rank) have the same costs.

    >>> from spmd.mesh import HostGrid, MeshTopoInfo
    >>> topo = MeshTopoInfo(HostGrid((2, 4), "0*4 1*4"))
    >>> round(all_gather_cost(1_000_000, 1, topo), 2)        # 6.6 + 3 * 0.6 + 750 kB / 87.7 GB/s
    16.95
    >>> round(all_gather_cost(1_000_000, (0, 1), topo), 2)   # + one hop of 2.7, and 125 kB / 19.294 GB/s
    26.13

These are the costs of a collective alone. `copy_cost` is the cost of putting its pieces in order before or after it, as
a gather on a dim other than the first does; a move (`tensor/redistribute/moves.py`) costs both. Left out: collectives
on other axes that use the links at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from spmd.mesh.algorithms import STEPS, Line, line
from spmd.mesh.layout import Ladder, group_shape
from spmd.mesh.machine import COPY, Machine, Way
from spmd.mesh.topology import Axes, MeshTopoInfo

Price = tuple[tuple[Line, ...], ...]  # the maximum over kinds of groups of the minimum over their lines


def all_gather_cost(nbytes: float, axes: Axes, topo: MeshTopoInfo) -> float:
    """`nbytes`: bytes of the *gathered* result on one rank. `axes`: one axis of the mesh, or several as one group."""
    return _cost("all_gather", nbytes, axes, topo)


def reduce_scatter_cost(nbytes: float, axes: Axes, topo: MeshTopoInfo) -> float:
    """`nbytes`: bytes of the input on one rank."""
    return _cost("reduce_scatter", nbytes, axes, topo)


def all_reduce_cost(nbytes: float, axes: Axes, topo: MeshTopoInfo) -> float:
    """`nbytes`: bytes of the tensor on one rank."""
    return _cost("all_reduce", nbytes, axes, topo)


def all_to_all_cost(nbytes: float, axes: Axes, topo: MeshTopoInfo) -> float:
    """`nbytes`: bytes of the local input. A rank keeps one n-th of it, so it is cheaper than a gather."""
    return _cost("all_to_all", nbytes, axes, topo)


def broadcast_cost(nbytes: float, axes: Axes, topo: MeshTopoInfo) -> float:
    """`nbytes`: bytes of the tensor. It passes along the ring in small pieces, so each link carries all of it."""
    return _cost("broadcast", nbytes, axes, topo)


def scatter_cost(nbytes: float, axes: Axes, topo: MeshTopoInfo) -> float:
    """`nbytes`: bytes of the global tensor on the rank that scatters it; this rank keeps one n-th."""
    return _cost("scatter", nbytes, axes, topo)


def permute_cost(nbytes: float, axes: Axes, topo: MeshTopoInfo) -> float:
    """`nbytes`: bytes that each rank sends to one other, at worst over the outermost links. Also for a send."""
    return _cost("permute", nbytes, axes, topo)


def exchange_cost(nbytes: Sequence[float], axes: Axes, topo: MeshTopoInfo) -> float:
    """An all-to-all of unequal pieces. `nbytes`: for each rank the bytes that it sends to others, or the bytes that it
    receives where these are more. The slowest rank counts, with its bytes spread over the others.

        >>> from spmd.mesh import HostGrid
        >>> topo = MeshTopoInfo(HostGrid((4,)))
        >>> exchange_cost([0, 750, 10, 750], 0, topo) == all_to_all_cost(1000, 0, topo)
        True
    """
    n = prod(topo.sizes[axis] for axis in topo.axes(axes))
    if len(nbytes) != n:
        raise ValueError(f"{len(nbytes)} numbers of bytes for a group of {n} ranks; give one for each")
    _check_bytes(min(nbytes))
    return _cost("all_to_all", max(nbytes) * n / (n - 1), axes, topo) if n > 1 else 0.0


def copy_cost(nbytes: float, topo: MeshTopoInfo) -> float:
    """`nbytes`: bytes of the result of a local copy: a cat, a transposition, a pad, or a reordering of pieces. Copies
    are free on a machine without `memory`, such as the textbook.

    >>> from spmd.mesh import HostGrid
    >>> round(copy_cost(1_000_000, MeshTopoInfo(HostGrid((4,)), "hopper")), 2)     # 2 + 1 MB / 1423.8 GB/s
    2.7
    """
    lines = topo._prices.get((COPY, ()))
    if lines is None:
        lines = topo._prices[COPY, ()] = _copies(topo.machine)
    _check_bytes(nbytes)
    return max([us + nbytes * us_per_byte for us, us_per_byte in lines], default=0.0)


def copies_are_priced(topo: MeshTopoInfo) -> bool:
    """Whether copies cost anything."""
    return bool(_copies(topo.machine))


def residual(collective: str, axes: Axes, topo: MeshTopoInfo) -> float:
    """The usual relative error of the cost of a collective, where it was measured; else 0, for nothing is known.

    >>> from spmd.mesh import HostGrid
    >>> residual("all_gather", 0, MeshTopoInfo(HostGrid((4,)), "hopper"))
    0.0
    """
    curves = [curve for curve in topo.machine.measured if curve.residual]
    if not curves:
        return 0.0
    groups = {(collective, *(group_shape(ladder) or ())) for ladder in topo.crossings(axes) if ladder}
    return max([curve.residual for curve in curves if curve.group in groups], default=0.0)


def ways_cost(collective: str, nbytes: float, axes: Axes, topo: MeshTopoInfo) -> dict[str, float]:
    """The modelled microseconds of every way that can run a collective, to see which is the fastest.

    >>> from spmd.mesh import HostGrid
    >>> ways_cost("permute", 1000, 0, MeshTopoInfo(HostGrid((2,)), "textbook"))
    {'ring': 7.211402508551881}
    """
    ladders = [ladder for ladder in topo.crossings(axes) if ladder]
    lines = {w.name: [line(collective, w, ladder) for ladder in ladders] for w in _ways(collective, topo.machine)}
    return {name: max((us + nbytes * per_byte for us, per_byte in each), default=0.0) for name, each in lines.items()}


def link_shares(axes: Axes, topo: MeshTopoInfo) -> tuple[tuple[int, float], ...]:
    """For each level of links that groups along the axes cross: the level, and its share of the time of their bytes.

    The shares are those of a ring on the machine's first ring; level 0 is inside a host.

    >>> from spmd.mesh import HostGrid
    >>> topo = MeshTopoInfo(HostGrid((2, 4), "0*4 1*4"))
    >>> [(level, round(share, 3)) for level, share in link_shares((0, 1), topo)]
    [(0, 0.569), (1, 0.431)]
    """
    key = "link shares", axes
    if key not in topo._prices:
        topo._prices[key] = _link_shares(axes, topo)
    return topo._prices[key]


def _link_shares(axes: Axes, topo: MeshTopoInfo) -> tuple[tuple[int, float], ...]:
    ring = next(way for way in topo.machine.ways if way.algorithm == "ring")
    per_byte: dict[int, float] = {}
    for ladder in topo.crossings(axes):
        for rung in ladder:
            us = STEPS["all_gather", "ring"](rung, ladder)[1] * ring.links[rung.level].us_per_byte
            per_byte[rung.level] = max(us, per_byte.get(rung.level, 0.0))
    total = sum(per_byte.values())
    return tuple((level, us / total) for level, us in sorted(per_byte.items()))


def _cost(collective: str, nbytes: float, axes: Axes, topo: MeshTopoInfo) -> float:
    price = topo._prices.get((collective, axes))
    if price is None:
        price = topo._prices[collective, axes] = _price(collective, axes, topo)
    if not nbytes >= 0:
        _check_bytes(nbytes)
    if len(price) == 1 and len(price[0]) == 1:
        us, us_per_byte = price[0][0]
        return us + nbytes * us_per_byte
    return max([min([us + nbytes * us_per_byte for us, us_per_byte in lines]) for lines in price], default=0.0)


def _check_bytes(nbytes: float) -> None:
    if not nbytes >= 0:
        raise ValueError(f"a collective cannot move {nbytes} bytes; nbytes must be at least 0")


def _price(collective: str, axes: Axes, topo: MeshTopoInfo) -> Price:
    found = [lines for ladder in topo.crossings(axes) if ladder for lines in _lines(collective, ladder, topo.machine)]
    return tuple(dict.fromkeys(found))


def _lines(collective: str, ladder: Ladder, machine: Machine) -> list[tuple[Line, ...]]:
    """For one kind of group: each line of the measured curve by itself, or else the lines of all ways together."""
    group = (collective, *(group_shape(ladder) or ()))
    for curve in machine.measured:
        if curve.group == group:
            return [(each,) for each in curve.lines]
    return [_undominated([line(collective, way, ladder) for way in _ways(collective, machine)])]


def _copies(machine: Machine) -> tuple[Line, ...]:
    """The lines of the measured curve, whose maximum counts, or else the line of the memory, where it is known."""
    found = [curve.lines for curve in machine.measured if curve.collective == COPY]
    if found or machine.memory is None:
        return found[0] if found else ()
    return ((machine.memory.hop_us, machine.memory.us_per_byte),)


def _ways(collective: str, machine: Machine) -> list[Way]:
    return [way for way in machine.ways if (collective, way.algorithm) in STEPS]


def _undominated(lines: Sequence[Line]) -> tuple[Line, ...]:
    """The lines that may be the least at some number of bytes."""
    kept: list[Line] = []
    for us, us_per_byte in sorted(lines):
        if not kept or us_per_byte < kept[-1][1]:
            kept.append((us, us_per_byte))
    return tuple(kept)
