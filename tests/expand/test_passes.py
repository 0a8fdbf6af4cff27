"""Passes: named, in any order, verified; the schedule is never slower or bigger than the program as it came."""

import functools
import itertools
import random
from math import inf

import pytest
import torch
import ways
from torch import optim

import spmd
from spmd import MeshTopoInfo
from spmd.expand.passes.list_scheduler import WINDOW, Start, Ways, listed
from spmd.expand.passes.passes import PASSES, Buckets, Schedule, checked_passes, with_passes
from spmd.expand.passes.schedule import WAYS
from spmd.expand.timeline.least import least_us
from spmd.expand.timeline.replay import bound_us, critical_us, step_us
from spmd.expand.timeline.work import Sending, Task, Work
from spmd.mesh.layout import HostGrid
from tests.expand.side_by_side import GPT_PLAN, INPUTS, NET, Net, gpt, rows, seeded, tokens, train_step

PLANS = {"dp": ((4, 1), {}), "zero3, tp": ((2, 2), {"params": GPT_PLAN, "fully_shard": "dp"})}


def program_of(plan):
    """The program of a GPT under a plan, on Hopper; without passes."""
    shape, more = PLANS[plan]
    mesh = spmd.DeviceMesh("cpu", torch.arange(4).view(shape).tolist(), mesh_dim_names=("dp", "tp"))
    mesh = mesh.with_topology(MeshTopoInfo(HostGrid(shape), "hopper"))
    model = gpt(n_embd=64)
    step = spmd.compile(train_step, mesh, inputs=INPUTS, passes=(), **more)
    return step.program_for(model, optim.AdamW(model.parameters()), *tokens(8)[0])


programs = functools.cache(program_of)


@pytest.fixture(params=PLANS)
def program(request):
    return programs(request.param)


def test_each_pass_and_every_pair_is_verified(program):
    """In both orders and twice; what the ranks run is verified, too. The program that is given is not changed."""
    text = str(program)
    for names in [(a,) for a in PASSES] + list(itertools.permutations(PASSES, 2)) + [("schedule", "schedule")]:
        after = with_passes(program, checked_passes(names))
        assert [r.name for r in after.reports] == list(names)
        assert all(r.same_bits != (r.name in ("chunks", "fused_updates")) for r in after.reports)
        assert sum(c.nbytes for c in after.collectives) == sum(c.nbytes for c in program.collectives)
    after.memory()  # it is bound, and the code of the rank is verified
    assert str(program) == text


def test_a_schedule_is_faster_and_not_bigger(program):
    """It hides what is sent; by the exact count, the memory of the rank is what it was."""
    after = with_passes(program, (Schedule(),))
    (report,) = after.reports
    before, now = program.timeline(), after.timeline()
    assert report.taken == (now.us < before.us)
    assert now.us <= before.us and now.peak <= before.peak and now.bound_us == pytest.approx(before.bound_us)
    if report.taken:
        assert (report.before.us, report.after.us) == (before.us, now.us)
        assert after.memory().peak <= program.memory().peak
    again = with_passes(after, (Schedule(),))
    assert again.timeline().us <= now.us
    assert sorted(n.name for n in after.graph.nodes) == sorted(n.name for n in program.graph.nodes)


def trained(passes):
    """Losses, parameters and state after three steps on this rank, and whether the last pass was taken."""
    mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = seeded(Net)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    step = spmd.compile(train_step, mesh, inputs=INPUTS, params=NET, fully_shard="dp", passes=passes)
    losses = [step(model, optimizer, *batch).detach() for batch in rows(8)]
    return losses, list(model.parameters()), [s["exp_avg"] for s in optimizer.state.values()], step.program.reports


def test_results_are_the_same_to_the_bit():
    """A training with all passes and with none, on simulated ranks; but for fused updates, whose kernel rounds."""
    names = tuple(name for name in PASSES if name != "fused_updates")[::-1]
    for (*alone, _), (*passed, reports) in zip(
        ways.on_ranks(lambda: trained(()), 4), ways.on_ranks(lambda: trained(names), 4), strict=True
    ):
        assert {"buckets", "overlap"} <= {r.name for r in reports if r.taken}
        assert ways.same(alone, passed)


# ---- control ----------------------------------------------------------------------------------


def test_passes_are_named_values_or_functions():
    """Names stand for the passes with their usual sizes; others are errors that say what there is."""
    mine = lambda program: program  # noqa: E731
    assert checked_passes(["schedule", Buckets(mb=1.0), mine]) == (Schedule(), Buckets(1.0), mine)
    with pytest.raises(ValueError, match=r"no pass 'shedule'; those with a name are .*schedule"):
        checked_passes(["shedule"])
    with pytest.raises(TypeError, match="give a list of passes"):
        checked_passes("schedule")
    with pytest.raises(TypeError, match="is no pass"):
        checked_passes([Schedule])


