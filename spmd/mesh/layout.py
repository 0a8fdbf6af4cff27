"""The places of the ranks of a mesh: their hosts and network cards, and the links that a group of them crosses.

A `HostGrid` has a place, (host, card), for each rank of a mesh *and of its sisters*: the other parts of the mesh that
it was sliced from, which send at the same time. So a slice still knows which ranks share a card with its own, and
slices, transposed, flattened and padded views of a mesh have the same groups.

    >>> grid = HostGrid((2, 4), "0*4 1*4")              # 2 x 4 ranks, one row on each host
    >>> grid.crossings((1,))                            # along axis 1: four ranks inside a host
    ((Rung(level=0, size=4, below=1, upto=4, senders=1, groups=1),),)
    >>> [rung.level for rung in grid.crossings((0, 1))[0]]   # both axes: four in each host, then two hosts
    [0, 1]

A group crosses a *ladder*: a rung for each level of links, innermost first. `AxisLevels` is the other layout, for
links that are given by hand: each axis is a level of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from math import prod

Place = tuple[int, int]  # (host, network card); the card is OWN where no other rank uses it
OWN = -1


@dataclass(frozen=True, order=True)
class Rung:
    """How a group crosses one level of links.

    At this level `size` parts, of `below` ranks each, are joined to one part of `upto` ranks. Where hosts have unequal
    numbers of the ranks, `below` is the least and `upto` the most. `senders`, `groups`: how many ranks, and how many
    groups, send through the busiest network card at once.
    """

    level: int
    size: int
    below: int
    upto: int
    senders: int = 1
    groups: int = 1


Ladder = tuple[Rung, ...]


@dataclass(frozen=True)
class HostGrid:
    """The places of all ranks of a mesh with axes of these `sizes`, and of its sisters: one row for each mesh.

    `places` may be written as text: host, or host.card for a card that ranks share, times a number of ranks in
    row-major order; a bar separates sisters. Where each row is on one host there is nothing to tell: there are no rows.

        >>> HostGrid((2,), "0.0 1.0 | 0.0 1.0").places
        (((0, 0), (1, 0)), ((0, 0), (1, 0)))
        >>> HostGrid((2,), "0*2 | 1*2")
        HostGrid((2,))
    """

    sizes: tuple[int, ...]
    places: tuple[tuple[Place, ...], ...] = ()

    def __post_init__(self) -> None:
        rows = _parsed(self.places) if isinstance(self.places, str) else tuple(map(tuple, self.places))
        if any(len(row) != prod(self.sizes) for row in rows):
            raise ValueError(f"{len(rows[0])} places for a mesh of shape {self.sizes}; give one for each rank")
        put = object.__setattr__
        put(self, "sizes", tuple(self.sizes))
        put(self, "places", tuple(sorted(rows)) if any(map(_is_on_several_hosts, rows)) else ())

    @property
    def levels(self) -> int:
        """How many levels of links its ranks cross: 1 inside a host, 2 between hosts."""
        return 2 if self.places else 1

    def view(self, parts: Sequence[Sequence[int]]) -> HostGrid:
        """The same ranks sliced, transposed or flattened: each new axis is made of some old ones, the first outermost.

        >>> HostGrid((2, 2), "0 1 2 3").view([(1,)])
        HostGrid((2,), '0 1 | 2 3')
        """
        sizes = tuple(prod(self.sizes[axis] for axis in part) for part in parts)
        if not self.places:  # not a walk over the ranks of one host
            return HostGrid(sizes)
        kept = [axis for part in parts for axis in part]
        rest = [axis for axis in range(len(self.sizes)) if axis not in kept]
        inside, outside = self._offsets(kept), self._offsets(rest)
        rows = (tuple(row[o + i] for i in inside) for row in self.places for o in outside)
        return HostGrid(sizes, tuple(rows))

    def _offsets(self, axes: Sequence[int]) -> list[int]:
        """The positions in a row of the ranks along `axes`, relative to the first of them; row-major."""
        steps = [prod(self.sizes[axis + 1 :]) for axis in axes]
        every = product(*(range(self.sizes[axis]) for axis in axes))
        return [sum(c * step for c, step in zip(at, steps, strict=True)) for at in every]

    def crossings(self, axes: Sequence[int]) -> tuple[Ladder, ...]:
        """The ladders that the groups along `axes` cross, each once. One rank alone crosses nothing."""
        size = prod(self.sizes[axis] for axis in axes)
        groups = self.view([axes]).places
        if not groups:
            return (_inside(size),)
        senders, sharing = _busiest_card(groups)
        counts = {tuple(sorted(Counter(host for host, _ in group).values())) for group in groups}
        return tuple(sorted(_ladder(size, count, senders, sharing) for count in counts))

    def __repr__(self) -> str:
        return f"HostGrid({self.sizes!r}{f', {_text(self.places)!r}' if self.places else ''})"


@dataclass(frozen=True)
class AxisLevels:
    """Each axis is made of levels of links of its own: (level, size) pairs, the first outermost.

    >>> AxisLevels((((0, 4),), ((1, 2),))).sizes
    (4, 2)
    """

    axes: tuple[tuple[tuple[int, int], ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(prod(size for _, size in axis) for axis in self.axes)

    @property
    def levels(self) -> int:
        return 1 + max((level for axis in self.axes for level, _ in axis), default=0)

    def view(self, parts: Sequence[Sequence[int]]) -> AxisLevels:
        """The same links sliced, transposed or flattened, as in `HostGrid.view`."""
        return AxisLevels(tuple(tuple(pair for axis in part for pair in self.axes[axis]) for part in parts))

    def crossings(self, axes: Sequence[int]) -> tuple[Ladder, ...]:
        """One ladder, from the lowest level to the highest: level 0 has the fastest links."""
        pairs = sorted(pair for axis in axes for pair in self.axes[axis] if pair[1] > 1)
        rungs, below = [], 1
        for level, on_level in groupby(pairs, key=lambda pair: pair[0]):
            size = prod(size for _, size in on_level)
            rungs.append(Rung(level, size, below, below * size))
            below *= size
        return (tuple(rungs),)


def group_shape(ladder: Ladder) -> tuple[int, int, int] | None:
    """(ranks on each host, hosts, ranks that share a card). Groups for which these are equal take equally long.

    None where hosts have unequal numbers of the ranks.

        >>> [group_shape(ladder) for ladder in HostGrid((4,), "0.0*2 1.0*2").crossings((0,))]
        [(2, 2, 2)]
    """
    outer = ladder[-1]
    if outer.level == 0:
        return outer.size, 1, 1
    even = len(ladder) <= 2 and outer.upto == outer.size * outer.below
    return (outer.below, outer.size, outer.senders) if even else None


def card(place_on_host: int, ranks_on_host: int, nics_per_host: int | None) -> int:
    """The network card of a rank: neighbours on a host share one where there are fewer cards than ranks.

    >>> [card(i, 4, nics_per_host=2) for i in range(4)], card(0, 4, nics_per_host=4)
    ([0, 0, 1, 1], -1)
    """
    if nics_per_host is None or ranks_on_host <= nics_per_host:
        return OWN
    return place_on_host * nics_per_host // ranks_on_host


def _inside(size: int) -> Ladder:
    return (Rung(0, size, 1, size),) if size > 1 else ()


def _ladder(size: int, counts: tuple[int, ...], senders: int, groups: int) -> Ladder:
    """The ladder of a group of `size` ranks; `counts` has the number of them on each host."""
    fewest, most, hosts = counts[0], counts[-1], len(counts)
    return _inside(most) + ((Rung(1, hosts, fewest, size, senders, groups),) if hosts > 1 else ())


def _busiest_card(groups: Sequence[tuple[Place, ...]]) -> tuple[int, int]:
    """The most ranks, and the most groups, that send through one card. Only groups on several hosts send."""
    crossing = [group for group in groups if _is_on_several_hosts(group)]
    ranks = Counter(place for group in crossing for place in group if place[1] != OWN)
    sharing = Counter(place for group in crossing for place in set(group) if place[1] != OWN)
    return max(ranks.values(), default=1), max(sharing.values(), default=1)


def _is_on_several_hosts(group: Sequence[Place]) -> bool:
    return len({host for host, _ in group}) > 1


def _text(places: Sequence[Sequence[Place]]) -> str:
    return " | ".join(" ".join(_runs(row)) for row in places)


def _runs(row: Sequence[Place]) -> Iterator[str]:
    for (host, card), run in groupby(row):
        count = len(list(run))
        yield f"{host}{'' if card == OWN else f'.{card}'}{f'*{count}' if count > 1 else ''}"


def _parsed(text: str) -> tuple[tuple[Place, ...], ...]:
    return tuple(tuple(place for run in row.split() for place in _parsed_run(run)) for row in text.split("|"))


def _parsed_run(run: str) -> list[Place]:
    where, _, count = run.partition("*")
    host, _, card = where.partition(".")
    try:
        return [(int(host), int(card) if card else OWN)] * int(count or 1)
    except ValueError:
        raise ValueError(f"{run!r} is no place; write host, host.card, or one of them times a count: 0.1*4") from None
