"""All states of a space at once, as arrays: which lies inside which, and what it takes to get from one to another.

States are numbered, and axes are bits: `left[s, t]` are the axes that cut s and, outside of them, not t. So t lies
inside s where `left[s, t]` is 0, and `left[t, s]` are then the axes that it has more; where neither is 0 only an
exchange leads from s to t, over the axes of `left[s, t]`.

How axes can lie (`Layouts`) depends on how many there are. What a rank lacks depends on the sizes: where the axes
divide every dim it is a share of the tensor, the same for all sizes (`Even`); elsewhere every rank is looked at
(`Uneven`). So nearly all plans over a mesh share a few graphs, which are kept.

    >>> layouts = Layouts.of(2, (1,))      # two axes, one dim
    >>> layouts.dims[0].axes
    ((), (0,), (1,), (0, 1), (1, 0))
    >>> Even(layouts, (2, 4)).lacks(np.array([1]), np.array([3, 4]))     # (0, 1) is inside (0,)
    array([0, 1])

Left out: where there are too many states, all but the most direct ones (`view_of`).
"""

# ruff: noqa: B905 - what is zipped has one entry a dim

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from math import isqrt, prod
from typing import Any, NamedTuple

import numpy as np

from spmd.tensor.redistribute.states import Cut, Cutting, Space, State, blocks_with_any

Orders = tuple[tuple[int, ...], ...]
MOST_IN_ANY_ORDER = 5  # axes; of more, only the orders of the start and the goal are looked at
MOST_PAIRS = 4_000_000  # of states, times the work that a pair takes: of more, the most direct states are chosen
MOST_CHOSEN = 400_000  # pairs of these; such a graph is not kept


# ---- how axes can lie -------------------------------------------------------------------------


class DimLayouts:
    """The ways to cut one dim: axes, in the order of one of the orders, and one of so many units."""

    def __init__(self, orders: Orders, units: int) -> None:
        parts = {part for order in orders for k in range(len(order)) for part in itertools.combinations(order, k + 1)}
        every = sorted(parts, key=lambda axes: (len(axes), axes))
        self.layouts = (((), 0), *[(axes, unit) for axes in every for unit in range(units)])
        self.number = {layout: i for i, layout in enumerate(self.layouts)}
        self.axes = tuple([axes for axes, _ in self.layouts])
        self.mask = np.array([sum([1 << a for a in axes]) for axes in self.axes])
        self.left = self._left(max(1, len(self.axes[-1])))

    def _left(self, longest: int) -> np.ndarray:
        """For each two layouts, the axes of the first that are not outer axes of both."""
        padded = np.array([axes + (-1,) * (longest - len(axes)) for axes in self.axes], int).reshape(-1, longest)
        unit = np.array([unit for _, unit in self.layouts])
        alike = (padded[:, None] == padded) & (padded >= 0) & (unit[:, None] == unit)[:, :, None]
        bits = np.where(padded >= 0, 1 << np.maximum(padded, 0), 0)
        common = np.logical_and.accumulate(alike, axis=2)
        return (self.mask[:, None] - (common * bits[:, None]).sum(2)).astype(np.int32)


class Layouts:
    """The ways for axes to lie on dims, numbered: `at` has each dim's layout. An axis lies on one dim, or on none."""

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
        """All of them: of so many axes, on dims that may be cut by so many units each."""
        return _layouts((tuple(itertools.permutations(range(axes))),) * len(units), units)

    def left(self, s: np.ndarray, t: np.ndarray) -> np.ndarray:
        """The axes that cut s and, outside of them, not t."""
        found = np.zeros(np.broadcast_shapes(s.shape, t.shape), np.int32)
        for dim, at in zip(self.dims, self.at.T):
            found |= dim.left[at[s], at[t]]
        return found


@functools.lru_cache(maxsize=64)
def _dim_layouts(orders: Orders, units: int) -> DimLayouts:
    return DimLayouts(orders, units)


