"""Rounds of a step that repeat are one loop, and the step trains as on one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
import ways
from torch import nn

import spmd
from spmd import FullyShard, LocalTensorMode, Shard
from spmd._torch import pytree
from spmd.comm import C10dTransport
from spmd.expand import code, write
from spmd.expand.code import code_for
from spmd.expand.loops import roll
from spmd.expand.loops.bound import BoundLoop
from spmd.expand.loops.loop import Loop
from spmd.expand.loops.unroll import unrolled
from spmd.expand.program import Program
from spmd.expand.regions import Region, with_compiled_regions
from spmd.expand.verify import ProgramFault
from spmd.expand.verify_bound import verify_bound
from spmd.mesh import as_rank
from tests.expand.side_by_side import gpt, seeded, tensors, values
from tests.expand.test_memory import counted_beside
from tests.expand.test_verify import (
    FAULTS,
    doubled_reduction,
    doubled_reduction_that_nobody_reads,
    dropped_last_reduction,
    not_launched,
    read_without_a_wait,
)  # fmt: skip

ROUNDS = 6

PLANS = {
    "dp 4": ((4,), ("dp",), {}),
    "tp 4": ((4,), ("tp",), {}),
    "2x2": ((2, 2), ("dp", "tp"), {}),
    "zero 3": ((4,), ("dp",), {"fully_shard": FullyShard("dp")}),
    "zero 3, kept": ((4,), ("dp",), {"fully_shard": FullyShard("dp", reshard_after_forward=False)}),
    "zero 2": ((4,), ("dp",), {"fully_shard": FullyShard("dp", level=2)}),
    "zero 3 tp": ((2, 2), ("dp", "tp"), {"fully_shard": FullyShard("dp")}),
}
TENSOR_PARALLEL = {"up.*": {"tp": Shard(0)}, "down.weight": {"tp": Shard(1)}}


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0, norm: Callable[[int], nn.Module] = nn.LayerNorm):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 8), norm(8), nn.Linear(8, 4)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.down(self.dropout(self.norm(F.gelu(self.up(x)))))


# ---- steps ------------------------------------------------------------------------------------


def summed(model, optimizer, x, y):
    """The usual loop: losses are added, gradients accumulate."""
    optimizer.zero_grad()
    total = 0.0
    for a, b in zip(x.chunk(ROUNDS), y.chunk(ROUNDS), strict=True):
        loss = F.mse_loss(model(a), b) / ROUNDS
        loss.backward()
        total = total + loss.detach()
    optimizer.step()
    return total


def listed(model, optimizer, x, y):
    """All losses are kept, and one of the middle is returned, too; the gradients are clipped, and cleared at last."""
    losses = []
    for i in range(ROUNDS):
        n = len(x) // ROUNDS
        loss = F.mse_loss(model(x[i * n : (i + 1) * n]), y[i * n : (i + 1) * n])
        loss.backward()
        losses.append(loss.detach())
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses), losses[2]


def running(model, optimizer, x, y):
    """The sum so far is carried, and read of every round."""
    optimizer.zero_grad()
    total, totals = torch.zeros((), dtype=x.dtype), []
    for a, b in zip(x.chunk(ROUNDS), y.chunk(ROUNDS), strict=True):
        loss = F.mse_loss(model(a), b)
        loss.backward()
        total = total + loss.detach()
        totals.append(total)
    optimizer.step()
    return torch.stack(totals), total


def averaged(model, optimizer, x, y):
    """A running average, and the results of the last micro-batch."""
    optimizer.zero_grad(set_to_none=False)
    average = torch.zeros(())
    for a, b in zip(x.tensor_split(ROUNDS), y.tensor_split(ROUNDS), strict=True):
        out = model(a)
        loss = F.mse_loss(out, b)
        (loss / ROUNDS).backward()
        average = 0.9 * average + 0.1 * loss.detach()
    optimizer.step()
    return average, out


def largest(model, optimizer, x, y):
    """What is carried begins in another dtype than it has later."""
    optimizer.zero_grad()
    most = torch.full((), -1.0, dtype=torch.float32)
    for a, b in zip(x.chunk(ROUNDS), y.chunk(ROUNDS), strict=True):
        loss = F.mse_loss(model(a), b)
        loss.backward()
        most = torch.maximum(most, loss.detach())
    optimizer.step()
    return most


def weighted(model, optimizer, x, y):
    """Another weight, and another index, for each micro-batch."""
    optimizer.zero_grad()
    weights = y[:ROUNDS, 0].tanh()
    for i, a in enumerate(x.split(len(x) // ROUNDS)):
        loss = ((model(a) - y.unflatten(0, (ROUNDS, -1))[i]) * weights[i]).square().mean()
        loss.backward()
    optimizer.step()
    return loss.detach()


def carried(model, optimizer, x, y):
    """The result of a round goes into the next one, and values change places."""
    optimizer.zero_grad()
    state, older, newer = torch.zeros_like(x[:4]), torch.zeros_like(x[0]), torch.ones_like(x[0])
    for a, b in zip(x.chunk(ROUNDS), y.chunk(ROUNDS), strict=True):
        out = model(a + state)
        F.mse_loss(out, b).backward()
        state = out.detach().tanh()
        older, newer = newer * 1, older + out.detach().mean(0)
    optimizer.step()
    return state, older, newer


def updated_inside(model, optimizer, x, y):
    """Weights change in each round, without an optimiser."""
    for a, b in zip(x.chunk(ROUNDS), y.chunk(ROUNDS), strict=True):
        loss = F.mse_loss(model(a), b)
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for p, g in zip(model.parameters(), grads, strict=True):
                p.sub_(0.1 * g)
    return loss.detach()


def of_unequal_parts(model, optimizer, x, y):
    """The parts have several sizes, of which nothing is left behind the first op."""
    optimizer.zero_grad()
    for a, b in zip(x.split([2, 4, 4, 4, 2, 6, 2]), y[:7], strict=True):
        loss = F.mse_loss(model(a.sum(0)), b)
        loss.backward()
    optimizer.step()
    return loss.detach()


def of_rests(model, optimizer, x, y):
    """What a micro-batch is cut from is shorter each time."""
    optimizer.zero_grad()
    n = len(x) // ROUNDS
    for i in range(ROUNDS):
        loss = F.mse_loss(model(x[i * n :][:n]), y[i * n :][:n])
        loss.backward()
    optimizer.step()
    return loss.detach()


def counted(model, optimizer, x, y):
    """A number of the model is one more in each round."""
    optimizer.zero_grad()
    for a, b in zip(x.chunk(ROUNDS), y.chunk(ROUNDS), strict=True):
        F.mse_loss(model(a), b).backward()
        model.rounds = getattr(model, "rounds", 0) + 1
    optimizer.step()
    return model.rounds


def alternating(model, optimizer, x, y):
    """Every other micro-batch is computed otherwise: a round has two."""
    optimizer.zero_grad()
    for i, (a, b) in enumerate(zip(x.chunk(ROUNDS), y.chunk(ROUNDS), strict=True)):
        out = model(a) if i % 2 else model(a).tanh()
        F.mse_loss(out, b).backward()
    optimizer.step()
    return out


class Adversaries(Net):
    """A net, and who tells what it makes from what there is."""

    def __init__(self):
        super().__init__()
        self.judge = nn.Linear(4, 1)


def adversarial(model, optimizer, x, y):
    """Two backward passes in a round, of which the second goes through what the first has trained."""
    optimizer.zero_grad()
    totals = [0.0, 0.0]
    for a, b in zip(x.chunk(ROUNDS), y.chunk(ROUNDS), strict=True):
        made = model(a)
        judged = (model.judge(b) - model.judge(made.detach())).square().mean()
        judged.backward()
        model.judge.requires_grad_(False)
        fooled = model.judge(made).square().mean()
        fooled.backward()
        model.judge.requires_grad_(True)
        totals = [total + loss.detach() for total, loss in zip(totals, (judged, fooled), strict=True)]
    optimizer.step()
    return totals


def several_losses(model, optimizer, x, y):
    """Three backward passes in a round, two of them through one graph."""
    optimizer.zero_grad(set_to_none=False)
    for a, b in zip(x.chunk(ROUNDS), y.chunk(ROUNDS), strict=True):
        out = model(a)
        F.mse_loss(out, b).backward(retain_graph=True)
        (0.5 * F.l1_loss(out, b)).backward()
        model(b).square().mean().backward()
    optimizer.step()
    return out


def penalised(model, optimizer, x, y):
    """The gradient of the batch is part of the loss."""
    optimizer.zero_grad()
    penalties = []
    for a, b in zip(x.chunk(ROUNDS), y.chunk(ROUNDS), strict=True):
        a = a.detach().requires_grad_()
        out = model(a)
        (slope,) = torch.autograd.grad(out.sum(), a, create_graph=True)
        penalties.append(slope.square().mean())
        (F.mse_loss(out, b) + penalties[-1]).backward()
    optimizer.step()
    return [each.detach() for each in penalties]


def remembering(model, optimizer, x, y):
    """Each round reads the one before the last."""
    optimizer.zero_grad()
    older, newer = torch.zeros_like(x[0]), torch.ones_like(x[0])
    for a, b in zip(x.chunk(ROUNDS), y.chunk(ROUNDS), strict=True):
        out = model(a)
        F.mse_loss(out, b).backward()
        older, newer = newer, older + out.detach().mean(0)
    optimizer.step()
    return older, newer


def updated_each_round(model, optimizer, x, y):
    """Several updates a call, each of a micro-batch, with clipped gradients."""
    total = 0.0
    for a, b in zip(x.chunk(ROUNDS), y.chunk(ROUNDS), strict=True):
        loss = F.mse_loss(model(a), b)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = total + loss.detach()
    return total


def updated_every_other(model, optimizer, x, y):
    """An update for two micro-batches; what it clears are zeros, and the last one leaves gradients."""
    losses = []
    for i, (a, b) in enumerate(zip(x.chunk(2 * ROUNDS), y.chunk(2 * ROUNDS), strict=True)):
        if not i % 2:
            optimizer.zero_grad(set_to_none=False)
        loss = F.mse_loss(model(a), b)
        loss.backward()
        losses.append(loss.detach())
        if i % 2:
            optimizer.step()
    return torch.stack(losses)


def numbered(model, optimizer, x, y):
    """Numbers of Python that are others in each round."""
    optimizer.zero_grad()
    for i, (a, b) in enumerate(zip(x.chunk(ROUNDS), y.chunk(ROUNDS), strict=True)):
        loss = F.mse_loss(model(a), b) * (0.5, 0.25, 2.0)[i % 3] / (i + 1)
        loss.backward()
    optimizer.step()
    return loss.detach()


STEPS = {
    "summed": (summed, Net), "listed": (listed, Net), "averaged": (averaged, Net), "weighted": (weighted, Net),
    "running": (running, Net),
    "carried": (carried, Net), "largest": (largest, Net), "updated inside": (updated_inside, Net),
    "unequal parts": (of_unequal_parts, Net), "rests": (of_rests, Net), "counted": (counted, Net),
    "alternating": (alternating, Net), "adversarial": (adversarial, Adversaries), "penalised": (penalised, Net),
    "several losses": (several_losses, Net), "numbered": (numbered, Net),
    "remembering": (remembering, Net), "updated each round": (updated_each_round, Net),
    "updated every other": (updated_every_other, Net),
    "BatchNorm": (summed, lambda: Net(norm=nn.BatchNorm1d)), "dropout": (summed, lambda: Net(0.3)),
}  # fmt: skip


def begun(name: str):
    model = seeded(STEPS[name][1]).double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batches(rows: int = 24) -> list[tuple]:
    g = torch.Generator().manual_seed(1)
    return [tuple(torch.randn(rows, 4, dtype=torch.float64, generator=g) for _ in range(2)) for _ in range(3)]


def compiled(name: str, plan: str, **more):
    shape, axes, options = PLANS[plan]
    mesh = spmd.init_device_mesh("cpu", shape, mesh_dim_names=axes)
    inputs = {"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}} if "dp" in axes else {}
    params = TENSOR_PARALLEL if "tp" in axes else {}
    return spmd.compile(STEPS[name][0], mesh, params=params, inputs=inputs, **options | more)


def trained(step, name: str, given=None) -> tuple[list, Program | None]:
    """What three steps return, and all state behind them."""
    model, optimizer = begun(name)
    found = [values(step(model, optimizer, *batch)) for batch in given or batches()]
    return pytree.tree_leaves([found, tensors(model, optimizer)])


def on_one_device(name: str, given=None) -> list:
    if name != "dropout":
        return trained(STEPS[name][0], name, given)
    with LocalTensorMode(1), flat():  # only spmd numbers its random numbers
        spmd.manual_seed(7)
        step = spmd.compile(STEPS[name][0], spmd.init_device_mesh("cpu", (1,)))
        return list(map(of_all, trained(step, name, given)))


def of_all(x):
    """The one value that all simulated ranks have."""
    return x.reconcile() if isinstance(x, spmd.LocalTensor) else x


@contextmanager
def flat() -> Iterator[None]:
    """Inside, no rounds become a loop."""
    with mock.patch.object(roll, "LEAST", 100):
        yield


def loops(program: Program) -> list[Loop]:
    return [node.target for node in program.graph.nodes if isinstance(node.target, Loop)]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", STEPS)
def test_a_step_with_a_loop_trains_as_on_one_device(name, plan):
    wanted = on_one_device(name)
    with LocalTensorMode(4):
        spmd.manual_seed(7)
        step = compiled(name, plan)
        found = trained(step, name)
        assert all(loops(program) for program in step.programs)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(of_all(a), b, rtol=1e-10, atol=1e-10)


def made(name: str, plan: str, **more) -> Program:
    with LocalTensorMode(4):
        return compiled(name, plan, **more).program_for(*begun(name), *batches()[0])


AT_MOST = {
    "summed": 1.01, "listed": 1.01, "averaged": 1.01, "adversarial": 1.03, "penalised": 1.03, "several losses": 1.05,
    "numbered": 1.01, "updated each round": 1.01,
}  # fmt: skip
"""How much more may be sent or needed than without a loop: rounds of several passes move some hundred bytes a round of
their own, which would go with others."""


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", AT_MOST)
def test_a_loop_sends_what_its_rounds_send_and_needs_no_more_memory(name, plan):
    looped = made(name, plan)
    with flat():
        plain = made(name, plan)
    assert loops(looped) and not loops(plain)
    assert sum(c.nbytes for c in looped.collectives) <= AT_MOST[name] * sum(c.nbytes for c in plain.collectives)
    assert looped.memory().peak <= AT_MOST[name] * plain.memory().peak


def in_rounds(model, optimizer, x, y):
    optimizer.zero_grad()
    for a, b in zip(x.unflatten(0, (ROUNDS, -1)), y.unflatten(0, (ROUNDS, -1)), strict=True):
        F.cross_entropy(model(a).flatten(0, 1), b.flatten()).backward()
    optimizer.step()


def test_buckets_in_a_body_have_the_room_of_the_program():
    """They may need what the update of the program needs, and not only what a round does by itself."""
    mesh = spmd.DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("dp",))
    model = gpt(n_layer=2, n_embd=32)
    batch = [torch.zeros(ROUNDS * 4, 6, dtype=torch.long)] * 2
    options = {"inputs": {"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}}, "fully_shard": FullyShard("dp")}

    def program():
        step = spmd.compile(in_rounds, mesh, **options)
        return step.program_for(model, torch.optim.AdamW(model.parameters()), *batch)

    looped = program()
    with flat():
        plain = program()
    with mock.patch.object(write, "with_room", lambda program: program):
        alone = program()
    sent = [len(each.collectives) for each in (plain, looped, alone)]
    assert sent[1] <= 1.15 * sent[0] < sent[2], sent
    assert looped.memory().peak <= 1.01 * plain.memory().peak


CUTS = {
    "unflatten": lambda x, n: x.unflatten(0, (n, -1)),
    "rows of a view": lambda x, n: [x.view(n, x.shape[0] // n, -1)[i] for i in range(n)],
    "chunk": lambda x, n: x.chunk(n),
    "split": lambda x, n: x.split(x.shape[0] // n),
    "tensor_split": lambda x, n: x.tensor_split(n),
    "slices": lambda x, n: [x[i * (x.shape[0] // n) : (i + 1) * (x.shape[0] // n)] for i in range(n)],
    "every n-th": lambda x, n: [x[i::n] for i in range(n)],
}


@pytest.mark.parametrize("rows", [48, 53])
@pytest.mark.parametrize("name", CUTS)
def test_micro_batches_stay_with_the_ranks_that_have_rows(name, rows):
    """However they are cut, gradients are reduced once, together. Equal parts take one exchange of each input."""
    if rows % ROUNDS and name not in ("chunk", "tensor_split", "every n-th"):
        return

    def step_in_parts(model, optimizer, x, y):
        total = 0.0
        for a, b in zip(*(CUTS[name](t, ROUNDS) for t in (x, y)), strict=True):
            loss = F.mse_loss(model(a), b)
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        return total

    mesh = spmd.DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("dp",))
    model = nn.Linear(6, 5)
    step = spmd.compile(step_in_parts, mesh, inputs={"x": {"dp": Shard(0)}, "y": {"dp": Shard(0)}})
    program = step.program_for(model, torch.optim.SGD(model.parameters()), torch.ones(rows, 6), torch.ones(rows, 5))
    *moves, sums = [c.kind for c in program.collectives]
    assert sums == "all_reduce"
    if rows % ROUNDS:
        assert set(moves) <= {"halo"}
    else:
        assert moves == ([] if name == "every n-th" else ["all_to_all"] * 2)


@pytest.mark.parametrize("plan", ["zero 3", "zero 3 tp"])
def test_what_a_body_needs_is_no_room_for_buckets_around_it(plan):
    """A program is said to need what it needs while its loop runs: what is gathered there would wait for all rounds."""
    program = made("listed", plan)
    said = program.work.memory(range(len(program.work.tasks)))
    assert max(said) >= 0.99 * program.memory().peak


@pytest.mark.parametrize("name", ["listed", "carried", "dropout"])
def test_a_timeline_has_all_rounds(name):
    program = made(name, "zero 3 tp")
    plain = unrolled(program).verify()
    assert not loops(plain) and unrolled(plain) is plain
    assert len(plain.collectives) == len(program.collectives)
    sent = [event for event in program.timeline().events if event.nbytes]
    assert len(sent) == len(program.collectives)


def test_a_program_does_not_grow_with_its_rounds():
    """The program of 12 micro-batches has a name for each batch more, and the same ops."""
    programs = []
    for n in (6, 12):
        with mock.patch.dict(globals(), ROUNDS=n):
            programs.append(made("summed", "2x2"))
    few, many = programs
    assert [loop.times for loop in loops(few) + loops(many)] == [3, 9]
    assert len(many.graph.nodes) - len(few.graph.nodes) == 6 * len(["a", "b"])
    (one,), (other,) = loops(few), loops(many)
    assert len(one.body.graph.nodes) == len(other.body.graph.nodes)
    assert len(many.collectives) - len(few.collectives) == 6 * len(one.body.collectives)


def test_the_text_has_the_body_once():
    program = made("summed", "tp 4")
    text = str(program)
    assert "# the body of loop, 3 times" in text and text.count("def loop_body(") == 1
    assert "loop = loop_body(" in text and "each of (" in text


SEES_ALL = [
    {"choose": "program"}, {"placements": {"down": {"dp": Shard(0)}}}, {"memory_budget": 1 << 30},
    {"passes": (lambda program: program,)},
]  # fmt: skip


@pytest.mark.parametrize("more", SEES_ALL, ids=lambda more: next(iter(more)))
def test_what_looks_at_all_ops_gets_them(more):
    """Choices for the whole program, pins, budgets, and passes of the user."""
    assert not loops(made("summed", "dp 4", **more))


def growing(model, optimizer, x, y):
    """Each round computes more than the one before."""
    optimizer.zero_grad()
    for i, (a, b) in enumerate(zip(x.chunk(ROUNDS), y.chunk(ROUNDS), strict=True)):
        out = model(a)
        for _ in range(i):
            out = out.tanh()
        F.mse_loss(out, b).backward()
    optimizer.step()
    return out


def test_rounds_that_differ_stay_as_they_are():
    with mock.patch.dict(STEPS, other=(growing, Net)):
        wanted = on_one_device("other")
        with LocalTensorMode(4):
            compiled_step = compiled("other", "2x2")
            found = trained(compiled_step, "other")
            assert not loops(compiled_step.program)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(of_all(a), b, rtol=1e-10, atol=1e-10)


def test_two_rounds_are_one_where_the_one_before_the_last_is_read():
    with mock.patch.dict(globals(), ROUNDS=12):
        (loop,) = loops(made("remembering", "2x2"))
    assert loop.times == 5


def blocks(x, factor):
    return x.tanh() * x * factor


on_blocks = spmd.local_map(blocks, out_placements=[Shard(0)], in_placements=([Shard(0)], None))


def mapping(function: Callable) -> Callable:
    """A step whose rounds call a function."""

    def mapped(model, optimizer, x, y):
        optimizer.zero_grad()
        for a, b in zip(x.chunk(ROUNDS), y.chunk(ROUNDS), strict=True):
            F.mse_loss(function(model(a), 2.0), b).backward()
        optimizer.step()

    return mapped


@pytest.mark.parametrize("plan", ["dp 4", "zero 3"])
def test_rounds_may_call_functions_of_blocks(plan):
    with mock.patch.dict(STEPS, blocks=(mapping(on_blocks), Net), one=(mapping(blocks), Net)):
        wanted = on_one_device("one")
        with LocalTensorMode(4):
            step = compiled("blocks", plan)
            found = trained(step, "blocks")
            assert all(loops(program) for program in step.programs)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(of_all(a), b, rtol=1e-10, atol=1e-10)


def updates(model, optimizer, x, y):
    for a, b in zip(x.unflatten(0, (ROUNDS, -1)), y.unflatten(0, (ROUNDS, -1)), strict=True):
        F.mse_loss(model(a), b).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("plan", PLANS)
def test_a_loop_updates_where_parameters_and_states_are(plan):
    """Updates in rounds write into the memory of the parameters, and gradients do not live on: no more is needed."""
    with mock.patch.dict(STEPS, other=(updates, Net)):
        looped = made("other", plan)
        with flat():
            plain = made("other", plan)
    assert loops(looped)
    assert sum(c.nbytes for c in looped.collectives) == sum(c.nbytes for c in plain.collectives)
    assert looped.memory().peak <= plain.memory().peak
    with as_rank(0):
        nodes = code_for(looped, (0,) * looped.mesh.ndim, C10dTransport()).module.graph.nodes
    (loop,) = [n for n in nodes if isinstance(n.target, BoundLoop)]
    assert not [n for n in loop.all_input_nodes if n.target is torch.ops.aten.clone.default]


# ---- sizes ------------------------------------------------------------------------------------


def unbound(model, optimizer, x, y):
    optimizer.zero_grad()
    total = 0.0
    for a, b in zip(x.unflatten(0, (ROUNDS, -1)), y.unflatten(0, (ROUNDS, -1)), strict=True):
        loss = F.mse_loss(model(a), b) / ROUNDS
        loss.backward()
        total = total + loss.detach()
    optimizer.step()
    return total


@pytest.mark.parametrize("plan", ["dp 4", "tp 4", "2x2"])
def test_a_form_with_a_loop_gives_what_an_expansion_gives(plan):
    """Batches of other sizes are neither captured nor expanded again, as far as they are cut alike."""
    with mock.patch.dict(STEPS, other=(unbound, Net)), LocalTensorMode(4):
        step = compiled("other", plan)
        for rows in (24, 48, 72, 120):
            given = *begun("other"), *batches(rows)[0]
            (call := step._call(given, {}, True)).find_first_specs()
            _, program = step._capture_and_expand(call)
            assert loops(program) and str(program) == str(step.program_for(*given))
        ((_, written),) = step._forms._of.values()
        assert len(written) == 1


def test_a_step_with_a_loop_takes_batches_of_any_size():
    given = [batches(rows)[0] for rows in (24, 30, 6, 48, 66)]
    with mock.patch.dict(STEPS, other=(unbound, Net)):
        wanted = on_one_device("other", given)
        with LocalTensorMode(4):
            found = trained(compiled("other", "2x2"), "other", given)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(of_all(a), b, rtol=1e-10, atol=1e-10)


# ---- verified ---------------------------------------------------------------------------------


def loop_of(program: Program) -> torch.fx.Node:
    (node,) = [node for node in program.graph.nodes if isinstance(node.target, Loop)]
    return node


def another_round(program: Program) -> None:
    node = loop_of(program)
    node.target = dataclasses.replace(node.target, times=node.target.times + 1)


def other_operand(program: Program) -> None:
    node = loop_of(program)
    weights = [n for n in node.args if n.meta["spec"].shape == (8, 4)]
    node.args = tuple([node.args[1] if n is weights[0] else n for n in node.args])


def leaves_otherwise(program: Program) -> None:
    body = loop_of(program).target.body
    name, spec = body.outputs[-1]
    new = spec.with_layout([()] * spec.ndim, spec.units, ())
    body.graph.output_node().args[0][-1].meta["spec"] = new
    body = dataclasses.replace(body, outputs=(*body.outputs[:-1], (name, new)))
    loop_of(program).target = dataclasses.replace(loop_of(program).target, body=body)


def body_without_a_move(program: Program) -> None:
    body = loop_of(program).target.body
    move = next(node for node, step in body.steps() if step.sends)
    move.replace_all_uses_with(move.args[0])
    body.graph.erase_node(move)


HARM = [another_round, other_operand, leaves_otherwise, body_without_a_move]


@pytest.mark.parametrize("harm", HARM, ids=lambda harm: harm.__name__)
def test_a_wrong_loop_is_a_fault(harm):
    program = made("summed", "tp 4")
    harm(program)
    with pytest.raises(ProgramFault):
        program.verify()


IN_BODIES = [dropped_last_reduction, doubled_reduction, doubled_reduction_that_nobody_reads]


@pytest.mark.parametrize("change", IN_BODIES, ids=lambda change: change.__name__)
def test_a_fault_in_a_body_is_named(change):
    program = made("summed", "tp 4")
    change(loop_of(program).target.body)
    with pytest.raises(ProgramFault) as error:
        program.verify()
    assert error.value.fault == FAULTS[change], error.value


def launched(graph) -> list[torch.fx.Node]:
    return [n for n in graph.nodes if "move" in n.meta]


def in_another_order(graph):
    first, second = launched(graph)[-2:]
    first.meta["move"], second.meta["move"] = second.meta["move"], first.meta["move"]


def twice(graph):
    first, (wait,) = launched(graph)[0], launched(graph)[0].users
    with graph.inserting_after(wait):
        again = graph.call_function(first.target, (wait, *first.args[1:]))
        again.meta.update(first.meta)
    with graph.inserting_after(again):
        waited = graph.call_function(wait.target, (again,))
    wait.replace_all_uses_with(waited, lambda user: user is not again)


IN_CODE = {in_another_order: "launch", twice: "launch", not_launched: "launch", read_without_a_wait: "wait"}


@pytest.mark.parametrize("change", IN_CODE, ids=lambda change: change.__name__)
def test_a_fault_in_the_code_of_a_body_is_named(change):
    program = made("summed", "tp 4")

    def harmed(graph, of, *rest):
        if of is loop_of(program).target.body:
            change(graph)
        verify_bound(graph, of, *rest)

    with as_rank(0), mock.patch.object(code, "verify_bound", harmed), pytest.raises(ProgramFault) as error:
        code_for(program, (0,), C10dTransport())
    assert error.value.fault == IN_CODE[change], error.value


# ---- memory -----------------------------------------------------------------------------------


def needed(name: str, plan: str) -> tuple[int, int]:
    step, given = compiled(name, plan), (*begun(name), *batches()[0])
    found = counted_beside(step, step.mesh, lambda: step(*given))
    assert loops(step.program)
    return found


NEEDED = [
    ("summed", "2x2"), ("listed", "zero 3"), ("carried", "tp 4"), ("dropout", "dp 4"), ("updated each round", "zero 2"),
]  # fmt: skip


@pytest.mark.parametrize("name, plan", NEEDED)
def test_a_rank_needs_what_a_program_with_a_loop_says(name, plan, gloo4):
    for predicted, counted in ways.run("gloo", gloo4, needed, name, plan):
        assert abs(predicted - counted) <= 0.005 * counted, (predicted, counted)


def test_gradients_are_added_where_they_are():
    """What is carried has one memory: a loop needs no copy of the gradients that it adds to."""
    program = made("summed", "tp 4")
    with as_rank(0):
        nodes = code_for(program, (0,), C10dTransport()).module.graph.nodes
    (loop,) = [n for n in nodes if isinstance(n.target, BoundLoop)]
    copies = [n for n in loop.all_input_nodes if n.target is torch.ops.aten.clone.default]
    assert len(loop.target.overwritten) >= len(list(Net().parameters())) and not copies


# ---- run --------------------------------------------------------------------------------------


def test_a_backend_compiles_the_body_once(monkeypatch):
    """All ops of a body are in regions, and the numbers are those of the ops one by one."""
    monkeypatch.setattr(torch, "compile", lambda region, **options: region)
    found = []
    for backend in ("eager", "aot_eager"):
        with LocalTensorMode(4):
            found.append(trained(compiled("averaged", "2x2", backend=backend), "averaged"))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(of_all(ours), of_all(theirs), rtol=1e-12, atol=1e-14)
    with as_rank(0):
        module = with_compiled_regions(code_for(made("averaged", "2x2"), (0, 0), C10dTransport()).module, "aot_eager")
    (loop,) = [n.target for n in module.graph.nodes if isinstance(n.target, BoundLoop)]
    called = [n.target for n in loop.module.graph.nodes if n.op == "call_function"]
    assert any(isinstance(target, Region) for target in called)
    assert not [target for target in called if getattr(target, "namespace", "") == "aten"]


def counted(name: str, plan: str) -> tuple[int, int]:
    """How many collectives a later call sends: as they are counted, and as the program has them."""
    step, given = compiled(name, plan), (*begun(name), *batches()[0])
    for _ in range(2):
        step(*given)
    with spmd.debug.CommDebugMode() as mode:
        step(*given)
    assert loops(step.program)
    return sum(mode.get_comm_counts().values()), len(step.program.collectives)


def test_collectives_of_all_rounds_are_counted(gloo4):
    for seen, said in ways.run("gloo", gloo4, counted, "summed", "zero 3 tp"):
        assert seen == said
