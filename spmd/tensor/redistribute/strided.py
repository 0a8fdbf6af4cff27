"""Sums that are scattered into strided blocks: all that a plan has to do with blocks that are no boxes.

Where the target shards a dim by several axes, and an outer one is held elsewhere, a sum cannot be scattered into blocks
of the target at once: that axis would have to cut the dim first. So its place is left open: the dim is seen as several,
one for each axis that the target shards it by, and in these a strided block is a box like any other.

    f32[8, 8@z] +sum@x -> f32[8@z,x, 8]                      2 ranks along x, 4 along z
      view(4, 2, 8)                f32[4, 2, 8@z] +sum@x
      reduce_scatter(x, 1)         f32[4, 2@x, 8@z]          every other row
      all_to_all(z, 2, 0)          f32[4@z, 2@x, 8]
      view(8, 8)                   f32[8@z,x, 8]

Such a plan has two moves that send: all that is pending is scattered, and one exchange brings the rest. Pending axes
that the target has not, or that have no place yet, go innermost into one dim, alone or with all others that are free.
Left out: dims that the axes of the target do not divide, for their blocks do not fit into one another.
"""

# ruff: noqa: B905 - what is zipped has one entry a dim

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, takewhile
from math import inf, prod
from typing import NamedTuple

from spmd.mesh import MeshTopoInfo
from spmd.tensor.redistribute.moves import Move, View
from spmd.tensor.redistribute.states import Space, State, Way
from spmd.tensor.spec import Spec

Link = tuple[Move, Spec, Spec]  # a move, and the specs before and after it
Cuts = tuple[list[int], list[tuple[int, ...]], list[tuple[int, ...]], list[tuple[int, ...]]]


def through_strides(src: Spec, dst: Spec, topology: MeshTopoInfo, than: list[Way] | None, most: float) -> list[Link]:
    """The best plan through a strided block, if it is better than these ways; else none.

    most: bytes of memory that a rank may use.
    """
    least = (inf, inf) if than is None else (sum([way.ps for way in than]), sum([way.sent for way in than]))
    found: list[Link] = []
    for start, between, goal in taken_apart(src, dst):
        space = Space(start, goal, topology)
        if any([axes and d not in space.which for d, axes in enumerate(between.dims)]):
            continue
        strided = State(*[tuple([of[d] for d in space.which]) for of in (between.dims, between.units)], ())
        (scatter,) = space.ways(space.start, strided)
        if scatter.ps > least[0]:
            continue
        bring = min(space.ways(strided, space.goal), key=lambda way: (way.ps, way.sent, way.peak))
        cost = scatter.ps + bring.ps, scatter.sent + bring.sent
        if cost < least and max(scatter.peak, bring.peak) <= most:
            sends = (scatter.move(scatter.axes), start, between), (bring.move(bring.axes), between, goal)
            least, found = cost, [(View(()), src, start), *sends, (View(()), goal, dst)]
    return found


def taken_apart(src: Spec, dst: Spec) -> Iterator[tuple[Spec, Spec, Spec]]:
    """The source, a strided block, and the target, as tensors of more dims."""
    ns = src.mesh.shape
    kept = [p for p in src.partial if p in dst.partial]
    if len(kept) == len(src.partial) or len(kept) < len(dst.partial):
        return  # nothing is reduced, or the target is to be made Partial
    held = {a for axes in src.dims for a in axes} | {a for a, _ in kept}
    free = {a for a, n in enumerate(ns) if n > 1} - held
    dims = [_Dim(*each) for each in zip(src.shape, src.dims, dst.dims, src.units, dst.units)]
    apart = [dim.has_gap(free) and dim.divides(ns) for dim in dims]
    if not any(apart):
        return
    cut = [dim.taken_apart(free, ns) if each else dim.whole(free) for dim, each in zip(dims, apart)]
    shape, start, between, goal = [list(chain(*column)) for column in zip(*cut)]
    ends = _spec(src, shape, start, src.partial), _spec(src, shape, goal, kept)
    left = free - {*chain(*between)}
    owed = left & {a for a, _ in src.partial}
    for rest in dict.fromkeys([tuple(sorted(left)), tuple(sorted(owed))]):
        for d, n in enumerate(shape) if rest else [(0, 0)]:
            axes = between[d] + rest
            if n % prod([ns[a] for a in axes]) == 0:
                yield ends[0], _spec(src, shape, [*between[:d], axes, *between[d + 1 :]], kept), ends[1]


def _spec(like: Spec, shape: list[int], dims: list[tuple[int, ...]], partial: Sequence[tuple[int, str]]) -> Spec:
    return Spec.of(like.mesh, shape, like.dtype, dims=dims, partial=partial)


class _Dim(NamedTuple):
    """One dim: which axes shard it at the source, and at the target."""

    size: int
    have: tuple[int, ...]
    want: tuple[int, ...]
    unit: int
    unit_wanted: int

    def divides(self, ns: tuple[int, ...]) -> bool:
        """Whether all blocks of the target are alike."""
        return self.unit == self.unit_wanted == 1 and self.size % prod([ns[a] for a in self.want]) == 0 < self.size

    def grows(self) -> bool:
        """Whether the target only has axes inside those of the source."""
        return self.want[: len(self.have)] == self.have

    def outer(self, free: set[int]) -> tuple[int, ...]:
        """The axes of the target that can be in place at once, with none left open outside of them."""
        return tuple(takewhile(lambda a: a in free or a in self.have, self.want)) if self.grows() else self.have

    def has_gap(self, free: set[int]) -> bool:
        """Whether more can be in place if some are left open."""
        return self.grows() and bool(free.intersection(self.want[len(self.outer(free)) :]))

    def whole(self, free: set[int]) -> Cuts:
        """The dim as it is: its sizes, and the axes that shard them at the source, between, and at the target."""
        return [self.size], [self.have], [self.outer(free)], [self.want]

    def taken_apart(self, free: set[int], ns: tuple[int, ...]) -> Cuts:
        """As one dim for each axis of the target."""
        sizes = [ns[a] for a in self.want[:-1]]
        have, between = [[(a,) if a in some else () for a in self.want] for some in (self.have, {*self.have, *free})]
        return [*sizes, self.size // prod(sizes)], have, between, [(a,) for a in self.want]
