"""Where the ranks of a mesh stand: on which hosts, behind which network cards, and what a group of them crosses.

A `HostGrid` has a place, (host, card), for each rank of a mesh *and of its sisters*: the other parts of the mesh that
it was cut from, which talk at the same time. So a slice still knows with whom it shares a card, and slices,
transposed, flattened and padded views of a mesh see the same groups.

    >>> grid = HostGrid((2, 4), "0*4 1*4")              # 2 x 4 ranks, one row a host
    >>> grid.crossings((1,))                            # along axis 1: four ranks inside a host
    ((Rung(level=0, size=4, below=1, upto=4, senders=1, groups=1),),)
    >>> [rung.level for rung in grid.crossings((0, 1))[0]]   # both axes: four in each host, then two hosts
    [0, 1]

What a group crosses is a *ladder*: a rung for each level of links, innermost first. `AxisLevels` is the other
layout, for links that were given by hand: each axis is a level of its own.
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

    `size`: how many parts are joined at this level, parts of `below` ranks into one of `upto`; where hosts hold
    unequal numbers of the ranks, the fewest below and the most above. `senders`, `groups`: how many ranks, and how
    many groups, send through the busiest network card at once.
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
    """The places of all ranks of a mesh with axes of these `sizes`, and of its sisters, one row each.

    `places` may be written as text: host, or host.card for a card that ranks share, times how many ranks in row-major
    order; sisters are parted by a bar. Where no row leaves its host nothing is left to tell, so there are no rows.

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
        put(self, "places", tuple(sorted(rows)) if any(map(_leaves_its_host, rows)) else ())

    @property
    def levels(self) -> int:
        """How many levels of links its ranks cross: 1 inside a host, 2 between hosts."""
        return 2 if self.places else 1

    def view(self, parts: Sequence[Sequence[int]]) -> HostGrid:
        """The same ranks cut, transposed or flattened: each new axis is made of some old ones, the first outermost.

        >>> HostGrid((2, 2), "0 1 2 3").view([(1,)])
        HostGrid((2,), '0 1 | 2 3')
        """
        kept = [axis for part in parts for axis in part]
        rest = [axis for axis in range(len(self.sizes)) if axis not in kept]
        inside, outside = self._offsets(kept), self._offsets(rest)
        rows = (tuple(row[o + i] for i in inside) for row in self.places for o in outside)
        return HostGrid(tuple(prod(self.sizes[axis] for axis in part) for part in parts), tuple(rows))

    def _offsets(self, axes: Sequence[int]) -> list[int]:
        """Where in a row the ranks along `axes` stand, as seen from the first of them; row-major."""
        steps = [prod(self.sizes[axis + 1 :]) for axis in axes]
        every = product(*(range(self.sizes[axis]) for axis in axes))
        return [sum(c * step for c, step in zip(at, steps, strict=True)) for at in every]

    def crossings(self, axes: Sequence[int]) -> tuple[Ladder, ...]:
        """What the groups along `axes` cross: the ladders that occur, each once. One rank alone crosses nothing."""
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
    """Each axis is made of levels of links that are its own: (level, size) pairs, the first outermost.

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
        """The same links cut, transposed or flattened, as in `HostGrid.view`."""
        return AxisLevels(tuple(tuple(pair for axis in part for pair in self.axes[axis]) for part in parts))

    def crossings(self, axes: Sequence[int]) -> tuple[Ladder, ...]:
        """One ladder, from the lowest level to the highest: levels are numbered from the fastest links on."""
        pairs = sorted(pair for axis in axes for pair in self.axes[axis] if pair[1] > 1)
        rungs, below = [], 1
        for level, on_level in groupby(pairs, key=lambda pair: pair[0]):
            size = prod(size for _, size in on_level)
            rungs.append(Rung(level, size, below, below * size))
            below *= size
        return (tuple(rungs),)


def evenly(ladder: Ladder) -> tuple[int, int, int] | None:
    """(ranks a host, hosts, ranks that share a card): what groups have in common that take equally long.

    None where hosts hold unequal numbers of the ranks.

        >>> [evenly(ladder) for ladder in HostGrid((4,), "0.0*2 1.0*2").crossings((0,))]
        [(2, 2, 2)]
    """
    outer = ladder[-1]
    if outer.level == 0:
        return outer.size, 1, 1
    even = len(ladder) <= 2 and outer.upto == outer.size * outer.below
    return (outer.below, outer.size, outer.senders) if even else None


def card(place_on_host: int, ranks_on_host: int, nics_per_host: int | None) -> int:
    """The network card of a rank: neighbours on a host share one, where there are fewer cards than ranks.

    >>> [card(i, 4, nics_per_host=2) for i in range(4)], card(0, 4, nics_per_host=4)
    ([0, 0, 1, 1], -1)
    """
    if nics_per_host is None or ranks_on_host <= nics_per_host:
        return OWN
    return place_on_host * nics_per_host // ranks_on_host


def _inside(size: int) -> Ladder:
    return (Rung(0, size, 1, size),) if size > 1 else ()


def _ladder(size: int, counts: tuple[int, ...], senders: int, groups: int) -> Ladder:
    """The ladder of a group of `size` ranks with so many of them on each host."""
    fewest, most, hosts = counts[0], counts[-1], len(counts)
    return _inside(most) + ((Rung(1, hosts, fewest, size, senders, groups),) if hosts > 1 else ())


def _busiest_card(groups: Sequence[tuple[Place, ...]]) -> tuple[int, int]:
    """How many ranks, and how many groups, send through one card; only groups that leave their host do."""
    crossing = [group for group in groups if _leaves_its_host(group)]
    ranks = Counter(place for group in crossing for place in group if place[1] != OWN)
    sharing = Counter(place for group in crossing for place in set(group) if place[1] != OWN)
    return max(ranks.values(), default=1), max(sharing.values(), default=1)


def _leaves_its_host(group: Sequence[Place]) -> bool:
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
