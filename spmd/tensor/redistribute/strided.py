"""Sums that are scattered into strided blocks: the only blocks in a plan that are no boxes.

If the target shards a dim by several axes, and the outermost of them shards another dim at the source, a sum cannot be
scattered into blocks of the target at once: that axis would have to shard the dim first. So its place is left open.
The dim is split into several, one for each axis that shards it at the target. In these dims a strided block is a box.

    f32[8, 8@z] +sum@x -> f32[8@z,x, 8]                      2 ranks along x, 4 along z
      view(4, 2, 8)                f32[4, 2, 8@z] +sum@x
      reduce_scatter(x, 1)         f32[4, 2@x, 8@z]          every other row
      all_to_all(z, 2, 0)          f32[4@z, 2@x, 8]
      view(8, 8)                   f32[8@z,x, 8]

Such a plan has two moves that send: one scatters all that is pending, and one exchange moves the rest. Pending axes
that the target does not have, or whose place is not free yet, go innermost into one dim, alone or with all other free
axes. Left out: dims that the axes of the target do not divide, because their blocks do not nest.
"""

# ruff: noqa: B905 - the zipped sequences have one entry for each dim

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, takewhile
from math import inf, prod
from typing import NamedTuple

from spmd.comm.chunk import Unit
from spmd.mesh import MeshTopoInfo
from spmd.tensor.redistribute.moves import Move, View
from spmd.tensor.redistribute.states import Cut, Edge, Space, State
from spmd.tensor.spec import Spec

Link = tuple[Move, Spec, Spec]  # a move with the specs before and after it
Cuts = tuple[list[int], list[Cut], list[Cut], list[Cut]]


def through_strides(
    src: Spec, dst: Spec, topology: MeshTopoInfo, best: list[Edge] | None, max_bytes: float
) -> list[Link]:
    """The best plan through a strided block, if it is better than the plan `best`; else an empty list.

    max_bytes: memory that a rank may use.
    """
    least = (inf, inf) if best is None else (sum([edge.ps for edge in best]), sum([edge.sent for edge in best]))
    found: list[Link] = []
    for start, between, goal in split_specs(src, dst):
        space = Space(start, goal, topology)
        if any([axes and d not in space.live_dims for d, axes in enumerate(between.dims)]):
            continue
        strided = State(*[tuple([of[d] for d in space.live_dims]) for of in (between.dims, between.units)], ())
        (scatter,) = space.edges(space.start, strided)
        if scatter.ps > least[0]:
            continue
        exchange = min(space.edges(strided, space.goal), key=lambda edge: (edge.ps, edge.sent, edge.peak))
        cost = scatter.ps + exchange.ps, scatter.sent + exchange.sent
        if cost < least and max(scatter.peak, exchange.peak) <= max_bytes:
            sends = (scatter.move(scatter.axes), start, between), (exchange.move(exchange.axes), between, goal)
            least, found = cost, [(View(()), src, start), *sends, (View(()), goal, dst)]
    return found


def split_specs(src: Spec, dst: Spec) -> Iterator[tuple[Spec, Spec, Spec]]:
    """The source, a strided block and the target, with dims split."""
    ns = src.mesh.shape
    kept = [p for p in src.partial if p in dst.partial]
    if len(kept) == len(src.partial) or len(kept) < len(dst.partial):
        return  # nothing is reduced, or axes become Partial
    held = {a for axes in src.dims for a in axes} | {a for a, _ in kept}
    free = {a for a, n in enumerate(ns) if n > 1} - held
    dims = [_Dim(*each) for each in zip(src.shape, src.dims, dst.dims, src.units, dst.units)]
    splits = [dim.has_gap(free) and dim.divides(ns) for dim in dims]
    if not any(splits):
        return
    cut = [dim.split(free, ns) if each else dim.unsplit(free) for dim, each in zip(dims, splits)]
    shape, start, between, goal = [list(chain(*column)) for column in zip(*cut)]
    ends = _spec(src, shape, start, src.partial), _spec(src, shape, goal, kept)
    left = free - {a for axes, _ in between for a in axes}
    owed = left & {a for a, _ in src.partial}
    for rest in dict.fromkeys([tuple(sorted(left)), tuple(sorted(owed))]):
        for d, n in enumerate(shape) if rest else [(0, 0)]:
            axes, unit = between[d][0] + rest, between[d][1]
            if n % prod([ns[a] for a in axes]) == 0:
                yield ends[0], _spec(src, shape, [*between[:d], (axes, unit), *between[d + 1 :]], kept), ends[1]


def _spec(like: Spec, shape: list[int], cuts: list[Cut], partial: Sequence[tuple[int, str]]) -> Spec:
    dims, units = zip(*cuts) if cuts else ((), ())
    return Spec.of(like.mesh, shape, like.dtype, dims=dims, units=units, partial=partial)


class _Dim(NamedTuple):
    """One dim, with the axes and units that shard it at the source and at the target."""

    size: int
    have: tuple[int, ...]
    want: tuple[int, ...]
    unit: Unit
    unit_wanted: Unit

    def divides(self, ns: tuple[int, ...]) -> bool:
        """Whether all blocks of the target have one size."""
        return self.unit == self.unit_wanted == 1 and self.size % prod([ns[a] for a in self.want]) == 0 < self.size

    def grows(self) -> bool:
        """Whether the target only adds axes inside those of the source."""
        return self.want[: len(self.have)] == self.have and (not self.have or self.unit == self.unit_wanted)

    def outer(self, free: set[int]) -> tuple[int, ...]:
        """The outer axes of the target that can shard the dim at once, with no place left open."""
        return tuple(takewhile(lambda a: a in free or a in self.have, self.want)) if self.grows() else self.have

    def has_gap(self, free: set[int]) -> bool:
        """Whether more axes can shard the dim if some places are left open."""
        return self.grows() and bool(free.intersection(self.want[len(self.outer(free)) :]))

    def unsplit(self, free: set[int]) -> Cuts:
        """The dim as it is: its size, and the axes that shard it at the source, between, and at the target."""
        between = self.outer(free), self.unit_wanted if self.grows() else self.unit
        return [self.size], [(self.have, self.unit)], [between], [(self.want, self.unit_wanted)]

    def split(self, free: set[int], ns: tuple[int, ...]) -> Cuts:
        """The dim split into one dim for each axis of the target; the same as `unsplit` for each of these."""
        sizes = [ns[a] for a in self.want[:-1]]
        some = self.have, {*self.have, *free}, self.want
        cuts = [[((a,) if a in each else (), 1) for a in self.want] for each in some]
        return [*sizes, self.size // prod(sizes)], *cuts
