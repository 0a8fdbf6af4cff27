"""The graph of a space: all its states at once, as arrays, with the moves between every two of them.

States have numbers, and sets of axes are bits. `removed[s, t]` are the axes that a tensor loses on the way from s to
t: they shard s, and are not among the outer axes that shard s and t alike. So t is inside s where `removed[s, t]` is 0,
and then `removed[t, s]` are the axes that t has more. Where neither is 0, only an exchange leads from s to t, over the
axes of `removed[s, t]`.

The possible layouts (`Layouts`) depend on the number of axes only. What a rank lacks depends on the sizes: if the axes
divide every dim, it is a fixed share of the tensor (`EvenSizes`); else every rank is considered (`UnevenSizes`). So
nearly all plans over a mesh share a few graphs, which are kept.

    >>> layouts = Layouts.of(2, (1,))      # two axes, one dim
    >>> layouts.dims[0].axes
    ((), (0,), (1,), (0, 1), (1, 0))
    >>> EvenSizes(layouts, (2, 4)).lacks(np.array([1]), np.array([3, 4]))     # (0, 1) is inside (0,)
    array([0, 1])

Left out: if there are too many states, all but the most direct ones (`graph_of`).
"""

# ruff: noqa: B905 - the zipped sequences have one entry for each dim

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from math import isqrt, prod
from typing import Any, NamedTuple

import numpy as np

from spmd.comm.chunk import split_unit
from spmd.tensor.redistribute.all_ranks import RankSides, common
from spmd.tensor.redistribute.states import Cut, Cutting, Space, State, nonempty_blocks

Orders = tuple[tuple[int, ...], ...]
MOST_IN_ANY_ORDER = 5  # axes; if there are more, only the orders of the start and the goal are considered
MOST_PAIRS = 4_000_000  # of states, times the work for a pair; if there are more, the most direct states are chosen
MOST_CHOSEN = 400_000  # pairs of the chosen states; such a graph is not kept


# ---- layouts ----------------------------------------------------------------------------------


class DimLayouts:
    """The layouts of one dim: some axes, in the order that one of the orders gives them, and one of so many units.

    number: the number of each layout. axes, mask: the axes of each, in order and as bits.
    """

    def __init__(self, orders: Orders, units: int) -> None:
        parts = {part for order in orders for k in range(len(order)) for part in itertools.combinations(order, k + 1)}
        every = sorted(parts, key=lambda axes: (len(axes), axes))
        self.layouts = (((), 0), *[(axes, unit) for axes in every for unit in range(units)])
        self.number = {layout: i for i, layout in enumerate(self.layouts)}
        self.axes = tuple([axes for axes, _ in self.layouts])
        self.mask = np.array([sum([1 << a for a in axes]) for axes in self.axes])
        self.removed = self._removed(max(1, len(self.axes[-1])))

    def _removed(self, longest: int) -> np.ndarray:
        """For each two layouts, the axes of the first that are not common outer axes of both."""
        padded = np.array([axes + (-1,) * (longest - len(axes)) for axes in self.axes], int).reshape(-1, longest)
        unit = np.array([unit for _, unit in self.layouts])
        alike = (padded[:, None] == padded) & (padded >= 0) & (unit[:, None] == unit)[:, :, None]
        bits = np.where(padded >= 0, 1 << np.maximum(padded, 0), 0)
        common = np.logical_and.accumulate(alike, axis=2)
        return (self.mask[:, None] - (common * bits[:, None]).sum(2)).astype(np.int32)


