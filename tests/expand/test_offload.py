"""What waits in host memory comes back to the bit, takes no memory of the device, and is chosen where it pays."""

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import ways
from torch import fx, optim

import spmd
from spmd import MeshTopoInfo
from spmd.comm import C10dTransport
from spmd.expand.bind import bind
from spmd.expand.kept.graphs import program_text, read_program
from spmd.expand.passes.keep_gathered import copied
from spmd.expand.passes.memory_budget import BudgetError, Plan, within
from spmd.expand.passes.passes import Offload, Overlap, with_passes
from spmd.expand.program import Program
from spmd.expand.verify import ProgramFault
from spmd.expand.verify_bound import verify_bound
from spmd.mesh import Machine, as_rank
from spmd.tensor.recipes.host import arrived, from_host, on_host, to_host
from spmd.tensor.redistribute.plan import Step
from tests.expand.budgets import DROPPED, NEAR_HOST, Dropped, all_choices_with_host, program_of
from tests.expand.side_by_side import GPT_PLAN, INPUTS, gpt, rows, seeded, tokens, train_step

programs = functools.cache(program_of)


@functools.cache
def offloaded(name: str, machine: Machine | str = "hopper") -> Program:
    return with_passes(programs(name, machine), (Offload(),))


MODELS = {
    "dropout, tp, uneven": ((2, 2), lambda: Dropped(1), lambda: rows(7, 2, 16), {"params": DROPPED}),
    "gpt, zero3, uneven": ((4, 1), gpt, lambda: tokens(6), {"fully_shard": "dp"}),
}


def trained(name, passes):
    """Losses and parameters after two steps on this rank, and the program."""
    spmd.manual_seed(0)
    shape, build, batches, said = MODELS[name]
    mesh = spmd.init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    model = seeded(build)
    optimizer = optim.SGD(model.parameters(), lr=1e-2)
    step = spmd.compile(train_step, mesh, inputs=INPUTS, passes=passes, **said)
    losses = [step(model, optimizer, *batch).detach() for batch in batches()]
    return losses, list(model.parameters()), step.program


@pytest.mark.parametrize("name", MODELS)
def test_results_are_the_same_to_the_bit(name):
    """With all that waits in host memory, on simulated ranks, with passes behind."""
    plain = ways.on_ranks(lambda: trained(name, ()), 4)
    sent = ways.on_ranks(lambda: trained(name, ("offload", "numbers_late", "buckets")), 4)
    assert {n.target for n in sent[0][-1].graph.nodes} > {to_host, on_host, from_host}
    for (*want, _), (*got, _) in zip(plain, sent, strict=True):
        assert ways.same(want, got)


def test_copies_run_beside_the_ops():
    """On a stream each way; a schedule moves them within the memory, and `on_host` stays behind all readers."""
    program = programs("block, zero3", NEAR_HOST)
    sent = offloaded("block, zero3", NEAR_HOST)
    timeline = sent.timeline()
    assert {"to host", "from host"} < set(timeline.streams)
    (busy,) = {timeline.busy_us[way] for way in ("to host", "from host")}
    nbytes = sum(n.meta["spec"].local_nbytes for n in sent.graph.nodes if n.target is to_host)
    many = sum(n.target is to_host for n in sent.graph.nodes)
    assert busy == pytest.approx(0.5 * many + nbytes / 400e3)
    assert timeline.us < program.timeline().us + 2 * busy
    better = with_passes(sent, (Overlap(),))
    assert better.reports[-1].taken and better.timeline().us < timeline.us and better.timeline().peak <= timeline.peak


def test_what_is_sent_takes_no_memory_of_the_device():
    """Where the two are apart: what is alive at the turn is less by what was sent. On a CPU it is alive twice."""
    came, sent = programs("net"), offloaded("net")
    at_turn = dict(came.memory().timeline)["ones_like"] - dict(sent.memory().timeline)["ones_like"]
    assert at_turn > 0.8 * sum(n.meta["spec"].local_nbytes for n in sent.graph.nodes if n.target is to_host)
    assert not any("no copy engine" in text for text in sent.reports[-1].left)
    on_cpu = offloaded("net", "textbook")
    assert "the machine 'textbook' has no copy engine" in str(on_cpu.reports[-1])
    assert on_cpu.memory().by_kind["host"] and on_cpu.memory().peak >= came.memory().peak
    for program in (sent, on_cpu):  # the tasks foresee what is counted
        assert max(program.work.memory(range(len(program.work.tasks)))) == program.memory().peak


