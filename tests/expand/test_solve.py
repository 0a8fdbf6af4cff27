"""Ways are chosen for a budget in few turns: never over it, and more memory never takes longer."""

from __future__ import annotations

import random
from unittest import mock

import numpy as np
import pytest

from spmd.expand.passes.recompute.again import Effect
from spmd.expand.passes.recompute.solve import Choice, Either
from spmd.expand.passes.recompute.spans import Way

SEGMENTS = 4
STARTS = tuple((10 * i, 10 * (2 * SEGMENTS - 1 - i)) for i in range(SEGMENTS))
"""Where the forward and the backward of each segment begin."""
HALVES = 2 * 10 * 2 * SEGMENTS


def made(segment: int, freed: int, us: float, late: int) -> Way:
    """A way that frees bytes between its segment's forward and backward, but `late` of them 3 places later."""
    start, stop = 2 * STARTS[segment][0] + 10, 2 * STARTS[segment][1] - 1
    changes = ((start, stop, late - freed), (start + 16, stop, -late)) if late else ((start, stop, -freed),)
    return Way(segment, segment + 1, frozenset(), Effect(us, changes))


def choice(seed: int, ways: int, late: int) -> Choice:
    """What is alive rises to the backward and falls; of each segment so many ways, of which none takes no time."""
    drawn = random.Random(seed)
    rising = [5_000 + 1_000 * min(t, HALVES - t) // 10 for t in range(HALVES)]
    found = [made(i, 0, 0.0, 0) for i in range(SEGMENTS)]
    for i in range(SEGMENTS):
        for _ in range(ways):
            freed = drawn.randrange(200, 2_000)
            found.append(made(i, freed, freed * drawn.uniform(0.5, 1.5), min(late, freed)))
    return Choice(tuple(found), np.array(rising, dtype=np.int64), STARTS, [range(SEGMENTS)])


def turns(one: Choice, limit: int) -> tuple[list, object]:
    """The paths that are looked at for a limit, and what is chosen."""
    seen, real = [], Choice._paths

    def paths(self, aim):
        found = real(self, aim)
        seen.append(found)
        return found

    with mock.patch.object(Choice, "_paths", paths):
        return seen, one.least_time(limit)


@pytest.mark.parametrize("late", [0, 1, 7, 150])
@pytest.mark.parametrize("seed", range(4))
def test_no_path_is_looked_at_twice_for_a_limit(seed, late):
    """However few bytes it exceeds the limit by; what is chosen keeps to it, and more memory never takes longer."""
    one = choice(seed, 6, late)
    low, high, before = one.least_peak().peak, one.unlimited.peak, float("inf")
    for limit in np.linspace(low, high, 40).astype(int).tolist():
        seen, chosen = turns(one, limit)
        taken = [None if path is None else tuple(way.effect for way in path.ways) for path in seen]
        assert len(set(taken)) == len(taken) <= 20
        assert chosen.peak <= limit and chosen.us <= before
        before = chosen.us


def test_what_frees_a_little_too_late_takes_two_turns():
    """The first way would do by what it frees at most, and has one byte too much alive for a while: so the other one is
    taken, however far below the limit the first way would still seem to fit."""
    alive = np.full(HALVES, 1_000, dtype=np.int64)
    start, stop = 2 * STARTS[0][0] + 10, 2 * STARTS[0][1] - 1
    one = Choice(
        (
            Way(0, 1, frozenset(), Effect(1.0, ((start, stop, -500), (100, 101, 401)))),
            Way(0, 1, frozenset(), Effect(2.0, ((0, HALVES, -600),))),
            *[Way(i, i + 1, frozenset(), Effect(0.0, ())) for i in range(1, SEGMENTS)],
        ),
        alive, STARTS, [range(SEGMENTS)],
    )  # fmt: skip
    alive[:start] = alive[stop:] = 400
    seen, chosen = turns(one, 900)
    assert len(seen) == 2 and chosen.us == 2.0


@pytest.mark.parametrize("seed", range(3))
def test_the_least_time_is_that_of_all_choices(seed):
    """Where all that is freed is freed from the start, for each of 40 limits."""
    one = choice(seed, 3, 0)
    by_segment = [[way for way in one.ways if way.start == i] for i in range(SEGMENTS)]
    every = [()]
    for ways in by_segment:
        every = [(*before, way.effect) for before in every for way in ways]
    all_of_them = [(one.peak_with(effects), sum(effect.us for effect in effects)) for effects in every]
    low = min(peak for peak, _ in all_of_them)
    assert one.least_peak().peak == low and one.least_time(low - 1) is None
    for limit in np.linspace(low, one.unlimited.peak, 40).astype(int).tolist():
        assert one.least_time(limit).us == pytest.approx(min(us for peak, us in all_of_them if peak <= limit))


@pytest.mark.parametrize("late", [0, 150])
@pytest.mark.parametrize("seed", range(4))
def test_of_several_the_least_peak_is_that_of_the_best(seed, late):
    """In whatever order they are given. The search of the others begins where that of the first has ended, so it may
    end elsewhere within the thousandth that a search leaves open."""
    several = [choice(4 * seed + n, 6, late) for n in range(3)]
    alone = min([one.least_peak() for one in several], key=lambda chosen: (chosen.peak, chosen.us))
    for given in (several, several[::-1]):
        found = Either(tuple([choice_again(one) for one in given])).least_peak()
        assert found.peak <= alone.peak * (1 + 2**-10)
        times = [chosen.us for one in several if (chosen := one.least_time(found.peak))]
        assert found.us == min(times)


def choice_again(one: Choice) -> Choice:
    """The same to choose from, of which nothing is known yet."""
    return Choice(one.ways, one.alive, one.starts, one.groups)
