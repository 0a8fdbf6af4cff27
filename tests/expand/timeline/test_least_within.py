"""No order that keeps within the memory is faster than the bound that knows the memory: all orders of small works."""

import itertools
import random
from collections.abc import Iterator
from math import inf

from spmd.expand.timeline.least import least_us
from spmd.expand.timeline.least_within import least_left, least_us_within
from spmd.expand.timeline.prices import Sending
from spmd.expand.timeline.replay import step_us
from spmd.expand.timeline.work import Task, Work


def orders(work: Work) -> Iterator[list[int]]:
    """All orders of a work, in which what names the results of a task stands right behind it."""
    tasks, n = work.tasks, len(work.tasks)
    pieces = {i: [j for j in range(n) if not tasks[j].is_op and tasks[j].makes and tasks[j].reads == (i,)]
              for i in range(n)}
    glued = {j for some in pieces.values() for j in some}

    def extended(order: list[int], done: frozenset[int]) -> Iterator[list[int]]:
        if len(order) == n:
            yield order
        for i in range(n):
            if i not in done and i not in glued and done.issuperset((*tasks[i].reads, *tasks[i].follows)):
                yield from extended([*order, i, *pieces[i]], done.union([i], pieces[i]))

    yield from extended([], frozenset())


def small_work(seed: int) -> Work:
    """A few ops and collectives, some with pieces; values of very different sizes, some overwritten."""
    r = random.Random(seed)
    tasks = [Task("w", (), (), (), 0.0, 0, 0, None, "", False)]
    while len(tasks) < 8:
        i = len(tasks)
        reads = tuple(sorted({r.choice([0, 0, r.randrange(i), i - 1]) for _ in range(r.randint(1, 2))}))
        sends, us, makes = None, r.choice([0.0, 1.0, 4.0]), r.choice([0, 1, 10, 10, 100])
        if r.random() < 0.45:
            sends = Sending(r.choice("aab"), r.choice([1.0, 5.0, 20.0]), ((0, 1.0),), r.choice([0.0, 1.0, 4.0]), 1)
            us = r.choice([0.0, 0.0, 1.0, 4.0])  # to pack it
        waits = tuple(dict.fromkeys([w for x in reads for w in (x, *tasks[x].reads) if tasks[w].sends]))
        follows = (r.randrange(i),) if r.random() < 0.15 else ()
        shown = [x for x in reads if tasks[x].makes and not tasks[x].sends]
        shows = r.choice(shown) if shown and not sends and r.random() < 0.2 else i  # it writes into what it reads
        cut_up = sends is not None and i < 7 and r.random() < 0.5
        made = makes if shows == i and not cut_up else 0
        tasks.append(Task(f"t{i}", reads, waits, follows, us, made, shows, sends, "", True))
        if cut_up:
            tasks.append(Task(f"t{i}_of", (i,), (), (), 0.0, makes, i + 1, None, "", False))
    read = {x for task in tasks for x in task.reads}
    last = [i for i in range(len(tasks)) if i not in read or r.random() < 0.2]  # all that is sent is waited for
    waits = tuple(dict.fromkeys([w for x in last for w in (x, *tasks[x].reads) if tasks[w].sends]))
    tasks.append(Task("out", tuple(last), waits, (), 0.0, 0, len(tasks), None, "", False))
    return Work(tuple(tasks), 5, keeps_sent=r.random() < 0.3)


def test_no_order_within_the_memory_is_faster_than_the_bound():
    """For every limit that some order keeps to, the fastest of all orders that do; and often it is met exactly."""
    tighter = met = 0
    for seed in range(120):
        work = small_work(seed)
        best: dict[int, float] = {}
        for order in orders(work):
            peak = max(work.memory(order))
            best[peak] = min(best.get(peak, inf), step_us(work, order))
        free = least_us(work)
        for limit in sorted(best):
            optimum = min(us for peak, us in best.items() if peak <= limit)
            bound = least_us_within(work, limit)
            assert free - 1e-9 <= bound <= optimum + 1e-9, (seed, limit)
            tighter += bound > free + 1e-9
            met += bound > free + 1e-9 and bound > optimum - 1e-9
    assert tighter > 10 and met > 5


