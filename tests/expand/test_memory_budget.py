"""A memory budget is kept exactly, in the least time, and no number changes."""

import functools
from dataclasses import replace

import pytest
import torch
import ways
from torch import fx, optim

import spmd
from spmd.expand.passes.memory_budget import BudgetError, Plan, within
from spmd.expand.passes.passes import Overlap, with_passes
from spmd.tensor.redistribute.plan import Step
from tests.expand.budgets import DROPPED, Dropped, all_choices, program_of
from tests.expand.odd_costs import ODD
from tests.expand.side_by_side import INPUTS, rows, seeded, train_step

programs = functools.cache(program_of)


def test_the_least_time_of_all_choices_is_found():
    """For ten limits; what is foreseen is what the program that is written has, and more memory never takes longer."""
    plan = Plan.of(programs("block, zero3"))
    every, lowest, before = all_choices(plan, 12), plan.choice.least_peak().peak, float("inf")
    assert lowest == min(peak for peak, _ in every)
    for k in range(10):
        limit = lowest + (plan.peak - lowest) * k // 9
        chosen = plan.choice.least_time(limit)
        assert chosen.us == pytest.approx(min(us for peak, us in every if peak <= limit))
        assert chosen.peak <= limit and chosen.us <= before
        before = chosen.us
    work = plan.program(plan.choice.least_peak()).verify().work
    assert max(work.memory(range(len(work.tasks)))) == lowest


def test_sets_across_segments_are_found():
    """Each is better than what the ways of single segments and short spans can do with as many bytes."""
    plan = Plan.of(programs("gpt, zero3 x tp"))
    parts = replace(plan.choice, ways=tuple(plan.spans.ways()))
    across = plan.choice.ways[len(parts.ways) :]
    assert across
    for way in across[::5]:
        assert (way.start, way.stop) == (0, len(plan.spans.units))
        peak = plan.choice.peak_with([way.effect])
        of_parts = parts.least_time(peak)
        assert of_parts is None or of_parts.us > way.effect.us


def test_the_budget_is_kept_and_the_smallest_is_named():
    """By the exact count of the rank's code, with passes behind; the smallest that the error names is possible."""
    program = programs("block, zero3")

    def finish(program):
        return with_passes(program, (Overlap(),))

    most = finish(program).memory().peak
    with pytest.raises(BudgetError, match=r"cannot run in 1 bytes a rank; the smallest possible is [\d,]+, with") as e:
        within(program, 1, finish, finish)
    done = within(program, e.value.smallest, finish, finish)
    assert done.memory().peak == e.value.smallest < most
    report = done.reports[0]
    assert report.taken and report.freed and f"again: {report.freed[0].name}" in str(report)
    kept = within(program, most, finish, finish)
    assert str(kept) == str(finish(program)) and kept.reports[0].why_not


def trained(budget, passes):
    """Losses, parameters and state after three steps on this rank, and the program."""
    spmd.manual_seed(0)
    mesh = spmd.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = seeded(lambda: Dropped(1))
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    step = spmd.compile(
        train_step, mesh, inputs=INPUTS, params=DROPPED, fully_shard="dp", passes=passes, memory_budget=budget
    )
    losses = [step(model, optimizer, *batch).detach() for batch in rows(128, 2, 16)]
    return losses, list(model.parameters()), [s["exp_avg"] for s in optimizer.state.values()], step.program


def test_results_are_the_same_to_the_bit():
    """A training under ZeRO-3 and tensor parallelism with dropout, on simulated ranks."""
    plain = ways.on_ranks(lambda: trained(None, None), 4)
    budget = plain[0][-1].memory().peak * 19 // 20
    tight = ways.on_ranks(lambda: trained(budget, None), 4)
    program = tight[0][-1]
    assert program.memory().peak <= budget and program.reports[0].freed
    for (*alone, _), (*again, _) in zip(plain, tight, strict=True):
        assert ways.same(alone, again)


def test_a_parameter_may_be_gathered_in_two_steps():
    """The first step of the second gather is freed with it, and not before its only reader."""
    program = programs("gpt, zero3 x tp", ODD["nothing known"])
    chained = [n for n in program.graph.nodes if _gathers(n) and _gathers(n.args[0])]
    assert chained
    plan = Plan.of(program)
    made = plan.program(plan.choice.least_peak()).verify()
    work = made.work
    assert max(work.memory(range(len(work.tasks)))) == plan.choice.least_peak().peak < plan.peak


def _gathers(node: fx.Node) -> bool:
    return isinstance(node.target, Step) and node.target.kind == "all_gather"


def test_a_budget_is_bytes():
    mesh = spmd.DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
    with pytest.raises(ValueError, match="memory_budget is 0; give bytes a rank"):
        spmd.compile(train_step, mesh, memory_budget=0)


def test_a_step_without_a_backward_has_nothing_to_free():
    mesh = spmd.DeviceMesh("cpu", [0], mesh_dim_names=("dp",))
    step = spmd.compile(lambda x: (x * 2).relu(), mesh, memory_budget=10)
    with pytest.raises(BudgetError, match="the smallest possible is 32"):
        step.program_for(torch.ones(4))