class Layouts:
    """All layouts of a tensor, numbered. An axis shards one dim, or none.

    at: for each layout, the number of the layout of each dim. used: for each layout, the axes that shard, as bits.
    """

    def __init__(self, orders: tuple[Orders, ...], units: tuple[int, ...]) -> None:
        self.dims = [_dim_layouts(*each) for each in zip(orders, units)]
        self.at, self.used = np.zeros((1, 0), int), np.zeros(1, int)
        for dim in self.dims:
            old, new = np.nonzero((self.used[:, None] & dim.mask) == 0)
            self.at = np.column_stack([self.at[old], new])
            self.used = self.used[old] | dim.mask[new]
        self.number = {layout: i for i, layout in enumerate(map(tuple, self.at.tolist()))}

    @staticmethod
    def of(axes: int, units: tuple[int, ...]) -> Layouts:
        """All layouts of so many axes; `units` says how many units may occur in each dim."""
        return _layouts((tuple(itertools.permutations(range(axes))),) * len(units), units)

    def removed(self, s: np.ndarray, t: np.ndarray) -> np.ndarray:
        """The axes that shard s and are not common outer axes of s and t."""
        found = np.zeros(np.broadcast_shapes(s.shape, t.shape), np.int32)
        for dim, at in zip(self.dims, self.at.T):
            found |= dim.removed[at[s], at[t]]
        return found


@functools.lru_cache(maxsize=64)
def _dim_layouts(orders: Orders, units: int) -> DimLayouts:
    return DimLayouts(orders, units)


@functools.lru_cache(maxsize=64)
def _layouts(orders: tuple[Orders, ...], units: tuple[int, ...]) -> Layouts:
    return Layouts(orders, units)


# ---- what ranks lack --------------------------------------------------------------------------