def test_gathers_that_do_not_fit_come_behind():
    """Ten ops make 10 bytes each for the backward, which reads four gathers of 30 us and 20 bytes. There is room for
    one beside the last op of the forward, and beside each of the backward. With more all are sent beside the forward.
    """
    gather = Sending("a", 30.0, (), 0.0, 1)
    tasks = [Task("w", (), (), (), 0.0, 0, 0, None, "", False)]
    tasks += [Task(f"f{i}", (i - 1,), (), (), 10.0, 10, i, None, "", True) for i in range(1, 11)]
    for k in range(4):
        n = len(tasks)
        tasks.append(Task(f"gather{k}", (0,), (), (), 0.0, 20, n, gather, "", True))
        reads = tuple(sorted({n, n - 1, *range(1, 11)} - {0}))
        tasks.append(Task(f"b{k}", reads, (n,), (), 1.0, 0, n + 1, None, "", True))
    work = Work(tuple(tasks), 0)
    assert max(work.memory(range(len(tasks)))) == 120
    assert least_us(work) == 121.0
    assert least_us_within(work, 120) == 100.0 + 3 * (30.0 + 1.0) + 1.0
    order = [0, 11, *range(1, 11), *range(12, len(tasks))]
    assert step_us(work, order) == 194.0 and max(work.memory(order)) == 120
    assert least_us_within(work, 180) == 121.0


def test_what_is_packed_and_ordered_counts_beside_what_is_computed():
    """Two collectives are packed, computed beside for 10 us, and put in order before the last op: 2 + 10 + 6 us."""
    tasks = [Task("w", (), (), (), 0.0, 0, 0, None, "", False)]
    for i in (1, 2):
        tasks.append(Task(f"g{i}", (0,), (), (), 1.0, 0, i, Sending("ab"[i - 1], 1.0, (), 3.0, 1), "", True))
    tasks.append(Task("f", (0,), (), (), 10.0, 0, 3, None, "", True))
    tasks.append(Task("big", (1, 2, 3), (1, 2), (), 5.0, 9, 4, None, "", True))
    tasks.append(Task("late", (0,), (), (), 0.0, 1, 5, Sending("a", 20.0, (), 0.0, 1), "", True))
    tasks.append(Task("last", (4, 5), (5,), (), 1.0, 0, 6, None, "", True))
    work = Work(tuple(tasks), 0)
    assert least_us(work) == 18.0 + 5.0 + 1.0
    assert least_us_within(work, 9) == 18.0 + 5.0 + 20.0 + 1.0  # what is sent last has no room beside the large op


def test_the_least_that_is_left_is_that_of_all_subsets(monkeypatch):
    """Of few things; and where there is no time to look, what may be cut leaves no more."""
    assert least_left([], 3) == 0.0 and least_left([(4.0, 0), (6.0, 3)], 0) == 6.0
    r = random.Random(0)
    for _ in range(60):
        choice = [(float(r.randint(1, 9)), r.choice([0, 2, 3, 3, 5])) for _ in range(r.randint(1, 8))]
        room = r.randint(0, 14)
        subsets = itertools.product([False, True], repeat=len(choice))
        left = [[x for x, taken in zip(choice, some, strict=True) if not taken]
                for some in subsets if sum(x[1] for x, taken in zip(choice, some, strict=True) if taken) <= room]
        least = min(sum(us for us, _ in some) for some in left)
        assert least_left(choice, room) == least
        with monkeypatch.context() as m:
            m.setattr("spmd.expand.timeline.least_within.MOST_TRIES", 0)
            assert least_left(choice, room) <= least + 1e-9
    with monkeypatch.context() as m:
        m.setattr("spmd.expand.timeline.least_within.MOST_TRIES", 0)
        assert least_left([(4.0, 4), (4.0, 2)], 4) == 2.0