def test_a_pass_of_the_user_is_verified_and_reported():
    """Nothing is known of its bits, and what it returns must be a program."""
    program = programs("dp")

    def same(program):
        return program

    (report,) = with_passes(program, (same,)).reports
    assert str(report) == "same                 bits unknown     not taken: nothing to change"
    with pytest.raises(TypeError, match="the pass <lambda> returned a int"):
        with_passes(program, (lambda program: 1,))


# ---- any work ---------------------------------------------------------------------------------


def random_work(seed):
    """Tasks that read earlier ones, send on three streams over two levels of links, and overwrite in order."""
    r = random.Random(seed)
    tasks: list[Task] = [Task(f"in{i}", (), (), (), 0.0, 0, i, None, "", False) for i in range(3)]
    for i in range(3, r.randint(5, 60)):
        reads = tuple(sorted({r.randrange(max(0, i - r.choice([3, 60])), i) for _ in range(r.randint(1, 3))}))
        sends = None
        if r.random() < 0.3:
            level, us = r.randrange(2), r.uniform(1, 20)
            sends = Sending(r.choice("abc"), us, ((level, us * 0.7),), r.choice([0.0, 1.0]), 1)
        follows = (r.randrange(i),) if r.random() < 0.1 else ()
        waits = tuple(x for x in reads if tasks[x].sends)
        us = r.choice([0.0, r.uniform(0.1, 10)])
        tasks.append(Task(f"t{i}", reads, waits, follows, us, r.randrange(100), i, sends, "", True))
    n = len(tasks)
    every = tuple(range(n))
    tasks.append(Task("out", every, tuple(i for i in every if tasks[i].sends), (), 0.0, 0, n, None, "", False))
    return Work(tuple(tasks), 0)


@pytest.mark.parametrize("ways", [Ways(), Ways(sink=False), Ways(fill=False), Ways(margin=0.0), Ways(ahead=2)], ids=str)
def test_any_order_is_one_that_the_tasks_allow(ways):
    """Each task once, behind what it reads and what it must follow; the same order each time."""
    for seed in range(60):
        work = random_work(seed)
        limit = max(work.memory(range(len(work.tasks))))
        start = Start(work, limit)
        order = listed(start, ways)
        assert order == listed(start, ways) == listed(Start(work, limit), ways)
        assert sorted(order) == list(range(len(work.tasks))), seed
        at = {i: place for place, i in enumerate(order)}
        for i, task in enumerate(work.tasks):
            assert all(at[b] < at[i] for b in (*task.reads, *task.follows)), (seed, i)


def test_no_order_is_faster_than_the_bound():
    """Random tasks in the orders that are found, and in random ones; the bound is never below the simple one."""
    tight = 0
    for seed in range(60):
        work, r = random_work(seed), random.Random(seed)
        least = least_us(work)
        steps = [step_us(work, listed(Start(work, 1 << 40), way)) for way in WAYS]
        steps += [step_us(work, any_order(work, r)) for _ in range(20)]
        assert critical_us(work) <= least + 1e-6 and least <= min(steps) + 1e-6, seed
        tight += least > max(bound_us(work), 1e-9) * (1 + 1e-6)
    assert tight > 5  # it sees more than the busiest stream and the longest chain


def any_order(work, r):
    """An order that the tasks allow, at random."""
    left, order, done = list(range(len(work.tasks))), [], set()
    while left:
        i = r.choice([i for i in left if done.issuperset((*work.tasks[i].reads, *work.tasks[i].follows))])
        left.remove(i)
        order.append(i)
        done.add(i)
    return order


def test_a_first_gather_and_a_last_reduction_are_not_hidden():
    """Ten ops of 10 us that read a gather of 50 and are summed in 30: at least 180 us; they alone take 100."""
    tasks = [Task("w", (), (), (), 0.0, 0, 0, None, "", False)]
    tasks.append(Task("gather", (0,), (), (), 0.0, 0, 1, Sending("a", 50.0, (), 0.0, 1), "", True))
    tasks += [Task(f"t{i}", (1,), (1,), (), 10.0, 0, i + 2, None, "", True) for i in range(10)]
    tasks.append(Task("sum", tuple(range(2, 12)), (), (), 0.0, 0, 12, Sending("a", 30.0, (), 0.0, 1), "", True))
    work = Work(tuple(tasks), 0)
    assert (bound_us(work), least_us(work), step_us(work)) == (100.0, 180.0, 180.0)


