"""What a step takes at least in any order that keeps within a number of bytes.

    forward, loss, backward: each layer of the backward reads a gather of 2 GiB    30 gathers, room for 4 at the loss
    least_us: gathers may all be sent beside the forward.   least_us_within: 26 of them come behind the loss

At a *place*, a task beside which much is alive, the others are those that must come before it, those that must come
behind it, and the free ones. Whatever free ones an order puts before the place: what must be alive beside the place
then is what the first read for the last, less what the free ones may have read for the last, and all that they have
made and that is read behind. The least of that, without the results of free collectives, is a minimum cut. What is left
below the limit is the *room* of the place. So

- a free task that makes more than the room, for readers behind, comes behind the place, and cannot start before it;
- of the free collectives of a stream no more come before the place than fit into the room: by a knapsack, the rest
  takes a *least time* behind it.

With these heads each stream is one worker with interruptions, as in `least.py`. Which orders are meant: those in which
what names one of several results stands right behind the task, as its memory is there from then on. The proof is in
`docs/design/schedule.md`; the tests try all orders of small works.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np

from spmd.expand.minimum_cut import minimum_cut
from spmd.expand.timeline.least import Heads, least_us, one_worker_us, runs_on
from spmd.expand.timeline.work import Work

MOST_ALIVE, FEWEST_FREE = 16, 8
"""How many places are looked at: of so many beside which most is alive in the order of the program, those with the
fewest free tasks, of which most is known."""


def least_us_within(work: Work, limit: int) -> float:
    """What the step takes at least in any order of its tasks with no more bytes alive, in microseconds."""
    places = [place for place in _places(work, limit) if place.room >= 0]  # else no order fits, of which all is true
    heads, tails = Heads.of(work.tasks), Heads.reversed(work.tasks).found()[::-1]
    heads = replace(heads, anchors=heads.anchors.union([place.at for place in places]))
    released, found = np.zeros(len(work.tasks)), heads.found()
    for place in places:
        if late := place.forced_behind:
            released[late] = np.maximum(released[late], found[place.at] + work.tasks[place.at].us)
            found = heads.found(released)
    return max([least_us(work), *[place.least_us(found, tails) for place in places]])


def _places(work: Work, limit: int) -> list[_Place]:
    """The places that are looked at, in order."""
    alive, values = work.memory(range(len(work.tasks))), _Values.of(work)
    most = sorted([i for i, task in enumerate(work.tasks) if task.is_op], key=lambda i: (-alive[i], i))[:MOST_ALIVE]
    places = sorted([_Place.of(values, i, limit) for i in most], key=lambda place: (len(place.free), place.at))
    return sorted(places[:FEWEST_FREE], key=lambda place: place.at)


@dataclass(frozen=True)
class _Values:
    """Who makes and who touches the memory of a work. touched: for each value the tasks up to which it is alive.
    owner: for each value the task with which its memory is there."""

    work: Work
    touched: Mapping[int, tuple[int, ...]]
    owner: Mapping[int, int]

    @classmethod
    def of(cls, work: Work) -> _Values:
        tasks = work.tasks
        touched: dict[int, dict[int, None]] = {i: {} for i, task in enumerate(tasks) if task.makes}
        for i, task in enumerate(tasks):
            reads = task.reads if task.is_op or not task.makes else ()
            for value in (task.shows, *[tasks[r].shows for r in reads]):
                if value in touched:
                    touched[value][i] = None
        owner = {v: v if tasks[v].is_op or not tasks[v].reads else tasks[v].reads[0] for v in touched}
        return cls(work, {v: tuple(readers) for v, readers in touched.items()}, owner)

    @cached_property
    def cut_out(self) -> dict[int, list[int]]:
        """For each collective the ops with new memory that read it and no other collective, as those that cut tensors
        out of what was gathered."""
        tasks, found = self.work.tasks, {}
        for i, task in enumerate(tasks):
            sent = {tasks[r].shows for r in task.reads if tasks[tasks[r].shows].sends}
            if task.is_op and not task.sends and i in self.touched and len(sent) == 1:
                found.setdefault(sent.pop(), []).append(i)
        return found

    @cached_property
    def made_by(self) -> dict[int, list[int]]:
        """The values of each task, those that name its results included."""
        found: dict[int, list[int]] = {}
        for value, owner in self.owner.items():
            found.setdefault(owner, []).append(value)
        return found


@dataclass(frozen=True)
class _Place:
    """A task with what must come before and behind it. free: the others."""

    values: _Values
    at: int
    limit: int
    before: frozenset[int]
    behind: frozenset[int]

    @classmethod
    def of(cls, values: _Values, at: int, limit: int) -> _Place:
        tasks = values.work.tasks
        before: set[int] = set()
        stack = [at]
        while stack:
            task = tasks[stack.pop()]
            more = [b for b in (*task.reads, *task.follows) if b not in before]
            before.update(more)
            stack += more
        before.update([v for v, owner in values.owner.items() if owner in before])
        behind = {at}
        for i in range(at + 1, len(tasks)):
            if not behind.isdisjoint(tasks[i].reads) or not behind.isdisjoint(tasks[i].follows):
                behind.add(i)
        return cls(values, at, limit, frozenset(before), frozenset(behind - {at}))

    @cached_property
    def free(self) -> frozenset[int]:
        """The tasks that may come before or behind."""
        return frozenset(range(len(self.values.work.tasks))) - self.before - self.behind - {self.at}

    def is_kept(self, value: int) -> bool:
        """Whether a value of what comes before must be alive at the place: someone behind reads it."""
        return any(i == self.at or i in self.behind for i in self.values.touched[value])

    @cached_property
    def kept(self) -> dict[int, int]:
        """For free tasks, the bytes that each makes for those behind, itself or by what is cut out of it."""
        tasks, made_by = self.values.work.tasks, self.values.made_by
        found = {i: sum([tasks[v].makes for v in made_by.get(i, ()) if self.is_kept(v)]) for i in sorted(self.free)}
        for c, cut in self.carried.items():  # while something is not cut out, all that came is there
            found[c] += min(tasks[c].makes, sum([tasks[v].makes for v in cut]))
        return found

    @cached_property
    def carried(self) -> dict[int, list[int]]:
        """For free collectives that only free ops read, what these make of them for those behind."""
        cut_out, touched = self.values.cut_out, self.values.touched
        read = [c for c in cut_out if c in self.free and c in touched and not self.is_kept(c)]
        found = {c: [v for v in cut_out[c] if v in self.free and self.is_kept(v)] for c in read}
        return {c: kept for c, kept in found.items() if kept}

    @cached_property
    def _counted(self) -> frozenset[int]:
        """The values of `carried`."""
        return frozenset(self.carried).union(*self.carried.values())

    @cached_property
    def room(self) -> int:
        """The bytes that results of free collectives for those behind may have at the place, at most."""
        work, values = self.values.work, self.values
        always = [v for v in values.touched if v in self.before and self.is_kept(v)]
        alive = work.held + work.tasks[self.at].makes + sum([work.tasks[v].makes for v in always])
        return self.limit - alive - self._least_of_others

    @property
    def _least_of_others(self) -> int:
        """The least bytes, for any choice of free tasks before the place, of values that may be gone there and of
        those that others than collectives make.

        A free task is chosen with all that it comes behind. What is chosen makes its values, at their price; where all
        that touch a value are chosen or come before, its bytes are won. Less is won than all, or bytes are paid: the
        least of both together is a minimum cut between what is won and what is paid.
        """
        tasks, touched, free = self.values.work.tasks, self.values.touched, self.free
        prices: dict[tuple[str, int], float] = {}
        edges: dict[tuple[str, int], list[tuple[str, int]]] = {}
        always, wins = 0, []
        for v in touched:
            if v == self.at or v in self.behind or self.is_kept(v) or v in self._counted:
                continue
            rest = [i for i in touched[v] if i in free]
            if rest:
                wins.append(v)
                prices["won", v], edges["won", v] = tasks[v].makes, [("task", i) for i in rest]
                always += tasks[v].makes if v in free else 0
        for i in self._needed([i for v in wins for _, i in edges["won", v]]):
            made = [v for v in self.values.made_by.get(i, ()) if v not in self._counted]
            values = [v for v in made if not (tasks[i].sends and self.is_kept(v))]
            prices["task", i] = inf
            edges["task", i] = [("task", b) for b in (*tasks[i].reads, *tasks[i].follows) if b in free]
            edges["task", i] += [("task", v) for v in self.values.made_by.get(i, ()) if v != i]
            paid = sum([tasks[v].makes for v in values])
            if paid:
                edges["task", i].append(("paid", i))
                prices["paid", i], edges["paid", i] = paid, []
        won, paid = ([n for n in prices if n[0] == kind] for kind in ("won", "paid"))
        cut, _ = minimum_cut(prices, edges, won, paid)
        return int(sum([prices[n] for n in cut])) - always

    def _needed(self, tasks: Sequence[int]) -> list[int]:
        """These free tasks with all free ones that they come behind, and what names their results."""
        found: set[int] = set()
        stack = list(tasks)
        while stack:
            i = stack.pop()
            if i not in found:
                found.add(i)
                task = self.values.work.tasks[i]
                stack += [b for b in (*task.reads, *task.follows) if b in self.free]
                stack += self.values.made_by.get(i, ())
        return sorted(found)

    @cached_property
    def forced_behind(self) -> list[int]:
        """The free collectives whose results for those behind do not fit, so that they come behind, too."""
        return [i for i, nbytes in self.kept.items() if nbytes > self.room and self.values.work.tasks[i].sends]

    def least_us(self, heads: np.ndarray, tails: np.ndarray) -> float:
        """What the step takes at least, by what cannot come before the place. heads, tails: as in `least.py`."""
        tasks, start = self.values.work.tasks, heads[self.at] + self.values.work.tasks[self.at].us
        jobs: dict[str, list[tuple[float, float, float]]] = {}
        choice: dict[str, list[tuple[float, int]]] = {}
        ends: dict[str, tuple[float, float]] = {}
        for i, task in enumerate(tasks):
            for stream, ahead, us, after in runs_on(task) if task.sends else ():
                if stream == "compute" or not us:
                    continue
                head, tail = heads[i] + ahead, tails[i] + after
                if i in self.free and self.kept[i] <= self.room:
                    choice.setdefault(stream, []).append((us, self.kept[i]))
                    first, last = ends.get(stream, (inf, inf))
                    ends[stream] = min(first, head), min(last, tail)
                else:
                    late = start + ahead if i in self.behind or i in self.free else 0.0
                    jobs.setdefault(stream, []).append((max(head, late), us, tail))
        for stream, some in choice.items():
            rest, (head, tail) = least_left(some, self.room), ends[stream]
            more = [(head, sum([us for us, _ in some]) - rest, tail), (max(head, start), rest, tail)]
            jobs.setdefault(stream, []).extend([job for job in more if job[1] > 0])
        return max(map(one_worker_us, jobs.values()), default=0.0)


MOST_TRIES = 10_000
"""How many choices of collectives are looked at. Where that is too few, they may be cut, which leaves less."""


def least_left(choice: Sequence[tuple[float, int]], room: int) -> float:
    """Of things with a time and bytes, the least time of what does not fit into the room: a knapsack, by branch and
    bound. Those of most time for their bytes are taken first; the bound is what fits if things can be cut.

    >>> least_left([(10.0, 4), (10.0, 8), (1.0, 0)], 8), least_left([(7.0, 3), (5.0, 2), (5.0, 2)], 4)
    (10.0, 7.0)
    """
    kinds = sorted(Counter(choice).items(), key=lambda kind: (kind[0][1] / kind[0][0], kind))
    best, tries = 0.0, 0

    def look(at: int, room: int, us: float) -> None:
        nonlocal best, tries
        best, tries = max(best, us), tries + 1
        if us + _most_if_cut(kinds[at:], room) <= best or tries > MOST_TRIES:
            return
        (each, nbytes), n = kinds[at]
        for many in range(min(n, room // nbytes) if nbytes else n, -1, -1):
            look(at + 1, room - many * nbytes, us + many * each)

    look(0, room, 0.0)
    return sum([us for us, _ in choice]) - (best if tries <= MOST_TRIES else _most_if_cut(kinds, room))


def _most_if_cut(kinds: Sequence[tuple[tuple[float, int], int]], room: int) -> float:
    """The most time that fits into the room of things that can be cut, of which there are so many of each kind."""
    most = 0.0
    for (us, nbytes), n in kinds:
        most += us * (min(n, room / nbytes) if nbytes else n)
        room = max(0, room - n * nbytes)
    return most