def test_the_best_of_three_choices_is_found():
    """For ten limits, of all choices of the largest units; and more memory never takes longer."""
    plan = Plan.of(programs("block, zero3", NEAR_HOST), offload=True)
    every, before = all_choices_with_host(plan, 6), float("inf")
    low = plan.choice.least_peak().peak
    assert low == min(peak for peak, _ in every)
    for k in range(10):
        limit = low + (plan.peak - low) * k // 9
        chosen = plan.choice.least_time(limit)
        assert chosen.us <= 1.05 * min(us for peak, us in every if peak <= limit) + 1e-9
        assert chosen.peak <= limit and chosen.us <= before
        before = chosen.us
        work = plan.program(chosen).verify().work
        assert max(work.memory(range(len(work.tasks)))) == chosen.peak


def test_a_budget_may_be_smaller_with_host_memory():
    """The smallest one is kept, and the report says what was sent; without a copy engine it says that there is none."""
    program = programs("block, zero3", NEAR_HOST)
    smallest = []
    for offload in (False, True):
        with pytest.raises(BudgetError) as e:
            within(program, 1, lambda p: p, lambda p: p, offload)
        smallest.append(e.value.smallest)
    done = within(program, smallest[1], lambda p: p, lambda p: p, offload=True)
    assert done.memory().peak == smallest[1] < smallest[0]
    assert any(each.to_host for each in done.reports[0].freed) and "to host: " in str(done.reports[0])
    on_cpu = within(programs("net", "textbook"), 14_000, lambda p: p, lambda p: p, offload=True)
    assert "the machine 'textbook' has no copy engine" in str(on_cpu.reports[0])
    with pytest.raises(ValueError, match="offload keeps within a memory_budget"):
        spmd.compile(train_step, program.mesh, offload=True)


def wide_gpt() -> Program:
    """Five layers of the widths of GPT-2 XL, stored in shards, with tensor parallelism on two hosts of eight."""
    mesh = spmd.DeviceMesh("cpu", torch.arange(16).view(4, 4).tolist(), mesh_dim_names=("dp", "tp"))
    mesh = mesh.with_topology(MeshTopoInfo.from_mesh(mesh, ranks_per_host=8, machine="hopper"))
    with torch.device("meta"):
        model = gpt(n_layer=5, n_head=25, n_embd=1600, block_size=1024, vocab=50257)
        x = torch.zeros(32, 1024, dtype=torch.int64)
    low = spmd.MixedPrecision(torch.bfloat16, torch.float32)
    said = {"params": GPT_PLAN, "fully_shard": "dp", "mixed_precision": low}
    step = spmd.compile(train_step, mesh, inputs=INPUTS, passes=(), **said)
    return step.program_for(model, optim.AdamW(model.parameters()), x, x)


def test_more_freedom_is_never_worse():
    """Where values may wait in host memory, too, the least budget is no larger, and no budget takes longer. The search
    with host memory alone leaves out what the one without finds here."""
    program = wide_gpt()
    plan, without = Plan.of(program, offload=True), Plan.of(program).choice
    alone, _ = plan.choices
    low = without.least_peak().peak
    assert plan.choice.least_peak().peak <= low < alone.least_peak().peak
    for k in range(10):
        limit = low + (plan.peak - low) * k // 9
        assert plan.choice.least_time(limit).us <= without.least_time(limit).us


def test_more_freedom_is_never_worse_behind_passes():
    """The same of what is written, with a schedule behind, by the count of the rank's code."""
    program = programs("net", NEAR_HOST)

    def finish(program):
        return with_passes(program, (Overlap(),))

    def least(offload):
        with pytest.raises(BudgetError) as e:
            within(program, 1, finish, finish, offload)
        return e.value.smallest

    smallest = least(False)
    assert least(True) <= smallest
    assert within(program, smallest, finish, finish, offload=True).memory().peak <= smallest


