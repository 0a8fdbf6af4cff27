"""What it costs to come from each of many specs of a tensor to each other, all at once.

    distances([f32[8@tp, 8], f32[8, 8@tp], f32[8, 8]])    ->  microseconds, [from, to]

A choice for a whole program asks for thousands of costs of a few tensors. `plan` would search once for each of them;
here the times of all moves of a tensor are computed once, and the cheapest ways between all specs follow together, by
the same graph of states (`search.py`). Left out is what `plan` adds beyond that graph: strided detours, and fewer moves
where a calibration cannot tell plans apart. Both are small; a plan that is written is priced as itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from spmd.comm.chunk import split_unit
from spmd.mesh.cost import copies_are_priced, copy_cost
from spmd.tensor.redistribute.collective_moves import AllReduce
from spmd.tensor.redistribute.copy_cost import copies_of
from spmd.tensor.redistribute.graph import graph_of
from spmd.tensor.redistribute.search import NEVER, Search, subsets
from spmd.tensor.redistribute.states import Cutting, Space, State
from spmd.tensor.spec import Spec


def distances(specs: Sequence[Spec]) -> np.ndarray:
    """Microseconds of the cheapest way from each spec of one tensor to each other: an array [from, to].

    >>> from spmd.mesh import DeviceMesh
    >>> from spmd.tensor.spec import parse_spec
    >>> mesh = DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("tp",))
    >>> distances([parse_spec("f32[8@tp, 8]", mesh), parse_spec("f32[8, 8]", mesh)]).round(1)
    array([[0. , 8.4],
           [0. , 0. ]])
    """
    found = np.zeros((len(specs), len(specs)))
    if not any(n > 1 for n in specs[0].mesh.shape):
        return found
    space = _WholeSpace(specs)
    owed = np.array([space.bits([a for a, _ in spec.partial]) for spec in specs])
    states = np.array([space.state_number(spec) for spec in specs])
    copies = np.array([int(copy_cost(spec.local_nbytes, space.topology) * 1e6) for spec in specs])
    ways = _Ways(space)
    for kept in sorted({a & b for a in owed.tolist() for b in set(owed.tolist())}):
        goals = np.nonzero(owed & kept == kept)[0]
        remaining = ways.remaining(kept, list(zip(states[goals].tolist(), (owed[goals] & ~kept).tolist(), strict=True)))
        becoming = np.where(owed[goals] != kept, copies[goals], 0)  # what copies take in becoming Partial
        for bits in sorted({each for each in owed.tolist() if each & kept == kept}):
            rows, columns = np.nonzero(owed == bits)[0], np.nonzero(owed[goals] & bits == kept)[0]
            times = remaining[bits & ~kept][np.ix_(states[rows], columns)]
            found[np.ix_(rows, goals[columns])] = times + becoming[columns]
    return found / 1e6


class _WholeSpace(Space):
    """All states of a tensor: each axis of the mesh may shard each dim that some spec shards, and one dim more."""

    def __init__(self, specs: Sequence[Spec]) -> None:
        mesh, spec = specs[0].mesh, specs[0]
        self.mesh_shape, self.topology = mesh.shape, mesh.topology
        self.copies_are_priced = copies_are_priced(mesh.topology)
        self.live_dims = _live_dims(specs, rows=self.copies_are_priced)
        self.sizes = tuple([spec.shape[d] for d in self.live_dims])
        self.stays_partial = self.becomes_partial = ()
        axes = tuple([a for a, n in enumerate(mesh.shape) if n > 1])
        units = [tuple(sorted({1, *[s.units[d] for s in specs]}, key=split_unit)) for d in self.live_dims]
        none = ((),) * len(self.sizes)
        self.start = self.goal = State(none, tuple([each[0] for each in units]), ())
        self.cutting = Cutting(self.sizes, none, tuple(units), tuple([(a,) for a in axes]), axes, mesh.shape)
        rest = [n for d, n in enumerate(spec.shape) if d not in self.live_dims]
        self.element_bytes = prod(rest) * spec.dtype.itemsize
        self._ns = tuple([mesh.shape[a] for a in axes])
        self.starts_with_dim_0 = self.live_dims[:1] == [0]
        self._itemsize = spec.dtype.itemsize
        owing = max(specs, key=lambda s: len(s.partial))
        self._wire_itemsize = AllReduce(axes).wire_itemsize(owing) if owing.partial else self._itemsize
        self.graph = graph_of(self).graph

    def bits(self, axes: Sequence[int]) -> int:
        return sum([1 << self.cutting.rank_axes.index(a) for a in axes])

    def state_number(self, spec: Spec) -> int:
        state = self._state(spec, ())
        layouts = self.graph.layouts
        at = [dim.number[self.cutting.layout(d, state)] for d, dim in enumerate(layouts.dims)]
        return int(np.searchsorted(self.graph.chosen, layouts.number[tuple(at)]))


def _live_dims(specs: Sequence[Spec], rows: bool) -> list[int]:
    """The dims that some spec shards, and one more to reduce in or to keep blocks in order."""
    spec = specs[0]
    found = [d for d in range(spec.ndim) if any(s.dims[d] for s in specs)]
    rest = [d for d in range(spec.ndim) if d not in found]
    if rest:
        n = prod(spec.mesh.shape)
        found.append(max(rest, key=lambda d: (spec.shape[d] % n == 0, rows and d == 0, spec.shape[d], -d)))
    return sorted(found)


class _Ways(Search):
    """The remaining times from all states to many goals."""

    def __init__(self, space: _WholeSpace) -> None:
        self.space, self.max_bytes = space, np.inf
        self.graph, self.cell_bytes, *_ = graph_of(space)
        self._named: dict[int, tuple[int, ...]] = {}
        self.copies = copies_of(self.graph, space) if space.copies_are_priced else None
        self.moving = self._moving()
        self._scatter_us: dict[int, np.ndarray] = {}
        self._reduce_us: dict[int, np.ndarray] = {}

    def remaining(self, kept: int, goals: Sequence[tuple[int, int]]) -> dict[int, np.ndarray]:
        """For each set of owed axes, picoseconds from each state to each goal. kept: axes that stay Partial.

        goals: for each its state, and the axes that become Partial at the end.
        """
        graph, ends = self.graph, np.array([state for state, _ in goals])
        made = np.array([bits for _, bits in goals])
        reached = (graph.removed[ends].T == 0) & (graph.removed[:, ends] & ~made == 0)
        free, found = ((1 << len(self.space.cutting.movable)) - 1) & ~kept, {}
        for owed in [bits for bits in subsets(free) if bits & kept == 0]:
            start = self._reduced(owed, found) if owed else np.where(reached, 0, NEVER)
            here = np.nonzero(graph.used & (owed | kept) == 0)[0]
            found[owed] = np.full(start.shape, NEVER)
            found[owed][here] = _closed(self.moving[here[:, None], here], start[here])
        return found

    def _reduced(self, owed: int, found: dict[int, np.ndarray]) -> np.ndarray:
        """The remaining times if the next move reduces some of the owed axes."""
        least = np.full(found[0].shape, NEVER)
        for axes in subsets(owed)[1:]:
            if axes not in self._reduce_us:
                self._reduce_us[axes] = self._all_reduces(axes)
            least = np.minimum(least, self._reduce_us[axes][:, None] + found[owed ^ axes])
        scatters = self.graph.scatters(owed)
        if len(scatters.outer):
            if owed not in self._scatter_us:
                copied = self.copies and self._scattered(owed, scatters)
                self._scatter_us[owed] = self._prices(scatters.moves, scatters.move_index, copied)
            after = np.empty((len(scatters.outer), least.shape[1]), least.dtype)
            for reduced in np.unique(scatters.reduced).tolist():
                some = scatters.reduced == reduced
                after[some] = found[owed ^ reduced][scatters.inner[some]]
            times = self._scatter_us[owed][:, None] + after
            outer = scatters.outer[scatters.first]
            least[outer] = np.minimum(least[outer], np.minimum.reduceat(times, scatters.first))
        return least


def _closed(moving: np.ndarray, remaining: np.ndarray) -> np.ndarray:
    """The remaining times after any number of moves."""
    remaining, to = remaining.copy(), moving.T.copy()
    further = np.empty_like(remaining)
    fresh = np.nonzero((remaining < NEVER).any(1))[0]
    while fresh.size:
        before = remaining.copy()
        for j in fresh.tolist():  # in place: what is nearer by now counts at once
            np.minimum(remaining, np.add(to[j][:, None], remaining[j], out=further), out=remaining)
        fresh = np.nonzero((remaining < before).any(1))[0]
    return remaining