@functools.lru_cache(maxsize=64)
def _layouts(orders: tuple[Orders, ...], units: tuple[int, ...]) -> Layouts:
    return Layouts(orders, units)


# ---- what ranks lack --------------------------------------------------------------------------


class Even:
    """Where axes of these sizes divide every dim. Counted in cells, of which a dim has as many as there are ranks."""

    work = 4  # that a pair of states takes, as compared with the ranks that are looked at elsewhere

    def __init__(self, layouts: Layouts, ns: tuple[int, ...]) -> None:
        self.layouts = layouts
        n = prod(ns)
        self.lengths = [np.array([n // prod([ns[a] for a in axes]) for axes in dim.axes]) for dim in layouts.dims]
        self.common = [self._common(dim.left, lengths) for dim, lengths in zip(layouts.dims, self.lengths)]

    @staticmethod
    def _common(left: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """For each two layouts of a dim, what the rank that has least of the second has of it in the first.

        Where different axes come next, the first ranks along the one are the last along the other: they have nothing.
        """
        return np.where((left != 0) & (left.T != 0), 0, np.minimum(lengths[:, None], lengths))

    def largest(self, s: np.ndarray) -> np.ndarray:
        """What the rank with most has, in these states."""
        return _product([n[at[s]] for n, at in zip(self.lengths, self.layouts.at.T)])

    def lacks(self, s: np.ndarray, t: np.ndarray) -> np.ndarray:
        """What the rank that lacks most must get to come from the blocks of s to those of t."""
        return self.largest(t) - _product([n[at[s], at[t]] for n, at in zip(self.common, self.layouts.at.T)])

    def same(self, s: np.ndarray, t: np.ndarray) -> np.ndarray:
        """Whether the blocks are the same, if on other ranks."""
        return _all([n[at[s]] == n[at[t]] for n, at in zip(self.lengths, self.layouts.at.T)])


class Uneven:
    """Where blocks may differ, or be empty. Counted in elements of the dims that matter."""

    def __init__(self, layouts: Layouts, cutting: Cutting) -> None:
        ns = cutting.mesh_shape
        places = np.indices([ns[a] for a in cutting.ranks]).reshape(len(cutting.ranks), -1)
        cuts = [[cutting.cut(d, *each) for each in dim.layouts] for d, dim in enumerate(layouts.dims)]
        self.layouts, self.work = layouts, places.shape[1]
        where = dict(zip(cutting.ranks, places))
        self.sides = [sides_of(size, each, ns, where) for size, each in zip(cutting.sizes, cuts)]
        self.blocks = [_numbered(size, each, ns) for size, each in zip(cutting.sizes, cuts)]

    def largest(self, s: np.ndarray) -> np.ndarray:
        """What the first rank has, which is what the rank with most has, in these states."""
        dims = zip(self.sides, self.layouts.at.T)
        return _product([(stops[:, 0] - starts[:, 0])[at[s]] for (starts, stops), at in dims])

    def lacks(self, s: np.ndarray, t: np.ndarray) -> np.ndarray:
        """What the rank that lacks most must get to come from the blocks of s to those of t."""
        want = common = np.ones(1, int)
        for sides, at in zip(self.sides, self.layouts.at.T):
            (v, each_s), (w, each_t) = _used(at[s]), _used(at[t])
            (a, b), (c, d) = [side[v, None] for side in sides], [side[w] for side in sides]
            both = np.maximum(np.minimum(b, d) - np.maximum(a, c), 0)
            common, want = common * both[each_s, each_t], want * (d - c)[each_t]
        return (want - common).max(-1)

    def same(self, s: np.ndarray, t: np.ndarray) -> np.ndarray:
        """Whether the blocks are the same, if on other ranks."""
        return _all([n[at[s]] == n[at[t]] for n, at in zip(self.blocks, self.layouts.at.T)])


def _used(layouts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The layouts that occur, and for each place which of them is there."""
    found, which = np.unique(layouts, return_inverse=True)
    return found, which.reshape(layouts.shape)


def sides_of(size: int, cuts: Sequence[Cut], ns: tuple[int, ...], places: dict[int, np.ndarray]) -> tuple:
    """Where the block of every rank starts, and where it stops, a row for each cut."""
    starts, stops = [], []
    whole = np.zeros_like(next(iter(places.values())))
    for axes, unit in cuts:
        start, length = whole, whole + size // unit
        for a in axes:
            step = -(-length // ns[a])
            offset = np.minimum(step * places[a], length)
            start, length = start + offset, np.minimum(step, length - offset)
        starts.append(start * unit)
        stops.append((start + length) * unit)
    return np.array(starts), np.array(stops)


def _numbered(size: int, cuts: Sequence[Cut], ns: tuple[int, ...]) -> np.ndarray:
    """A number for each cut, the same where the blocks are the same."""
    found: dict = {}
    sizes = [tuple([ns[a] for a in axes]) for axes, _ in cuts]
    blocks = [(prod(each), blocks_with_any(size, unit, each)) for each, (_, unit) in zip(sizes, cuts)]
    return np.array([found.setdefault(each, len(found)) for each in blocks])


def _product(factors: list[np.ndarray]) -> np.ndarray:
    return functools.reduce(np.multiply, factors, np.ones(1, int))


def _all(conditions: list[np.ndarray]) -> np.ndarray:
    return functools.reduce(np.logical_and, conditions, np.ones(1, bool))


# ---- graphs -----------------------------------------------------------------------------------

Row = tuple[int, int, int]  # what is sent or held, the kind of move, and the axes
SLICE, EXCHANGE, ALL_TO_ALL, PERMUTE, ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE = range(7)


class Graph:
    """The chosen states, and for each two of them the move that leads from the one to the other; of `moves`, few.

    `inner` and `outer` are the pairs of states of which the one lies inside the other: from the outer to the inner a
    slice leads, or a reduce-scatter, and back a gather.
    """

    def __init__(self, sizes: Even | Uneven, chosen: np.ndarray) -> None:
        self.layouts, self.chosen = sizes.layouts, chosen
        self.used, self.largest = self.layouts.used[chosen], np.broadcast_to(sizes.largest(chosen), chosen.shape)
        s, t = chosen[:, None], chosen[None]
        self.left = self.layouts.left(s, t)
        self.outer, self.inner = np.nonzero((self.left == 0) & (s != t))
        self.added = self.left[self.inner, self.outer]
        sent = np.where(self.left == 0, 0, sizes.lacks(s, t))
        turned = np.where(sizes.same(s, t), PERMUTE, ALL_TO_ALL)
        kind = np.where(sent == 0, SLICE, np.where(self.left == self.left.T, turned, EXCHANGE))
        self.moves, self.which = _few(sent, kind, np.where(sent == 0, 0, self.left))
        self.gathers, self.which_gather = _few(self.largest[self.inner], ALL_GATHER, self.added)
        self.blocks = np.unique(self.largest, return_inverse=True)
        self._scatters: dict[int, Scatters] = {}
        self.copies: dict[tuple, Any] = {}  # what the moves copy, kept by `copying.py`

    def scatters(self, pending: int) -> Scatters:
        """What scatters some of the pending axes, from all states where they are pending."""
        found = self._scatters.get(pending)
        if found is None:
            some = np.nonzero((self.used[self.outer] & pending == 0) & (self.added & pending != 0))[0]
            reduced = self.added[some] & pending
            outer, few = self.outer[some], _few(self.largest[self.inner[some]], REDUCE_SCATTER, reduced)
            first = np.nonzero(np.diff(outer, prepend=-1))[0]
            found = self._scatters[pending] = Scatters(outer, self.inner[some], reduced, *few, first)
        return found


class Scatters(NamedTuple):
    """From which states to which, and which axes are reduced on the way; the few moves of which these are.

    `first` is where the next state that they lead from begins.
    """

    outer: np.ndarray
    inner: np.ndarray
    reduced: np.ndarray
    moves: list[Row]
    which: np.ndarray
    first: np.ndarray


def _few(size: np.ndarray, kind: np.ndarray | int, axes: np.ndarray) -> tuple[list[Row], np.ndarray]:
    """The rows that occur, and for each place which of them is there."""
    keys, which = np.unique((size << 3 | kind) << 16 | axes, return_inverse=True)
    return [(key >> 19, key >> 16 & 7, key & 0xFFFF) for key in keys.tolist()], which.reshape(axes.shape)


# ---- of a space -------------------------------------------------------------------------------


class View(NamedTuple):
    """The graph of a space, as the space sees it."""

    graph: Graph
    cell: int  # bytes of what the graph counts in
    start: int
    goal: int


def view_of(space: Space) -> View:
    """The graph of a space; where that has too many states, those by which least has to be sent in all."""
    cutting = space.cutting
    ns = tuple([space.size(axes) for axes in cutting.movable])
    layouts = _layouts(_orders(space), tuple(map(len, cutting.units)))
    lengths = [n // space.size(prefix) for n, prefix in zip(cutting.sizes, cutting.prefixes)]
    if divides(space, prod(ns)):
        sizes: Even | Uneven = _even(layouts, ns)
        cell = prod([n // prod(ns) for n in lengths]) * space.item
    else:
        sizes, cell = _uneven(layouts, cutting), space.item
    ends = [_number(layouts, space, state) for state in (space.start, space.goal)]
    most, chosen = [isqrt(pairs // sizes.work) for pairs in (MOST_PAIRS, MOST_CHOSEN)]
    graph = _whole(sizes) if len(layouts.used) <= most else Graph(sizes, _direct(sizes, *ends, chosen))
    return View(graph, cell, *[int(np.searchsorted(graph.chosen, end)) for end in ends])


def state_of(space: Space, graph: Graph, number: int, pending: tuple[int, ...]) -> State:
    """The state of this number, with these axes pending."""
    at = graph.layouts.at[graph.chosen[number]].tolist()
    cuts = [space.cutting.cut(d, *dim.layouts[i]) for d, (dim, i) in enumerate(zip(graph.layouts.dims, at))]
    return State(tuple([axes for axes, _ in cuts]), tuple([unit for _, unit in cuts]), pending)


def divides(space: Space, n: int) -> bool:
    """Whether n, in each dim, divides what the outer axes that stay leave, which divide it too."""
    cutting = space.cutting
    each = [size % (n * space.size(prefix)) == 0 < size for size, prefix in zip(cutting.sizes, cutting.prefixes)]
    return all(each) and all([units == (1,) for units in cutting.units])


def _orders(space: Space) -> tuple[Orders, ...]:
    """The orders in which axes may lie on each dim: all; if there are many axes, those of the start and the goal.

    An axis that the goal does not have may then come last on the longest dim.
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


def _direct(sizes: Even | Uneven, start: int, goal: int, most: int) -> np.ndarray:
    """So many states, the start and the goal among them, by which the rank that lacks most has least to get."""
    every = np.arange(len(sizes.layouts.used))
    sent = sizes.lacks(np.array([start]), every) + sizes.lacks(every, np.array([goal]))
    sent[[start, goal]] = -1
    return np.sort(np.argsort(sent, kind="stable")[:most])


@functools.lru_cache(maxsize=32)
def _even(layouts: Layouts, ns: tuple[int, ...]) -> Even:
    return Even(layouts, ns)


@functools.lru_cache(maxsize=32)
def _uneven(layouts: Layouts, cutting: Cutting) -> Uneven:
    return Uneven(layouts, cutting)


@functools.lru_cache(maxsize=16)
def _whole(sizes: Even | Uneven) -> Graph:
    return Graph(sizes, np.arange(len(sizes.layouts.used)))