def test_a_program_with_copies_can_be_kept():
    sent = offloaded("net")
    assert str(read_program(program_text(sent), sent.constants, sent.mesh).verify()) == str(sent)


# ---- faults -----------------------------------------------------------------------------------


def only(graph: fx.Graph, target: Callable) -> fx.Node:
    return next(n for n in graph.nodes if n.target is target)


def after(node: fx.Node, target: Callable, *args: fx.Node) -> fx.Node:
    with node.graph.inserting_after(node):
        new = node.graph.call_function(target, args)
    new.meta["spec"] = node.meta.get("spec")
    return new


def of_another(graph):
    first, second = [n for n in graph.nodes if n.target is to_host][:2]
    first.args, second.args = second.args, first.args


def made_twice(graph, target):
    node = only(graph, target)
    reader = next(iter(node.users))
    reader.replace_input_with(node, after(node, target, *node.args))


def fetched_twice(graph):
    made_twice(graph, from_host)


def not_waited(graph):
    node = only(graph, from_host)
    node.args = (node.args[0].args[0],)


def kept(graph):
    node = only(graph, on_host)
    after(node, torch.ops.aten.relu.default, node.args[1])


def read_there(graph):
    node = only(graph, on_host)
    after(node, torch.ops.aten.relu.default, node)


def unread(graph):
    node = only(graph, from_host)
    node.replace_all_uses_with(node.args[0].args[1])


def another_spec(graph):
    node = only(graph, from_host)
    node.meta["spec"] = only(graph, to_host).args[0].all_input_nodes[0].meta["spec"]


FAULTS = {
    of_another: "host copy", fetched_twice: "fetched twice", not_waited: "wait", kept: "kept", read_there: "wait",
    unread: "kept", another_spec: "host copy",
}  # fmt: skip


@pytest.mark.parametrize("change", FAULTS, ids=lambda change: change.__name__)
def test_a_fault_of_a_copy_is_named(change):
    program = copied(offloaded("net"))
    change(program.graph)
    with pytest.raises(ProgramFault) as error:
        program.verify()
    assert error.value.fault == FAULTS[change], error.value


def arrived_twice(graph):
    made_twice(graph, arrived)


def read_early(graph):
    node = only(graph, arrived)
    after(node, torch.ops.aten.relu.default, node.args[0])


def freed_early(graph):
    node = only(graph, on_host)
    node.args = (node.args[0], node.args[1].all_input_nodes[0])


BOUND_FAULTS = {arrived_twice: "wait", read_early: "wait", not_waited: "wait", freed_early: "host copy"}


@pytest.mark.parametrize("change", BOUND_FAULTS, ids=lambda change: change.__name__)
def test_a_fault_of_a_copy_in_a_rank_is_named(change):
    program = offloaded("net")
    with as_rank(0):
        graph = bind(program, (0, 0), C10dTransport()).graph
        rest = program, (0, 0), C10dTransport(), [False] * len(program.inputs), [None] * len(program.outputs)
        change(graph)
        with pytest.raises(ProgramFault) as error:
            verify_bound(graph, *rest)
    assert error.value.fault == BOUND_FAULTS[change], error.value


def test_a_gather_may_wait_for_its_readers_longer_than_for_the_backward():
    """A schedule launches gathers early. What the forward and the backward gather is freed between their readers."""

    def early(program):
        graph = copied(program).graph
        *_, last = [n for n in graph.nodes if n.op == "placeholder"]
        for node in [n for n in graph.nodes if isinstance(n.target, Step) and n.target.kind == "all_gather"]:
            if node.args[0].op == "placeholder":
                last.append(node)
        return replace(program, graph=graph)

    program = programs("block, zero3")
    gathers = sum([c.kind == "all_gather" for c in program.collectives])
    after = with_passes(program, (early, Offload()))
    assert sum([c.kind == "all_gather" for c in after.collectives]) <= gathers
