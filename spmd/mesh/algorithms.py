"""The hops, and the share of the bytes, that an algorithm takes on each level of links that a group crosses.

On one level of n ranks:

                     ring                     doubling                     tree                  direct
    all_gather       n-1 hops, (n-1)/n        ceil(log2 n) hops, (n-1)/n
    reduce_scatter   the same                 the same
    all_reduce       2(n-1), 2(n-1)/n         2 ceil(log2 n), 2(n-1)/n     2 ceil(log2 n), 2
    all_to_all       n-1, (n-1)/n             ceil(log2 n), ceil(log2 n)/2                       n-1, (n-1)/n
    broadcast        n-1, 1                   ceil(log2 n), ceil(log2 n)
    scatter          n-1, (n-1)/n                                                                as the ring
    permute          1, 1                                                                        as the ring

(Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations in MPICH"; a tree is NCCL's:
a chain inside a host, and pieces that go up and down at once.) Over several levels a collective works level by level,
and each rank then moves its part only: one of `rung.below`. Ranks with one network card wait for each other: their
bytes count `rung.senders` times.

    >>> from spmd.mesh.machine import Link
    >>> way = Way("ring", base_us=6.0, links=(Link(hop_us=0.5, gb_per_s=100.0),))
    >>> line("broadcast", way, (Rung(level=0, size=4, below=1, upto=4),))      # 6.0 + 3 * 0.5, and 1e-3 / 100
    (7.5, 1e-05)
"""

from __future__ import annotations

from collections.abc import Callable

from spmd.mesh.layout import Ladder, Rung
from spmd.mesh.machine import Way

Line = tuple[float, float]  # microseconds, microseconds for each byte
Step = Callable[[Rung, Ladder], tuple[float, float]]  # (hops, share of the bytes) of one level


def line(collective: str, way: Way, ladder: Ladder) -> Line:
    """The microseconds, and the microseconds for each byte, of a way on all levels of a ladder."""
    step = STEPS[collective, way.algorithm]
    us, us_per_byte = way.base_us, 0.0
    for rung in ladder:
        hops, share = step(rung, ladder)
        us += hops * way.links[rung.level].hop_us
        us_per_byte += share * way.links[rung.level].us_per_byte
    return us, us_per_byte


def _doublings(size: int) -> int:
    return (size - 1).bit_length()  # ceil(log2(size))


def _part(rung: Rung) -> float:
    """The share of the bytes that one rank moves at this level: a ring over the parts below."""
    return (rung.size - 1) / rung.size / rung.below * rung.senders


def _ring(rung: Rung, ladder: Ladder) -> tuple[float, float]:
    return rung.size - 1, _part(rung)


def _doubling(rung: Rung, ladder: Ladder) -> tuple[float, float]:
    return _doublings(rung.size), _part(rung)


def _twice(step: Step) -> Step:
    def both(rung: Rung, ladder: Ladder) -> tuple[float, float]:
        hops, share = step(rung, ladder)
        return 2 * hops, 2 * share

    return both


def _tree(rung: Rung, ladder: Ladder) -> tuple[float, float]:
    """Up and down a tree between hosts, in pieces; inside a host the tree is a chain."""
    hops = rung.size - 1 if rung.level == 0 else _doublings(rung.size)
    return 2 * hops, 2 / rung.below * rung.senders


def _staged(rung: Rung, ladder: Ladder) -> tuple[float, float]:
    """An all-to-all at each level, of all bytes: more bytes inside a host, and fewer, larger pieces between hosts."""
    return rung.size - 1, (rung.size - 1) / rung.size * rung.senders


def _bruck(rung: Rung, ladder: Ladder) -> tuple[float, float]:
    return _doublings(rung.size), _doublings(rung.size) / 2 * rung.senders


def _direct(rung: Rung, ladder: Ladder) -> tuple[float, float]:
    """One piece to each rank outside the own part below this level."""
    peers = rung.upto - rung.below
    return peers, peers / ladder[-1].upto * rung.senders


def _from_one(rung: Rung, ladder: Ladder) -> tuple[float, float]:
    """Like `_direct`, but one rank of each group sends."""
    peers = rung.upto - rung.below
    return peers, peers / ladder[-1].upto * rung.groups


def _chain(rung: Rung, ladder: Ladder) -> tuple[float, float]:
    return rung.size - 1, rung.senders / rung.below


def _binomial(rung: Rung, ladder: Ladder) -> tuple[float, float]:
    return _doublings(rung.size), _doublings(rung.size) * rung.senders / rung.below


def _across(rung: Rung, ladder: Ladder) -> tuple[float, float]:
    """One hop over the outermost links, which the slowest pair uses."""
    return (1, rung.senders) if rung is ladder[-1] else (0, 0.0)


STEPS: dict[tuple[str, str], Step] = {
    ("all_gather", "ring"): _ring,
    ("all_gather", "doubling"): _doubling,
    ("reduce_scatter", "ring"): _ring,
    ("reduce_scatter", "doubling"): _doubling,
    ("all_reduce", "ring"): _twice(_ring),
    ("all_reduce", "doubling"): _twice(_doubling),
    ("all_reduce", "tree"): _tree,
    ("all_to_all", "ring"): _staged,
    ("all_to_all", "doubling"): _bruck,
    ("all_to_all", "direct"): _direct,
    ("broadcast", "ring"): _chain,
    ("broadcast", "doubling"): _binomial,
    ("scatter", "ring"): _from_one,
    ("scatter", "direct"): _from_one,
    ("permute", "ring"): _across,
    ("permute", "direct"): _across,
}