class EvenSizes:
    """For axes whose sizes divide every dim. Counts in cells; a dim has as many cells as there are ranks."""

    work = 4  # for a pair of states; `UnevenSizes` takes as much as there are ranks

    def __init__(self, layouts: Layouts, ns: tuple[int, ...]) -> None:
        self.layouts = layouts
        n = prod(ns)
        self.lengths = [np.array([n // prod([ns[a] for a in axes]) for axes in dim.axes]) for dim in layouts.dims]
        self.common = [self._common(dim.removed, lengths) for dim, lengths in zip(layouts.dims, self.lengths)]

    @staticmethod
    def _common(removed: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """For each two layouts of a dim, what a rank has of its second block in its first, on the rank that has least.

        If different axes come next, a rank that is first along the one and last along the other has nothing.
        """
        return np.where((removed != 0) & (removed.T != 0), 0, np.minimum(lengths[:, None], lengths))

    def largest(self, s: np.ndarray) -> np.ndarray:
        """The size of the largest block, in these states."""
        return _product([n[at[s]] for n, at in zip(self.lengths, self.layouts.at.T)])

    def lacks(self, s: np.ndarray, t: np.ndarray) -> np.ndarray:
        """What the busiest rank has to receive to come from its block in s to its block in t."""
        return self.largest(t) - _product([n[at[s], at[t]] for n, at in zip(self.common, self.layouts.at.T)])

    def same(self, s: np.ndarray, t: np.ndarray) -> np.ndarray:
        """Whether the blocks are the same, perhaps on other ranks."""
        return _all([n[at[s]] == n[at[t]] for n, at in zip(self.lengths, self.layouts.at.T)])


class UnevenSizes:
    """For blocks that may differ in size or be empty. Counts in elements of the dims that matter."""

    def __init__(self, layouts: Layouts, cutting: Cutting) -> None:
        ns = cutting.mesh_shape
        places = np.indices([ns[a] for a in cutting.rank_axes]).reshape(len(cutting.rank_axes), -1)
        cuts = [[cutting.cut(d, *each) for each in dim.layouts] for d, dim in enumerate(layouts.dims)]
        where = dict(zip(cutting.rank_axes, places))
        sides = [sides_of(size, each, ns, where) for size, each in zip(cutting.sizes, cuts)]
        kinds = _kinds_of_ranks(sides, places.shape[1])
        self.layouts, self.work = layouts, len(kinds)
        self.sides = [side._replace(start=side.start[:, kinds], stop=side.stop[:, kinds]) for side in sides]
        self.blocks = [_numbered(size, each, ns) for size, each in zip(cutting.sizes, cuts)]

    def largest(self, s: np.ndarray) -> np.ndarray:
        """The size of the largest block, which is that of the first rank, in these states."""
        return _product([side.lengths()[:, 0][at[s]] for side, at in zip(self.sides, self.layouts.at.T)])

    def lacks(self, s: np.ndarray, t: np.ndarray) -> np.ndarray:
        """What the busiest rank has to receive to come from its block in s to its block in t."""
        want = held = np.ones(1, int)
        for side, at in zip(self.sides, self.layouts.at.T):
            (v, each_s), (w, each_t) = _unique(at[s]), _unique(at[t])
            wanted = side.rows(w)
            held, want = held * common(side.rows((v, None)), wanted)[each_s, each_t], want * wanted.lengths()[each_t]
        return (want - held).max(-1)

    def same(self, s: np.ndarray, t: np.ndarray) -> np.ndarray:
        """Whether the blocks are the same, perhaps on other ranks."""
        return _all([n[at[s]] == n[at[t]] for n, at in zip(self.blocks, self.layouts.at.T)])


def _unique(layouts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The layouts that occur, and for each place the index of its layout."""
    found, which = np.unique(layouts, return_inverse=True)
    return found, which.reshape(layouts.shape)


def sides_of(size: int, cuts: Sequence[Cut], ns: tuple[int, ...], places: dict[int, np.ndarray]) -> RankSides:
    """Where the block of every rank starts and where it stops: arrays with a row for each cut."""
    starts, stops = [], []
    whole = np.zeros_like(next(iter(places.values())))
    for axes, unit in cuts:
        packed, inner = split_unit(unit)
        start, length = whole, whole + size // packed // inner
        for a in axes:
            step = -(-length // ns[a])
            offset = np.minimum(step * places[a], length)
            start, length = start + offset, np.minimum(step, length - offset)
        starts.append(start * inner)
        stops.append((start + length) * inner)
    counts = np.array([split_unit(unit)[0] for _, unit in cuts])
    if (counts == 1).all():
        return RankSides(np.array(starts), np.array(stops), 1, max(size, 1))
    shape = (-1,) + (1,) * whole.ndim
    periods = np.maximum(size // counts, 1)
    return RankSides(np.array(starts), np.array(stops), counts.reshape(shape), periods.reshape(shape))


def _kinds_of_ranks(sides: Sequence[RankSides], n: int) -> np.ndarray:
    """The first rank of each kind, rank 0 first. Ranks are of one kind if their blocks have the same lengths, and the
    same parts in common, in all cuts of a dim: then they lack the same."""
    kind, kinds = np.zeros(n, int), 1
    for side in sides:
        for i in range(len(side.start)):
            for lengths in common(side.rows(i), side.rows(slice(i, None))):
                if lengths.min() == lengths.max():
                    continue
                most = int(lengths.max()) + 1
                if kinds > 2**62 // most:  # numbered anew only where the numbers would not fit
                    found, kind = np.unique(kind, return_inverse=True)
                    kinds = len(found)
                kind, kinds = kind * most + lengths, kinds * most
    return np.sort(np.unique(kind, return_index=True)[1])


def _numbered(size: int, cuts: Sequence[Cut], ns: tuple[int, ...]) -> np.ndarray:
    """A number for each cut; cuts with the same blocks have the same number."""
    found: dict = {}
    sizes = [tuple([ns[a] for a in axes]) for axes, _ in cuts]
    blocks = [(prod(each), nonempty_blocks(size, unit, each)) for each, (_, unit) in zip(sizes, cuts)]
    return np.array([found.setdefault(each, len(found)) for each in blocks])


def _product(factors: list[np.ndarray]) -> np.ndarray:
    return functools.reduce(np.multiply, factors, np.ones(1, int))


def _all(conditions: list[np.ndarray]) -> np.ndarray:
    return functools.reduce(np.logical_and, conditions, np.ones(1, bool))


# ---- graphs -----------------------------------------------------------------------------------

MoveRow = tuple[int, int, int]  # what is sent (gathers, reductions: what a rank holds), the kind of move, the axes
SLICE, EXCHANGE, ALL_TO_ALL, PERMUTE, ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = range(7)


class Graph:
    """The chosen states, and for each two of them the move from the one to the other.

    moves, move_index: the distinct moves, which are few, and for each two states the index of theirs.
    inner, outer: the pairs of states of which the one is inside the other. A slice or a reduce-scatter leads from the
    outer to the inner, a gather back.
    added: for each such pair, the axes that the inner has more.
    """

    def __init__(self, sizes: EvenSizes | UnevenSizes, chosen: np.ndarray) -> None:
        self.layouts, self.chosen = sizes.layouts, chosen
        self.used, self.largest = self.layouts.used[chosen], np.broadcast_to(sizes.largest(chosen), chosen.shape)
        s, t = chosen[:, None], chosen[None]
        self.removed = self.layouts.removed(s, t)
        self.outer, self.inner = np.nonzero((self.removed == 0) & (s != t))
        self.added = self.removed[self.inner, self.outer]
        sent = np.where(self.removed == 0, 0, sizes.lacks(s, t))
        turned = np.where(sizes.same(s, t), PERMUTE, ALL_TO_ALL)
        kind = np.where(sent == 0, SLICE, np.where(self.removed == self.removed.T, turned, EXCHANGE))
        self.moves, self.move_index = _unique_rows(sent, kind, np.where(sent == 0, 0, self.removed))
        self.gathers, self.gather_index = _unique_rows(self.largest[self.inner], ALL_GATHER, self.added)
        self.blocks = np.unique(self.largest, return_inverse=True)
        self._scatters: dict[int, Scatters] = {}
        self.copies: dict[tuple, Any] = {}  # how much the moves copy; filled by `copy_cost.py`

    def scatters(self, pending: int) -> Scatters:
        """All reduce-scatters of some of the pending axes, from all states where these are pending."""
        found = self._scatters.get(pending)
        if found is None:
            some = np.nonzero((self.used[self.outer] & pending == 0) & (self.added & pending != 0))[0]
            reduced = self.added[some] & pending
            outer, few = self.outer[some], _unique_rows(self.largest[self.inner[some]], REDUCE_SCATTER, reduced)
            first = np.nonzero(np.diff(outer, prepend=-1))[0]
            found = self._scatters[pending] = Scatters(outer, self.inner[some], reduced, *few, first)
        return found


class Scatters(NamedTuple):
    """Reduce-scatters: from which states (outer) to which (inner), and which axes they reduce.

    moves, move_index: the distinct moves, which are few, and for each reduce-scatter the index of its move.
    first: where in `outer` each state begins.
    """

    outer: np.ndarray
    inner: np.ndarray
    reduced: np.ndarray
    moves: list[MoveRow]
    move_index: np.ndarray
    first: np.ndarray


def _unique_rows(size: np.ndarray, kind: np.ndarray | int, axes: np.ndarray) -> tuple[list[MoveRow], np.ndarray]:
    """The distinct rows, and for each place the index of its row."""
    keys, which = np.unique((size << 3 | kind) << 16 | axes, return_inverse=True)
    return [(key >> 19, key >> 16 & 7, key & 0xFFFF) for key in keys.tolist()], which.reshape(axes.shape)


# ---- the graph of a space ---------------------------------------------------------------------


class SpaceGraph(NamedTuple):
    """The graph of a space, with the numbers of its start and goal."""

    graph: Graph
    cell_bytes: int  # bytes of one cell or element that the graph counts in
    start: int
    goal: int


def graph_of(space: Space) -> SpaceGraph:
    """The graph of a space. If it has too many states, those through which least is sent in all."""
    cutting = space.cutting
    ns = tuple([space.size(axes) for axes in cutting.movable])
    layouts = _layouts(_orders(space), tuple(map(len, cutting.units)))
    lengths = [n // space.size(prefix) for n, prefix in zip(cutting.sizes, cutting.prefixes)]
    if divides(space, prod(ns)):
        sizes: EvenSizes | UnevenSizes = _even(layouts, ns)
        cell_bytes = prod([n // prod(ns) for n in lengths]) * space.element_bytes
    else:
        sizes, cell_bytes = _uneven(layouts, cutting), space.element_bytes
    ends = [_number(layouts, space, state) for state in (space.start, space.goal)]
    most, chosen = [isqrt(pairs // sizes.work) for pairs in (MOST_PAIRS, MOST_CHOSEN)]
    graph = _full_graph(sizes) if len(layouts.used) <= most else Graph(sizes, _most_direct(sizes, *ends, chosen))
    return SpaceGraph(graph, cell_bytes, *[int(np.searchsorted(graph.chosen, end)) for end in ends])


def state_of(space: Space, graph: Graph, number: int, pending: tuple[int, ...]) -> State:
    """The state with this number and these pending axes."""
    at = graph.layouts.at[graph.chosen[number]].tolist()
    cuts = [space.cutting.cut(d, *dim.layouts[i]) for d, (dim, i) in enumerate(zip(graph.layouts.dims, at))]
    return State(tuple([axes for axes, _ in cuts]), tuple([unit for _, unit in cuts]), pending)


def divides(space: Space, n: int) -> bool:
    """Whether in each dim the outer axes that stay divide the size, and n divides their blocks."""
    cutting = space.cutting
    each = [size % (n * space.size(prefix)) == 0 < size for size, prefix in zip(cutting.sizes, cutting.prefixes)]
    return all(each) and all([units == (1,) for units in cutting.units])


def _orders(space: Space) -> tuple[Orders, ...]:
    """The orders of axes that may shard each dim: all; if there are many axes, those of the start and the goal.

    In the second case the axes that the goal does not have may come last on the longest dim.
    """
    cutting = space.cutting
    m, dims = len(cutting.movable), range(len(cutting.sizes))
    if m <= MOST_IN_ANY_ORDER:
        return (_any_order(m),) * len(dims)
    starts, goals = [[cutting.layout(d, state)[0] for d in dims] for state in (space.start, space.goal)]
    rest = tuple([i for i in range(m) if i not in {*itertools.chain(*goals)}])
    longest = max(dims, key=lambda d: cutting.sizes[d], default=None)
    return tuple([(start, goal + rest if d == longest else goal) for d, start, goal in zip(dims, starts, goals)])


@functools.lru_cache(maxsize=16)
def _any_order(m: int) -> Orders:
    return tuple(itertools.permutations(range(m)))


def _number(layouts: Layouts, space: Space, state: State) -> int:
    return layouts.number[tuple([dim.number[space.cutting.layout(d, state)] for d, dim in enumerate(layouts.dims)])]


def _most_direct(sizes: EvenSizes | UnevenSizes, start: int, goal: int, most: int) -> np.ndarray:
    """The states, `most` of them, through which the busiest rank receives least; with the start and the goal."""
    every = np.arange(len(sizes.layouts.used))
    sent = sizes.lacks(np.array([start]), every) + sizes.lacks(every, np.array([goal]))
    sent[[start, goal]] = -1
    return np.sort(np.argsort(sent, kind="stable")[:most])


@functools.lru_cache(maxsize=32)
def _even(layouts: Layouts, ns: tuple[int, ...]) -> EvenSizes:
    return EvenSizes(layouts, ns)


@functools.lru_cache(maxsize=32)
def _uneven(layouts: Layouts, cutting: Cutting) -> UnevenSizes:
    return UnevenSizes(layouts, cutting)


@functools.lru_cache(maxsize=16)
def _full_graph(sizes: EvenSizes | UnevenSizes) -> Graph:
    return Graph(sizes, np.arange(len(sizes.layouts.used)))