def test_gathers_find_room_where_ops_that_fill_waits_take_none_for_long():
    """A wait of 20 us in the forward may be filled with what an update needs, which is alive until the end. Then the
    gather of the backward, of 40 us, does not fit beside the loss; it does if only what is nearer fills waits."""
    first, gather = Sending("b", 20.0, (), 0.0, 1), Sending("a", 40.0, (), 0.0, 1)
    work = Work((
        Task("w", (), (), (), 0.0, 0, 0, None, "", False),
        Task("first", (0,), (), (), 0.0, 0, 1, first, "", True),
        Task("forward", (1,), (1,), (), 100.0, 10, 2, None, "", True),
        Task("loss", (2,), (), (), 10.0, 10, 3, None, "", True),
        Task("gradient", (3,), (), (), 1.0, 0, 4, None, "", True),
        Task("gather", (0,), (), (), 0.0, 10, 5, gather, "", True),
        Task("backward", (4, 5), (5,), (), 5.0, 0, 6, None, "", True),
        Task("decay", (0,), (), (), 15.0, 10, 7, None, "", True),
        Task("update", (6, 7), (), (), 1.0, 0, 8, None, "", True),
    ), 0)  # fmt: skip
    far, near = (listed(Start(work, 30), Ways(margin=1.0, ahead=ahead)) for ahead in (inf, 4))
    assert step_us(work, far) == 20.0 + 100.0 + 10.0 + 40.0 + 5.0 + 1.0
    assert step_us(work, near) == 20.0 + 100.0 + 10.0 + 1.0 + 5.0 + 15.0 + 1.0
    assert max(work.memory(far)) == max(work.memory(near)) == 30


def test_ops_from_behind_the_fullest_place_leave_it_to_gathers():
    """The same where the op is near: it would be alive beside the loss, where most is."""
    first, gather = Sending("b", 20.0, (), 0.0, 1), Sending("a", 40.0, (), 0.0, 1)
    work = Work((
        Task("w", (), (), (), 0.0, 0, 0, None, "", False),
        Task("first", (0,), (), (), 0.0, 0, 1, first, "", True),
        Task("forward", (1,), (1,), (), 100.0, 10, 2, None, "", True),
        Task("loss", (2,), (), (), 10.0, 10, 3, None, "", True),
        Task("gather", (0,), (), (), 0.0, 10, 4, gather, "", True),
        Task("decay", (0,), (), (), 15.0, 10, 5, None, "", True),
        Task("backward", (3, 4, 5), (4,), (), 5.0, 0, 6, None, "", True),
    ), 0)  # fmt: skip
    with_all, without = (listed(Start(work, 30), Ways(margin=1.0, ahead=ahead)) for ahead in (inf, 100))
    assert without.index(5) > without.index(3) > with_all.index(5)
    assert max(work.memory(without)) == 30 and step_us(work, without) == 20.0 + 100.0 + 10.0 + 15.0 + 5.0


def test_while_an_op_waits_streams_go_on():
    """An op waits 50 us for a gather. Two gathers of another stream, of 10 us each, are sent meanwhile."""
    slow, quick = Sending("a", 50.0, (), 0.0, 1), Sending("b", 10.0, (), 0.0, 1)
    work = Work((
        Task("w", (), (), (), 0.0, 0, 0, None, "", False),
        Task("slow", (0,), (), (), 0.0, 0, 1, slow, "", True),
        Task("first", (1,), (1,), (), 5.0, 0, 2, None, "", True),
        Task("quick1", (0,), (), (), 0.0, 0, 3, quick, "", True),
        Task("quick2", (0,), (), (), 0.0, 0, 4, quick, "", True),
        Task("last", (2, 3, 4), (3, 4), (), 5.0, 0, 5, None, "", True),
    ), 0)  # fmt: skip
    assert step_us(work, listed(Start(work, inf), Ways(margin=1.0))) == 60.0


def test_launches_that_wait_in_a_long_program_are_found():
    """More ops than the scheduler looks at, with a gather at the end: it is launched at the start."""
    n = 3 * WINDOW
    tasks = [Task("w", (), (), (), 0.0, 0, 0, None, "", False)]
    tasks += [Task(f"t{i}", (i - 1,) if i > 1 else (0,), (), (), 1.0, 0, i, None, "", True) for i in range(1, n)]
    tasks.append(Task("gather", (0,), (), (), 0.0, 0, n, Sending("a", 50.0, (), 0.0, 1), "", True))
    tasks.append(Task("use", (n - 1, n), (n,), (), 1.0, 0, n + 1, None, "", True))
    work = Work(tuple(tasks), 0)
    assert step_us(work) == n + 50
    assert step_us(work, listed(Start(work, 0), Ways())) == n
