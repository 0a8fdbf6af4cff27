"""What it does to time and memory that some units are freed and computed again, or wait in host memory.

    freed {gelu}:   gelu runs again before linear_backward; its bytes are gone from its last reader to there
    hosted {gelu}:  gelu is copied to the host, and back in time for linear_backward; its bytes are gone between

Before each reader behind the wait, what it lacks is written again, with all that this needs: what is there is read,
what was freed or is gone is written again in turn, once. What waits in host memory is fetched before its first reader,
whether that ran there or is written again (`copies.py`). `rewrite.py` writes what is foreseen here.

Time is counted in halves of places: node t runs at 2 t, and what is written before it at 2 t - 1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from spmd.expand.passes.recompute.copies import Clock, Copy, Window, Wish
from spmd.expand.passes.recompute.values import Root, Values, recomputable
from spmd.expand.timeline.prices import copy_us

NONE: frozenset[int] = frozenset()


class CannotRecompute(Exception):
    """Something that is needed is gone, and its op can run only once; or a copy back would begin before the one to the
    host is done."""


@dataclass(frozen=True)
class Effect:
    """What freeing a set of units does.

    us: what is computed and sent again, and how long copies are waited for. changes: (start, stop, bytes) of memory
    that is alive from the one half place to before the other, more or less than when all is kept. copies: of what waits
    in host memory.
    """

    us: float
    changes: tuple[tuple[int, int, int], ...]
    copies: tuple[Copy, ...] = ()


@dataclass(frozen=True)
class Lookup:
    """Looks up how units are computed again."""

    values: Values

    @cached_property
    def can(self) -> list[bool]:
        """For each node whether it may run twice."""
        return recomputable(self.values.nodes)

    @cached_property
    def clock(self) -> Clock:
        """What the ops of the program take, without what they wait for."""
        tasks = self.values.work.tasks
        return Clock([*accumulate([task.us + (task.sends.joined_us if task.sends else 0.0) for task in tasks])])

    @cached_property
    def whole(self) -> tuple[int, int]:
        """The last place of the forward and the first one of the backward, for copies of all segments."""
        after = [r.after for roots in self.values.units.values() for r in roots]
        return self.values.turn, max(min(after, default=0), self.values.turn + 1)

    def nbytes(self, unit: int) -> int:
        """The bytes of a unit that wait."""
        return sum([r.nbytes for r in self.values.units[unit]])

    def begins(self, unit: int) -> int:
        """The place behind which a unit waits."""
        return max([r.before for r in self.values.units[unit]])

    def copy_us(self, unit: int) -> float:
        """What it takes to copy the values of a unit to host memory, or back."""
        link = self.values.program.mesh.topology.machine.host
        return sum([copy_us(link, r.nbytes) for r in self.values.units[unit]]) if link else 0.0

    def is_there(self, place: int, at: int, freed: Collection[int], hosted: Collection[int] = NONE) -> bool:
        """Whether the value of a node can be read at a place, if these units are freed, and these in host memory. Kept
        units can, always."""
        values = self.values
        root = values.root(place)
        if root not in values.roots:  # an input, or written into one
            return True
        unit = values.unit(place)
        if unit in freed or self.is_hosted(root, hosted):
            return False
        return (unit in values.units and unit not in hosted) or values.roots[root].touches[-1] >= at

    def is_hosted(self, place: int, hosted: Collection[int]) -> bool:
        """Whether a node makes a value that waits, if these units are in host memory. Their other results do not."""
        unit = self.values.unit(place)
        return unit in hosted and any(r.place == place for r in self.values.units[unit])

    def needs(self, unit: int) -> frozenset[int]:
        """The units that are read where a unit is computed again: directly, or by what is gone by then."""
        if unit not in self._needs:
            found: set[int] = set()
            self._walk(unit, min([r.after for r in self.values.units[unit]]), found, set())
            self._needs[unit] = frozenset(found - {unit})
        return self._needs[unit]

    @cached_property
    def _needs(self) -> dict[int, frozenset[int]]:
        return {}

    def _walk(self, place: int, at: int, found: set[int], seen: set[int]) -> None:
        if place in seen:
            return
        seen.add(place)
        if not self.can[place]:
            raise CannotRecompute(self.values.nodes[place].name)
        for r in self.values.work.tasks[place].reads:
            if self.values.unit(r) in self.values.units:
                found.add(self.values.unit(r))
                self._views(r, at, found, seen)
            elif not self.is_there(r, at, ()):
                self._walk(r, at, found, seen)

    def _views(self, place: int, at: int, found: set[int], seen: set[int]) -> None:
        """What stands between the result of a unit and a reader of it can run again, too."""
        if place not in seen and place != self.values.unit(place):
            seen.add(place)
            if not self.can[place]:
                raise CannotRecompute(self.values.nodes[place].name)
            for r in self.values.work.tasks[place].reads:
                self._views(r, at, found, seen)

    def effect(
        self, freed: Collection[int], hosted: Collection[int] = NONE, window: Window | None = None
    ) -> Effect:
        """What freeing these units does, and sending these ones to host memory within a window."""
        return _Writing(self, frozenset(freed), frozenset(hosted), window or Window(*self.whole)).effect()

    def costs(self, freed: Collection[int], hosted: Collection[int] = NONE) -> dict[int, float]:
        """For each of the freed units the microseconds that it takes to compute it again, while others are in host
        memory; and for those what they take beside the copies."""
        return _Writing(self, frozenset(freed), frozenset(hosted), Window(*self.whole)).costs()

    def us(self, place: int) -> float:
        """What a node takes, with what it sends."""
        task = self.values.work.tasks[place]
        return task.us + (task.sends.us + task.sends.joined_us if task.sends else 0.0)

    def readers(self, freed: Collection[int]) -> dict[int, list[int]]:
        """By place, in order: the readers behind the waits of these units, with the operands that they lack there."""
        values, found = self.values, {}
        for unit in freed:
            after = {r.place: r.after for r in values.units[unit]}
            for place in after:
                for j in values.roots[place].touches:
                    if j >= after[place]:
                        found.setdefault(j, []).extend(
                            x for x in values.work.tasks[j].reads
                            if values.root(x) == place and x < after[place]
                        )  # fmt: skip
        return {j: sorted(set(found[j])) for j in sorted(found)}


@dataclass
class _Writing:
    """What is written again, as it is written. order: the nodes, by place, with the reader that they stand before.
    owners: for each of them the unit that it is written for. copies: the half places of the copies. last: of the memory
    of each copy the last reader. extended: until when a kept value is alive longer than it was. needed: of what is in
    host memory, the place that reads it first."""

    lookup: Lookup
    freed: frozenset[int]
    hosted: frozenset[int]
    window: Window
    order: list[tuple[int, int]] = field(default_factory=list)
    owners: list[int] = field(default_factory=list)
    copies: dict[int, int] = field(default_factory=dict)
    last: dict[int, tuple[int, int]] = field(default_factory=dict)
    extended: dict[int, int] = field(default_factory=dict)
    needed: dict[int, int] = field(default_factory=dict)

    def write(self) -> None:
        """Write all that the readers lack."""
        for j, lacks in self.lookup.readers(self.freed | self.hosted).items():
            for place in lacks:
                self._read(place, j, self.lookup.values.unit(place))
                self._note(place, (2 * j, len(self.order)))
        for root in [*self._roots(self.freed), *self._roots(self.hosted)]:
            if root.place in self.last:  # a view behind the wait may be read later than it is made
                self.last[root.place] = max(self.last[root.place], (2 * root.touches[-1], 0))

    def effect(self) -> Effect:
        self.write()
        us, copies = sum([self.lookup.us(place) for place, _ in self.order]), self._sent()
        changes = (*self._changes(), *self._away(copies))
        return Effect(us + sum([copy.us for copy in copies]), changes, tuple(copies))

    def _roots(self, units: Collection[int]) -> Iterator[Root]:
        for unit in units:
            yield from self.lookup.values.units[unit]

    def _sent(self) -> list[Copy]:
        """The copies of what is in host memory."""
        if not self.hosted:
            return []
        lookup = self.lookup
        wishes = [Wish(u, lookup.begins(u), self.needed[u], lookup.copy_us(u)) for u in sorted(self.hosted)]
        copies = lookup.clock.copies(wishes, self.window)
        if any(copy.leaves >= copy.returns for copy in copies):
            raise CannotRecompute("there is no time in host memory")
        return copies

    def costs(self) -> dict[int, float]:
        """For each unit the microseconds of what is written for it."""
        self.write()
        found = dict.fromkeys(sorted(self.freed), 0.0)
        for (place, _), owner in zip(self.order, self.owners, strict=True):
            found[owner] = found.get(owner, 0.0) + self.lookup.us(place)  # views of what was fetched, too
        return found

    def _read(self, place: int, j: int, owner: int) -> None:
        """Make sure that the value of a node can be read by what is written before place j."""
        lookup, values = self.lookup, self.lookup.values
        if place in self.copies:
            return
        if lookup.is_hosted(place, self.hosted):
            unit = values.unit(place)
            self.needed[unit] = min(self.needed.get(unit, j), j)
            self.copies[place] = 2 * j - 1
            return
        if lookup.is_there(place, j, self.freed, self.hosted):
            root = values.roots.get(values.root(place))
            if root is not None and root.touches[-1] < j:
                self.extended[root.place] = max(self.extended.get(root.place, 0), 2 * j)
            return
        if not lookup.can[place]:
            raise CannotRecompute(values.nodes[place].name)
        owner = values.unit(place) if values.unit(place) in self.freed else owner
        for r in values.work.tasks[place].reads:
            self._read(r, j, owner)
        if values.work.tasks[place].is_op:  # one of several results has memory of its own, and keeps no other alive
            for r in values.work.tasks[place].reads:
                self._note(r, (2 * j - 1, len(self.order)))
        self.copies[place] = 2 * j - 1
        self.order.append((place, j))
        self.owners.append(owner)
        self._note(place, (2 * j - 1, len(self.order) - 1))

    def _note(self, place: int, when: tuple[int, int]) -> None:
        """Note that the memory of a copy is read at this time."""
        if place in self.copies:
            root = self.lookup.values.root(place)
            self.last[root] = max(self.last.get(root, when), when)

    def _changes(self) -> Iterator[tuple[int, int, int]]:
        values = self.lookup.values
        for root in self._roots(self.freed):
            yield 2 * root.before + 1, 2 * root.touches[-1] + 1, -root.nbytes
        for place, until in self.extended.items():
            root = values.roots[place]
            yield 2 * root.touches[-1] + 1, until, root.nbytes
        yield from self._made()

    def _away(self, copies: list[Copy]) -> Iterator[tuple[int, int, int]]:
        """The memory of what is in host memory: gone behind the wait, there again from the fetch on."""
        for copy in copies:
            for root in self.lookup.values.units[copy.unit]:
                yield 2 * copy.leaves + 2, 2 * root.touches[-1] + 1, -root.nbytes
                yield 2 * copy.returns - 1, self.last.get(root.place, (2 * copy.returns, 0))[0] + 1, root.nbytes

    def _made(self) -> Iterator[tuple[int, int, int]]:
        """The memory of what is written again, with the most that is alive while it is written."""
        roots, by_place = self.lookup.values.roots, {}
        for at, (place, j) in enumerate(self.order):
            by_place.setdefault(j, []).append((at, place))
        for j, written in by_place.items():
            begins = 2 * j - 1
            alive = most = stays = 0
            dying: dict[int, int] = {}
            for at, place in written:
                if place in roots:
                    ends, last = self.last[place]
                    alive += roots[place].nbytes
                    if ends > begins:
                        stays += roots[place].nbytes
                        yield begins, ends + 1, roots[place].nbytes
                    else:
                        dying[last] = dying.get(last, 0) + roots[place].nbytes
                most = max(most, alive)
                alive -= dying.pop(at, 0)
            if most > stays:
                yield begins, begins + 1, most - stays
