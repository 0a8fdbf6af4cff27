"""When copies to host memory are made, waited for and fetched, and how long ops wait for them.

    ops             | gelu | down | add | ln | ...        | ln' | add' | down' | gelu' ...
    to host                 [gelu   ]                                                        freed behind down
    from host                                        [gelu       ]                           fetched before ln'

Each way has an engine of its own, which makes one copy after the other. A copy begins behind the last forward reader of
the value, and is waited for where the ops before take as long, or where the forward of the span ends. It is fetched so
early that it is there for its first reader, but not before the backward of the span begins. So nothing is under way at
the ends of a span, and what spans cost adds up. *At once* means that nothing is computed meanwhile: it takes the time
of all copies, and needs the least memory.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf


@dataclass(frozen=True)
class Window:
    """Where copies may be under way. last: the last place behind which one may be waited for. first: the first place
    before which one may be fetched. at_once: whether each is waited for where it begins."""

    last: int
    first: int
    at_once: bool = False


@dataclass(frozen=True)
class Copy:
    """A unit that is sent to host memory. begins, leaves: the places behind which the copy begins and is waited for.
    returns: the place before which it is fetched. us: how long ops wait for it, both ways."""

    unit: int
    begins: int
    leaves: int
    returns: int
    us: float


@dataclass(frozen=True)
class Wish:
    """A unit to be copied, behind one place, to be there again before another one. us: of a copy."""

    unit: int
    begins: int
    needed: int
    us: float


@dataclass(frozen=True)
class Clock:
    """ends: for each place the microseconds that the ops up to it take."""

    ends: Sequence[float]

    def between(self, first: int, last: int) -> float:
        """What the ops behind one place take, up to another one."""
        return max(0.0, self.ends[last] - self.ends[first])

    def copies(self, wishes: Sequence[Wish], window: Window) -> list[Copy]:
        """The copies of these units, in the order in which they are needed."""
        out = {unit: (leaves, us) for unit, leaves, us in self._out(sorted(wishes, key=_beginning), window)}
        back = self._back(sorted(wishes, key=_need), window)
        return [Copy(w.unit, w.begins, out[w.unit][0], returns, out[w.unit][1] + us) for w, returns, us in back]

    def _out(self, wishes: Sequence[Wish], window: Window) -> Iterator[tuple[int, int, float]]:
        """Each unit with the place behind which it is waited for, and how long."""
        engine, waited = 0.0, 0.0
        for w in wishes:
            late = waited if w.begins >= window.last else 0.0
            engine = max(engine, self.ends[w.begins] + late) + w.us
            fits = bisect_left(self.ends, engine)
            leaves = w.begins if window.at_once else max(w.begins, min(fits, window.last))
            us = w.us if window.at_once else max(0.0, engine - self.ends[leaves] - waited)
            waited += us if leaves >= window.last else 0.0
            yield w.unit, leaves, us

    def _back(self, wishes: Sequence[Wish], window: Window) -> Iterator[tuple[Wish, int, float]]:
        """Each unit with the place before which it is fetched, and how long it is waited for."""
        until, places = inf, []
        for w in reversed(wishes):
            until = min(until, self._start(w.needed)) - w.us
            fits = bisect_right(self.ends, until)  # the last place that starts by then
            places.append(w.needed if window.at_once else min(w.needed, max(fits, window.first)))
        engine, waited = 0.0, 0.0
        for w, returns in zip(wishes, reversed(places), strict=True):
            engine = max(engine, self._start(returns) + waited) + w.us
            us = max(0.0, engine - self._start(w.needed) - waited)
            waited += us
            yield w, returns, us

    def _start(self, place: int) -> float:
        return self.ends[place - 1] if place else 0.0


def _beginning(wish: Wish) -> tuple[int, int]:
    return wish.begins, wish.unit


def _need(wish: Wish) -> tuple[int, int]:
    return wish.needed, wish.unit
